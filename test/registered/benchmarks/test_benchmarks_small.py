"""Every script of `benchmark/` runs in its small form on a CPU and writes its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="benchmarks")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmark"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TIMEOUT_S = 200

# Script: its small form, to which the file of the figures is added; the longest first.
SMALL_FORMS = {
    "bench_replicas": ["--small", "--json"],
    "bench_serving": ["--small", "--json"],
    "bench_cpu_engine": ["--small", "--threads", "1", "--json"],
    "bench_weight_update": ["--small", "--json"],
    "bench_one_batch": ["--device", "cpu", "--small", "--json"],
    "bench_overhead": ["--device", "cpu", "--json"],
    "bench_attention": ["--small", "--json"],
    "bench_radix_cache": ["--small", "--json"],
    "bench_hicache": ["--small", "--json"],
    "bench_draft_coherence": ["--small", "--json"],
    "bench_speculative": ["--device", "cpu", "--small", "--json"],
    "bench_hicache_storage": ["--small", "--json"],
    "bench_hicache_copy": ["--device", "cpu", "--small", "--json"],
    "bench_scheduler": ["--small", "--json"],
    "bench_cpu_ops": ["--small", "--threads", "1", "--json"],
}
# Times kernels that only a GPU runs: there is no small form of it.
CUDA_ONLY = ["bench_gemv"]
PLOT = "picture.png"


@dataclass(frozen=True)
class Done:
    """A script that has ended, and the folder it wrote to."""

    process: subprocess.CompletedProcess[str]
    folder: Path

    def figures(self) -> Any:
        assert self.process.returncode == 0, self.process.stdout + self.process.stderr
        return json.loads((self.folder / "figures.json").read_text())


def run_script(name: str, folder: Path) -> Done:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SMALL_FORMS[name]]
    command.append(str(folder / "figures.json"))
    if name == "bench_serving" and importlib.util.find_spec("matplotlib") is not None:
        command += ["--plot", str(folder / PLOT)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    return Done(process, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """All scripts, two at a time: they mostly start up, and nobody looks at the times."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_script, name, tmp_path_factory.mktemp(name))
            for name in SMALL_FORMS
        }


def test_every_script_has_a_small_form_here() -> None:
    scripts = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
    assert sorted([*SMALL_FORMS, *CUDA_ONLY]) == scripts


@pytest.mark.parametrize("name", SMALL_FORMS)
def test_small_form_prints_a_table_and_writes_json(
    name: str, runs: dict[str, Future[Done]]
) -> None:
    done = runs[name].result()
    assert done.figures(), "the JSON holds no figures"
    assert len(done.process.stdout.splitlines()) >= 3


def test_serving_measures_soaks_and_draws(runs: dict[str, Future[Done]]) -> None:
    """Its small form is an open loop, then a soak, on a server of its own."""
    done = runs["bench_serving"].result()
    result = done.figures()
    assert [check["passed"] for check in result["checks"]] == [True] * 3
    assert "left early" in result["checks"][2]["detail"]
    summary = result["summary"]
    assert summary["outcomes"] == {"ok": 40} and summary["short_answers"] == 0
    assert result["server"]["version"] and summary["client_lag_ms"]["count"] > 0
    assert {"time to first token", "between tokens"} <= set(summary["latencies_ms"])
    picture = done.folder / PLOT
    if importlib.util.find_spec("matplotlib") is not None:
        assert picture.read_bytes().startswith(PNG_SIGNATURE)


def test_no_script_needs_the_test_tools() -> None:
    """Whoever measures has the server's environment, not that of its tests."""
    names = [*SMALL_FORMS, *CUDA_ONLY, "sglang.test.compile_kernels"]
    program = (
        "import importlib, sys\n"
        "for tool in ('pytest', 'hypothesis'): sys.modules[tool] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
