"""Life and death of a real server's processes: start, stop, crash.

Of several ranks, replicas and hosts: `test/registered/parallel/test_parallel.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch

from sglang.srt.entrypoints import launch
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import get_free_ports
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=70, suite="basic")

START_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(folder, "llama")
    return folder


class Server:
    """A server started by the command line, and what it wrote."""

    def __init__(
        self, model_path: Path, log: Path, *flags: object, port: int | None = None
    ) -> None:
        self.port = port or get_free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.cli", "serve", "--model-path", str(model_path)]
        command += ["--device", "cpu", "--port", str(self.port), "--max-total-tokens", "2048"]
        command += ["--num-threads", "1", *map(str, flags)]
        with log.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        self.children: list[psutil.Process] = []

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.get("/ready") != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def get(self, path: str) -> int | None:
        try:
            return requests.get(self.url + path, timeout=5).status_code
        except requests.RequestException:
            return None

    def generate(self, max_new_tokens: int = 4) -> requests.Response:
        body: dict[str, Any] = {"text": "hi", "sampling_params": {"max_new_tokens": max_new_tokens}}
        return requests.post(self.url + "/generate", json=body, timeout=60)

    def scheduler(self) -> psutil.Process:
        """The child with the most memory is a scheduler: it alone loads torch."""
        return max(self.children, key=lambda child: child.memory_info().rss)

    def assert_gone(self) -> None:
        # The resource tracker of multiprocessing leaves a moment after the parent.
        _, left = psutil.wait_procs(self.children, timeout=3)
        assert [c for c in left if c.status() != psutil.STATUS_ZOMBIE] == []

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


@contextmanager
def _serving(*arguments: Any, **options: Any) -> Iterator[Server]:
    server = Server(*arguments, **options)
    try:
        yield server
    finally:
        server.stop()


def test_sigterm_is_a_clean_stop(model_path: Path, tmp_path: Path) -> None:
    with _serving(model_path, tmp_path / "log") as server:
        server.wait_ready()
        assert server.generate().status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0, server.log.read_text()
        server.assert_gone()
        assert "Traceback" not in server.log.read_text()


def test_requests_cut_off_by_sigterm_get_proper_errors(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has no answer in time is told so in the shape of its endpoint, queued or running."""
    monkeypatch.setenv("SGLANG_SHUTDOWN_TIMEOUT", "1")
    flags = ("--max-running-requests", 3)
    with _serving(model_path, tmp_path / "log", *flags) as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        slow = requests.post(server.url + "/slow_down", json={"forward_sleep_time": 0.1})
        assert slow.status_code == 200
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        native = _stream(server, "/generate", {"text": "hi", "sampling_params": sampling})
        body = {"model": str(model_path), "prompt": "hi", "max_tokens": 300, "ignore_eos": True}
        openai = _stream(server, "/v1/completions", body)
        begun = [next(native), next(openai)]
        assert all(text.startswith("data: ") and "error" not in text for text in begun)
        running, queued = [
            pool.submit(_post, server, "/generate", {"text": "hi", "sampling_params": sampling})
            for _ in range(2)
        ]
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        ends = [list(native)[-2:], list(openai)[-2:]]
        assert server.process.wait(15) == 0, server.log.read_text()
        log = server.log.read_text()
        assert "Failing 4 requests" in log, log
        assert "Traceback" not in log and "Cancel" not in log, log
        for answer in (running.result(), queued.result()):
            error = answer.json()
            assert (answer.status_code, error["code"], error["type"]) == (503, 503, "503")
            assert error["message"] == "The server is shutting down."
        assert json.loads(ends[0][0].removeprefix("data: "))["error"]["retryable"] is True
        for failure, done in ends:
            error = json.loads(failure.removeprefix("data: "))["error"]
            assert done == "data: [DONE]"
            assert error["code"] == 503
            assert error["message"] == "The server is shutting down."


