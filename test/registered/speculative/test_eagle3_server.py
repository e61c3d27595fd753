"""The real small model with its EAGLE3 draft: tokens, accept lengths and what a server reports.

Accept lengths are compared with the loop of `eagle3_reference`, which shares no code with the
server; tokens with those of the target alone, with --run-slow those of a hundred prompts in every
way of serving them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.eagle3_reference import (
    ReferenceDraft,
    ReferenceTarget,
    chat_prompt,
    repeated_prompt,
    run_chain,
)
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.prompts import mixed_prompts
from sglang.test.small_server import SmallServer, serve
from sglang.test.test_utils import SMALL_EAGLE3_DRAFT

register_cpu_ci(est_time=120, suite="speculative")

NUM_STEPS = 7
FLAGS: tuple[str | int, ...] = (
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    str(SMALL_EAGLE3_DRAFT),
    "--speculative-num-steps",
    NUM_STEPS,
    "--speculative-eagle-topk",
    1,
    "--speculative-num-draft-tokens",
    NUM_STEPS + 1,
)
POOL = ("--max-total-tokens", 6144, "--max-running-requests", 8)
FOX = " The quick brown fox jumps over the lazy dog."
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n"
CHATS = ("Explain why the sky is blue in two sentences.", "How do I boil an egg?")


@pytest.fixture(scope="module")
def reference(small_model: Path) -> tuple[ReferenceTarget, ReferenceDraft]:
    target = ReferenceTarget(small_model)
    return target, ReferenceDraft(SMALL_EAGLE3_DRAFT, target.embedding)


@pytest.fixture(scope="module")
def served(small_model: Path) -> Iterator[ServedScheduler]:
    with ServedScheduler(small_model, *FLAGS, *POOL, "--grammar-backend", "none") as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    with serve(str(small_model), *FLAGS, "--enable-metrics", "--decode-log-interval", 4) as running:
        yield running


def _step_lens(served: ServedScheduler, prompt: list[int], count: int) -> list[list[int]]:
    """Tokens of each message of a streamed request: the prefill's, then one step each."""
    rid = served.submit(prompt, count, stream=True)
    served.run_until(lambda: served.finish(rid) is not None, timeout_s=240)
    return [list(output.new_token_ids) for output in served.outputs[rid] if output.new_token_ids]


def test_repetitive_text_is_accepted_as_in_the_reference_step_by_step(
    small_model: Path,
    served: ServedScheduler,
    reference: tuple[ReferenceTarget, ReferenceDraft],
) -> None:
    prompt = repeated_prompt(small_model, FOX, 1024)
    expected = run_chain(*reference, prompt, num_steps=NUM_STEPS, max_new_tokens=96)
    steps = _step_lens(served, prompt, 96)
    assert [token for step in steps for token in step] == expected.output_ids
    assert [len(step) for step in steps[1:-1]] == expected.accept_lens[:-1]
    assert len(steps) - 1 == len(expected.accept_lens)
    assert 96 / (len(steps) - 1) >= 7.0


def test_accept_lengths_of_chat_and_code_are_the_references(
    small_model: Path,
    served: ServedScheduler,
    reference: tuple[ReferenceTarget, ReferenceDraft],
) -> None:
    texts = [chat_prompt(small_model, text) for text in CHATS]
    texts.append(get_tokenizer(str(small_model)).encode(CODE))
    for prompt in texts:
        expected = run_chain(*reference, prompt, num_steps=NUM_STEPS, max_new_tokens=48)
        steps = _step_lens(served, prompt, 48)
        assert 48 / (len(steps) - 1) == pytest.approx(expected.accept_length, rel=0.02)


def test_mixed_prompts_give_the_tokens_of_the_target_alone(
    small_model: Path, served: ServedScheduler
) -> None:
    tokenizer = get_tokenizer(str(small_model))
    texts = [tokenizer.encode(text) for text in mixed_prompts()[::2]]
    outputs = []
    with ServedScheduler(small_model, *POOL, "--grammar-backend", "none") as alone:
        for scheduler in (alone, served):
            rids = [scheduler.submit(text, 16) for text in texts]
            scheduler.run_until(
                lambda: all(scheduler.finish(rid) is not None for rid in rids),  # noqa: B023
                timeout_s=240,
            )
            outputs.append([scheduler.answer_of(rid).tokens for rid in rids])
    assert len(texts) == 25
    assert outputs[0] == outputs[1]


EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", SMALL_EAGLE3_DRAFT)
TREE = (
    *("--speculative-num-steps", 3, "--speculative-eagle-topk", 4),
    *("--speculative-num-draft-tokens", 8),
)
# More at once than there is room for.
SMALL_POOL = (
    *("--max-total-tokens", 1536, "--max-running-requests", 64),
    *("--schedule-conservativeness", 0.05),
)
CASES: dict[str, tuple[tuple[Any, ...], bool]] = {
    "chain": ((*EAGLE3, "--speculative-num-steps", 3), False),
    "chain, v2, page 4, retraction": (
        (*EAGLE3, "--speculative-num-steps", 3, "--page-size", 4, *SMALL_POOL),
        True,
    ),
    "tree, v2, page 16, chunks": (
        (*EAGLE3, *TREE, "--page-size", 16, "--chunked-prefill-size", 64),
        True,
    ),
    "tree, retraction": ((*EAGLE3, *TREE, *SMALL_POOL), False),
    "ngram, v2, page 64, chunks": (
        ("--speculative-algorithm", "NGRAM", "--page-size", 64, "--chunked-prefill-size", 64),
        True,
    ),
}


@pytest.fixture(scope="module")
def hundred(small_model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The fifty mixed prompts and the first halves of them; what the target says to each alone."""
    tokenizer = get_tokenizer(str(small_model))
    texts = [tokenizer.encode(text) for text in mixed_prompts()]
    texts += [text[: len(text) // 2 + 1] for text in texts]
    with ServedScheduler(small_model, *POOL, "--grammar-backend", "none") as alone:
        return texts, _answers(alone, texts)


def _answers(server: ServedScheduler, texts: list[list[int]]) -> list[list[int]]:
    rids = [server.submit(text, 16) for text in texts]
    server.run_until(lambda: all(server.finish(rid) is not None for rid in rids), timeout_s=900)
    return [server.answer_of(rid).tokens for rid in rids]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_prompts_give_the_tokens_of_the_target_alone(
    small_model: Path, hundred: tuple[list[list[int]], list[list[int]]], case: str
) -> None:
    texts, expected = hundred
    flags, overlap = CASES[case]
    with (
        envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(overlap),
        ServedScheduler(small_model, *POOL, *flags, "--grammar-backend", "none") as server,
    ):
        assert _answers(server, texts) == expected
        assert (server.scheduler.reports.num_retracted_total > 0) == ("retraction" in case)
    assert len(texts) == 100


def test_a_server_reports_what_was_accepted(small_model: Path, server: SmallServer) -> None:
    prompt = repeated_prompt(small_model, FOX, 256)
    params = {"temperature": 0.0, "max_new_tokens": 65, "ignore_eos": True}
    assert server.post("/flush_cache").status_code == 200
    state = server.get("/server_info").json()["internal_states"][0]
    assert "avg_spec_accept_length" not in state

    meta = server.generate(input_ids=prompt, sampling_params=params)["meta_info"]
    steps, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / steps)
    assert meta["spec_accept_length"] > 5
    assert meta["spec_accept_rate"] == pytest.approx(correct / (steps * NUM_STEPS))
    assert meta["spec_num_proposed_drafts"] == meta["spec_draft_token_num"] == steps * NUM_STEPS
    assert meta["spec_accept_token_num"] == correct
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == steps and len(histogram) <= NUM_STEPS + 1

    info = server.get("/server_info").json()
    assert info["speculative_eagle_topk"] == 1
    average = info["internal_states"][0]["avg_spec_accept_length"]
    assert average == pytest.approx(1 + correct / steps)

    text = server.get("/metrics").text
    values = {
        name: float(value)
        for name, value in re.findall(r"^sglang:(spec_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    }
    assert values["spec_accept_length"] > 5
    assert 0 < values["spec_accept_rate"] <= 1
    assert values["spec_verify_calls_total"] == steps


def test_a_chat_gets_the_text_of_the_target_alone(small_model: Path, server: SmallServer) -> None:
    prompt = chat_prompt(small_model, CHATS[1])
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": 24}}
    found = server.generate(**body)
    with ServedScheduler(small_model, *POOL, "--grammar-backend", "none") as alone:
        expected = alone.answer(prompt, 24, ignore_eos=False)
    assert found["output_ids"] == expected.tokens
    assert found["meta_info"]["finish_reason"] == expected.finish
