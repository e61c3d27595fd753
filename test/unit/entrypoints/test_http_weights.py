"""Endpoints of weights and memory over a socket: bodies, shapes, statuses, what the front keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.entrypoints import http_state
from sglang.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from sglang.test.fakes.http_front import HttpFront, serve_fake

TENSORS = {"serialized_named_tensors": ["AAAA"]}
GROUP = {"master_address": "127.0.0.1", "master_port": "5000", "rank_offset": 1, "world_size": 2}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpFront]:
    """A server of this file; the application's engine is the one from before afterwards."""
    before = http_state._state
    with serve_fake(tmp_path_factory.mktemp("model")) as http:
        yield http
    http_state._state = before


@pytest.fixture
def weights(own_server: HttpFront) -> Iterator[HttpFront]:
    http = own_server
    state = http.front.manager.weights.state
    kept = (state.version, state.model_path, state.served_model_name)
    yield http
    http.scheduler.weight_reply = WeightUpdateReqOutput(message="Success", released_tags=[])
    assert http.post("/resume_memory_occupation").status_code == 200
    http.scheduler.weight_reply = WeightUpdateReqOutput(message="Success")
    state.version, state.model_path, state.served_model_name = kept
    state.is_mixed = False
    http.scheduler.step_s = 0.0
    http.scheduler.received.clear()


def last(http: HttpFront, kind: type) -> Any:
    return http.scheduler.of_type(kind)[-1]


def test_an_update_is_passed_on_and_its_version_kept(weights: HttpFront) -> None:
    body = {**TENSORS, "weight_version": "7", "unknown": 1, "rid": "x", "http_worker_ipc": None}
    headers = {"Authorization": "Bearer None"}
    reply = weights.post("/update_weights_from_tensor", json=body, headers=headers)
    assert reply.status_code == 200
    assert reply.json() == {"success": True, "message": "Success"}
    sent = last(weights, UpdateWeightsFromTensorReqInput)
    assert sent.flush_cache is True and sent.selector == "all" and sent.load_format is None
    assert weights.get("/model_info").json()["weight_version"] == "7"
    assert weights.get("/get_weight_version").json() == {"weight_version": "7"}


def test_a_refusal_keeps_the_keys_and_the_version(weights: HttpFront) -> None:
    weights.scheduler.weight_reply = WeightUpdateReqOutput(success=False, message="no")
    body = {"model_path": "/x", "weight_version": "7"}
    reply = weights.post("/update_weights_from_disk", json=body)
    assert reply.status_code == 400
    assert reply.json() == {"success": False, "message": "no", "num_paused_requests": 0}
    assert weights.get("/model_info").json()["weight_version"] == "default"
    assert weights.get("/model_info").json()["model_path"] != "/x"


def test_files_rename_the_model(weights: HttpFront) -> None:
    body = {"model_path": "/new", "manifest": {"a": 1}, "token_step": "3"}
    assert weights.post("/update_weights_from_disk", json=body).json()["num_paused_requests"] == 0
    assert last(weights, UpdateWeightFromDiskReqInput).token_step == 3
    info = weights.get("/model_info").json()
    assert info["model_path"] == info["served_model_name"] == "/new"


def test_ports_may_be_text(weights: HttpFront) -> None:
    assert weights.post("/init_weights_update_group", json=GROUP).status_code == 200
    sent = last(weights, InitWeightsUpdateGroupReqInput)
    assert sent.master_port == 5000 and sent.group_name == "weight_update_group"
    for missing in ({}, {**GROUP, "master_port": "x"}):
        assert weights.post("/init_weights_update_group", json=missing).status_code == 400


def test_tensors_must_be_texts(weights: HttpFront) -> None:
    body = {"serialized_named_tensors": [1]}
    assert weights.post("/update_weights_from_tensor", json=body).status_code == 400


def test_mixed_weights_are_not_ready(weights: HttpFront, caplog: pytest.LogCaptureFixture) -> None:
    lacking = "the target lacks 1 of 2 tensors (a)"
    weights.scheduler.weight_reply = WeightUpdateReqOutput(
        success=False, message="half", weights_mixed=True, mixed_tensors=lacking
    )
    for _ in range(2):
        weights.post("/update_weights_from_tensor", json=TENSORS)
    assert caplog.text.count(lacking) == 1, "told when it becomes so"
    for path in ("/health_generate", "/health"):
        reply = weights.get(path)
        assert reply.status_code == 503 and lacking in reply.text
    weights.scheduler.weight_reply = WeightUpdateReqOutput(message="Success")
    weights.post("/update_weights_from_tensor", json=TENSORS)
    assert weights.get("/health_generate").status_code == 200


def test_requests_wait_for_released_memory(weights: HttpFront) -> None:
    weights.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=["kv_cache"])
    reply = weights.request("GET", "/release_memory_occupation", json={"tags": ["kv_cache"]})
    assert reply.status_code == 200 and reply.json() is None
    answers: list[Any] = []
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 2}}
    thread = threading.Thread(
        target=lambda: answers.append(weights.post("/generate", json=body).status_code)
    )
    thread.start()
    time.sleep(0.1)
    assert not answers and not weights.scheduler.live
    assert weights.get("/health_generate").status_code == 200  # answered by a ping
    # An update is possible meanwhile: the waiting request does not keep it out.
    weights.scheduler.weight_reply = WeightUpdateReqOutput(message="Success")
    assert weights.post("/update_weights_from_tensor", json=TENSORS).status_code == 200
    weights.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=[])
    assert weights.post("/resume_memory_occupation").json() is None
    thread.join(10)
    assert answers == [200]


def test_a_release_that_cannot_be_is_a_native_error(weights: HttpFront) -> None:
    weights.scheduler.weight_reply = WeightUpdateReqOutput(success=False, message="already")
    reply = weights.post("/release_memory_occupation")
    assert reply.status_code == 400 and reply.json() == {"error": {"message": "already"}}


def test_an_update_waits_for_requests_unless_paused(weights: HttpFront) -> None:
    weights.scheduler.step_s = 0.02
    body = {"text": "ab", "sampling_params": {"max_new_tokens": 25}}
    thread = threading.Thread(target=lambda: weights.post("/generate", json=body))
    thread.start()
    while not weights.scheduler.live:
        time.sleep(0.005)
    assert weights.post("/update_weights_from_tensor", json=TENSORS).status_code == 200
    assert not weights.scheduler.live
    thread.join()
    thread = threading.Thread(target=lambda: weights.post("/generate", json=body))
    thread.start()
    while not weights.scheduler.live:
        time.sleep(0.005)
    assert weights.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    update = {**TENSORS, "flush_cache": False}
    assert weights.post("/update_weights_from_tensor", json=update).status_code == 200
    assert weights.scheduler.live
    weights.scheduler.step_s = 0.0
    assert weights.post("/continue_generation", json={}).status_code == 200
    thread.join()
