"""Captured speculative steps against the same steps run part by part; graphs are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.environ import envs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_gate import DraftGate
from sglang.srt.speculative.spec_graph_runner import GraphKind
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=90, suite="speculative")

PROMPTS = [[3 + (i * 11 + j) % 150 for j in range(4 + 5 * i)] for i in range(5)]
CHAIN = ("--speculative-num-steps", 3, "--speculative-eagle-topk", 1)
TREE = (
    *("--speculative-num-steps", 3, "--speculative-eagle-topk", 3),
    *("--speculative-num-draft-tokens", 7),
)
WHOLE, FRONT, TARGET, COMMIT, ASIDE = GraphKind


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platforms, "_current", None)
    use_eager_graphs(monkeypatch)
    with envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(True):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(root / "target", num_hidden_layers=6)
    make_tiny_draft(root / "eagle3")
    return root


def served(folder: Path, algorithm: str, *flags: Any) -> ServedScheduler:
    # A draft that is the target itself is always right, at least where it is greedy.
    drafts = {"EAGLE3": folder / "eagle3", "STANDALONE": folder / "target"}
    draft = ("--speculative-draft-model-path", drafts[algorithm]) if algorithm in drafts else ()
    return ServedScheduler(
        folder / "target",
        *("--speculative-algorithm", algorithm, *draft, *flags),
        *("--max-running-requests", 8, "--max-total-tokens", 1024, "--page-size", 4),
    )


def worker_of(server: ServedScheduler) -> BaseSpecWorker:
    worker = server.scheduler.draft_worker
    assert isinstance(worker, BaseSpecWorker)
    return worker


def tokens_of(server: ServedScheduler, **wishes: Any) -> list[list[int]]:
    # Different ends, so that batches shrink and padding follows.
    rids = [
        server.submit(prompt, 6 + 5 * index, sampling_seed=index, **wishes)
        for index, prompt in enumerate(PROMPTS)
    ]
    server.run_until_idle()
    return [server.answer_of(rid).tokens for rid in rids]


def both(
    folder: Path, algorithm: str, *flags: Any, sizes: tuple[int, ...] = (1, 2, 4, 8), **wishes: Any
) -> dict[GraphKind, int]:
    """Check that graphs change no token; how often each was replayed."""
    torch.manual_seed(0)
    with served(folder, algorithm, *flags) as server:
        expected = tokens_of(server, **wishes)
    torch.manual_seed(0)
    with served(folder, algorithm, *flags) as server:
        worker = worker_of(server)
        worker.capture_graphs(list(sizes), pad=True, show_progress=False)
        assert tokens_of(server, **wishes) == expected
        padding_row = worker.target_runner.req_to_token_pool.padding_row
        assert worker.committed_lens[padding_row] == 0
        assert not worker.target_runner.req_to_token_pool.req_to_token[padding_row].any()
        assert worker.graphs is not None
        assert server.scheduler.reports.count_replays() == {
            f"speculative_{kind.value}": count for kind, count in worker.graphs.num_steps.items()
        }
        return worker.graphs.num_steps


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_greedy_steps_are_one_graph(
    folder: Path, algorithm: str, shape: tuple[Any, ...], overlap: bool
) -> None:
    flags = () if overlap else ("--disable-overlap-schedule",)
    num_steps = both(folder, algorithm, *shape, *flags)
    assert num_steps[WHOLE] > 5
    assert num_steps[FRONT] == num_steps[TARGET] == num_steps[COMMIT] == 0


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, WHOLE), (0.8, COMMIT)])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_accepted_features_reach_the_draft(
    folder: Path, shape: tuple[Any, ...], temperature: float, kind: GraphKind
) -> None:
    # Random drafts are hardly ever right, and then only the target decides about tokens: here
    # drafts become tokens, right or wrong, several in a step.
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.5):
        assert both(folder, "EAGLE3", *shape, temperature=temperature)[kind] > 5


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.8, "top_k": 20},
        {"frequency_penalty": 0.7},
        {"logit_bias": {"7": 3.0, "9": -2.0}},
        {"return_logprob": True},
    ],
    ids=["sampled", "penalty", "bias", "logprobs"],
)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_other_steps_are_captured_up_to_acceptance_and_from_it_on(
    folder: Path, algorithm: str, shape: tuple[Any, ...], wishes: dict[str, Any]
) -> None:
    num_steps = both(folder, algorithm, *shape, **wishes)
    assert num_steps[FRONT] == num_steps[COMMIT] > 5
    assert num_steps[WHOLE] == num_steps[TARGET] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drawn_drafts_are_verified_by_a_graph(folder: Path, temperature: float) -> None:
    flag = "--speculative-use-rejection-sampling"
    num_steps = both(folder, "EAGLE3", *CHAIN, flag, temperature=temperature)
    if temperature > 0:
        assert num_steps[TARGET] == num_steps[COMMIT] > 5 and num_steps[FRONT] == 0
    else:
        assert num_steps[WHOLE] > 5


def test_large_batches_run_part_by_part(folder: Path) -> None:
    num_steps = both(folder, "STANDALONE", *CHAIN, sizes=(1, 2))
    assert 0 < num_steps[WHOLE] < 8


def test_without_padding_only_exact_sizes_are_replayed(folder: Path) -> None:
    with served(folder, "STANDALONE", *CHAIN) as server:
        worker = worker_of(server)
        worker.capture_graphs([2, 4], pad=False, show_progress=False)
        assert worker.graphs is not None
        assert [worker.graphs.can_run(n) for n in range(1, 6)] == [False, True, False, True, False]


@pytest.mark.parametrize(
    "wishes",
    [{}, {"temperature": 0.8}, {"frequency_penalty": 0.7}],
    ids=["greedy", "sampled", "penalty"],
)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_large_batches_step_aside_and_come_back(
    folder: Path, algorithm: str, shape: tuple[Any, ...], wishes: dict[str, Any]
) -> None:
    with served(folder, algorithm, *shape) as server:
        expected = tokens_of(server, **wishes)
    # A batch of one is within the limit.
    with envs.SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS.override(7):
        num_steps = both(folder, algorithm, *shape, **wishes)
        with served(folder, algorithm, *shape) as server:
            assert worker_of(server).steps_aside(5) and not worker_of(server).steps_aside(1)
            assert tokens_of(server, **wishes) == expected
    assert (num_steps[ASIDE] > 3) == (not wishes)
    assert num_steps[FRONT if wishes else WHOLE] > 0


@pytest.mark.parametrize("wishes", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
def test_padding_beyond_the_limit_does_not_step_aside(folder: Path, wishes: dict[str, Any]) -> None:
    """Three requests are within the limit, and run with the graphs of four, which are not."""
    width = 4
    with envs.SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS.override(4 * width - 1):
        with served(folder, "EAGLE3", *CHAIN) as server:
            worker = worker_of(server)
            assert worker.steps_aside(4) and not worker.steps_aside(3)
            worker.capture_graphs([1, 2, 4], pad=True, show_progress=False)
            assert worker.graphs is not None
            rids = [server.submit(prompt, 9, **wishes) for prompt in PROMPTS[:3]]
            server.run_until_idle()
            assert all(len(server.answer_of(rid).tokens) == 9 for rid in rids)
            assert worker.graphs.num_steps[FRONT if wishes else WHOLE] > 0


def test_the_draft_is_up_to_date_after_stepping_aside(folder: Path) -> None:
    with envs.SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS.override(7):
        with served(folder, "STANDALONE", *CHAIN) as server:
            worker_of(server).capture_graphs([1, 2, 4, 8], pad=True, show_progress=False)
            short = server.submit(PROMPTS[1], 9)
            long = server.submit(PROMPTS[0], 33)
            server.run_until_idle()
            spec = server.answer_of(long).spec
            assert server.answer_of(short).spec["spec_num_correct_drafts"] == 0  # type: ignore[index]
    # Alone again, every draft is right: all proposals of whole steps are taken, three of four.
    assert spec is not None
    alone = 33 - 9
    assert spec["spec_num_correct_drafts"] >= alone * 3 // 4 - 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_the_host_are_given_to_the_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    # Whether drafts pay is a matter of time: here they always do.
    monkeypatch.setattr(DraftGate, "wants_verification", lambda self, *_: True)
    num_steps = both(folder, "NGRAM", temperature=temperature)
    if temperature > 0:
        assert num_steps[TARGET] == num_steps[COMMIT] > 0 and num_steps[WHOLE] == 0
    else:
        assert num_steps[WHOLE] > 0 and num_steps[TARGET] == 0
