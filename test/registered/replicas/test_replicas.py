"""Replicas behind the router: it understands them, they share storage, and deaths lose nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from serving.conversations import Client, Shape, SteadyLoad, contradictions
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.replicas import (
    Fleet,
    Router,
    route,
    router_is_installed,
    serve_fleet,
    shared_storage,
)
from sglang.test.small_server import SmallServer, metric

register_cpu_ci(est_time=60, suite="replicas")

pytestmark = [
    pytest.mark.skipif(not router_is_installed(), reason="needs the router: pip install smg"),
    pytest.mark.timeout(200),
]

COUNT = 3
PAGE = 16
PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(8 * PAGE + 5)]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SHAPE = Shape(num_conversations=6, num_heads=2, turns=3, head_len=64, answer_len=200)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("replicas")
    model = make_tiny_checkpoint(root / "tiny", max_position_embeddings=1024)
    flags = ("--served-model-name", "tiny", "--enable-metrics", *shared_storage(root / "l3", PAGE))
    with serve_fleet(str(model), COUNT, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def router(fleet: Fleet) -> Iterator[Router]:
    with route(fleet.urls) as running:
        yield running


def sources(answer: dict[str, Any]) -> dict[str, int]:
    details = answer["meta_info"]["cached_tokens_details"] or {}
    return {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}


def ask(server: SmallServer, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
    answer = server.generate(input_ids=prompt, sampling_params=GREEDY)
    return answer["output_ids"], sources(answer)


def wait_written(server: SmallServer) -> None:
    """Storage has all that this server computed; its pools are empty."""
    assert server.post("/flush_cache?timeout=20").status_code == 200


# ------------------------------------------------------------------------------------------------
# What the router asks, and how it rewrites what clients ask
# ------------------------------------------------------------------------------------------------


def test_the_router_knows_what_it_needs_of_each_replica(fleet: Fleet, router: Router) -> None:
    workers = router.get("/v1/rl/workers").json()["workers"]
    assert sorted(worker["url"] for worker in workers) == sorted(fleet.urls)
    for worker in workers:
        assert (worker["engine"], worker["health"], worker["model_id"]) == (
            "sglang",
            "ready",
            "tiny",
        )
        assert (worker["tp_size"], worker["dp_size"]) == (1, 1)
        labels = worker["labels"]
        assert labels["weight_version"] == "default"
        assert (labels["model_type"], labels["is_generation"]) == ("llama", "true")
        assert json.loads(labels["architectures"]) == ["LlamaForCausalLM"]
        assert (labels["context_length"], labels["max_total_tokens"]) == ("1024", "4096")
        assert labels["max_running_requests"].isdigit()


def test_questions_that_the_router_passes_on(fleet: Fleet, router: Router) -> None:
    for path in ("/health", "/health_generate", "/readiness", "/liveness"):
        assert router.get(path).status_code == 200, path
    assert router.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert router.get("/get_model_info").json()["weight_version"] == "default"
    assert router.get("/get_server_info").json()["internal_states"]
    loads = polled_loads(router)
    assert sorted(load["worker"] for load in loads) == sorted(fleet.urls)
    assert all(load["max_total_num_tokens"] == 4096 for load in loads)
    assert "sglang:http_requests_total" in router.get("/engine_metrics").text
    flushed = router.post("/flush_cache").json()
    assert (flushed["status"], flushed["workers_flushed"]) == ("success", COUNT)


def polled_loads(router: Router) -> list[dict[str, Any]]:
    """The loads of all replicas; the router asks for them once a second."""
    deadline = time.monotonic() + 10
    while True:
        loads = router.get("/get_loads").json()["loads"]
        if len(loads) == COUNT or time.monotonic() > deadline:
            return loads
        time.sleep(0.2)


def test_rewritten_requests_are_answered(router: Router) -> None:
    text = router.generate(text="hello", sampling_params=GREEDY)
    assert text["meta_info"]["prompt_tokens"] == 5
    batch = router.generate(
        input_ids=[PROMPT[:20], PROMPT[:30]],
        sampling_params=GREEDY,
        return_logprob=True,
        top_logprobs_num=2,
        no_such_field={"kept": 1},
    )
    assert [answer["meta_info"]["prompt_tokens"] for answer in batch] == [20, 30]
    assert len(batch[0]["meta_info"]["output_top_logprobs"][0]) == 2
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "temperature": 0,
        "stop": None,
        "ignore_eos": True,
        "seed": 7,
    }
    reply = router.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 4
    reply = router.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3})
    assert reply.status_code == 200, reply.text
    wrong = router.post("/generate", json={"input_ids": [99999], "sampling_params": GREEDY})
    assert wrong.status_code == 400, wrong.text


def test_streams_pass_through(router: Router) -> None:
    whole = router.generate(input_ids=PROMPT, sampling_params=GREEDY)
    streamed = Client(router.url, GREEDY["max_new_tokens"]).send(PROMPT, stream=True)
    assert list(streamed.output) == whole["output_ids"]


def test_load_of_cached_tokens_is_not_counted_as_use(fleet: Fleet, router: Router) -> None:
    """Routers leave out replicas that are full; what can be evicted does not make one full."""
    prompts = [[100 + number, *PROMPT * 3] for number in range(12)]
    for prompt in prompts:
        ask(fleet[0], prompt)
    deadline = time.monotonic() + 20
    while True:  # what is on its way to another tier cannot be evicted yet
        load = fleet[0].get("/v1/loads?include=core").json()["loads"][0]
        if load["token_usage"] == 0 and load["num_used_tokens"] == 0:
            break
        assert time.monotonic() < deadline, load
        time.sleep(0.05)
    assert ask(fleet[0], prompts[-1])[1]["device"] > len(PROMPT)


def test_no_answer_to_the_router_was_an_error(fleet: Fleet, router: Router) -> None:
    """`/loads` is its probe for servers of another kind, and 400 the test of a wrong request."""
    for replica in fleet.running():
        for status in ("401", "404", "405", "422", "500"):
            seen = metric(replica, "sglang:http_responses_total", status_code=status)
            probes = metric(
                replica, "sglang:http_responses_total", status_code=status, endpoint="other"
            )
            assert seen == (probes if status == "404" else 0), status


# ------------------------------------------------------------------------------------------------
# One storage for all
# ------------------------------------------------------------------------------------------------


def test_what_one_replica_computed_is_a_storage_hit_on_another(fleet: Fleet) -> None:
    prompt = [11, *PROMPT]
    full = (len(prompt) - 1) // PAGE * PAGE
    before = metric(fleet[1], "sglang:prefetched_tokens_total")
    first, counts = ask(fleet[0], prompt)
    assert sum(counts.values()) == 0
    wait_written(fleet[0])
    again, counts = ask(fleet[1], prompt)
    assert (again, counts) == (first, {"device": 0, "host": 0, "storage": full})
    assert metric(fleet[1], "sglang:prefetched_tokens_total") == before + full
    # The control: one other token at the front, and no page fits.
    assert sum(ask(fleet[1], [12, *PROMPT])[1].values()) == 0


def test_a_conversation_moves_on_when_its_replica_dies(fleet: Fleet, router: Router) -> None:
    def counts() -> list[float]:
        return [router.counter("smg_worker_requests_total", worker=url) for url in fleet.urls]

    prompt, before = [13, *PROMPT], counts()
    first, _ = ask(router, prompt)
    owner = [now > then for now, then in zip(counts(), before, strict=True)].index(True)
    assert ask(router, prompt)[1]["device"] > 0, "the router keeps a prefix on one replica"
    wait_written(fleet[owner])
    fleet.kill(owner)
    try:
        again, sources_now = ask(router, prompt)
        assert (again, sources_now["device"]) == (first, 0)
        assert sources_now["storage"] == (len(prompt) - 1) // PAGE * PAGE
    finally:
        fleet.start(owner)
    router.wait_healthy(COUNT)


# ------------------------------------------------------------------------------------------------
# Deaths under load
# ------------------------------------------------------------------------------------------------


def busy_replica(fleet: Fleet) -> int:
    """One that is computing right now; answers are long enough for it to be so for a while."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for index in range(COUNT):
            if fleet[index].num_requests() > 0:
                return index
    raise TimeoutError("no replica is busy")


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_death_under_load_loses_nothing(fleet: Fleet, router: Router, way: str) -> None:
    retries = router.num_retries()
    client = Client(router.url, SHAPE.answer_len)
    with SteadyLoad(client, SHAPE, num_clients=6, pause_s=0.0, stream_every=3) as load:
        time.sleep(1.0)
        victim = busy_replica(fleet)
        getattr(fleet, way)(victim)
        time.sleep(1.0)
        fleet.start(victim)
        router.wait_healthy(COUNT)
        back = time.time()
        time.sleep(1.0)
        turns = load.stop()
    assert not [turn.error for turn in turns if turn.error]
    assert contradictions(turns) == 0
    assert sum(turn.start_s > back for turn in turns) > 0
    if way == "kill":
        # The router sent whole requests again, clients the streams that had begun.
        resends = sum(turn.resends for turn in turns)
        assert router.num_retries() - retries + resends > 0, "nothing was under way"


