"""The file backend over hundreds of killed writers, and with a whole backend that is killed.

`HISPEC_KILL_CYCLES` sets how often a writer is killed (default 300).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang.srt.mem_cache.storage.folder_quota import is_temporary
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.host_pages import get, make_file_store, make_host_pool, put
from sglang.test.fakes.page_writer import faults_of

register_cpu_ci(est_time=60, suite="hicache")

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}

WRITER = """
import sys
from pathlib import Path
from sglang.test.fakes.host_pages import make_file_store, make_host_pool, put

pool = make_host_pool(page_size=64)
store = make_file_store(Path(sys.argv[1]), pool, max_size=1_000_000)
sys.stdout.write("ready\\n")
sys.stdout.flush()
while True:
    for first in range(0, 400, 16):
        put(store, pool, range(first, first + 16))
"""


def run_writers(*arguments: str) -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, "-m", "sglang.test.fakes.page_writer", *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_many_killed_writers_leave_only_whole_pages(tmp_path: Path) -> None:
    cycles = os.environ.get("HISPEC_KILL_CYCLES", "300")
    result = run_writers("kill", str(tmp_path), "--cycles", cycles)
    assert result["faults"] == []
    assert int(str(result["strays"])) > 0  # some were killed in the middle of a page


@pytest.mark.parametrize("writers", ["2", "4"])
def test_the_limit_holds_for_many_pages(tmp_path: Path, writers: str) -> None:
    result = run_writers("quota", str(tmp_path), "--writers", writers, "--pages", "2000")
    assert result["faults"] == []


def test_a_backend_that_is_killed_serves_whole_pages_at_its_restart(tmp_path: Path) -> None:
    rng = random.Random(5)
    pool = make_host_pool(page_size=64)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0.05, 0.3))
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        store = make_file_store(tmp_path, pool, max_size=1_000_000)
        assert not [name for name in os.listdir(tmp_path) if is_temporary(name)]
        for first in range(0, 400, 16):
            get(store, pool, range(first, first + 16))  # raises when bytes are wrong
        assert store.get_stats()["hits"] > 0
        assert store.get_stats()["corrupt"] == 0
        assert put(store, pool, range(16)) == [True] * 16
        store.close()
    assert faults_of(tmp_path, 1_000_000) == []
