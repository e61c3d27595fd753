"""Speculative workers in a whole scheduler: what comes out is what comes out without drafts.

Tiny models, one process. Drafts come from an oracle that is right now and then, so that steps add
one to several tokens; every test compares with the target alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.spec_rig import (
    Oracle,
    TinyPair,
    check_greedy,
    finish_all,
    prompts,
    run_all,
    serve,
    worker_of,
)
from sglang.test.fakes.tiny_models import EOS_ID

PROMPTS = prompts(6)
NUM_NEW = 24
# algorithm, topk, page size, overlapped loop, chunk: each pair of values that matters once.
COVERING = [
    ("EAGLE3", 1, 1, False, -1),
    ("EAGLE3", 1, 16, True, 16),
    ("EAGLE3", 4, 1, True, 8),
    ("EAGLE3", 4, 16, False, 16),
    ("EAGLE", 1, 1, True, 8),
    ("EAGLE", 4, 16, True, -1),
    ("STANDALONE", 1, 16, False, 16),
    ("STANDALONE", 4, 1, True, 8),
    ("NGRAM", 1, 1, False, 8),
    ("NGRAM", 1, 16, True, -1),
]


@pytest.fixture(scope="module")
def plain(pair: TinyPair) -> Iterator[ServedScheduler]:
    with serve(pair, None, "--grammar-backend", "llguidance") as served:
        yield served


@pytest.fixture(scope="module")
def greedy(plain: ServedScheduler) -> list[list[int]]:
    return run_all(plain, PROMPTS, NUM_NEW)


@pytest.mark.parametrize(("algorithm", "topk", "page", "overlap", "chunk"), COVERING)
def test_greedy_tokens_are_those_of_the_target_alone(
    pair: TinyPair,
    greedy: list[list[int]],
    algorithm: str,
    topk: int,
    page: int,
    overlap: bool,
    chunk: int,
) -> None:
    flags = ("--page-size", page, "--chunked-prefill-size", chunk)
    with serve(pair, algorithm, *flags, topk=topk, overlap=overlap) as served:
        assert check_greedy(served, PROMPTS, greedy, NUM_NEW).accept_length > 1.7


@pytest.mark.parametrize(
    ("algorithm", "topk", "page", "overlap"),
    [("EAGLE3", 4, 1, True), ("STANDALONE", 1, 16, False), ("NGRAM", 1, 1, True)],
)
def test_retraction_changes_no_token(
    pair: TinyPair,
    greedy: list[list[int]],
    algorithm: str,
    topk: int,
    page: int,
    overlap: bool,
) -> None:
    flags = ("--page-size", page, "--max-total-tokens", 272, "--schedule-conservativeness", 0.01)
    with serve(pair, algorithm, *flags, topk=topk, overlap=overlap) as served:
        assert run_all(served, PROMPTS, NUM_NEW) == greedy
        assert served.scheduler.reports.num_retracted_total > 0


# ------------------------------------------------------------------------------------------------
# Sampling wishes
# ------------------------------------------------------------------------------------------------

WISHES: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 0.8, "sampling_seed": 7},
    "seed, min-p": {"temperature": 1.3, "sampling_seed": 8, "min_p": 0.05},
    "seed, top-k, top-p": {"temperature": 1.2, "sampling_seed": 9, "top_k": 20, "top_p": 0.9},
    "frequency": {"frequency_penalty": 0.7},
    "presence, repetition": {"presence_penalty": 0.9, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {"65": 9.0, "66": 8.5, "7": -100.0}},
    "minimum": {"min_new_tokens": 9, "ignore_eos": False, "logit_bias": {str(EOS_ID): 60.0}},
    "regex": {"regex": "[a-f]{5,30}"},
    "regex, penalties, seed": {
        "regex": "[a-f]{12,14}",
        "presence_penalty": 0.9,
        "temperature": 0.9,
        "sampling_seed": 3,
    },
}


def _answers(served: ServedScheduler, wishes: dict[str, Any]) -> list[Answer]:
    rids = [served.submit(prompt, NUM_NEW, **wishes) for prompt in PROMPTS[:3]]
    # A neighbour without wishes.
    rids.append(served.submit(PROMPTS[3], NUM_NEW))
    finish_all(served, rids)
    return [served.answer_of(rid) for rid in rids]


@pytest.fixture(scope="module", params=[("EAGLE3", 4, True), ("EAGLE3", 1, True), ("NGRAM", 1, 0)])
def speculating(request: Any, pair: TinyPair) -> Iterator[ServedScheduler]:
    algorithm, topk, overlap = request.param
    flags = ("--grammar-backend", "llguidance")
    with serve(pair, algorithm, *flags, topk=topk, overlap=bool(overlap)) as served:
        yield served


@pytest.mark.parametrize("name", WISHES)
def test_wishes_count_at_every_accepted_token(
    plain: ServedScheduler, speculating: ServedScheduler, name: str
) -> None:
    expected = _answers(plain, WISHES[name])
    oracle = None
    if not isinstance(speculating.scheduler.worker, NGRAMWorker):
        oracle = Oracle(worker_of(speculating), share_right=0.9)
        for prompt, answer in zip(PROMPTS, expected):
            oracle.know(prompt, answer.tokens)
    found = _answers(speculating, WISHES[name])
    for own, other in zip(found, expected):
        assert own.tokens == other.tokens
        assert own.finish == other.finish
    if oracle is not None:
        # Several tokens a step, and each request got its share of them.
        assert oracle.num_steps < 0.7 * max(len(answer.tokens) for answer in found)
        for answer in found:
            assert answer.spec is not None
            assert len(answer.tokens) / answer.spec["spec_verify_ct"] > 1.2


def test_an_end_inside_an_accepted_run_is_the_end(
    plain: ServedScheduler, speculating: ServedScheduler
) -> None:
    prompt = PROMPTS[0]
    known = plain.answer(prompt, NUM_NEW).tokens
    if not isinstance(speculating.scheduler.worker, NGRAMWorker):
        Oracle(worker_of(speculating), share_right=1.0).know(prompt, known)
    text = bytes(known[3:5]).decode("latin-1")
    ends: list[dict[str, Any]] = [{"max_new_tokens": count} for count in (1, 2, 5, 6, 7)]
    ends += [{"stop_token_ids": [known[i]], "ignore_eos": False} for i in (1, 4, 6)]
    ends += [{"stop": [text]}, {"stop": [text], "max_new_tokens": 4}, {"stop_regex": ["[a-z]"]}]
    for fields in ends:
        limit = fields.pop("max_new_tokens", NUM_NEW)
        expected = plain.answer(prompt, limit, **fields)
        found = speculating.answer(prompt, limit, **fields)
        assert found.tokens == expected.tokens, fields
        assert found.finish == expected.finish, fields


def test_logprobs_are_those_of_one_token_a_step(
    plain: ServedScheduler, speculating: ServedScheduler
) -> None:
    fields = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 99],
        "repetition_penalty": 1.2,
    }
    results: list[dict[str, list[Any]]] = []
    for served in (plain, speculating):
        if served is speculating and not isinstance(served.scheduler.worker, NGRAMWorker):
            oracle = Oracle(worker_of(served))
            oracle.know(PROMPTS[1], plain.answer(PROMPTS[1], NUM_NEW, **fields).tokens)
        rid = served.submit(PROMPTS[1], NUM_NEW, **fields)
        finish_all(served, [rid])
        deltas = [output.logprobs for output in served.outputs[rid] if output.logprobs is not None]
        results.append(
            {
                "val": [v for delta in deltas for v in delta.output_val],
                "idx": [i for delta in deltas for i in delta.output_idx],
                "top": [pair for delta in deltas for pair in delta.output_top or []],
                "ids": [pair for delta in deltas for pair in delta.output_token_ids or []],
            }
        )
    expected, found = results
    assert found["idx"] == expected["idx"] and len(found["idx"]) == NUM_NEW
    torch.testing.assert_close(found["val"], expected["val"], atol=2e-4, rtol=1e-4)
    for name in ("top", "ids"):
        assert [ids for _, ids in found[name]] == [ids for _, ids in expected[name]]
        for (own, _), (other, _) in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(own, other, atol=2e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------
# The draft's KV
# ------------------------------------------------------------------------------------------------


def _draft_kv(served: ServedScheduler, tokens: list[int]) -> torch.Tensor:
    """K and V of the draft for the cached part of a text: [2, layers, tokens, ...]."""
    tree, worker = served.scheduler.tree_cache, worker_of(served)
    slots = tree.match_prefix(MatchPrefixParams(key=tree.make_key(tokens, None))).device_indices
    assert isinstance(worker, DraftModelWorker)
    pool = worker.model_runner.token_to_kv_pool
    assert isinstance(pool, MHATokenToKVPool)
    return torch.stack([pool.k_data[:, slots], pool.v_data[:, slots]])


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_the_draft_has_the_same_kv_whatever_the_chunks_and_the_acceptance(
    pair: TinyPair, plain: ServedScheduler, algorithm: str
) -> None:
    prompt = list(range(50, 90))
    output = plain.answer(prompt, NUM_NEW).tokens
    found = []
    for chunk, share_right in ((-1, 0.0), (8, 0.0), (8, 0.9)):
        with serve(pair, algorithm, "--chunked-prefill-size", chunk, topk=4) as served:
            Oracle(worker_of(served), share_right=share_right).know(prompt, output)
            assert served.answer(prompt, NUM_NEW).tokens == output
            found.append(_draft_kv(served, prompt + output))
    assert found[0].shape[2] >= len(prompt) + NUM_NEW - 4
    for kv in found[1:]:
        torch.testing.assert_close(kv, found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("algorithm", "num_shared"), [("EAGLE3", 9), ("STANDALONE", 10)])
def test_a_shared_prefix_ends_where_the_drafts_kv_does(
    pair: TinyPair, algorithm: str, num_shared: int
) -> None:
    shared = list(range(30, 40))
    first, second = shared + [1, 2, 3], shared + [4, 5, 6]
    with serve(pair, algorithm) as served:
        cold = served.answer(second, 8)
        expected = _draft_kv(served, second)
    with serve(pair, algorithm) as served:
        served.answer(first, 8)
        warm = served.answer(second, 8)
        assert warm.cached_tokens == num_shared
        assert warm.tokens == cold.tokens
        torch.testing.assert_close(_draft_kv(served, second), expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------
# Statistics and switches
# ------------------------------------------------------------------------------------------------


def test_the_statistics_of_a_request_add_up(pair: TinyPair, greedy: list[list[int]]) -> None:
    with serve(pair, "EAGLE3") as served:
        Oracle(worker_of(served)).know(PROMPTS[0], greedy[0])
        answer = served.answer(PROMPTS[0], NUM_NEW)
        spec = answer.spec
        assert spec is not None
        steps, correct = spec["spec_verify_ct"], spec["spec_num_correct_drafts"]
        histogram = spec["spec_correct_drafts_histogram"]
        assert sum(histogram) == steps
        assert sum(index * count for index, count in enumerate(histogram)) == correct
        # The first token is the prefill's; tokens after the last one may have been accepted.
        assert 0 <= 1 + steps + correct - len(answer.tokens) <= 3
        assert spec["spec_num_proposed_drafts"] == 3 * steps == spec["spec_draft_token_num"]
        assert spec["spec_accept_rate"] == correct / (3 * steps)
        assert spec["spec_accept_length"] == len(answer.tokens) / steps
        assert spec["spec_accept_token_num"] == correct
        state = served.scheduler.reports.internal_state()
        assert state["avg_spec_accept_length"] == pytest.approx(1 + correct / steps)
        assert served.scheduler.flush_cache()
        assert "avg_spec_accept_length" not in served.scheduler.reports.internal_state()


@pytest.mark.parametrize("topk", [1, 4])
def test_simulated_acceptance_has_the_mean_that_was_asked_for(
    pair: TinyPair, topk: int, caplog: pytest.LogCaptureFixture
) -> None:
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.3), serve(pair, "EAGLE3", topk=topk) as served:
        assert "OUTPUT IS GARBAGE" in caplog.text
        run_all(served, PROMPTS * 2, 60)
        total = served.scheduler.result_processor.spec_total
        assert total is not None and total.accept_length == pytest.approx(2.3, abs=0.12)
        assert set(range(len(total.histogram))) >= {1, 2} and sum(total.histogram[3:]) == 0


def test_the_target_of_a_draft_model_has_no_shortcut_and_ngrams_has(pair: TinyPair) -> None:
    for algorithm, has_runner in (("EAGLE3", False), ("NGRAM", True)):
        with serve(pair, algorithm) as served:
            runner = worker_of(served).target_runner
            assert (runner.decode_runner is not None) == has_runner


# ------------------------------------------------------------------------------------------------
# NGRAM
# ------------------------------------------------------------------------------------------------


def test_ngram_steps_between_plain_ones_and_verifications(
    pair: TinyPair, greedy: list[list[int]]
) -> None:
    with serve(pair, "NGRAM") as served:
        worker = worker_of(served)
        assert isinstance(worker, NGRAMWorker)
        turns = iter([False, True, True, False, False, True] * 100)
        worker.gate.wants_verification = lambda *_: next(turns)  # type: ignore[method-assign]
        for _ in range(3):
            assert run_all(served, PROMPTS, NUM_NEW) == greedy
        runner = worker.target_runner.decode_runner
        assert runner is not None and runner.num_steps > 0
        total = served.scheduler.result_processor.spec_total
        assert total is not None and total.accept_length > 1.3


def test_ngram_sleeps_where_drafts_never_pay(pair: TinyPair, greedy: list[list[int]]) -> None:
    with serve(pair, "NGRAM") as served:
        worker = worker_of(served)
        assert isinstance(worker, NGRAMWorker)
        worker.gate.wants_verification = lambda *_: False  # type: ignore[method-assign]
        for _ in range(3):
            assert run_all(served, PROMPTS, NUM_NEW) == greedy
        assert worker.gate.is_asleep


def test_a_reused_request_id_is_another_request(pair: TinyPair, greedy: list[list[int]]) -> None:
    with serve(pair, "NGRAM") as served:
        for index in (0, 1, 0):
            served.outputs.clear()
            tokens = served.answer(PROMPTS[index], NUM_NEW, rid="same").tokens
            assert tokens == greedy[index]


def test_ngram_drafts_from_a_corpus(pair: TinyPair, greedy: list[list[int]], tmp_path: Any) -> None:
    corpus = tmp_path / "corpus.txt"
    lines = [" ".join(map(str, p + o)) for p, o in zip(PROMPTS, greedy)]
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    flags = ("--skip-tokenizer-init", "--speculative-ngram-external-corpus-path", str(corpus))
    with serve(pair, "NGRAM", *flags) as served:
        assert run_all(served, PROMPTS, NUM_NEW) == greedy
        total = served.scheduler.result_processor.spec_total
        assert total is not None and total.accept_length > 4
