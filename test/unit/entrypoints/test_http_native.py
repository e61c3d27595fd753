"""Native and control endpoints over a socket: shapes, statuses, bodies, health."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
import requests

from sglang.srt.entrypoints.http_memory import LARGE_BODY_BYTES
from sglang.srt.entrypoints.http_server import _warmup_body
from sglang.srt.environ import envs
from sglang.srt.managers import client_watch, health, tokenizer_manager
from sglang.srt.managers.io_struct import (
    AbandonReq,
    ProfileReqInput,
    SlowDownReqInput,
    TokenizedGenerateReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.managers.request_normalizer import parse_generate_body, split_request
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils.memory_return import MemoryReturner
from sglang.test.fakes.http_front import HttpFront
from sglang.test.fakes.tiny_tokenizer import CONTEXT_LEN, VOCAB_SIZE

FOUR = {"max_new_tokens": 4}
ENDLESS = {"max_new_tokens": 200}


def wait_for(condition: Any, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def sse(reply: requests.Response) -> list[Any]:
    """Events of a stream; the last is the string [DONE]."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in reply.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]] + ["[DONE]"]


# -- error shapes ----------------------------------------------------------------------------------

GATE = [
    ({"text": 1}, "invalid type: integer `1`, expected a string"),
    ({"text": "a", "stream": "yes"}, "expected a boolean for `stream`"),
    ({"text": "a", "rid": 3}, "`rid`"),
    ({"input_ids": [1, 2.5]}, "`input_ids`"),
    ({"input_ids": [True]}, "`input_ids`"),
    ({"text": "a", "top_logprobs_num": 2**64}, "`top_logprobs_num`"),
    ({"text": "a", "sampling_params": 3}, "`sampling_params`"),
    ({"text": "a", "sampling_params": {"max_tokens": 3}}, "unknown field `max_tokens`"),
    ({"text": "a", "sampling_params": {"top_k": "3"}}, "invalid type: string"),
    ({"text": "a", "return_hidden_states": "all"}, "`return_hidden_states`"),
    ([], "invalid type: sequence, expected a map"),
]


@pytest.mark.parametrize(("body", "text"), GATE)
def test_generate_gate(http: HttpFront, body: Any, text: str) -> None:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 400
    assert text in reply.json()["error"]
    assert set(reply.json()) == {"error"}


