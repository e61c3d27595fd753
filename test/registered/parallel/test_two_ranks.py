"""Two ranks against one and against each other: the parts of `scripts/two_gpus.py`, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.two_ranks import PARTS

register_cpu_ci(est_time=180, suite="parallel")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "two_gpus.py"
# Families have tests of their own over gloo, and times of two ranks on two cores mean nothing.
SLOW = ("speed", "distributed", "experts", "latent")


@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "part",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in PARTS],
)
def test_a_part_passes_on_the_cpu(part: str, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--small", "--only", part]
    done = subprocess.run(
        [*command, "--json", str(figures)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    outcome = json.loads(figures.read_text())[part]
    assert outcome["ok"] and outcome["figures"]
    assert f"{part} " in done.stdout and "1 of 1 parts passed" in done.stdout
