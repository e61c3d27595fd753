"""Client helpers and server test utilities, against a stub server of the standard library."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import unittest
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from sglang import utils
from sglang.test import test_utils as tu
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci


class StubHandler(BaseHTTPRequestHandler):
    """Refuses the first two requests, then answers with what it was sent."""

    refusals = 2

    def do_GET(self) -> None:  # noqa: N802
        self.answer({"path": self.path, "auth": self.headers.get("Authorization")})

    def do_POST(self) -> None:  # noqa: N802
        length = int(self.headers["Content-Length"])
        self.answer({"text": json.loads(self.rfile.read(length))["text"]})

    def answer(self, content: dict[str, object]) -> None:
        status = 200
        if StubHandler.refusals > 0:
            StubHandler.refusals -= 1
            status = 503
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(utils, "_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(StubHandler, "refusals", 2)
    with ThreadingHTTPServer(("127.0.0.1", 0), StubHandler) as stub:
        thread = threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{stub.server_port}"
        stub.shutdown()
        thread.join()


def test_waiting_ends_with_the_first_200(server: str) -> None:
    utils.wait_for_http_ready(server, timeout=10)
    assert StubHandler.refusals == 0
    utils.wait_for_server(server.removeprefix("http://"), timeout=10)


def test_waiting_ends_when_time_is_up_or_the_process_is_gone(server: str) -> None:
    StubHandler.refusals = 10**9
    with pytest.raises(TimeoutError, match="not ready"):
        utils.wait_for_http_ready(server, timeout=0.05)
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    ended.wait()
    with pytest.raises(RuntimeError, match="code 3"):
        utils.wait_for_http_ready(server, timeout=10, process=ended)


def test_requests_carry_key_and_body(server: str) -> None:
    StubHandler.refusals = 0
    reply = utils.http_request(f"{server}/x", api_key="secret")
    assert reply.json() == {"path": "/x", "auth": "Bearer secret"}
    assert utils.http_request(server, json={"text": "hello"}).json() == {"text": "hello"}
    assert tu.send_generate_requests(server, 2) == ["The capital of France is"] * 2
    assert len(tu.send_concurrent_generate_requests(server, 3)) == 3


def test_urls_are_normalised() -> None:
    assert utils.normalize_base_url("localhost:30000/") == "http://localhost:30000"
    assert utils.normalize_base_url("https://host/prefix") == "https://host/prefix"


def test_started_commands_get_a_port_and_end(capfd: pytest.CaptureFixture[str]) -> None:
    command = "python -c \\\n 'import sys, time; print(sys.argv[1:], flush=True); time.sleep(60)'"
    process, port = utils.launch_server_cmd(command, host="127.0.0.1")
    assert 1024 < port < 65536
    assert process.poll() is None
    utils.terminate_process(process)
    assert process.poll() is not None


def test_the_whole_family_of_a_server_ends(tmp_path: Path) -> None:
    # The parent exits on SIGTERM and leaves its child behind, as a crashing server may.
    child = "import time; time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid')!r} + '.new', 'w').write(str(child.pid))\n"
        f"import os; os.rename({str(tmp_path / 'pid')!r} + '.new', {str(tmp_path / 'pid')!r})\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    while not (tmp_path / "pid").exists():
        assert process.poll() is None
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    tu.terminate_and_kill_process_tree(process, terminate_timeout=10)
    assert process.poll() is not None
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_server_that_ends_early_is_reported_with_its_output(tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    port = tu.find_available_port(30000)
    with pytest.raises(RuntimeError, match="exited with code"):
        tu.popen_launch_server(
            str(tmp_path / "no-such-model"),
            f"http://127.0.0.1:{port}",
            timeout=60,
            other_args=["--log-level", "error"],
            return_stdout_stderr=(out, err),
        )


def test_ports_are_above_the_base_and_free() -> None:
    port = tu.find_available_port(20000)
    assert 20100 <= port < 65536


class FailingSetUp(tu.CustomTestCase):
    """Collected by hand only: its set-up always fails."""

    __test__ = False
    cleaned = False

    @classmethod
    def setUpClass(cls) -> None:
        raise ValueError("set-up fails")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cleaned = True

    def test_nothing(self) -> None:
        """Never runs."""


def test_clean_up_runs_after_a_failed_set_up() -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(FailingSetUp).run(result)
    assert "set-up fails" in result.errors[0][1]
    assert FailingSetUp.cleaned


class FailsOnce(tu.CustomTestCase):
    """Collected by hand only: passes from its second call on."""

    __test__ = False
    calls = 0

    def test_second_call(self) -> None:
        FailsOnce.calls += 1
        self.assertGreater(FailsOnce.calls, 1)


@pytest.mark.parametrize(("retries", "passes"), [("0", False), ("1", True)])
def test_failing_methods_are_repeated_as_often_as_asked(
    monkeypatch: pytest.MonkeyPatch, retries: str, passes: bool
) -> None:
    monkeypatch.setenv("SGLANG_TEST_MAX_RETRY", retries)
    monkeypatch.setattr(FailsOnce, "calls", 0)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(FailsOnce).run(result)
    assert result.wasSuccessful() is passes


def test_metrics_and_summaries_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_METRICS_OUTPUT", str(tmp_path / "metrics"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    tu.dump_metric("speed", 1.5, {"batch": "8"})
    tu.write_github_step_summary("| speed | 1.5 |\n")
    record = json.loads((tmp_path / "metrics").read_text())
    assert (record["name"], record["value"], record["labels"]) == ("speed", 1.5, {"batch": "8"})
    assert (tmp_path / "summary").read_text() == "| speed | 1.5 |\n"


def test_rouge_l_counts_words_in_order() -> None:
    scores = tu.calculate_rouge_l(["a b c d", "x", ""], ["a c d e", "x", "y"])
    assert scores == [0.75, 1.0, 0.0]


def test_machine_queries_work_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert tu.get_gpu_count() == 0
    assert tu.get_gpu_memory_gb() == 0
    assert not tu.is_h200_system()
    assert not tu.is_blackwell_system()
    rows = [["0", "NVIDIA H200", "143771"], ["1", "NVIDIA H200", "143771"]]
    monkeypatch.setattr(tu, "_query_gpus", lambda *args: rows)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert tu.get_gpu_count() == 1
    assert tu.is_h200_system()


def test_registration_does_nothing_at_run_time() -> None:
    register_cuda_ci(est_time=60, suite="per-commit")
    register_cpu_ci(60, stage="unit", runner_config="small")