@pytest.mark.parametrize(
    "raw", [b"{", b'{"text": NaN}', b'{"text": 1e999}', b"\xff", b"[" * 3000, b'"\\ud800"']
)
def test_malformed_json_is_a_validation_error_everywhere(http: HttpFront, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/generate", "/v1/completions", "/pause_generation", "/tokenize"):
        reply = http.post(path, data=raw, headers=headers)
        assert reply.status_code == 400, path
        body = reply.json()
        assert (body["object"], body["type"], body["code"]) == ("error", "Bad Request", 400)
        assert body["param"] is None and "JSON" in body["message"]


def test_handler_failures_have_the_native_shape(http: HttpFront) -> None:
    reply = http.post("/generate", json={})
    assert reply.status_code == 400
    message = "Either text, input_ids or input_embeds should be provided."
    assert reply.json() == {"error": {"message": message}}


def test_overload_has_the_exception_shape(http: HttpFront) -> None:
    http.scheduler.refuse = {
        "type": "abort",
        "message": "The request queue is full.",
        "status_code": 503,
        "err_type": None,
    }
    reply = http.post("/generate", json={"text": "a"})
    assert reply.status_code == 503
    assert reply.json() == {
        "object": "error",
        "message": "The request queue is full.",
        "type": "503",
        "param": None,
        "code": 503,
    }


def test_failure_after_the_stream_began_is_an_event(http: HttpFront) -> None:
    http.scheduler.step_s = 0.02
    body: dict[str, Any] = {"text": "a", "stream": True, "sampling_params": ENDLESS}
    with requests.post(http.url + "/generate", json=body, stream=True, timeout=30) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith(b"data: {")
        rid = next(iter(http.scheduler.live))
        live = http.scheduler.live[rid]
        reason = {"type": "abort", "message": "late", "status_code": 503, "err_type": None}
        http.scheduler._emit(live, [], reason)
        events = [line for line in lines if line]
    assert events[-1] == b"data: [DONE]"
    error = json.loads(events[-2].removeprefix(b"data: "))["error"]
    assert error["message"] == "late" and error["code"] == 503 and error["retryable"] is True


def test_unknown_path_and_method(http: HttpFront) -> None:
    assert http.get("/nope").json()["type"] == "404"
    reply = http.request("DELETE", "/generate")
    assert reply.status_code == 405 and reply.json()["object"] == "error"
    assert http.get("/v1/loads?dp_rank=x").status_code == 400  # never 422


def test_missing_features_say_so_in_their_familys_shape(http: HttpFront) -> None:
    embeddings = http.post("/v1/embeddings", json={}).json()
    assert embeddings["type"] == embeddings["error"]["type"] == "BadRequestError"
    assert http.post("/open_session").json()["error"]["message"]
    assert http.post("/load_lora_adapter").json()["success"] is False
    assert http.post("/v1/responses").json()["error"]["code"] == 400


# -- generate --------------------------------------------------------------------------------------


def test_generate_whole_and_put(http: HttpFront) -> None:
    body: dict[str, Any] = {
        "text": "ab",
        "sampling_params": FOUR,
        "model": None,
        "background": False,
        "x": [1],
    }
    for method in ("POST", "PUT"):
        reply = http.request(method, "/generate", json=body)
        assert reply.status_code == 200 and reply.json()["text"] == "abab"
    batch = http.post("/generate", json={"text": ["a", "b"], "sampling_params": FOUR}).json()
    assert [item["text"] for item in batch] == ["aaaa", "bbbb"]


def test_every_known_field_may_be_null(http: HttpFront) -> None:
    from sglang.srt.managers.request_normalizer import GENERATE_FIELDS

    body = {**dict.fromkeys(GENERATE_FIELDS), "text": "a", "sampling_params": {"top_p": None}}
    assert http.post("/generate", json=body).status_code == 200


def test_content_type_does_not_matter_for_generate(http: HttpFront) -> None:
    body = json.dumps({"text": "a", "sampling_params": FOUR})
    assert http.post("/generate", data=body).status_code == 200


def test_stream_is_cumulative_and_ends_with_done(http: HttpFront) -> None:
    http.scheduler.step_s = 0.01
    body: dict[str, Any] = {"text": "ab", "stream": True, "sampling_params": FOUR}
    events = sse(http.post("/generate", json=body))
    texts = [item["text"] for item in events[:-1]]
    assert texts[-1] == "abab" and texts == sorted(texts)
    assert events[0]["meta_info"]["finish_reason"] is None
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "length"


def test_bad_stream_request_gets_its_status(http: HttpFront) -> None:
    reply = http.post("/generate", json={"input_ids": [10**6], "stream": True})
    assert reply.status_code == 400 and "input_ids" in reply.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(http: HttpFront, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    for module in (client_watch, tokenizer_manager):
        monkeypatch.setattr(module, "DISCONNECT_POLL_S", 0.2)
    http.scheduler.step_s = 0.03
    body: dict[str, Any] = {"text": "a", "stream": stream, "sampling_params": ENDLESS}
    with pytest.raises(requests.exceptions.RequestException):
        if stream:
            with requests.post(http.url + "/generate", json=body, stream=True, timeout=5) as reply:
                next(reply.iter_lines())
                reply.close()
                raise requests.exceptions.RequestException
        requests.post(http.url + "/generate", json=body, timeout=0.3)
    wait_for(lambda: not http.scheduler.live)
    assert len(http.scheduler.of_type(AbandonReq)[-1].rids) == 1
    wait_for(lambda: not http.front.manager.rid_to_state)


def test_abort_request(http: HttpFront) -> None:
    http.scheduler.step_s = 0.02
    with ThreadPoolExecutor(1) as pool:
        body: dict[str, Any] = {"text": "a", "rid": "job-1", "sampling_params": ENDLESS}
        future = pool.submit(http.post, "/generate", json=body)
        wait_for(lambda: http.scheduler.live)
        for ignored in ({}, {"rid": ""}, {"rid": None}, {"rid": "other"}):
            reply = http.post("/abort_request", json=ignored)
            assert reply.status_code == 200 and reply.content == b""
        assert not future.done()
        http.post("/abort_request", json={"rid": "job", "unknown": 1})
        answer = future.result()
    assert answer.status_code == 200
    assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_exact_abort(http: HttpFront) -> None:
    http.scheduler.step_s = 0.02
    with ThreadPoolExecutor(2) as pool:
        bodies: list[dict[str, Any]] = [
            {"text": "a", "rid": "job1", "sampling_params": ENDLESS},
            {"text": "a", "rid": "job10", "sampling_params": {"max_new_tokens": 20}},
        ]
        futures = [pool.submit(http.post, "/generate", json=body) for body in bodies]
        wait_for(lambda: len(http.scheduler.live) == 2)
        http.post("/abort_request", json={"rid": "job1", "exact": True})
        wait_for(lambda: list(http.scheduler.live) == ["job10"])
        http.scheduler.step_s = 0.0
        answers = [future.result().json() for future in futures]
    kinds = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert kinds == ["abort", "length"]


def test_ids_of_health_checks_are_refused(http: HttpFront) -> None:
    for rid in ("HEALTH_CHECK_x", ["a", "HEALTH_CHECK"]):
        text: Any = "a" if isinstance(rid, str) else ["a", "b"]
        reply = http.post("/generate", json={"text": text, "rid": rid})
        assert reply.status_code == 400
        assert "rid must not begin with 'HEALTH_CHECK'" in reply.text
    assert http.scheduler.received == []


def test_nesting_that_no_message_can_hold_is_the_clients_fault(http: HttpFront) -> None:
    inner = "[" * 1000 + "]" * 1000
    raw = f'{{"text": "a", "sampling_params": {{"custom_params": {{"a": {inner}}}}}}}'
    reply = http.post("/generate", data=raw)
    assert reply.status_code == 400 and "nested too deep" in reply.text
    assert http.get("/health").status_code == 200


def test_what_is_internal_is_not_published(http: HttpFront) -> None:
    assert "control_id" not in http.get("/openapi.json").text
    assert http.post("/slow_down", json={"control_id": "mine"}).status_code == 200
    (message,) = http.scheduler.of_type(SlowDownReqInput)
    assert message.control_id != "mine"


# -- health and information ------------------------------------------------------------------------


def test_health_and_friends(http: HttpFront) -> None:
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        reply = http.get(path)
        assert (reply.status_code, reply.content) == (200, b""), path
    sent = http.scheduler.of_type(TokenizedGenerateReqInput)
    assert sent and all(r.is_health_check and r.rid.startswith("HEALTH_CHECK") for r in sent)
    assert http.get("/").text == "SGLang is running"


@pytest.mark.parametrize("status", [ServerStatus.Starting])
def test_starting_server_is_not_healthy_but_informs(http: HttpFront, status: ServerStatus) -> None:
    http.front.manager.server_status = status
    try:
        for path in ("/health", "/health_generate", "/ready", "/ping"):
            assert http.get(path).status_code == 503
        assert http.get("/model_info").status_code == 200
    finally:
        http.front.manager.server_status = ServerStatus.Up


def test_paused_server_is_alive_but_not_ready(http: HttpFront) -> None:
    http.post("/pause_generation", json={"mode": "in_place"})
    assert http.get("/health").status_code == 200
    assert http.get("/ping").status_code == 200
    assert http.get("/ready").status_code == 503
    assert http.scheduler.of_type(TokenizedGenerateReqInput) == []
    http.post("/continue_generation", json={})
    assert http.get("/ready").status_code == 200


def test_server_that_holds_requests_is_not_ready(http: HttpFront) -> None:
    http.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=["kv_cache"])
    http.post("/release_memory_occupation")
    assert http.get("/ready").status_code == 503
    assert http.get("/ping").status_code == 200
    http.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=[])
    http.post("/resume_memory_occupation")
    assert http.get("/ready").status_code == 200


