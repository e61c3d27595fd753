"""Speculative steps on a GPU: captured, without waiting for the host, the same tokens as a CPU.

Tiny models in float32, so that it takes seconds and ties do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.loader import load_weights_into
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_graph_runner import GraphKind, SpecGraphRunner
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft, make_tiny_mtp_copies
from sglang.test.fakes.tiny_models import BOS_ID, make_tiny_checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[3 + (i * 11 + j) % 150 for j in range(4 + 5 * i)] for i in range(5)]
CHAIN = ("--speculative-num-steps", 3, "--speculative-eagle-topk", 1)
TREE = (
    *("--speculative-num-steps", 3, "--speculative-eagle-topk", 3),
    *("--speculative-num-draft-tokens", 7),
)
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
ALGORITHMS = pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(root / "target", num_hidden_layers=6, head_dim=16)
    make_tiny_draft(root / "eagle3", head_dim=16)
    return root


def served(folder: Path, algorithm: str | None, *flags: Any, device: str = "cuda") -> Any:
    platforms._current = None
    drafts = {"EAGLE3": folder / "eagle3", "STANDALONE": folder / "target"}
    spec: tuple[Any, ...] = ()
    if algorithm is not None:
        spec = ("--speculative-algorithm", algorithm)
        spec += ("--speculative-draft-model-path", drafts[algorithm])
    return ServedScheduler(
        folder / "target",
        *("--device", device, "--dtype", "float32", "--page-size", 4, *spec, *flags),
        *("--max-running-requests", 8, "--max-total-tokens", 2048),
    )


def tokens_of(server: ServedScheduler, **wishes: Any) -> list[list[int]]:
    # Different ends, so that batches shrink and padding follows.
    rids = [
        server.submit(prompt, 16 + 5 * index, sampling_seed=index, **wishes)
        for index, prompt in enumerate(PROMPTS)
    ]
    server.run_until_idle()
    return [server.answer_of(rid).tokens for rid in rids]


def graphs_of(server: ServedScheduler) -> SpecGraphRunner:
    worker = server.scheduler.draft_worker
    assert isinstance(worker, BaseSpecWorker) and worker.graphs is not None
    return worker.graphs


@SHAPES
@ALGORITHMS
def test_greedy_tokens_are_those_of_a_plain_engine_on_the_cpu(
    folder: Path, algorithm: str, shape: tuple[Any, ...]
) -> None:
    with served(folder, None, device="cpu") as server:
        expected = tokens_of(server)
    with served(folder, algorithm, *shape) as server:
        assert tokens_of(server) == expected
        assert graphs_of(server).num_steps[GraphKind.WHOLE] > 5


@SHAPES
@ALGORITHMS
def test_sampled_tokens_are_those_without_graphs(
    folder: Path, algorithm: str, shape: tuple[Any, ...]
) -> None:
    with served(folder, algorithm, *shape, "--disable-cuda-graph") as server:
        expected = tokens_of(server, temperature=0.8, top_k=20)
        worker = server.scheduler.draft_worker
        assert isinstance(worker, BaseSpecWorker) and worker.graphs is None
    with served(folder, algorithm, *shape) as server:
        assert tokens_of(server, temperature=0.8, top_k=20) == expected
        steps = graphs_of(server).num_steps
        assert steps[GraphKind.FRONT] == steps[GraphKind.COMMIT] > 5


@SHAPES
@ALGORITHMS
def test_captured_prefill_steps_change_no_token(
    folder: Path, algorithm: str, shape: tuple[Any, ...]
) -> None:
    """Nor how many drafts were right, which follows from the states that the steps keep."""
    answers = []
    for most in (0, 96):
        flags = ("--cuda-graph-max-bs-prefill", most)
        with served(folder, algorithm, *shape, *flags) as server:
            found = []
            for _ in range(2):  # the second time with hits
                rids = [server.submit(prompt, 16) for prompt in PROMPTS]
                server.run_until_idle()
                found += [
                    (server.answer_of(rid).tokens, server.answer_of(rid).spec) for rid in rids
                ]
            answers.append(found)
            worker = server.scheduler.draft_worker
            assert isinstance(worker, BaseSpecWorker)
            prefill = worker.target_runner.prefill_runner
            assert (prefill is not None) == bool(most)
            if prefill is not None:
                assert prefill.hidden_mode is worker.feature_mode and prefill.num_steps == 2
    assert answers[0] == answers[1]


@SHAPES
def test_accepted_features_reach_the_draft(folder: Path, shape: tuple[Any, ...]) -> None:
    with envs.SGLANG_SIMULATE_ACC_LEN.override(2.5):
        torch.manual_seed(0)
        with served(folder, "EAGLE3", *shape, "--disable-cuda-graph") as server:
            expected = tokens_of(server)
        torch.manual_seed(0)
        with served(folder, "EAGLE3", *shape) as server:
            assert tokens_of(server) == expected


@pytest.mark.parametrize(("temperature", "kind"), [(0.0, GraphKind.WHOLE), (0.8, GraphKind.COMMIT)])
def test_drafts_of_several_layers_are_captured(
    tmp_path: Path, temperature: float, kind: GraphKind
) -> None:
    """The drafts are right whenever the KV of every layer is."""
    folder = make_tiny_mtp_copies(tmp_path, 3)
    flags = (
        *("--dtype", "float32", "--page-size", 4, "--max-running-requests", 8),
        *("--max-total-tokens", 2048, "--speculative-algorithm", "NEXTN"),
        *("--enable-multi-layer-eagle", "--speculative-num-steps", 3),
    )
    # Sampling on another device may differ by rounding.
    plain = (
        ("--device", "cpu") if temperature == 0 else ("--device", "cuda", "--disable-cuda-graph")
    )
    answers = []
    for where in (plain, ("--device", "cuda")):
        platforms._current = None
        with ServedScheduler(folder, *where, *flags) as server:
            rids = [
                server.submit(
                    [BOS_ID] * 3 + prompt, 16 + 5 * i, temperature=temperature, sampling_seed=i
                )
                for i, prompt in enumerate(PROMPTS)
            ]
            server.run_until_idle()
            answers.append([server.answer_of(rid) for rid in rids])
            if where is not plain:
                assert graphs_of(server).num_steps[kind] > 3
    expected, got = answers
    assert [answer.tokens for answer in got] == [answer.tokens for answer in expected]
    if temperature == 0:
        assert all(a.spec and a.spec["spec_accept_length"] > 3 for a in got)


def test_sizes_follow_the_flags(folder: Path) -> None:
    with served(folder, "EAGLE3", *CHAIN, "--cuda-graph-bs", 1, 4) as server:
        assert graphs_of(server).batch_sizes == [1, 4]
    with served(folder, "EAGLE3", *CHAIN, "--cuda-graph-max-bs", 3) as server:
        assert graphs_of(server).batch_sizes == [1, 2, 3]


@pytest.fixture
def errors_on_sync() -> Iterator[Callable[[BaseSpecWorker], None]]:
    """Let decode steps of a worker raise where they wait for the device."""

    def guard(worker: BaseSpecWorker) -> None:
        step = worker.forward_batch_generation

        def guarded(batch: ScheduleBatch) -> Any:
            if batch.forward_mode is not ForwardMode.DECODE:
                return step(batch)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        worker.forward_batch_generation = guarded  # type: ignore[method-assign]

    yield guard
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("flags", [(), ("--disable-cuda-graph",)], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@SHAPES
@ALGORITHMS
def test_a_step_does_not_wait_for_the_device(
    folder: Path,
    algorithm: str,
    shape: tuple[Any, ...],
    temperature: float,
    flags: tuple[Any, ...],
    errors_on_sync: Callable[[BaseSpecWorker], None],
) -> None:
    with served(folder, algorithm, *shape, *flags) as server:
        worker = server.scheduler.draft_worker
        assert isinstance(worker, BaseSpecWorker)
        tokens_of(server, temperature=temperature)  # compiles
        errors_on_sync(worker)
        tokens_of(server, temperature=temperature)


def test_the_guard_notices_waiting(
    folder: Path, errors_on_sync: Callable[[BaseSpecWorker], None]
) -> None:
    with served(folder, "EAGLE3", *CHAIN) as server:
        worker = server.scheduler.draft_worker
        assert isinstance(worker, BaseSpecWorker)
        step = worker.forward_batch_generation

        def waits(batch: ScheduleBatch) -> Any:
            worker.committed_lens.tolist()
            return step(batch)

        worker.forward_batch_generation = waits  # type: ignore[method-assign]
        errors_on_sync(worker)
        with pytest.raises(RuntimeError, match="synchroniz"):
            tokens_of(server)


def test_new_weights_are_seen_by_the_graphs(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path / "t", num_hidden_layers=6, head_dim=16, seed=9)
    with served(folder, "STANDALONE", *CHAIN) as server:
        before = tokens_of(server)
        worker = server.scheduler.draft_worker
        assert isinstance(worker, BaseSpecWorker)
        load_weights_into(worker.target_runner.model, str(other))
        server.scheduler.flush_cache()
        after = tokens_of(server)
    with ServedScheduler(
        other, "--device", "cuda", "--dtype", "float32", "--max-total-tokens", 2048
    ) as server:
        assert tokens_of(server) == after != before
