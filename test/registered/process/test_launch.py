"""The launcher with fake children: ready handshake, failures, deaths on both sides, stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sglang.srt.entrypoints import launch
from sglang.srt.server_args import PortArgs, ServerArgs

FAKES = "sglang.test.fakes.fake_processes"


@pytest.fixture(autouse=True)
def fake_targets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "SCHEDULER_TARGET", f"{FAKES}:run_fake_scheduler")
    monkeypatch.setattr(launch, "DETOKENIZER_TARGET", f"{FAKES}:run_fake_detokenizer")
    monkeypatch.setattr(launch, "_FAILURE_GRACE_S", 0.2)
    monkeypatch.setattr(launch, "check_model", lambda args: None)
    monkeypatch.delenv("FAKE_CHILD", raising=False)
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    trackers = [child for child in left if "resource_tracker" in " ".join(child.cmdline())]
    assert len(left) == len(trackers), f"processes left over: {left}"


def _args(**kwargs: object) -> ServerArgs:
    return ServerArgs(model_path="fake", device="cpu", log_level="error", **kwargs)  # type: ignore[arg-type]


def test_launch_starts_a_scheduler_per_rank_and_reports_one_info_per_replica() -> None:
    launched = launch.launch_subprocesses(_args(tp_size=2, dp_size=2, num_threads=3))
    try:
        assert len(launched.processes) == 5
        assert len(launched.scheduler_infos) == 2
        assert launched.scheduler_infos[0].resolved_args["threads"] == "3"
        assert os.path.isdir(launched.port_args.ipc_dir)
    finally:
        # The fake ranks above 0 are told by nobody, so they are killed after the time limit.
        launched.shutdown(timeout_s=0.5)
    assert not os.path.exists(launched.port_args.ipc_dir)


def test_shutdown_lets_children_leave_with_code_zero() -> None:
    launched = launch.launch_subprocesses(_args())
    start = time.monotonic()
    launched.shutdown()
    launched.shutdown()
    assert [process.exitcode for process in launched.processes] == [0, 0]
    assert time.monotonic() - start < 4


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [("raise", "made of cheese"), ("exit-early", "exit code 7")],
)
def test_a_child_that_fails_to_start_raises_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, behaviour: str, text: str
) -> None:
    monkeypatch.setenv("FAKE_CHILD", behaviour)
    args = _args()
    ports = PortArgs.init_new(args)
    with pytest.raises(launch.LaunchError, match=text):
        launch.launch_subprocesses(args, ports)
    assert not os.path.exists(ports.ipc_dir)


def test_a_users_mistake_travels_as_one_sentence_a_defect_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "bad-file")
    with pytest.raises(launch.LaunchError) as caught:
        launch.launch_subprocesses(_args())
    assert str(caught.value) == (
        "scheduler TP0 failed to start: the file weights.bin is not for this model "
        "(run with --log-level debug for the trace)"
    )
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setenv("FAKE_CHILD", "raise")
    with pytest.raises(launch.LaunchError, match="failed to start:\nTraceback"):
        launch.launch_subprocesses(_args())


def test_a_child_that_is_never_ready_is_killed_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_CHILD", "never-ready")
    monkeypatch.setenv("SGLANG_STARTUP_TIMEOUT", "3")
    with pytest.raises(launch.LaunchError, match="not ready after 3 s: scheduler TP0"):
        launch.launch_subprocesses(_args())


def test_death_of_a_child_is_told_with_its_cause() -> None:
    launched = launch.launch_subprocesses(_args(), exit_on_failure=False)
    told: list[str] = []
    seen = threading.Event()

    def tell(reason: str) -> None:
        told.append(reason)
        seen.set()

    launched.watchdog.add_failure_callback(tell)
    try:
        os.kill(launched.processes[0].pid or 0, signal.SIGKILL)
        assert seen.wait(5), "the watchdog did not notice within 5 s"
        assert "scheduler TP0" in told[0] and "SIGKILL" in told[0]
        assert launched.watchdog.failure == told[0]
    finally:
        launched.shutdown()


def test_a_stuck_scheduler_loop_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CHILD", "stuck")
    launched = launch.launch_subprocesses(_args(watchdog_timeout=0.5), exit_on_failure=False)
    try:
        deadline = time.monotonic() + 10
        while launched.watchdog.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert launched.watchdog.failure is not None
        assert "made no step for 0.5 s" in launched.watchdog.failure
    finally:
        launched.shutdown()


def test_children_do_not_react_to_signals_meant_for_the_parent() -> None:
    launched = launch.launch_subprocesses(_args(), exit_on_failure=False)
    try:
        for process in launched.processes:
            os.kill(process.pid or 0, signal.SIGTERM)
            os.kill(process.pid or 0, signal.SIGINT)
        time.sleep(0.5)
        assert launched.watchdog.failure is None
        assert all(process.is_alive() for process in launched.processes)
    finally:
        launched.shutdown()


def test_children_launched_by_a_thread_outlive_that_thread() -> None:
    # The kernel's parent-death signal is bound to the thread that forked.
    result: list[launch.Launched] = []
    thread = threading.Thread(
        target=lambda: result.append(launch.launch_subprocesses(_args(), exit_on_failure=False))
    )
    thread.start()
    thread.join()
    try:
        time.sleep(0.3)
        assert all(process.is_alive() for process in result[0].processes)
    finally:
        result[0].shutdown()


# ------------------------------------------------------------------------------------------------
# Whole trees: the parent is a process of its own
# ------------------------------------------------------------------------------------------------


@contextmanager
def _start_tree(tmp_path: Path, body: str) -> Iterator[subprocess.Popen[str]]:
    """Run a parent that launches fake children, writes their pids and then does `body`."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys, time, signal, threading
            from sglang.srt.entrypoints import launch
            from sglang.srt.server_args import ServerArgs

            def main():
                launch.SCHEDULER_TARGET = "{FAKES}:run_fake_scheduler"
                launch.DETOKENIZER_TARGET = "{FAKES}:run_fake_detokenizer"
                launch.check_model = lambda args: None
                args = ServerArgs(model_path="fake", device="cpu", log_level="error")
                launched = launch.launch_subprocesses(args)
                pids = " ".join(str(p.pid) for p in launched.processes)
                sys.stdout.write(pids + " " + launched.port_args.ipc_dir + "\\n")
                sys.stdout.flush()
                {body}

            if __name__ == "__main__":
                main()
            """
        )
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as tree:
        try:
            yield tree
        finally:
            tree.kill()


def _read_tree(parent: subprocess.Popen[str]) -> tuple[list[int], str]:
    assert parent.stdout is not None
    words = parent.stdout.readline().split()
    return [int(word) for word in words[:-1]], words[-1]


def _all_gone(pids: list[int], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_children_end_when_the_parent_is_killed(tmp_path: Path) -> None:
    with _start_tree(tmp_path, "time.sleep(60)") as parent:
        pids, _ = _read_tree(parent)
        assert len(pids) == 2
        parent.kill()
    assert _all_gone(pids, 5)


def test_the_tree_exits_non_zero_when_a_child_is_killed(tmp_path: Path) -> None:
    with _start_tree(tmp_path, "time.sleep(60)") as parent:
        pids, ipc_dir = _read_tree(parent)
        os.kill(pids[0], signal.SIGKILL)
        assert parent.wait(8) == 128 + signal.SIGKILL
    assert _all_gone(pids, 5)
    assert not os.path.exists(ipc_dir)


def test_leaving_the_parent_without_shutdown_stops_the_children(tmp_path: Path) -> None:
    with _start_tree(tmp_path, "return") as parent:
        pids, ipc_dir = _read_tree(parent)
        assert parent.wait(8) == 0
    assert _all_gone(pids, 1)
    assert not os.path.exists(ipc_dir)
