"""What `device.sh` and `device_two_gpus.sh` refuse before they install or start anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import sglang

SCRIPTS = Path(sglang.__file__).parents[2] / "scripts"


def run(script: str, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it with its own folders under `folder`, and a Python that leaves a mark there."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\ntouch {folder}/called\n")
    python.chmod(0o755)
    own = {
        **{"OUT": "out", "SITE": "site", "PYTHON": "python"},
        **{"HISPEC_BACKGROUND": "background", "HISPEC_KEPT_PARTS": "parts"},
    }
    env = {**os.environ, **{name: str(folder / path) for name, path in own.items()}}
    command = ["bash", str(SCRIPTS / script), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "bogus"], "'bogus' is none of tests"),
        (["run", "gemv", "bogus"], "'bogus' is none of tests"),
        (["run", "gemv bogus"], "'bogus' is none of tests"),
        (["start", "bogus"], "'bogus' is none of tests"),
        (["follow"], "follow SECONDS"),
        (["follow", "soon"], "follow SECONDS"),
        (["follow", "1"], "scripts/device.sh start comes first"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    words: list[str], message: str, tmp_path: Path
) -> None:
    done = run("device.sh", *words, folder=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("device.sh: ") and message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python"]


def test_known_names_run(tmp_path: Path) -> None:
    done = run("device.sh", "run", "gemv overhead", "two-gpus", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["== gemv", "== overhead", "== two-gpus"]
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize("script", ["device.sh", "device_two_gpus.sh"])
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_usage_and_starts_nothing(script: str, word: str, tmp_path: Path) -> None:
    done = run(script, word, folder=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert f"scripts/{script} " in done.stdout and "set -e" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python"]