@pytest.mark.parametrize(
    ("signals", "between_s"), [("TERM INT", 0.05), ("INT INT", 1.0), ("INT TERM", 0.05)]
)
def test_a_second_signal_ends_the_time_to_finish(
    model_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signals: str,
    between_s: float,
) -> None:
    """Open streams get their errors at once, and an unfinished request holds nobody up."""
    monkeypatch.setenv("SGLANG_SHUTDOWN_TIMEOUT", "20")
    first, second = (signal.Signals[f"SIG{name}"] for name in signals.split())
    with _serving(model_path, tmp_path / "log") as server, socket.socket() as unfinished:
        server.wait_ready()
        slow = requests.post(server.url + "/slow_down", json={"forward_sleep_time": 0.1})
        assert slow.status_code == 200
        unfinished.connect(("127.0.0.1", server.port))
        unfinished.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
        sampling = {"max_new_tokens": 300, "ignore_eos": True}
        stream = _stream(server, "/generate", {"text": "hi", "sampling_params": sampling})
        assert "error" not in next(stream)
        server.process.send_signal(first)
        time.sleep(between_s)
        signalled = time.monotonic()
        server.process.send_signal(second)
        failure, done = list(stream)[-2:]
        assert server.process.wait(15) == 0, server.log.read_text()
        assert time.monotonic() - signalled < 6
        server.assert_gone()
        assert done == "data: [DONE]"
        error = json.loads(failure.removeprefix("data: "))["error"]
        assert error["message"] == "The server is shutting down."
        log = server.log.read_text()
        assert log.count("A second signal") == log.count("Failing 1 requests") == 1, log
        assert "Traceback" not in log and "ERROR" not in log, log


