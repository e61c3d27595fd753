"""A step is compared with the replay of a step as long as itself."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_overhead
from bench_one_batch import last_step_ms, use_tiny_model
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="benchmarks")

SECONDS_PER_TOKEN = 2e-5


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.Namespace]:
    """Of a tiny model whose steps take as long as their context says."""
    forward = ModelRunner.forward

    def slow_forward(runner: ModelRunner, batch: Any) -> Any:
        time.sleep(SECONDS_PER_TOKEN * int(batch.seq_lens.sum()))
        return forward(runner, batch)

    monkeypatch.setattr(ModelRunner, "forward", slow_forward)
    words = argparse.Namespace(device="cpu", batch=[1], repeats=1, input_len=16, output_len=240)
    options = bench_overhead.bench_arguments(words)
    use_tiny_model(options, str(tmp_path))
    # The process is that of other tests as well.
    monkeypatch.setattr(CpuPlatform, "configure_process", lambda *_: None)
    with torch.no_grad():
        yield options


def test_steps_that_grow_are_not_faster_than_the_replay(options: argparse.Namespace) -> None:
    (row,) = bench_overhead.measure("tiny", options)
    assert row["step_over_replay"] == row["last_ms_per_step"] / row["replay_ms"]
    assert row["last_ms_per_step"] > 1.2 * row["ms_per_step"]
    assert row["step_over_replay"] > 0.9  # the mean of all steps is 0.7 of the last


def test_the_last_steps_of_a_run_count() -> None:
    moments = [0.0, 9.0, 18.0, *(18.0 + 2.0 * n for n in range(1, 17))]
    assert last_step_ms(moments) == 2e3
    assert last_step_ms(moments[:3]) == 9e3
