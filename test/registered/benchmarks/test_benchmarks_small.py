"""Every script of `benchmark/` runs in its small form on a CPU and writes its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="benchmarks")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmark"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TIMEOUT_S = 150

# Script: its small form. The file of the figures is added.
SMALL_FORMS = {
    "bench_attention": ["--small", "--json"],
    "bench_cpu_engine": ["--small", "--threads", "1", "--json"],
    "bench_cpu_ops": ["--small", "--threads", "1", "--json"],
    "bench_one_batch": ["--device", "cpu", "--small", "--json"],
    "bench_radix_cache": ["--small", "--out"],
    "bench_scheduler": ["--small", "--json"],
    "bench_serving": ["--small", "--json"],
}


def run_script(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)


def test_every_script_has_a_small_form_here() -> None:
    assert sorted(SMALL_FORMS) == sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))


@pytest.mark.parametrize("name", sorted(SMALL_FORMS))
def test_small_form_prints_a_table_and_writes_json(name: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run_script(name, *SMALL_FORMS[name], figures)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 3
    assert json.loads(figures.read_text()), "the JSON holds no figures"


def test_soak_of_own_server_passes_its_checks_and_draws_a_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "picture.png"
    arguments: list[str | Path] = ["--small", "--mix", "0.06", "--json", figures]
    # Seconds on a busy machine say nothing about a drift; the check itself has its own tests.
    arguments += ["--drift-tolerance", "20", "--input-len", "64", "--output-len", "32"]
    if importlib.util.find_spec("matplotlib") is not None:
        arguments += ["--plot", picture]
    done = run_script("bench_serving", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(figures.read_text())
    assert [check["passed"] for check in result["checks"]] == [True] * 3
    outcomes = result["summary"]["outcomes"]
    assert outcomes["ok"] > 0 and outcomes["aborted"] + outcomes["disconnected"] > 0
    assert result["server"]["version"] and result["summary"]["client_lag_ms"]["count"] > 0
    if picture in arguments:
        assert picture.read_bytes().startswith(PNG_SIGNATURE)
