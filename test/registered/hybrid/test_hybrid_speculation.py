"""Speculation on a target with recurrent states: they follow exactly the accepted tokens.

Drafts come from an oracle that is right now and then, so steps accept one to several tokens, along
chains and along branches of trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import FlushCacheReqInput
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.spec_rig import (
    TinyPair,
    check_greedy,
    prompts,
    run_all,
    serve,
    worker_of,
)
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=60, suite="hybrid")

PROMPTS = prompts(5)
NUM_NEW = 20

# algorithm, topk, page size, overlapped loop, chunk
CASES = [
    ("EAGLE3", 1, 1, False, -1),
    ("EAGLE3", 1, 16, True, 16),
    ("EAGLE3", 4, 1, True, 8),
    ("STANDALONE", 1, 16, False, 16),
    ("STANDALONE", 4, 1, True, -1),
    ("NGRAM", 1, 1, False, 8),
    ("NGRAM", 1, 16, True, -1),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    root: Path = tmp_path_factory.mktemp("hybrid_pair")
    return TinyPair(
        make_tiny_checkpoint(root / "target", "qwen3_next"),
        {
            "EAGLE3": make_tiny_draft(
                root / "eagle3", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
            ),
            "STANDALONE": make_tiny_checkpoint(root / "standalone", "llama"),
        },
    )


@pytest.fixture(scope="module")
def greedy(pair: TinyPair) -> Iterator[list[list[int]]]:
    with serve(pair, None) as served:
        yield run_all(served, PROMPTS, NUM_NEW)


@pytest.mark.parametrize(("algorithm", "topk", "page", "overlap", "chunk"), CASES)
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
        assert check_greedy(served, PROMPTS, greedy, NUM_NEW).accept_length > 1.5
        served.settle()


@pytest.mark.parametrize("page", [1, 16])
def test_every_length_around_a_chunk_is_reused_to_its_last_page(pair: TinyPair, page: int) -> None:
    text = [3 + (7 * i + i * i // 5) % 190 for i in range(70)]
    with serve(pair, "EAGLE3", "--page-size", page, "--chunked-prefill-size", 32) as served:
        for length in (31, 32, 33, 64, 65, 70):
            served.control(FlushCacheReqInput(timeout_s=10.0))
            first, second = (served.answer(text[:length], 6) for _ in range(2))
            assert second.tokens == first.tokens
            assert second.cached_tokens == (length - 1) // page * page, length
        served.settle()


def test_retraction_changes_no_token(pair: TinyPair, greedy: list[list[int]]) -> None:
    flags = ("--max-total-tokens", 160, "--schedule-conservativeness", 0.01)
    with serve(pair, "EAGLE3", *flags, topk=4, overlap=True) as served:
        assert run_all(served, PROMPTS, NUM_NEW) == greedy
        assert served.scheduler.reports.num_retracted_total > 0
        served.settle()


@pytest.mark.parametrize(
    ("algorithm", "topk", "temperature"),
    [("EAGLE3", 1, 0.0), ("EAGLE3", 4, 0.0), ("EAGLE3", 4, 0.8), ("NGRAM", 1, 0.8)],
)
def test_captured_steps_change_no_token(
    pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    topk: int,
    temperature: float,
) -> None:
    # Drafts become tokens, right or wrong: several in a step, which random drafts never would.
    use_eager_graphs(monkeypatch)
    answers = []
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.5):
        for is_captured in (False, True):
            torch.manual_seed(0)
            with serve(pair, algorithm, topk=topk) as served:
                worker = worker_of(served)
                if is_captured:
                    worker.capture_graphs([1, 2, 4, 8], pad=True, show_progress=False)
                wishes = {"temperature": temperature, "sampling_seed": 3}
                answers.append(run_all(served, PROMPTS, NUM_NEW, **wishes))
                assert (worker.graphs is not None) == is_captured
                if worker.graphs is not None:
                    assert sum(worker.graphs.num_steps.values()) > 5
    assert answers[0] == answers[1]
