"""Requests that no client should send: a clear refusal, and the server goes on as before."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=60, suite="basic")

GREEDY = {"temperature": 0, "max_new_tokens": 4}
ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    with serve(str(small_model), "--max-queued-requests", 200) as running:
        yield running


@pytest.fixture(autouse=True)
def _unharmed(server: SmallServer) -> Iterator[None]:
    """After every test: the same processes, the same answer, nothing left running."""
    before = server.children()
    yield
    answer = server.generate(text="The capital of France is", sampling_params=GREEDY)
    assert "Paris" in answer["text"]
    assert server.children() == before
    assert server.num_requests() == 0
    assert server.get("/flush_cache?timeout=10").status_code == 200


HUGE = 2**31
PARAMS: list[dict[str, Any]] = [
    {"n": HUGE},
    {"n": -1},
    {"n": 1.5},
    {"max_new_tokens": -1},
    {"max_new_tokens": 2**62},
    {"min_new_tokens": 10, "max_new_tokens": 5},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"top_p": 1.1},
    {"top_k": 0},
    {"top_k": -2},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"frequency_penalty": 3},
    {"stop": ["x"] * 33},
    {"stop": ["x" * 100_000]},
    {"stop": 5},
    {"stop_regex": "("},
    {"stop_regex": "a" * 300},
    {"stop_token_ids": [-5]},
    {"stop_token_ids": "5"},
    {"logit_bias": {"999999": 1}},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 1e300}},
    {"sampling_seed": 2**63},
    {"json_schema": "{"},
    {"json_schema": '{"type": "nonsense"}'},
    {"regex": "("},
    {"ebnf": "root ::= ("},
    {"regex": "a", "json_schema": "{}"},
    {"structural_tag": "{}"},
    {"max_tokens": 5},
    {"": 1},
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: str(p)[:40])
def test_bad_sampling_parameters(server: SmallServer, params: dict[str, Any]) -> None:
    for stream in (False, True):
        body = {"text": "a", "stream": stream, "sampling_params": params}
        reply = server.post("/generate", json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]


FIELDS: list[dict[str, Any]] = [
    {"input_ids": [49152]},
    {"input_ids": [-1]},
    {"input_ids": [2**31]},
    {"input_ids": [2**63]},
    {"input_ids": [1, None]},
    {"input_ids": [[1], []]},
    {"input_ids": [[1], 2]},
    {"input_ids": [1] * 9000},
    {"text": ""},
    {"text": ["", "a"]},
    {"text": [1]},
    {"text": {"a": 1}},
    {"text": "a " * 9000},
    {"text": "a", "rid": ["a", "b"]},
    {"text": "a", "return_logprob": True, "top_logprobs_num": HUGE},
    {"text": "a", "return_logprob": True, "top_logprobs_num": -1},
    {"text": "a", "return_logprob": True, "logprob_start_len": 100},
    {"text": "a", "return_logprob": True, "logprob_start_len": -HUGE},
    {"text": "a", "return_logprob": True, "token_ids_logprob": [HUGE]},
    {"text": "a", "routed_dp_rank": 7},
    {"text": "a", "input_embeds": [[0.5]]},
    {"text": "a", "session_params": {"id": "x"}},
    {"text": "a", "custom_logit_processor": "x"},
    {"text": "a", "priority": 2**70},
    {"input_embeds": [[0.5]]},
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda f: str(f)[:40])
def test_bad_fields(server: SmallServer, fields: dict[str, Any]) -> None:
    reply = server.post("/generate", json=fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]


def test_wide_batches_are_refused_before_they_cost_anything(server: SmallServer) -> None:
    body = {"text": ["a"] * 70_000, "sampling_params": {"n": 1000}}
    assert server.post("/generate", json=body, timeout=10).status_code == 400


@pytest.mark.parametrize("path", ENDPOINTS)
def test_bodies_that_are_no_request(server: SmallServer, path: str) -> None:
    deep = b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    noise = os.urandom(10_000)
    for raw in (b"null", b"[]", b"3", b'"x"', b"{", b'{"a": NaN}', deep, noise, b"\xef\xbb\xbf{}"):
        reply = server.post(path, data=raw, headers=JSON_TYPE)
        assert reply.status_code == 400, (raw[:20], reply.text)
        assert reply.json()
    surrogate = b'{"text": "\\ud800", "prompt": "\\ud800"}'
    assert server.post(path, data=surrogate, headers=JSON_TYPE).status_code == 400


def test_huge_body(server: SmallServer) -> None:
    body = json.dumps({"text": "x" * 8_000_000})
    assert server.post("/generate", data=body).status_code == 400
    deep = json.dumps({"text": "a", "unknown": ["y" * 100] * 50_000, "sampling_params": GREEDY})
    assert server.post("/generate", data=deep).status_code == 200


def test_half_requests_and_garbage_on_the_socket(server: SmallServer) -> None:
    parts = urlsplit(server.url)
    assert parts.hostname is not None and parts.port is not None
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    for data in (b"", b"GARBAGE\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", head + b'{"te'):
        with socket.create_connection((parts.hostname, parts.port), timeout=5) as connection:
            connection.sendall(data)


def test_same_id_many_times_at_once(server: SmallServer) -> None:
    body = {"text": "a", "rid": "same", "sampling_params": {"max_new_tokens": 20}}
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.post("/generate", json=body), range(8)))
    codes = sorted(reply.status_code for reply in replies)
    assert codes[0] == 200 and set(codes) <= {200, 400}
    refused = [r.json()["error"]["message"] for r in replies if r.status_code == 400]
    assert refused and all("Duplicate request ID" in message for message in refused)
    assert server.post("/generate", json=body).status_code == 200  # free again


def test_odd_request_ids(server: SmallServer) -> None:
    for rid in ("", " ", "🙂", "a" * 5000, "HEALTH", "\u0000", "../../x"):
        answer = server.generate(text="a", rid=rid, sampling_params=GREEDY)
        assert answer["meta_info"]["id"] == rid or rid == ""


def test_odd_texts(server: SmallServer) -> None:
    for text in ("\u0000", "\ufffd", "\u202e", "<|im_end|>", "🙂" * 50, "\r\n\t", "a\u0300" * 50):
        assert server.generate(text=text, sampling_params=GREEDY)["output_ids"]


def test_broken_queries_and_methods(server: SmallServer) -> None:
    for path in ("/flush_cache?timeout=x", "/v1/loads?dp_rank=x", "/v1/loads?include=x"):
        assert server.get(path).status_code == 400
    assert server.request("DELETE", "/generate").status_code == 405
    assert server.get("/" + "x" * 5000).status_code == 404
    assert server.get("/v1/models/%00").status_code == 404


def test_storm_of_requests_that_leave_early(server: SmallServer) -> None:
    """A hundred clients that hang up at random moments leave nothing behind."""
    rng = random.Random(0)
    delays = [rng.uniform(0.001, 0.6) for _ in range(100)]

    def leave(delay: float) -> None:
        body = {"text": "a " * rng.randint(1, 200), "sampling_params": {"max_new_tokens": 300}}
        try:
            server.post("/generate", json=body, timeout=delay)
        except OSError:
            return  # what is wanted: requests' errors are OSErrors

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(leave, delays))
    server.post("/abort_request", json={"abort_all": True})
