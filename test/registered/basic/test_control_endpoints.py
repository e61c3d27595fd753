"""Control endpoints of a real server: what they promise, and a generate works after each."""

from __future__ import annotations

import gzip
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import VOCAB_SIZE, make_tiny_checkpoint
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=60, suite="basic")

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
MB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(folder, "llama")
    with serve(str(folder)) as running:
        yield running


@pytest.fixture(autouse=True)
def _unharmed(server: SmallServer) -> Iterator[None]:
    """After every test: the same processes and the same answer."""
    before = server.children()
    ids = server.generate(text="hello", sampling_params=GREEDY)["output_ids"]
    yield
    assert server.generate(text="hello", sampling_params=GREEDY)["output_ids"] == ids
    assert server.children() == before


def _traces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.trace.json.gz"))


def _wait_for(condition: Callable[[], Any], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_the_scheduler_reports_how_long_its_start_took(server: SmallServer) -> None:
    info = server.get("/server_info").json()
    assert info["internal_states"][0]["startup_time"] == info["startup_time"] > 0


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_profile_is_written(server: SmallServer, tmp_path: Path, method: str) -> None:
    body = {"output_dir": str(tmp_path / "new"), "activities": ["CPU"], "profile_id": "run-1"}
    reply = server.request(method, "/start_profile", json=body)
    assert (reply.status_code, reply.text) == (200, "Start profiling.\n")
    assert server.post("/start_profile", json=body).status_code == 400  # one at a time
    server.generate(text="hello", sampling_params=GREEDY)
    assert server.request(method, "/stop_profile").status_code == 200
    (trace,) = _traces(tmp_path)
    assert trace.name.startswith("run-1")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(str(event.get("name")).startswith("aten::") for event in events)
    assert server.post("/stop_profile").status_code == 400  # none is running


def test_profile_of_some_steps_ends_by_itself(server: SmallServer, tmp_path: Path) -> None:
    body = {"output_dir": str(tmp_path), "activities": ["CPU"], "num_steps": 3}
    assert server.post("/start_profile", json=body).status_code == 200
    server.generate(text="hello", sampling_params=GREEDY)
    _wait_for(lambda: _traces(tmp_path))


def test_profile_that_cannot_be_written(server: SmallServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    body = {"output_dir": str(tmp_path / "file" / "inside"), "activities": ["CPU"]}
    started = server.post("/start_profile", json=body)
    if started.status_code == 200:
        server.generate(text="hello", sampling_params=GREEDY)
        started = server.post("/stop_profile")
    assert 400 <= started.status_code < 500 and started.json()["error"]["message"]


def test_slow_down(server: SmallServer) -> None:
    def seconds() -> float:
        started = time.monotonic()
        server.generate(text="hello", sampling_params=GREEDY)
        return time.monotonic() - started

    assert server.post("/slow_down", json={"forward_sleep_time": 0.2}).status_code == 200
    assert server.post("/slow_down", json={"forward_sleep_time": -1}).status_code == 400
    assert seconds() > 8 * 0.2 * 0.8
    assert server.post("/slow_down", json={"forward_sleep_time": None}).status_code == 200
    assert seconds() < 8 * 0.2 * 0.8


def test_freeze_gc(server: SmallServer) -> None:
    for method in ("GET", "POST"):
        assert server.request(method, "/freeze_gc").status_code == 200


def test_configure_logging(server: SmallServer, tmp_path: Path) -> None:
    body = {"log_requests": True, "dump_requests_folder": str(tmp_path)}
    assert server.post("/configure_logging", json=body).status_code == 200
    server.generate(text="hello", rid="seen", sampling_params=GREEDY)
    dumped = (tmp_path / "requests.jsonl").read_text()
    body = {"log_requests": False, "dump_requests_folder": ""}
    assert server.post("/configure_logging", json=body).status_code == 200
    assert json.loads(dumped)["request"]["rid"] == "seen"
    assert server.post("/configure_logging", json={"log_requests_level": 9}).status_code == 400


def test_set_internal_state(server: SmallServer) -> None:
    for method in ("POST", "PUT"):
        reply = server.request(method, "/set_internal_state", json={"server_args": {"nope": 1}})
        assert reply.status_code == 200 and reply.json() == [False]


def test_update_weight_version(server: SmallServer) -> None:
    body = {"new_version": "step-7", "abort_all_requests": False}
    reply = server.post("/update_weight_version", json=body)
    assert reply.status_code == 200 and reply.json()["success"] is True
    assert server.post("/update_weight_version", json={}).status_code == 400
    answer = server.generate(text="hello", sampling_params=GREEDY)
    assert answer["meta_info"]["weight_version"] == "step-7"
    assert server.get("/model_info").json()["weight_version"] == "step-7"


@pytest.mark.parametrize("which", [0, 1])
def test_health_tells_of_a_suspended_process(server: SmallServer, which: int) -> None:
    children = psutil.Process(server.pid).children(recursive=True)
    # The two with the most memory: scheduler and detokenizer. A third only tracks resources.
    child = sorted(children, key=lambda c: c.memory_info().rss, reverse=True)[which]
    child.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        reply = server.get("/health", timeout=5)
        assert reply.status_code == 503 and time.monotonic() - started < 5
    finally:
        child.send_signal(signal.SIGCONT)
    _wait_for(lambda: server.get("/health", timeout=5).status_code == 200)


def test_memory_comes_back_after_huge_requests(server: SmallServer) -> None:
    front = psutil.Process(server.pid)
    before = front.memory_info().rss
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"text": "hello world " * (10 * MB // 12)}),
        ("/generate", {"input_ids": [5, 6, VOCAB_SIZE - 1] * 700_000}),
        ("/generate", {"text": ["hello world " * 40] * 5000}),
        ("/tokenize", {"prompt": ["hello world " * 40] * 5000}),
    ]
    for path, body in bodies:
        assert server.post(path, json=body).status_code in (200, 400), path
    _wait_for(lambda: front.memory_info().rss < before + 100 * MB, timeout_s=15)