def test_a_replica_joins_and_leaves(fleet: Fleet) -> None:
    with route(fleet.urls[:1]) as router:
        added = router.post("/workers", json={"url": fleet.urls[1], "worker_type": "regular"})
        assert added.status_code in (200, 202), added.text
        router.wait_healthy(2)
        workers = router.get("/workers").json()["workers"]
        chosen = next(worker for worker in workers if worker["url"] == fleet.urls[0])
        assert router.request("DELETE", f"/workers/{chosen['id']}").status_code in (200, 202)
        router.wait_healthy(1)
        before = router.counter("smg_worker_requests_total", worker=fleet.urls[1])
        ask(router, [17, *PROMPT])
        assert router.counter("smg_worker_requests_total", worker=fleet.urls[1]) == before + 1


def test_without_retries_the_same_death_is_seen(fleet: Fleet) -> None:
    """The control: it is the router's retries that hide a death, and the count would notice."""
    with route(fleet.urls, "--disable-retries", "--disable-circuit-breaker") as router:
        client = Client(router.url, SHAPE.answer_len)
        with SteadyLoad(client, SHAPE, num_clients=6, pause_s=0.0, stream_every=0) as load:
            time.sleep(0.5)
            fleet.kill(busy_replica(fleet))
            time.sleep(1.0)
            turns = load.stop()
    assert [turn.error for turn in turns if turn.error]
