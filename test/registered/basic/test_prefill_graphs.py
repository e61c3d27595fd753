"""Captured prefill steps in whole schedulers: drafts, loads from the host. Graphs are stand-ins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.prefill_graph_runner import PrefillGraphRunner
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=60, suite="basic")

PAGE = 4
COUNTS = [8, 32, 96]
COMMON = ("--max-running-requests", 8, "--max-total-tokens", 1024, "--page-size", PAGE)
# What a layer of a load takes: a step that did not wait would read what was there before.
LAYER_S = 0.02


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


def target_of(server: ServedScheduler) -> ModelRunner:
    worker = server.scheduler.worker
    found: Any = worker.target_runner  # type: ignore[attr-defined]
    assert isinstance(found, ModelRunner)
    return found


def capture(server: ServedScheduler) -> PrefillGraphRunner:
    """As at the start of a server: with the states that its draft reads."""
    worker, target = server.scheduler.worker, target_of(server)
    mode = CaptureHiddenMode.NULL
    if isinstance(worker, BaseSpecWorker):
        mode = worker.feature_mode
    target.prefill_runner = PrefillGraphRunner(target, COUNTS, hidden_mode=mode)
    return target.prefill_runner


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


def what(answers: list[Answer]) -> list[tuple[list[int], int, Any]]:
    """Tokens, and how many drafts were right: both follow from the target's states."""
    return [(a.tokens, a.cached_tokens, a.spec) for a in answers]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "flags"),
    [
        ("EAGLE3", ("--speculative-num-steps", 3, "--speculative-eagle-topk", 1)),
        ("EAGLE3", ("--speculative-num-steps", 3, "--speculative-eagle-topk", 3)),
        ("STANDALONE", ("--speculative-num-steps", 3, "--speculative-eagle-topk", 1)),
        ("NGRAM", ()),
    ],
    ids=["chain", "tree", "standalone", "ngram"],
)
def test_drafts_are_those_of_uncaptured_steps(
    folder: Path, algorithm: str, flags: tuple[Any, ...], overlap: bool
) -> None:
    drafts = {"EAGLE3": folder / "eagle3", "STANDALONE": folder / "target"}
    all_flags: list[Any] = ["--speculative-algorithm", algorithm, *flags, *COMMON]
    all_flags += ["--chunked-prefill-size", 32]
    if algorithm in drafts:
        all_flags += ["--speculative-draft-model-path", drafts[algorithm]]
    if not overlap:
        all_flags.append("--disable-overlap-schedule")
    answers = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        with ServedScheduler(folder / "target", *all_flags) as server:
            graphs = capture(server) if is_captured else None
            if isinstance(server.scheduler.worker, BaseSpecWorker) and is_captured:
                server.scheduler.worker.capture_graphs([1, 4, 8], pad=True, show_progress=False)
            answers.append(rounds(server))
            if graphs is not None:
                assert graphs.num_steps >= 6
    if algorithm == "NGRAM":  # which drafts where it measures that they pay
        assert [a.tokens for a in answers[0]] == [a.tokens for a in answers[1]]
    else:
        assert what(answers[0]) == what(answers[1])
        assert any(spec for _, _, spec in what(answers[0]))


@pytest.mark.parametrize(
    ("model", "algorithm"), [("target", None), ("windows", None), ("target", "EAGLE3")]
)
def test_a_step_waits_for_what_comes_from_the_host(
    folder: Path, model: str, algorithm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[Any] = [*COMMON, "--enable-hierarchical-cache", "--hicache-ratio", 2]
    if algorithm is not None:
        flags += ["--speculative-algorithm", algorithm, "--speculative-num-steps", 3]
        flags += ["--speculative-eagle-topk", 1]
        flags += ["--speculative-draft-model-path", folder / "eagle3"]
    ids = prompt(45)
    with ServedScheduler(folder / model, *flags) as server:
        expected = server.answer(ids, 12)
        graphs = capture(server)
        controller = server.tree.cache_controller
        monkeypatch.setattr(controller, "_copy_hook", lambda kind, layer: time.sleep(LAYER_S))
        for _ in range(2):
            server.evict_device()
            answer = server.answer(ids, 12)
            assert answer.sources == {"device": 0, "host": 44}, answer.sources
            assert answer.tokens == expected.tokens
        assert graphs.num_steps == 2
        server.settle()
