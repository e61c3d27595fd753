"""How servers with storage end: whole schedulers that are killed while they write, and those that
follow them; a server whose storage hangs.

`HISPEC_KILL_CYCLES` sets how often (default 10 here); a hundred take about a minute and a half.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.fault_store import Fault
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.hicache_fault_server import serve_with_faults

register_cpu_ci(est_time=30, suite="hicache")


def test_no_wrong_token_and_no_damaged_page_after_kills(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model")
    cycles = os.environ.get("HISPEC_KILL_CYCLES", "10")
    command = [sys.executable, "-m", "sglang.test.fakes.killed_scheduler"]
    result = subprocess.run(
        [*command, str(model), str(tmp_path / "l3"), "--cycles", cycles],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout, result.stderr[-4000:]
    outcome = json.loads(result.stdout)
    assert outcome["faults"] == [], result.stderr[-4000:]
    # What was written before the kills was served after them.
    assert outcome["storage_tokens"] > 100 * int(cycles)


def test_ends_at_once_while_storage_hangs(tmp_path: Path) -> None:
    with serve_with_faults(tmp_path) as case:
        case.switch.set(Fault.HANG, "set", "get", "exists")
        case.ask(1)
        start = time.monotonic()
    assert time.monotonic() - start < 8  # less than the time that detaching waits for
