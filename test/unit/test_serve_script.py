"""Where `serve.sh` lets pages go: the script itself, with an interpreter that starts no server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglang
from sglang.srt.utils.network import get_free_port

PACKAGE = Path(sglang.__file__).parents[1]
SCRIPT = PACKAGE.parent / "scripts" / "serve.sh"
VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
# Answers what the set-up asks, and tells how the server would be started.
INTERPRETER = f"""#!/bin/sh
case "$1 $2" in
  "-c import hashlib"*) cat >/dev/null; echo stamp ;;
  "-c "*) exit 0 ;;
  "-m sglang.cli") echo "folder=${VARIABLE}"; printf '%s\\n' "$@" ;;
  *fetch_model.py*) echo /model ;;
  *) exec "{sys.executable}" "$@" ;;
esac
"""


def started(tmp_path: Path, *flags: str) -> list[str]:
    """Run the script; return the folder's variable and the arguments of the server, a line each."""
    interpreter = tmp_path / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(INTERPRETER)
    interpreter.chmod(0o755)
    (tmp_path / "venv" / ".hispec-stamp-gguf").write_text("stamp\n")
    changed = {"HISPEC_VENV": str(tmp_path / "venv"), "HISPEC_CACHE": str(tmp_path / "cache")}
    environment = {**os.environ, **changed, "PYTHONPATH": str(PACKAGE)}
    environment.pop(VARIABLE, None)
    flags = ("--device", "cpu", "--port", str(get_free_port()), *flags)
    done = subprocess.run(
        ["bash", str(SCRIPT), *flags], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pages_go_to_the_cache_folder(tmp_path: Path) -> None:
    config = json.dumps({"prefetch_threshold": 16})
    lines = started(tmp_path, "--hicache-storage-backend-extra-config", config)
    assert lines[0] == f"folder={tmp_path / 'cache' / 'hicache'}"
    assert "--hicache-storage-backend" in lines


@pytest.mark.parametrize(
    "flags",
    [
        ("--hicache-storage-backend-extra-config", '{"file_storage_path": "/somewhere"}'),
        ("--hicache-storage-backend", "redis"),
    ],
)
def test_storage_that_the_flags_describe_is_left_to_them(
    tmp_path: Path, flags: tuple[str, str]
) -> None:
    lines = started(tmp_path, *flags)
    assert lines[0] == "folder="
    assert not (tmp_path / "cache" / "hicache").exists()
    assert lines[-2:] == list(flags)  # behind the defaults, so that they win