def test_requests_held_by_a_pause_get_proper_errors_at_sigterm(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SHUTDOWN_TIMEOUT", "1")
    with _serving(model_path, tmp_path / "log") as server, ThreadPoolExecutor() as pool:
        server.wait_ready()
        pause = requests.post(server.url + "/pause_generation", json={"mode": "retract"})
        assert pause.status_code == 200
        waiting = pool.submit(server.generate)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0, server.log.read_text()
        assert waiting.result().status_code == 503
        assert "Traceback" not in server.log.read_text()


def _post(server: Server, path: str, body: dict[str, Any], **options: Any) -> requests.Response:
    return requests.post(server.url + path, json=body, timeout=60, **options)


def _stream(server: Server, path: str, body: dict[str, Any]) -> Iterator[str]:
    """Events of a streamed answer as they come."""
    reply = _post(server, path, {**body, "stream": True}, stream=True)
    assert reply.status_code == 200
    return (line.decode() for line in reply.iter_lines(chunk_size=1) if line)


def test_sigterm_to_the_whole_group_is_a_clean_stop(model_path: Path, tmp_path: Path) -> None:
    # What `timeout` and terminals do: every process gets the signal at once.
    with _serving(model_path, tmp_path / "log") as server:
        server.wait_ready()
        for process in [psutil.Process(server.process.pid), *server.children]:
            process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0, server.log.read_text()
        server.assert_gone()


def test_sigterm_while_starting(model_path: Path, tmp_path: Path) -> None:
    with _serving(model_path, tmp_path / "log") as server:
        deadline = time.monotonic() + 30
        parent = psutil.Process(server.process.pid)
        while len(parent.children(recursive=True)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        server.children = parent.children(recursive=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0, server.log.read_text()
        server.assert_gone()


def test_a_killed_scheduler_ends_the_server(model_path: Path, tmp_path: Path) -> None:
    with _serving(model_path, tmp_path / "log") as server:
        server.wait_ready()
        assert server.get("/health") == 200
        server.scheduler().kill()
        killed = time.monotonic()
        while server.get("/health") == 200:
            assert time.monotonic() - killed < 5, "/health is still 200 after 5 s"
        assert server.process.wait(15) == 128 + signal.SIGKILL
        server.assert_gone()
        log = server.log.read_text()
        assert "The server cannot go on: scheduler TP0" in log and "SIGKILL" in log


def test_a_busy_port_is_reported_before_anything_is_loaded(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_WAIT_PORT_TIMEOUT", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with _serving(model_path, tmp_path / "log", port=port) as server:
            assert server.process.wait(30) == 1
            assert f"127.0.0.1:{port} is in use" in server.log.read_text()


def test_a_host_that_is_no_address_is_reported_at_once(model_path: Path, tmp_path: Path) -> None:
    with _serving(model_path, tmp_path / "log", "--host", "300.1.1.1") as server:
        assert server.process.wait(8) == 1  # the wait for a busy port is longer
        log = server.log.read_text()
        assert "--host 300.1.1.1 is no address" in log and "Traceback" not in log


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    with _serving(tmp_path / "nothing", tmp_path / "log") as server:
        assert server.process.wait(30) == 1
        log = server.log.read_text()
        assert "nothing does not exist" in log and "Traceback" not in log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_clear_line(model_path: Path, tmp_path: Path) -> None:
    with _serving(model_path, tmp_path / "log", "--device", "cuda") as server:
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert log.count("failed to start: --device cuda: ") == 1
        assert "Traceback" not in log, log


def test_a_corrupt_model_shows_the_cause(model_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_path.iterdir():
        if file.suffix == ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes()[:1000])
        else:
            os.link(file, broken / file.name)
    with _serving(broken, tmp_path / "log") as server:
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert log.count("The server did not start: scheduler TP0 failed to start: cannot") == 1
        assert "--log-level debug" in log
        assert "Traceback" not in log and "leaked" not in log, log


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: (f / "config.json").unlink(), "cannot read .*config.json: No such file"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda f: _edit(f, rope_scaling=[5]), "the config of .* has a malformed value"),
        (lambda f: _edit(f, architectures=["GemmaForX"]), "not supported: GemmaForX; supported"),
        (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
        (lambda f: _edit(f, num_attention_heads=9), "--tp-size 2 does not fit: 9 attention heads"),
        (lambda f: _edit(f, hidden_size=[1]), "'hidden_size' must be a positive integer"),
    ],
)
def test_what_is_known_before_the_start_is_one_sentence(
    tmp_path: Path, change: Callable[[Path], object], text: str
) -> None:
    make_tiny_checkpoint(tmp_path, "llama")
    change(tmp_path)
    args = ServerArgs(model_path=str(tmp_path), device="cpu", tp_size=2)
    with pytest.raises(launch.LaunchError, match=text) as caught:
        launch.start_subprocesses(args)
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_one_sentence() -> None:
    args = ServerArgs(model_path="some-one/some-model", device="cpu")
    with pytest.raises(launch.LaunchError, match="models are not downloaded"):
        launch.start_subprocesses(args)


def test_tensors_that_do_not_fit_are_named_without_a_traceback(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    _edit(tmp_path, num_hidden_layers=config["num_hidden_layers"] + 1)
    with _serving(tmp_path, tmp_path / "log") as server:
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert log.count("missing tensors") == 1
        assert "Traceback" not in log and "leaked" not in log, log


@pytest.mark.parametrize("flags", [("--max-total-tokens", 20), ("--context-length", 3)])
def test_small_configurations_pass_the_warm_up(
    model_path: Path, tmp_path: Path, flags: tuple[object, ...]
) -> None:
    with _serving(model_path, tmp_path / "log", *flags) as server:
        server.wait_ready()
        names = {" ".join(child.cmdline()).strip() for child in server.children}
        assert {"sglang::scheduler TP0", "sglang::detokenizer"} <= names
        assert {"sglang:schTP0", "sglang:detokeni"} <= {c.name() for c in server.children}


def test_prompts_up_to_the_last_slot_are_served(model_path: Path, tmp_path: Path) -> None:
    """In whole pages a long prompt takes all of the pool: no scheduler dies of it."""
    flags = ("--max-total-tokens", 96, "--page-size", 16, "--chunked-prefill-size", 32)
    with _serving(model_path, tmp_path / "log", *flags) as server:
        server.wait_ready()
        for length, code in ((79, 200), (80, 200), (81, 200), (95, 200), (96, 400), (94, 200)):
            # Prompts that share no prefix: each is computed, chunk by chunk.
            body: dict[str, Any] = {
                "input_ids": [length] * length,
                "sampling_params": {"max_new_tokens": 50, "ignore_eos": True},
            }
            reply = requests.post(server.url + "/generate", json=body, timeout=20)
            assert reply.status_code == code, (length, reply.text)
            if code == 200:
                room = min(50, 96 - length)
                assert reply.json()["meta_info"]["completion_tokens"] == room
        assert psutil.Process(server.process.pid).children(recursive=True) == server.children


def test_a_refused_warm_up_is_told_once_and_exits_with_one(
    model_path: Path, tmp_path: Path
) -> None:
    with _serving(model_path, tmp_path / "log", "--context-length", 1) as server:
        assert server.process.wait(60) == 1, server.log.read_text()
        log = server.log.read_text()
        assert log.count("The warm-up request failed: ") == 1
        assert "its warm-up request failed" in log
        assert "SIGKILL" not in log and "Traceback" not in log, log


def _edit(folder: Path, **values: object) -> None:
    """Overwrite keys of the config."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_failure_after_loading_leaves_no_noise(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama")
    # Ends a scheduler after it has read its weights.
    log_file = tmp_path / "log"
    with _serving(tmp_path, log_file, "--max-total-tokens", 1, "--page-size", 64) as server:
        assert server.process.wait(60) == 1, server.log.read_text()
        log = server.log.read_text()
        assert "The server did not start: scheduler TP0 failed to start: " in log
        assert "Traceback" not in log and "leaked" not in log, log