def test_warm_up_of_the_server_fits_any_preferred_minimum(http: HttpFront) -> None:
    body = _warmup_body(http.front.manager.server_args)
    split = split_request(parse_generate_body(body), {"min_new_tokens": 200})
    split.singles[0].sampling_params.verify(VOCAB_SIZE)


@pytest.fixture
def answers_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A health check waits a third of a second instead of two; clients give it three."""
    assert health._ANSWER_WITHIN_S < 3
    monkeypatch.setattr(health, "_ANSWER_WITHIN_S", 0.3)


@pytest.mark.usefixtures("answers_soon")
def test_long_step_is_not_death_and_silence_is(http: HttpFront) -> None:
    assert http.get("/health").status_code == 200
    http.scheduler.silent = True
    time.sleep(0.05)
    with envs.SGLANG_HEALTH_CHECK_TIMEOUT.override(1.5):
        with ThreadPoolExecutor(20) as pool:
            started = time.monotonic()
            codes = {r.status_code for r in pool.map(http.get, ["/health"] * 20)}
        assert codes == {200} and time.monotonic() - started < 5
        wait_for(lambda: http.get("/health").status_code == 503)
        assert time.monotonic() - started > 1.4
        assert http.get("/ping").status_code == 503
        http.scheduler.silent = False
        wait_for(lambda: not http.scheduler.live)
        assert http.get("/health").status_code == 200
    probes = [r for r in http.scheduler.of_type(TokenizedGenerateReqInput) if r.is_health_check]
    assert len(probes) <= 4  # twenty callers shared one
    # The last caller was answered by a sign of life, which may come before the probe's own answer.
    wait_for(lambda: not http.front.manager.rid_to_state)


def test_model_info(http: HttpFront) -> None:
    info = http.get("/model_info").json()
    assert info["served_model_name"] == "tiny/one" and info["is_generation"] is True
    assert info["weight_version"] == "default" and info["disaggregation_mode"] == "null"
    assert http.get("/get_model_info").json() == info
    assert http.get("/get_weight_version").json() == {"weight_version": "default"}


def test_server_info(http: HttpFront) -> None:
    info = http.get("/server_info").json()
    assert info["tp_size"] == 1 and info["status"] == "ready"
    assert info["max_total_num_tokens"] == 4 * CONTEXT_LEN
    assert len(info["internal_states"]) == 1 and info["version"]
    assert http.get("/get_server_info").status_code == 200


def test_loads(http: HttpFront) -> None:
    report = http.get("/v1/loads?include=core").json()
    # Routers parse these two strictly and drop reports of another form.
    assert datetime.fromisoformat(report["timestamp"]).tzinfo is not None
    assert report["dp_rank_count"] == 1
    loads = report["loads"]
    assert loads[0]["num_running_reqs"] == 0 and "memory" not in loads[0]
    assert "memory" in http.get("/v1/loads").json()["loads"][0]
    assert http.get("/v1/loads?include=core,nope").status_code == 400
    assert http.get("/v1/loads?dp_rank=3").status_code == 400
    text = http.get("/v1/loads?format=prometheus").text
    assert 'sglang:num_running_reqs{dp_rank="0"} 0' in text
    assert http.get("/get_load").json()[0]["num_reqs"] == 0


# -- control ---------------------------------------------------------------------------------------


def test_flush_cache_is_text(http: HttpFront) -> None:
    for method in ("GET", "POST"):
        reply = http.request(method, "/flush_cache?timeout=0.5", json={"anything": 1})
        assert reply.status_code == 200 and reply.text.startswith("Cache flushed")
    http.scheduler.flush_ok = False
    reply = http.get("/flush_cache")
    assert (reply.status_code, reply.text) == (400, "Flush cache failed.\n")
    for bad in ("-1", "nan", "inf", "x"):
        assert http.get(f"/flush_cache?timeout={bad}").status_code == 400


def test_pause_and_continue_bodies(http: HttpFront) -> None:
    paused = {"message": "Generation paused successfully.", "status": "ok"}
    resumed = {"message": "Generation continued successfully.", "status": "ok"}
    assert http.post("/pause_generation").json() == paused  # absent body
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(http.post, "/generate", json={"text": "a", "sampling_params": FOUR})
        time.sleep(0.1)
        assert not future.done()  # held, not refused
        assert http.post("/continue_generation", json={"torch_empty_cache": 0}).json() == resumed
        assert future.result().status_code == 200
    assert http.post("/pause_generation", json={"mode": "nope"}).status_code == 400


def test_small_controls(http: HttpFront) -> None:
    assert http.post("/set_internal_state", json={"server_args": {"x": 1}}).json() == [False]
    assert http.get("/start_profile").text == "Start profiling.\n"
    assert http.post("/start_profile", json={"num_steps": "3"}).status_code == 200
    assert http.post("/stop_profile").text == "Stop profiling. This will take some time.\n"
    assert http.get("/freeze_gc").status_code == 200
    assert http.get("/slow_down", json={"forward_sleep_time": None}).status_code == 200
    assert http.post("/slow_down", json={"forward_sleep_time": "x"}).status_code == 400
    assert http.post("/configure_logging", json={"log_requests": True}).content == b""
    assert http.post("/configure_logging", json={"log_requests_level": 7}).status_code == 400
    http.post("/configure_logging", json={"log_requests": False})


SENSELESS_CONTROLS: list[tuple[str, dict[str, Any]]] = [
    ("/slow_down", {"forward_sleep_time": -1}),
    ("/slow_down", {"forward_sleep_time": 61}),
    ("/slow_down", {"forward_sleep_time": "nan"}),
    ("/start_profile", {"activities": ["CPU", "NOPE"]}),
    ("/start_profile", {"profile_id": "../x"}),
    ("/start_profile", {"profile_id": "a/b"}),
    ("/start_profile", {"profile_prefix": "a b"}),
    ("/start_profile", {"profile_prefix": "a" * 101}),
    ("/start_profile", {"start_step": -1}),
    ("/start_profile", {"num_steps": -3}),
]


@pytest.mark.parametrize(("path", "body"), SENSELESS_CONTROLS)
def test_senseless_controls_stop_at_the_front(
    http: HttpFront, path: str, body: dict[str, Any]
) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert next(iter(body)) in reply.json()["error"]["message"]
    assert http.scheduler.of_type(SlowDownReqInput) == http.scheduler.of_type(ProfileReqInput) == []


def test_sensible_controls_reach_the_schedulers(http: HttpFront) -> None:
    for sleep_s in (0, 60, 0.5, None):
        assert http.post("/slow_down", json={"forward_sleep_time": sleep_s}).status_code == 200
    sent = http.scheduler.of_type(SlowDownReqInput)
    assert [message.forward_sleep_time for message in sent] == [0, 60, 0.5, None]
    body = {"activities": ["CPU", "GPU"], "profile_id": "run-1.a_B", "profile_prefix": ""}
    assert http.post("/start_profile", json={**body, "start_step": 0}).status_code == 200
    assert http.scheduler.of_type(ProfileReqInput)[-1].profile_id == "run-1.a_B"


@pytest.mark.parametrize("path", ["/flush_cache", "/freeze_gc", "/stop_profile", "/start_profile"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_controls_without_options_refuse_broken_json(
    http: HttpFront, method: str, path: str
) -> None:
    reply = http.request(method, path, data=b"{oops")
    assert reply.status_code == 400 and reply.json()["type"] == "Bad Request"
    assert http.request(method, path).status_code == 200  # no body at all


@pytest.mark.parametrize("body", [{}, {"new_version": ""}, {"new_version": None}, None])
def test_weight_version_must_be_given(http: HttpFront, body: Any) -> None:
    reply = http.post("/update_weight_version", json=body)
    assert reply.status_code == 400 and "new_version" in reply.json()["message"]
    assert http.get("/get_weight_version").json() == {"weight_version": "default"}


def test_stop_token_outside_the_vocabulary(http: HttpFront) -> None:
    body = {"text": "a", "sampling_params": {"stop_token_ids": [1, VOCAB_SIZE]}}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 400 and "stop_token_ids" in reply.json()["error"]["message"]
    body["sampling_params"] = {"stop_token_ids": [VOCAB_SIZE - 1], "max_new_tokens": 1}
    assert http.post("/generate", json=body).status_code == 200


def test_text_that_cannot_fit_is_refused_untokenised(
    http: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("tokenised")

    assert http.front.manager.tokenizer is not None
    monkeypatch.setattr(http.front.manager.tokenizer, "encode_batch", fail)
    text = "hello " * 500_000
    reply = http.post("/generate", json={"text": ["a", text]})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and f"context length ({CONTEXT_LEN} tokens)" in message
    assert message.startswith("The input (at least ")
    chat = {"messages": [{"role": "user", "content": text}]}
    assert "at least" in http.post("/v1/chat/completions", json=chat).json()["message"]
    completion = http.post("/v1/completions", json={"prompt": text})
    assert completion.status_code == 400 and "at least" in completion.json()["message"]


def test_memory_is_given_back_after_large_bodies_only(
    http: HttpFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[bool] = []
    monkeypatch.setattr(MemoryReturner, "request", lambda self: requested.append(True))
    http.post("/generate", json={"text": "a", "sampling_params": FOUR})
    assert requested == []
    http.post("/generate", json={"text": "x" * (LARGE_BODY_BYTES + 1)})
    wait_for(lambda: requested == [True])


def test_held_requests_show_in_the_loads(http: HttpFront) -> None:
    http.post("/pause_generation")
    with ThreadPoolExecutor(3) as pool:
        body = {"text": "abcd", "sampling_params": FOUR}
        futures = [pool.submit(http.post, "/generate", json=body) for _ in range(3)]
        wait_for(lambda: len(http.front.manager.rid_to_state) == 3)
        wait_for(lambda: all(s.prompt_ids for s in http.front.manager.rid_to_state.values()))
        (load,) = http.get("/v1/loads").json()["loads"]
        assert load["num_waiting_reqs"] == 3 and load["queues"]["paused"] == 3
        assert load["num_waiting_uncached_tokens"] == 12
        assert http.get("/get_load").json()[0]["num_waiting_reqs"] == 3
        http.post("/continue_generation")
        assert {future.result().status_code for future in futures} == {200}
    (load,) = http.get("/v1/loads").json()["loads"]
    assert load["num_waiting_reqs"] == 0


def test_held_requests_are_bounded(http: HttpFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http.front.manager.server_args, "max_queued_requests", 2)
    http.post("/pause_generation")
    with ThreadPoolExecutor(2) as pool:
        body = {"text": "a", "sampling_params": FOUR}
        futures = [pool.submit(http.post, "/generate", json=body) for _ in range(2)]
        wait_for(lambda: len(http.front.manager.rid_to_state) == 2)
        reply = http.post("/generate", json=body)
        assert reply.status_code == 503
        assert reply.json()["message"] == "The request queue is full."
        assert len(http.front.manager.rid_to_state) == 2
        http.post("/continue_generation")
        assert {future.result().status_code for future in futures} == {200}
    assert http.post("/generate", json={**body, "text": ["a"] * 5}).status_code == 200


def test_answer_cut_short_by_nan_is_logged_once(
    http: HttpFront, caplog: pytest.LogCaptureFixture
) -> None:
    http.scheduler.refuse = {"type": "stop", "matched": "NaN happened"}
    reply = http.post("/generate", json={"text": "a", "rid": "broken-7"})
    assert reply.json()["meta_info"]["finish_reason"]["matched"] == "NaN happened"
    warnings = [r.getMessage() for r in caplog.records if "NaN" in r.getMessage()]
    assert len(warnings) == 1 and "broken-7" in warnings[0]


@pytest.mark.usefixtures("answers_soon")
def test_suspended_engine_is_not_a_long_step(http: HttpFront) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    http.front.manager.engine_pids = [child.pid]
    http.scheduler.silent = True
    try:
        assert http.get("/health").status_code == 200  # silent for a moment only
        child.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert http.get("/health").status_code == 503
        assert time.monotonic() - started < 3
        child.send_signal(signal.SIGCONT)
        http.scheduler.silent = False
        assert http.get("/health").status_code == 200
    finally:
        http.front.manager.engine_pids = []
        child.kill()
        child.wait()


def test_weight_version_and_get_with_a_body(http: HttpFront) -> None:
    reply = http.post("/update_weight_version", json={"new_version": "default"})
    assert reply.json()["message"] == "Weight version updated to default"
    reply = http.get("/configure_logging", json={"log_requests_level": 9})
    assert reply.status_code == 400  # the body of a GET counts


def test_bearer_none_is_ignored_without_keys(http: HttpFront) -> None:
    headers = {"Authorization": "Bearer None"}
    assert http.get("/model_info", headers=headers).status_code == 200
    assert http.post("/flush_cache", headers={"Authorization": "Bearer"}).status_code == 200


def test_dumped_requests_are_whole(http: HttpFront, tmp_path: Any) -> None:
    http.post("/configure_logging", json={"dump_requests_folder": str(tmp_path)})
    http.post("/generate", json={"text": "ab", "rid": "dumped", "sampling_params": FOUR})
    http.post("/configure_logging", json={"dump_requests_folder": ""})
    http.post("/generate", json={"text": "ab", "sampling_params": FOUR})
    (line,) = (tmp_path / "requests.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["request"]["rid"] == "dumped" and record["answers"][0]["text"] == "abab"


def test_many_clients_at_once(http: HttpFront) -> None:
    http.scheduler.step_s = 0.001
    failures: list[Any] = []

    def work(number: int) -> None:
        text = chr(ord("a") + number % 26)
        body: dict[str, Any] = {
            "text": text,
            "stream": number % 2 == 0,
            "sampling_params": {"max_new_tokens": 9},
        }
        reply = http.post("/generate", json=body)
        answer = sse(reply)[-2] if body["stream"] else reply.json()
        if answer["text"] != text * 9:
            failures.append(answer)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
