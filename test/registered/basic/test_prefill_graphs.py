"""Captured prefill steps in whole schedulers: drafts, loads from the host. Graphs are stand-ins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.managers import scheduler_process
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=60, suite="basic")

PAGE = 4
COUNTS = (8, 32, 96)
COMMON = ("--max-running-requests", 8, "--max-total-tokens", 1024, "--page-size", PAGE)
# What a layer of a load takes: a step that did not wait would read what was there before.
LAYER_S = 0.02

Start = Callable[..., ServedScheduler]


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
    make_tiny_checkpoint(root / "windows", "gemma3")
    make_tiny_draft(root / "eagle3")
    return root


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 11 * i + i * i // 7) % 150 for i in range(length)]


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a server of one of the models, as on a device that can capture."""
    monkeypatch.setattr(CpuPlatform, "graph_capture_supported", True)

    def start(model: str, *flags: Any, counts: tuple[int, ...] = ()) -> ServedScheduler:
        # On a CPU the flags have no effect.
        monkeypatch.setattr(scheduler_process, "_prefill_graph_tokens", lambda *given: counts)
        return ServedScheduler(folder / model, *COMMON, *flags)

    return start


def target_of(server: ServedScheduler) -> ModelRunner:
    found: Any = server.scheduler.worker.target_runner  # type: ignore[attr-defined]
    assert isinstance(found, ModelRunner)
    return found


def num_captured(server: ServedScheduler) -> int:
    """Prefill steps that were replayed."""
    graphs = target_of(server).prefill_runner
    return 0 if graphs is None else graphs.num_steps


def rounds(server: ServedScheduler, **wishes: Any) -> list[Answer]:
    """Together, again with hits, and one long prompt."""
    prompts = [prompt(5 + 6 * i, i) for i in range(5)]
    found: list[Answer] = []
    for _ in range(2):
        rids = [server.submit(ids, 6 + 3 * i, **wishes) for i, ids in enumerate(prompts)]
        server.run_until_idle()
        answers = [server.answer_of(rid) for rid in rids]
        prompts = [ids + answer.tokens + prompt(3, 9) for ids, answer in zip(prompts, answers)]
        found += answers
    return [*found, server.answer(prompt(70, 50), 8, **wishes)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "topk"),
    [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", None)],
    ids=["chain", "tree", "standalone", "ngram"],
)
def test_drafts_are_those_of_uncaptured_steps(
    folder: Path, start: Start, algorithm: str, topk: int | None, overlap: bool
) -> None:
    flags: list[Any] = ["--speculative-algorithm", algorithm, "--chunked-prefill-size", 32]
    if topk is not None:
        draft = {"EAGLE3": folder / "eagle3", "STANDALONE": folder / "target"}[algorithm]
        flags += ["--speculative-num-steps", 3, "--speculative-eagle-topk", topk]
        flags += ["--speculative-draft-model-path", draft]
    if not overlap:
        flags.append("--disable-overlap-schedule")
    answers = []
    for counts in ((), COUNTS):
        torch.manual_seed(0)
        with start("target", *flags, counts=counts) as server:
            worker = server.scheduler.worker
            assert isinstance(worker, BaseSpecWorker)
            if counts:
                worker.capture_graphs([1, 4, 8], pad=True, show_progress=False)
                graphs = target_of(server).prefill_runner
                assert graphs is not None and graphs.hidden_mode is worker.feature_mode
            if isinstance(worker, DraftModelWorker):
                assert worker.model_runner.prefill_runner is None
            answers.append(rounds(server))
            assert (num_captured(server) >= 6) == bool(counts)
    assert [answer.tokens for answer in answers[0]] == [answer.tokens for answer in answers[1]]
    if algorithm != "NGRAM":  # which drafts where it measures that they pay
        # How many drafts were right follows from the target's states.
        assert [a.spec for a in answers[0]] == [a.spec for a in answers[1]]
        assert any(answer.spec for answer in answers[0])


@pytest.mark.parametrize(
    ("model", "algorithm"), [("target", None), ("windows", None), ("target", "EAGLE3")]
)
def test_a_step_waits_for_what_comes_from_the_host(
    folder: Path,
    start: Start,
    model: str,
    algorithm: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags: list[Any] = ["--enable-hierarchical-cache", "--hicache-ratio", 2]
    if algorithm is not None:
        flags += ["--speculative-algorithm", algorithm, "--speculative-num-steps", 3]
        flags += ["--speculative-eagle-topk", 1]
        flags += ["--speculative-draft-model-path", folder / "eagle3"]
    ids = prompt(45)
    with start(model, *flags) as server:
        expected = server.answer(ids, 12)
    with start(model, *flags, counts=COUNTS) as server:
        assert server.answer(ids, 12).tokens == expected.tokens
        controller = server.tree.cache_controller
        monkeypatch.setattr(controller, "_copy_hook", lambda kind, layer: time.sleep(LAYER_S))
        for _ in range(2):
            server.evict_device()
            answer = server.answer(ids, 12)
            assert answer.sources == {"device": 0, "host": 44}, answer.sources
            assert answer.tokens == expected.tokens
        assert num_captured(server) == 3
        server.settle()


def test_no_prefill_step_is_captured_without_a_gpu(folder: Path) -> None:
    with ServedScheduler(folder / "target", *COMMON) as server:
        assert server.answer(prompt(5), 2).tokens
        assert target_of(server).prefill_runner is None


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({}, (32, 64, 96, 128)),
        ({"cuda_graph_max_bs_prefill": 0}, ()),
        ({"cuda_graph_max_bs_prefill": 0, "cuda_graph_bs_prefill": [8]}, ()),
        ({"cuda_graph_max_bs_prefill": 80}, (32, 64, 80)),
        ({"cuda_graph_bs_prefill": [64, 16]}, (16, 64)),
        ({"cuda_graph_bs_prefill": [64, 16], "cuda_graph_max_bs_prefill": 20}, (16,)),
        # Padding is a request too, and no longer than any other.
        ({"cuda_graph_backend_prefill": "full"}, (32, 64, 96, 128)),
        # No step has more tokens than a chunk.
        ({"cuda_graph_max_bs_prefill": 96, "chunked_prefill_size": 64}, (32, 64)),
        ({"cuda_graph_bs_prefill": [16, 96], "chunked_prefill_size": 64}, (16,)),
        ({"cuda_graph_max_bs_prefill": 80, "chunked_prefill_size": -1}, (32, 64, 80)),
        ({"cuda_graph_max_bs_prefill": 80, "disable_prefill_cuda_graph": True}, ()),
        ({"cuda_graph_max_bs_prefill": 80, "disable_cuda_graph": True}, ()),
        ({"cuda_graph_max_bs_prefill": 32, "disable_decode_cuda_graph": True}, (32,)),
    ],
)
def test_flags_say_which_steps_are_captured(
    folder: Path, fields: dict[str, Any], counts: tuple[int, ...]
) -> None:
    args = ServerArgs(str(folder / "target"), device="cuda", context_length=128, **fields)
    config = ModelConfig.from_path(args.model_path, **args.model_options())
    assert scheduler_process._prefill_graph_tokens(args, config) == counts
