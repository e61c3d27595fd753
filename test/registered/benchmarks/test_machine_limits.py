"""Limits are those of the memory and not of a cache, and belong to the figures beside them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_cpu_engine
import machine_limits
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="benchmarks")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmark"
# As much as the largest servers have in one socket's last-level cache, nearly.
LARGE_CACHE_BYTES = 512 << 20


def test_a_cpu_is_measured_outside_its_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "timed", lambda function, repeats: 1.0)
    limits = machine_limits.measure_limits(torch.device("cpu"), torch.float32)
    assert limits["read_bytes_s"] > LARGE_CACHE_BYTES
    assert limits["copy_bytes_s"] > LARGE_CACHE_BYTES
    assert limits["matmul_ops_s"] >= 2 * 2048**3


def test_the_small_form_gives_no_share_of_a_limit(tmp_path: Path) -> None:
    """Its model fits in a cache: no memory limits it."""
    figures = tmp_path / "figures.json"
    words = "--device cpu --small --batch 1 --threads 1 --json".split()
    command = [sys.executable, str(BENCHMARKS / "bench_one_batch.py"), *words, str(figures)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=True)
    rows = json.loads(figures.read_text())
    assert rows["limits"] is None and "no limits" in done.stdout
    assert "share" not in rows["decode"][0] and "mfu" not in rows["prefill"][0]
    assert "MFU" not in done.stdout and " of " not in done.stdout.split("decode", 1)[1]


def test_a_limit_is_that_of_the_bandwidth_beside_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Engine(bench_cpu_engine.EngineContestant):
        def __init__(self, *_: Any) -> None:
            self.vocab_size, self.weight_bytes = 10, 1 << 30

    measured = iter([20e9, 30e9])
    monkeypatch.setattr(machine_limits, "cpu_read_bandwidth", lambda: next(measured))
    monkeypatch.setattr(bench_cpu_engine, "EngineContestant", Engine)
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"what": "bandwidth"}\n'))
    bench_cpu_engine.serve(Namespace(role="engine", model="", threads=1, cpu_weight_format="auto"))
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["limit_b1"] == values["bandwidth_gb_s"] * 1e9 / Engine().weight_bytes
