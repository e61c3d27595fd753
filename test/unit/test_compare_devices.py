"""What `compare_devices.py` refuses before it loads anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", str(ROOT)], "compare_devices.py: needs a CUDA device"),
        (["--model", "/nope"], "there is no /nope"),
        (["--model", str(ROOT), "--dtype", "foo"], "invalid choice: 'foo'"),
    ],
)
def test_what_cannot_be_compared_ends_with_one_line(words: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "compare_devices.py"), *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    message = done.stderr.partition(": error: ")[2] or done.stderr  # argparse: after the usage
    assert done.returncode != 0 and said in message
    assert len(message.strip().splitlines()) == 1
