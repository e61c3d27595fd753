"""Process trees, devices, limits, logging, metrics folder."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang.srt.utils import common
from sglang.srt.utils.common import (
    assert_pkg_version,
    kill_process_tree,
    parse_json_object,
    set_prometheus_multiproc_dir,
    set_ulimit,
)
from sglang.srt.utils.logging import configure_logger

_TREE = """
import subprocess, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
sys.stdout.write(f"{child.pid}\\n"); sys.stdout.flush()
time.sleep(60)
"""


def _tree() -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen([sys.executable, "-c", _TREE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_whole_tree_is_killed() -> None:
    with _tree()[0] as parent:
        grandchild = psutil.Process(parent.pid).children()[0].pid
        kill_process_tree(parent.pid)
        assert parent.wait(5) == -signal.SIGKILL
        assert not _is_alive(grandchild)


def test_the_parent_or_one_process_can_be_spared() -> None:
    parent, child = _tree()
    with parent:
        kill_process_tree(parent.pid, include_parent=False, skip_pid=child)
        assert parent.poll() is None and _is_alive(child)
        kill_process_tree(parent.pid, include_parent=False)
        assert parent.poll() is None and not _is_alive(child)
        kill_process_tree(parent.pid)
    kill_process_tree(parent.pid)  # already gone: nothing happens


def test_none_means_own_children() -> None:
    code = f"""
import subprocess, sys
from sglang.srt.utils import kill_process_tree
child = subprocess.Popen([sys.executable, "-c", {_TREE!r}])
kill_process_tree(None)
sys.exit(0 if child.wait(5) == -9 else 1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_a_process_can_end_itself_last() -> None:
    code = "import os; from sglang.srt.utils import *; kill_process_tree(os.getpid())"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == -9


def test_devices_are_found_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def nvmlDeviceGetCount_v2(pointer: object) -> int:
            pointer._obj.value = 2  # type: ignore[attr-defined]
            return 0

    monkeypatch.setattr(common, "_torch_build_has_cuda", lambda: True)
    monkeypatch.setattr(common, "_nvml", Library)
    for visible, count in ((None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("0,7,1", 1)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert common.num_cuda_devices() == count, visible
    assert common.get_device() == "cuda" and common.get_device(1) == "cuda:1"
    monkeypatch.setattr(common, "_torch_build_has_cuda", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert common.num_cuda_devices() == 0 and common.get_device(1) == "cpu"


def test_the_build_of_torch_is_read_from_its_version_file() -> None:
    import torch

    assert common._torch_build_has_cuda() is (torch.version.cuda is not None)


def test_cpu_count_obeys_affinity() -> None:
    assert 1 <= common.available_cpu_count() <= len(os.sched_getaffinity(0))


def test_package_versions() -> None:
    assert_pkg_version("psutil", "1.0", "fine")
    with pytest.raises(RuntimeError, match="999.0 is needed. Upgrade it."):
        assert_pkg_version("psutil", "999.0", "Upgrade it.")
    with pytest.raises(RuntimeError, match="is not installed"):
        assert_pkg_version("no-such-package", "1.0", "")


def test_json_objects() -> None:
    assert parse_json_object('{"a": 1}', "--x") == {"a": 1}
    with pytest.raises(ValueError, match="--x is not valid JSON"):
        parse_json_object("{", "--x")
    with pytest.raises(ValueError, match="--x must be a JSON object, not list"):
        parse_json_object("[]", "--x")


def test_limits_only_go_up() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_ulimit(1)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_the_metrics_folder_of_former_runs_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "counter_1.db").write_text("old")
    (folder / "notes.txt").write_text("keep")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    assert set_prometheus_multiproc_dir() == str(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_log_lines_carry_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        configure_logger("info", " TP1")
        logging.getLogger("a.b").info("hello %d", 7)
        logging.getLogger("a.b").debug("hidden")
        logging.getLogger("urllib3").info("hidden too")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    text = capsys.readouterr().err
    assert " TP1] INFO a.b: hello 7" in text and "hidden" not in text
    with pytest.raises(ValueError, match="unknown log level"):
        configure_logger("loud")
