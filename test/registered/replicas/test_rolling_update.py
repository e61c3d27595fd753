"""Replicas get new weights one after the other under load: nothing fails, no page crosses over."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests

from serving.conversations import TIERS, Client, Shape, SteadyLoad, Turn
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.examples import load_example
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.replicas import (
    Fleet,
    Router,
    route,
    router_is_installed,
    serve_fleet,
    shared_storage,
)
from sglang.test.small_server import SmallServer

register_cpu_ci(est_time=45, suite="replicas")

pytestmark = [
    pytest.mark.skipif(not router_is_installed(), reason="needs the router: pip install smg"),
    pytest.mark.timeout(200),
]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "rolling_update.py"
PAGE = 16
PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(6 * PAGE + 5)]
FULL = (len(PROMPT) - 1) // PAGE * PAGE
NEW_TOKENS = 12
SHAPE = Shape(num_conversations=4, num_heads=2, turns=3, head_len=64, answer_len=NEW_TOKENS)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("rolling_update")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one architecture, by version."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_checkpoint(root / name, seed=seed, max_position_embeddings=1024)
        for seed, name in enumerate(("old", "new"))
    }


@pytest.fixture(scope="module")
def running(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Router]]:
    flags = [
        *("--weight-version", "old", "--served-model-name", "tiny", "--enable-metrics"),
        *shared_storage(tmp_path_factory.mktemp("l3"), PAGE),
    ]
    with serve_fleet(str(folders["old"]), 2, *flags) as fleet, route(fleet.urls) as router:
        yield fleet, router


@pytest.fixture
def fleet(
    running: tuple[Fleet, Router], example: ModuleType, folders: dict[str, Path]
) -> Iterator[Fleet]:
    """Replicas that serve the old weights at the begin and the end."""
    yield running[0]
    back = example.from_disk(str(folders["old"]), "old")
    example.rolling_update(running[0].urls, back, "old")


@pytest.fixture
def router(running: tuple[Fleet, Router]) -> Router:
    return running[1]


def ask(server: SmallServer, prompt: list[int] = PROMPT) -> tuple[list[int], dict[str, int]]:
    body = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    answer = server.generate(input_ids=prompt, sampling_params=body)
    details = answer["meta_info"]["cached_tokens_details"] or {}
    counts = {tier: details[tier] for tier in TIERS if details.get(tier)}
    return answer["output_ids"], counts


def wait_written(server: SmallServer) -> None:
    assert server.post("/flush_cache?timeout=20").status_code == 200


def expect_answers_of(folder: Path, turns: list[Turn]) -> None:
    """Each answer is what an engine with these weights alone, without any cache, says."""
    wanted = {turn.prompt: turn.output for turn in turns}
    flags = ("--max-total-tokens", 4096, "--disable-radix-cache")
    with ServedScheduler(folder, *flags) as alone:
        for prompt, output in wanted.items():
            assert alone.answer(list(prompt), NEW_TOKENS).tokens == list(output)


def test_updates_under_load(
    fleet: Fleet, router: Router, example: ModuleType, folders: dict[str, Path]
) -> None:
    client = Client(router.url, NEW_TOKENS)
    with SteadyLoad(client, SHAPE, num_clients=4, pause_s=0.02, stream_every=3) as load:
        time.sleep(1.0)
        for version in ("new", "old", "new"):
            urls = example.replica_urls(router.url)
            assert urls == sorted(fleet.urls)
            update = example.from_disk(str(folders[version]), version)
            steps = example.rolling_update(urls, update, version)
            assert [(step.url, step.version) for step in steps] == [(url, version) for url in urls]
            time.sleep(0.7)
        turns = load.stop()
    assert not [turn.error for turn in turns if turn.error]
    assert sum(turn.resends for turn in turns) == 0
    by_version = {v: [t for t in turns if t.weight_versions == (v,)] for v in folders}
    # A request that was paused half-way has tokens of both, which no single model would say.
    mixed = [turn for turn in turns if len(turn.weight_versions) > 1]
    assert len(mixed) + sum(map(len, by_version.values())) == len(turns)
    assert all(len(found) > 10 for found in by_version.values())
    assert any(turn.cached["storage"] for turn in turns), "storage was never read"
    for version, found in by_version.items():
        expect_answers_of(folders[version], found)
    # The control: the two models do not say the same.
    with pytest.raises(AssertionError):
        expect_answers_of(folders["new"], by_version["old"])


def test_no_page_of_another_version_is_read(
    fleet: Fleet, example: ModuleType, folders: dict[str, Path]
) -> None:
    prompt = [9, *PROMPT]
    first, counts = ask(fleet[0], prompt)
    assert counts == {}
    wait_written(fleet[0])
    new = example.from_disk(str(folders["new"]), "new")
    example.rolling_update(fleet.urls[:1], new, "new")
    # One replica is ahead. Each reads its own pages from the same folder, and only those.
    second, counts = ask(fleet[0], prompt)
    assert counts == {} and second != first
    assert ask(fleet[1], prompt) == (first, {"storage": FULL})
    wait_written(fleet[0])
    example.rolling_update(fleet.urls[1:], new, "new")
    assert ask(fleet[1], prompt) == (second, {"storage": FULL})
    # Weights that come back find what they had written.
    example.rolling_update(fleet.urls, example.from_disk(str(folders["old"]), "old"), "old")
    assert ask(fleet[0], prompt) == (first, {"storage": FULL})


def test_a_refusal_stops_the_update_and_nothing_else(
    fleet: Fleet, router: Router, example: ModuleType, folders: dict[str, Path], tmp_path: Path
) -> None:
    def update(replica: Any) -> None:
        is_first = replica.url == fleet.urls[0]
        body = {"model_path": str(folders["new"] if is_first else tmp_path / "none")}
        replica.post("/update_weights_from_disk", {**body, "weight_version": "new"})

    with pytest.raises(example.UpdateFailed) as failure:
        example.rolling_update(fleet.urls, update, "new")
    assert (failure.value.url, failure.value.updated) == (fleet.urls[1], [fleet.urls[0]])
    versions = [replica.get("/model_info").json()["weight_version"] for replica in fleet.running()]
    assert versions == ["new", "old"]
    for replica in fleet.running():
        assert replica.get("/ready").status_code == 200
        assert ask(replica)[0]
    assert ask(router)[0]


def test_a_replica_that_is_gone(
    fleet: Fleet, example: ModuleType, folders: dict[str, Path]
) -> None:
    gone = "http://127.0.0.1:1"
    with pytest.raises(example.UpdateFailed, match="was not updated"):
        example.rolling_update([gone], example.from_disk(str(folders["new"]), "new"), "new")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (("--router", "http://127.0.0.1:1"), "router at http://127.0.0.1:1 does not say"),
        (("--url", "http://127.0.0.1:1"), "http://127.0.0.1:1 was not updated"),
        ((), "--router or --url"),
    ],
)
def test_the_program_ends_with_a_sentence(place: tuple[str, ...], reason: str) -> None:
    command = [sys.executable, str(EXAMPLE), *place, "--model-path", "/none", "--version", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert reason in done.stderr and "Traceback" not in done.stderr


def test_all_at_once_through_the_router(
    fleet: Fleet, router: Router, folders: dict[str, Path]
) -> None:
    """The router's control plane for trainers: pause all, update all, continue all."""

    def fan_out(path: str, body: dict[str, Any]) -> list[Any]:
        url = f"/v1/rl/engine/{path}?selector=served_model_name%3Dtiny"
        reply = router.post(url, json=body)
        assert reply.status_code == 200, reply.text
        content = reply.json()
        assert (content["failed"], content["succeeded"]) == ([], 2)
        return [result["body"] for result in content["results"].values()]

    fan_out("pause_generation", {"mode": "retract"})
    update = {"model_path": str(folders["new"]), "weight_version": "new"}
    assert all(body["success"] for body in fan_out("update_weights_from_disk", update))
    with pytest.raises(requests.exceptions.Timeout):  # paused: a request waits
        router.post("/generate", json={"input_ids": PROMPT}, timeout=1.0)
    fan_out("continue_generation", {})
    assert ask(router)[0]
    for replica in fleet.running():
        assert replica.get("/model_info").json()["weight_version"] == "new"


def test_a_router_that_asks_for_readiness_goes_round_a_paused_replica(fleet: Fleet) -> None:
    with route(fleet.urls, "--health-check-endpoint", "/ready") as router:
        assert fleet[0].post("/pause_generation", json={"mode": "retract"}).status_code == 200
        try:
            router.wait_healthy(1)
            before = router.counter("smg_worker_requests_total", worker=fleet.urls[1])
            for number in range(4):
                ask(router, [20 + number, *PROMPT])
            after = router.counter("smg_worker_requests_total", worker=fleet.urls[1])
            assert after == before + 4
        finally:
            assert fleet[0].post("/continue_generation", json={}).status_code == 200
        router.wait_healthy(2)
