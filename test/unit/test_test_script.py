"""What `test.sh` says of itself, before it sets up anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import sglang

SCRIPT = Path(sglang.__file__).parents[2] / "scripts" / "test.sh"


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_its_own_and_installs_nothing(word: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    python.chmod(0o755)
    env = {**os.environ, "HISPEC_VENV": str(tmp_path / "venv"), "HISPEC_PYTHON": str(python)}
    command = ["bash", str(SCRIPT), word]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert "scripts/test.sh ARGUMENTS" in done.stdout and "shellcheck" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python"]
