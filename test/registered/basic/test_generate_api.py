"""`/generate` of a real server with a real model: answers, logprobs, streams, aborts, pauses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=60, suite="basic")

PARIS = "The capital of France is"
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    with serve(str(small_model), "--enable-metrics", "--stream-interval", 1) as running:
        yield running


def events(reply: requests.Response) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in reply.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def gauge(server: SmallServer, name: str) -> float:
    """The sum of its series, the front's and the scheduler's."""
    lines = server.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"sglang:{name}{{")]
    assert found, f"there is no {name}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


def wait_for(condition: Any, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_greedy_answer_is_sensible_and_repeatable(server: SmallServer) -> None:
    first, second = (server.generate(text=PARIS, sampling_params=GREEDY) for _ in range(2))
    assert "Paris" in first["text"]
    assert first["output_ids"] == second["output_ids"]
    assert 0 < second["meta_info"]["cached_tokens"] < second["meta_info"]["prompt_tokens"]
    details = second["meta_info"]["cached_tokens_details"]
    assert details["device"] == second["meta_info"]["cached_tokens"]


def test_ids_and_text_agree(server: SmallServer) -> None:
    ids = server.post("/tokenize", json={"prompt": PARIS}).json()["tokens"]
    by_ids = server.generate(input_ids=ids, sampling_params=GREEDY)
    by_text = server.generate(text=PARIS, sampling_params=GREEDY, return_prompt_token_ids=True)
    assert by_ids["text"] == by_text["text"] and by_text["prompt_token_ids"] == ids
    text = server.post("/detokenize", json={"tokens": by_ids["output_ids"]}).json()["text"]
    assert text == by_ids["text"]


@pytest.mark.parametrize("batch", [False, True])
def test_stream_joins_to_the_whole(server: SmallServer, batch: bool) -> None:
    texts = [PARIS, "日本の首都は", "Emoji: 🙂"] if batch else PARIS
    params = {**GREEDY, "max_new_tokens": 24}
    whole = server.generate(text=texts, sampling_params=params)
    reply = server.post(
        "/generate", json={"text": texts, "sampling_params": params, "stream": True}
    )
    last: dict[int, Any] = {}
    for chunk in events(reply):
        index = chunk.get("index", 0)
        assert chunk["text"].startswith(last.get(index, {"text": ""})["text"])  # cumulative
        last[index] = chunk
    for index, answer in enumerate(whole if batch else [whole]):
        assert last[index]["text"] == answer["text"]
        assert last[index]["output_ids"] == answer["output_ids"]
        assert last[index]["meta_info"]["finish_reason"] == answer["meta_info"]["finish_reason"]


def test_stop_string_is_trimmed_and_never_streamed(server: SmallServer) -> None:
    free = server.generate(text="1, 2, 3, 4,", sampling_params={**GREEDY, "max_new_tokens": 24})
    stop = free["text"][6:9]
    params = {**GREEDY, "max_new_tokens": 24, "stop": [stop]}
    answer = server.generate(text="1, 2, 3, 4,", sampling_params=params)
    assert answer["text"] == free["text"][: free["text"].index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    body: dict[str, Any] = {"text": "1, 2, 3, 4,", "sampling_params": params, "stream": True}
    for chunk in events(server.post("/generate", json=body)):
        assert answer["text"].startswith(chunk["text"])
    kept = server.generate(text="1, 2, 3, 4,", sampling_params={**params, "no_stop_trim": True})
    assert kept["text"].startswith(answer["text"] + stop)


def test_stop_token_counts_but_is_no_text(server: SmallServer) -> None:
    free = server.generate(text=PARIS, sampling_params=GREEDY)
    token = free["output_ids"][2]
    params = {**GREEDY, "stop_token_ids": [token]}
    answer = server.generate(text=PARIS, sampling_params=params)
    cut = free["output_ids"].index(token) + 1
    assert answer["output_ids"] == free["output_ids"][:cut]
    assert answer["meta_info"]["completion_tokens"] == cut
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert free["text"].startswith(answer["text"]) and answer["text"] != free["text"]


def test_logprobs(server: SmallServer) -> None:
    answer = server.generate(
        text=PARIS,
        sampling_params=GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=3,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
    )
    meta = answer["meta_info"]
    assert [row[1] for row in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "".join(row[2] for row in meta["output_token_logprobs"]) == answer["text"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(row[0] <= 0 for row in meta["input_token_logprobs"][1:])
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"]):
        assert len(top) == 3 and top[0][:2] == pytest.approx(chosen[:2])  # greedy
    assert [row[1] for row in meta["output_token_ids_logprobs"][0]] == [5, 6]
    again = server.generate(
        text=PARIS, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0
    )["meta_info"]  # the same with a cached prefix
    for one, two in zip(meta["input_token_logprobs"][1:], again["input_token_logprobs"][1:]):
        assert one[0] == pytest.approx(two[0], abs=1e-3)
    assert (
        server.generate(text=PARIS, sampling_params=GREEDY, return_logprob=True)["meta_info"][
            "input_token_logprobs"
        ]
        == []
    )


def test_no_new_tokens_is_legal(server: SmallServer) -> None:
    answer = server.generate(text=PARIS, sampling_params={"max_new_tokens": 0}, return_logprob=True)
    assert (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["output_token_logprobs"] == []


def test_samples_with_a_seed_differ_and_repeat(server: SmallServer) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 12, "n": 4, "sampling_seed": 5}
    first = [a["text"] for a in server.generate(text="I like", sampling_params=params)]
    second = [a["text"] for a in server.generate(text="I like", sampling_params=params)]
    assert first == second and len(set(first)) > 1


def test_batch_with_its_own_parameters(server: SmallServer) -> None:
    params = [{**GREEDY, "max_new_tokens": n} for n in (1, 0, 5)]
    answers = server.generate(text=[PARIS] * 3, sampling_params=params)
    assert [len(a["output_ids"]) for a in answers] == [1, 0, 5]


def test_json_schema(server: SmallServer) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}},
        "required": ["n"],
        "additionalProperties": False,
    }
    params = {"temperature": 0, "max_new_tokens": 40, "json_schema": json.dumps(schema)}
    text = server.generate(text="A number as JSON: ", sampling_params=params)["text"]
    assert isinstance(json.loads(text)["n"], int)


# -- control ---------------------------------------------------------------------------------------


def test_abort_returns_the_partial_answer(server: SmallServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(
                server.generate,
                text=f"{i} {PARIS}",
                rid=f"partial-{i}",
                sampling_params=LONG,
                return_logprob=True,
            )
            for i in range(4)
        ]
        wait_for(lambda: server.num_requests() == 4)
        time.sleep(0.5)
        assert server.post("/abort_request", json={"rid": "partial"}).content == b""
        answers = [future.result() for future in futures]
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert len(meta["output_token_logprobs"]) == len(answer["output_ids"]) < 400
        assert meta["weight_versions"][-1]["end"] == len(answer["output_ids"])
    wait_for(lambda: server.num_requests() == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_engine(server: SmallServer, stream: bool) -> None:
    body: dict[str, Any] = {"text": PARIS, "sampling_params": LONG, "stream": stream}
    with pytest.raises(requests.exceptions.RequestException):
        with requests.post(
            server.url + "/generate", json=body, stream=stream, timeout=0.7
        ) as reply:
            next(reply.iter_lines())
            raise requests.exceptions.RequestException
    wait_for(lambda: server.num_requests() == 0, 5)
    assert server.get("/flush_cache?timeout=5").status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_freezes_and_continue_finishes(server: SmallServer, mode: str) -> None:
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    want = server.generate(text=PARIS, sampling_params=params)["output_ids"]
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.generate, text=PARIS, sampling_params=params)
        wait_for(lambda: server.num_requests() == 1)
        assert server.post("/pause_generation", json={"mode": mode}).status_code == 200
        held = pool.submit(server.generate, text=PARIS, sampling_params=GREEDY)
        time.sleep(1)
        assert not running.done() and not held.done()
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 503
        assert gauge(server, "num_queue_reqs") == (1 if mode == "in_place" else 2)
        assert gauge(server, "num_paused_reqs") == (2 if mode == "in_place" else 1)
        assert gauge(server, "num_running_reqs") == (1 if mode == "in_place" else 0)
        flushed = server.get("/flush_cache").status_code
        assert flushed == (200 if mode == "retract" else 400)
        server.post("/continue_generation", json={})
        assert running.result()["output_ids"] == want
        assert held.result()["meta_info"]["finish_reason"]["type"] == "length"
    wait_for(lambda: gauge(server, "num_queue_reqs") == gauge(server, "num_paused_reqs") == 0)


def test_pause_abort_drains(server: SmallServer) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.generate, text=PARIS, sampling_params=LONG)
        wait_for(lambda: server.num_requests() == 1)
        assert server.post("/pause_generation").status_code == 200
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert server.get("/flush_cache").status_code == 200
        held = pool.submit(server.generate, text=PARIS, sampling_params=GREEDY)
        time.sleep(0.3)
        assert not held.done()
        server.post("/continue_generation")
        assert held.result()["text"]


def test_weight_version_splits_spans(server: SmallServer) -> None:
    params = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    before = server.get("/model_info").json()["weight_version"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.generate, text=PARIS, sampling_params=params)
        wait_for(lambda: server.num_requests() == 1)
        time.sleep(0.3)
        change = {"new_version": "other", "abort_all_requests": False}
        assert server.post("/update_weight_version", json=change).json()["success"] is True
        meta = running.result()["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"]) == (before, "other")
    assert (first["start"], first["end"], second["end"]) == (0, second["start"], 60)
    assert meta["weight_version"] == server.get("/model_info").json()["weight_version"] == "other"


def test_flush_is_refused_while_busy_and_waits_when_asked(server: SmallServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            server.generate, text=PARIS, sampling_params={**LONG, "max_new_tokens": 40}
        )
        wait_for(lambda: server.num_requests() == 1)
        refused = server.get("/flush_cache")
        assert refused.status_code == 400 and refused.text
        assert server.get("/flush_cache?timeout=30").status_code == 200
        running.result()
    answer = server.generate(text=PARIS, sampling_params=GREEDY)
    assert answer["meta_info"]["cached_tokens"] == 0


def test_health_under_full_load(server: SmallServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(
                server.generate,
                text=f"{i} " + "word " * 300,
                sampling_params={**LONG, "max_new_tokens": 12},
            )
            for i in range(16)
        ]
        while not all(future.done() for future in futures):
            started = time.monotonic()
            assert server.get("/health", timeout=5).status_code == 200
            assert time.monotonic() - started < 5
        assert all(f.result()["meta_info"]["completion_tokens"] == 12 for f in futures)


def test_metrics(server: SmallServer) -> None:
    server.generate(text=PARIS, sampling_params=GREEDY)
    text = server.get("/metrics").text
    for name in (
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:num_requests_total",
        "sglang:time_to_first_token_seconds_bucket",
        "sglang:e2e_request_latency_seconds_count",
        "sglang:num_running_reqs",
        "sglang:token_usage",
    ):
        assert name in text, name
    assert gauge(server, "startup_available_gpu_memory_gb") > 0
