"""A server of two ranks serves while it waits for a trainer's group."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests
import torch

from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.fakes.trainer_group import ThreadTrainer
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=40, suite="rl")

GROUP = "late"
NORM = "model.norm.weight"
UPDATE = {"names": [NORM], "dtypes": ["float32"], "shapes": [[60]]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[SmallServer]:
    env = {"SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT": "60", "OMP_NUM_THREADS": "1"}
    with serve(model, "--tp-size", 2, env=env) as running:
        yield running


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    made = ThreadPoolExecutor(4)
    yield made
    made.shutdown(wait=False)


def place(port: int, name: str = GROUP) -> dict[str, Any]:
    master = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
    return {**master, "world_size": 3, "group_name": name, "backend": "gloo"}


def open_group(
    server: SmallServer, pool: ThreadPoolExecutor, port: int, name: str = GROUP
) -> Future[requests.Response]:
    """The call, once the scheduler has seen it."""
    asked = pool.submit(server.post, "/init_weights_update_group", json=place(port, name))
    deadline, body = time.monotonic() + 10, {**UPDATE, "group_name": name}
    while "still being opened" not in refused(server, "/update_weights_from_distributed", body):
        assert time.monotonic() < deadline and not asked.done()
    return asked


def refused(server: SmallServer, path: str, body: Any) -> str:
    reply = server.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return str(reply.json()["message"])


def generates(server: SmallServer) -> None:
    start = time.monotonic()
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    answer = server.generate(input_ids=[1, 2, 3], sampling_params=sampling)
    assert len(answer["output_ids"]) == 8 and time.monotonic() - start < 5


def test_everything_goes_on(server: SmallServer, pool: ThreadPoolExecutor) -> None:
    port = get_free_port()
    asked = open_group(server, pool, port)
    generates(server)
    for mode in ("retract", "in_place"):
        assert server.post("/pause_generation", json={"mode": mode}).status_code == 200
        assert server.post("/continue_generation", json={}).status_code == 200
    assert server.post("/flush_cache").status_code == 200
    assert server.get("/health_generate").status_code == 200
    assert "being opened already" in refused(server, "/init_weights_update_group", place(port))
    assert not asked.done()

    trainer = ThreadTrainer(GROUP, 3, port)
    trainer.join()
    assert asked.result(20).status_code == 200
    body = {**UPDATE, "group_name": GROUP}
    updated = pool.submit(server.post, "/update_weights_from_distributed", json=body)
    trainer.broadcast(torch.full((60,), 2.0))
    assert updated.result(20).status_code == 200
    rows = server.get("/get_weights_by_name", json={"name": NORM}).json()
    assert rows == [2.0] * 60
    destroyed = server.post("/destroy_weights_update_group", json={"group_name": GROUP})
    assert destroyed.status_code == 200


def test_destroyed_and_opened_again(server: SmallServer, pool: ThreadPoolExecutor) -> None:
    asked = open_group(server, pool, get_free_port())
    destroyed = server.post("/destroy_weights_update_group", json={"group_name": GROUP})
    assert destroyed.status_code == 200
    reply = asked.result(5)
    assert reply.status_code == 400
    assert "was destroyed before all members were there" in reply.json()["message"]
    trainer = ThreadTrainer(GROUP, 3)
    asked = open_group(server, pool, trainer.port)
    trainer.join()
    assert asked.result(20).status_code == 200
    generates(server)


def test_a_server_ends_while_it_waits(
    model: str, pool: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    env = {"OMP_NUM_THREADS": "1", "SGLANG_SHUTDOWN_TIMEOUT": "3"}
    with serve(model, "--tp-size", 2, env=env) as running:
        # For a trainer that is not there, and for one that is there and does not join.
        open_group(running, pool, get_free_port(), "nobody")
        open_group(running, pool, ThreadTrainer("there", 3).port, "there")
        family = psutil.Process(running.pid).children(recursive=True)
        psutil.Process(running.pid).send_signal(signal.SIGTERM)
        assert not psutil.wait_procs(family, timeout=30)[1]
    told = "".join(capfd.readouterr())
    assert told.count("Scheduler stopped") == 2 and "is killed" not in told
