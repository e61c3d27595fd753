"""Shared heartbeat counters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.utils.liveness import LivenessCounter


def test_counters_are_separate_and_seen_by_other_processes(tmp_path: Path) -> None:
    path = str(tmp_path / "liveness")
    LivenessCounter.create(path, 3)
    code = (
        "from sglang.srt.utils.liveness import LivenessCounter\n"
        f"counter = LivenessCounter({path!r}, 1)\n"
        "for _ in range(5): counter.increment()"
    )
    with LivenessCounter(path) as reader, LivenessCounter(path, 2) as own:
        assert reader.read_all() == [0, 0, 0]
        own.increment()
        subprocess.run([sys.executable, "-c", code], check=True)
        assert reader.read_all() == [0, 5, 1]
    with LivenessCounter(path, 1) as again:
        again.increment()
        assert again.read(1) == 6


def test_a_missing_file_or_index_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        LivenessCounter(str(tmp_path / "nothing"))
    LivenessCounter.create(str(tmp_path / "one"), 1)
    with pytest.raises(ValueError, match="not in \\[0, 1\\)"):
        LivenessCounter(str(tmp_path / "one"), 1)
