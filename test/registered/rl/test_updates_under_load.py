"""Weights change again and again while clients generate: nothing is lost, doubled or mislabelled.

`HISPEC_UPDATE_CYCLES` sets how often in each pause mode (default 6).
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.rl_trainers import PROMPTS
from sglang.test.small_server import SmallServer

from .conftest import GREEDY, Models, named_tensors, serialized

register_cpu_ci(est_time=45, suite="rl")

CYCLES = int(os.environ.get("HISPEC_UPDATE_CYCLES", "6"))
NUM_CLIENTS = 4
NUM_NEW_TOKENS = 48


class Clients:
    """Threads that generate until they are stopped; odd ones read a stream."""

    def __init__(self, server: SmallServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self.answers: list[tuple[list[int], dict[str, Any]]] = []  # prompt, answer
        self._futures = [self._pool.submit(self._run, number) for number in range(NUM_CLIENTS)]

    def finish(self) -> list[tuple[list[int], dict[str, Any]]]:
        self._stop.set()
        for future in self._futures:
            future.result(120)
        self._pool.shutdown()
        return self.answers

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            prompt = rng.choice(PROMPTS) + [rng.randrange(250) for _ in range(rng.randrange(3))]
            body = {
                "input_ids": prompt,
                "sampling_params": {**GREEDY, "max_new_tokens": NUM_NEW_TOKENS},
                "return_logprob": True,
            }
            answer = self._stream(body) if number % 2 else self._server.generate(**body)
            self.answers.append((prompt, answer))

    def _stream(self, body: dict[str, Any]) -> dict[str, Any]:
        """The last chunk; each chunk must continue the one before it."""
        last: dict[str, Any] = {"output_ids": []}
        url = f"{self._server.url}/generate"
        with requests.post(url, json={**body, "stream": True}, stream=True, timeout=120) as reply:
            for line in reply.iter_lines():
                if not line or line == b"data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                seen = last["output_ids"]
                assert chunk["output_ids"][: len(seen)] == seen, "a token was lost or changed"
                last = chunk
        return last


def check_answer(answer: dict[str, Any], versions: list[str], may_abort: bool) -> None:
    """Tokens, logprobs and spans agree with each other and with the order of the updates."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    kind = meta["finish_reason"]["type"]
    assert kind == "length" or (may_abort and kind == "abort"), meta["finish_reason"]
    assert len(ids) == NUM_NEW_TOKENS or kind == "abort"
    assert meta["completion_tokens"] == len(ids)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == ids
    spans = meta["weight_versions"]
    if not ids:
        return
    edges = [span["start"] for span in spans] + [spans[-1]["end"]]
    assert edges[0] == 0 and edges[-1] == len(ids) and edges == sorted(set(edges)), spans
    order = [versions.index(span["version"]) for span in spans]
    assert order == sorted(set(order)), spans


def push(server: SmallServer, payloads: dict[str, list[str]], name: str, **fields: Any) -> None:
    body = {"serialized_named_tensors": payloads[name], "selector": "target", **fields}
    reply = server.post("/update_weights_from_tensor", json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "none"])
def test_updates_under_load(mode: str, server: SmallServer, models: Models) -> None:
    payloads = {
        name: serialized(list(named_tensors(folder).items()))
        for name, folder in models.folders.items()
    }
    versions, weights_of = ["0"], {"0": "old"}
    clients = Clients(server)
    for cycle in range(CYCLES):
        time.sleep(0.15)
        name = ("new", "old")[cycle % 2]
        version = f"{mode}-{cycle}"
        versions.append(version)
        weights_of[version] = name
        if mode != "none":
            assert server.post("/pause_generation", json={"mode": mode}).status_code == 200
        push(
            server,
            payloads,
            name,
            flush_cache=mode != "in_place",
            weight_version=version,
        )
        if mode != "none":
            assert server.post("/continue_generation", json={}).status_code == 200
    answers = clients.finish()
    # Also in_place without a flush: nothing that an update has left behind may be matched.
    again = server.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert [answer["output_ids"] for answer in again] == models.expected[name]
    assert len(answers) >= NUM_CLIENTS
    oracle = Oracle(server, payloads)
    for prompt, answer in answers:
        check_answer(answer, versions, may_abort=mode == "abort")
        spans = answer["meta_info"]["weight_versions"]
        if len(spans) > 1:
            assert mode in ("retract", "in_place")  # the others wait for requests, or end them
        # A span's KV is all of its own weights, unless the request was frozen with its old KV.
        trusted = spans if mode == "retract" else spans[:1]
        for span in trusted:
            oracle.expect(weights_of[span["version"]], prompt, answer["output_ids"], span)
    if mode in ("retract", "in_place"):
        assert any(len(answer["meta_info"]["weight_versions"]) > 1 for _, answer in answers)
    oracle.check()
    if mode == "retract":
        check_that_the_oracle_sees_a_shift(server, payloads, weights_of, answers)


def check_that_the_oracle_sees_a_shift(
    server: SmallServer,
    payloads: dict[str, list[str]],
    weights_of: dict[str, str],
    answers: list[tuple[list[int], dict[str, Any]]],
) -> None:
    """The negative control: spans that begin one token too early are found out."""
    oracle = Oracle(server, payloads)
    for prompt, answer in answers:
        for span in answer["meta_info"]["weight_versions"][1:]:
            shifted = {**span, "start": span["start"] - 1}
            oracle.expect(weights_of[span["version"]], prompt, answer["output_ids"], shifted)
    with pytest.raises(AssertionError):
        oracle.check()


class Oracle:
    """Compares spans with what an idle server of the same weights makes of the same prefix."""

    def __init__(self, server: SmallServer, payloads: dict[str, list[str]]) -> None:
        self._server = server
        self._payloads = payloads
        self._wanted: dict[str, dict[tuple[int, ...], list[int]]] = {"old": {}, "new": {}}

    def expect(self, name: str, prompt: list[int], ids: list[int], span: dict[str, Any]) -> None:
        start, end = span["start"], span["end"]
        if end > start:
            self._wanted[name][tuple(prompt + ids[:start])] = ids[start:end]

    def check(self, most: int = 40) -> None:
        for name, wanted in self._wanted.items():
            push(self._server, self._payloads, name, flush_cache=True)
            chosen = list(wanted.items())[-most:]
            if not chosen:
                continue
            answers = self._server.generate(
                input_ids=[list(prefix) for prefix, _ in chosen],
                sampling_params=[{**GREEDY, "max_new_tokens": len(tokens)} for _, tokens in chosen],
            )
            assert [answer["output_ids"] for answer in answers] == [t for _, t in chosen]
