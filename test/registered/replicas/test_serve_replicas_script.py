"""`scripts/serve_replicas.sh` says what is wrong with its arguments before it installs anything."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=1, suite="replicas")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "serve_replicas.sh"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Serve a model by N replicas")
    assert "STORAGE" in done.stdout and "#" not in done.stdout


@pytest.mark.parametrize("arguments", [(), ("0",), ("two",), ("-1",)])
def test_the_number_of_replicas(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "serve_replicas.sh N" in done.stderr


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("--port", "set those instead"), ("--host=::", "HOST and PORT"), ("--api-key", "API_KEY")],
)
def test_flags_that_the_script_sets_itself(flag: str, reason: str) -> None:
    done = run("2", flag, "1")
    assert done.returncode == 1
    assert reason in done.stderr
