"""KV events of a running server: a subscriber knows what each request will find in the cache.

The subscriber is the one of examples/follow_kv_events.py. What it says of a prompt before it is
sent is compared with where the answer says that the prompt's tokens came from.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq

import sglang
from sglang.srt.mem_cache.hicache_records import LOAD_BACK_THRESHOLD
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.examples import load_example
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=45, suite="hicache")

PAGE = 8
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
EVENTS = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
NUM_REPLICAS = 2


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_example("follow_kv_events")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("events") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    """Two replicas; the device holds about four prompts, the host eight."""
    storage = {"file_storage_path": str(tmp_path_factory.mktemp("l3")), "prefetch_threshold": PAGE}
    with serve(
        str(model),
        *("--max-total-tokens", 512, "--page-size", PAGE, "--dp-size", NUM_REPLICAS),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2, "--grammar-backend", "none"),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(storage)),
        *("--kv-events-config", json.dumps({**EVENTS, "topic": "kv@here"})),
    ) as running:
        yield running


def info_of(server: SmallServer) -> dict[str, Any]:
    info = server.get("/server_info").json()["kv_events"]
    assert isinstance(info, dict)
    return info


@pytest.fixture
def followers(server: SmallServer, example: ModuleType) -> Iterator[list[Any]]:
    made = [example.Follower(info_of(server), rank) for rank in range(NUM_REPLICAS)]
    try:
        for follower in made:
            follower.catch_up()
        yield made
    finally:
        for follower in made:
            follower.close()


@contextmanager
def following(example: ModuleType, info: dict[str, Any]) -> Iterator[Any]:
    """A follower that is closed whatever happens: what is left open would hang at the exit."""
    follower = example.Follower(info)
    try:
        follower.catch_up()
        yield follower
    finally:
        follower.close()


def settle(follower: Any, quiet_s: float = 0.15) -> list[dict[str, Any]]:
    """Read on until nothing comes; return all events."""
    found: list[dict[str, Any]] = []
    while (events := follower.poll(quiet_s)) is not None:
        found += events
    return found


def flush(server: SmallServer) -> None:
    assert server.post("/flush_cache?timeout=30").status_code == 200


def test_server_info_says_where(server: SmallServer) -> None:
    info = info_of(server)
    assert info["publisher"] == "zmq" and info["topic"] == "kv@here"
    assert info["block_size"] == PAGE and info["dp_size"] == NUM_REPLICAS
    assert info["endpoint_host"] == info["replay_endpoint_host"] == "127.0.0.1"
    assert [one["dp_rank"] for one in info["publishers"]] == [0, 1]
    assert info["publishers"][0]["endpoint"] == f"tcp://127.0.0.1:{info['endpoint_port_base']}"
    addresses = {one[key] for one in info["publishers"] for key in ("endpoint", "replay_endpoint")}
    assert len(addresses) == 2 * NUM_REPLICAS


@pytest.mark.timeout(120)
def test_a_subscriber_foretells_every_hit(server: SmallServer, followers: list[Any]) -> None:
    rng = random.Random(5)
    beginnings = [[rng.randrange(3, 190) for _ in range(60)] for _ in range(4)]
    found = {"device": 0, "host": 0}
    for step in range(60):
        rank = step % NUM_REPLICAS
        prompt = rng.choice(beginnings)[: rng.randrange(20, 61)]
        prompt = prompt + [rng.randrange(3, 190) for _ in range(rng.randrange(30, 60))]
        salt = rng.choice([None, "tenant"])
        settle(followers[rank])
        view = followers[rank].view
        # The last token is always computed; only whole pages are cached.
        usable = (len(prompt) - 1) // PAGE * PAGE
        here = {
            medium: min(view.matched_tokens(prompt, salt, medium), usable)
            for medium in ("GPU", None)
        }
        answer = server.generate(
            input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=rank, extra_key=salt
        )
        details = answer["meta_info"]["cached_tokens_details"] or {}
        device, host = details.get("device", 0), details.get("host", 0)
        assert device == here["GPU"], step
        on_host = here[None] - here["GPU"]
        is_worth_it = on_host >= LOAD_BACK_THRESHOLD
        assert host in ((on_host,) if is_worth_it else (0, on_host)), step
        found["device"] += device
        found["host"] += host
    assert found["device"] > 200 and found["host"] > 100, found
    assert all(follower.num_gaps == 0 for follower in followers)


def test_a_flush_clears_and_storage_fills_again(
    server: SmallServer, followers: list[Any], example: ModuleType
) -> None:
    follower, prompt = followers[0], list(range(20, 90))
    server.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=0)
    settle(follower)
    assert follower.view.matched_tokens(prompt, medium="CPU_PINNED") == 64
    flush(server)
    assert {event["type"] for event in settle(follower)} == {"AllBlocksCleared"}
    assert follower.view.matched_tokens(prompt) == 0
    server.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=0)
    media = [event["medium"] for event in settle(follower)]
    assert media.index("CPU_PINNED") < media.index("GPU"), "from storage to the host first"
    assert follower.view.matched_tokens(prompt) == 64
    # One that comes late knows as much.
    with following(example, info_of(server)) as late:
        settle(late)
        assert late.view.held == follower.view.held and late.view.pages == follower.view.pages


def test_other_weights_hold_nothing(
    server: SmallServer, followers: list[Any], model: Path, tmp_path: Path
) -> None:
    prompt = list(range(60, 130))

    def generate() -> int:
        answer = server.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=0)
        return int(answer["meta_info"]["cached_tokens"])

    def update(path: Path) -> None:
        body = {"model_path": str(path), "flush_cache": False}
        reply = server.post("/update_weights_from_disk", json=body)
        assert reply.json()["success"], reply.text

    other = make_tiny_checkpoint(tmp_path / "other", seed=77)
    generate()
    settle(followers[0])
    assert followers[0].view.matched_tokens(prompt) == 64
    update(other)
    settle(followers[0])
    assert not any(followers[0].view.held.values())
    assert generate() == 0
    settle(followers[0])
    assert followers[0].view.matched_tokens(prompt) == 64
    update(model)
    settle(followers[0])
    # The first weights are back, and with them what is left of their KV.
    assert followers[0].view.matched_tokens(prompt) == generate() == 64


def test_bad_peers_stop_nothing(server: SmallServer, followers: list[Any]) -> None:
    context: zmq.Context[Any] = zmq.Context()
    try:
        for one in info_of(server)["publishers"]:
            replay = context.socket(zmq.DEALER)
            replay.connect(one["replay_endpoint"])
            for frames in ([b"x"], [b"", b"", b""], [bytes(8), bytes(8)], [b"\xff" * 8] * 3):
                replay.send_multipart(frames)
            for endpoint in (one["endpoint"], one["replay_endpoint"]):
                port = int(endpoint.rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port)) as raw:
                    raw.sendall(random.Random(1).randbytes(5000))
        lazy = context.socket(zmq.SUB)
        lazy.rcvhwm = 1
        lazy.subscribe(b"")
        lazy.connect(info_of(server)["publishers"][0]["endpoint"])
        children = server.children()
        for number in range(10):
            prompt = list(range(30 + number, 100 + number))
            server.generate(input_ids=prompt, sampling_params=GREEDY, routed_dp_rank=0)
            settle(followers[0])
            assert followers[0].view.matched_tokens(prompt) == 64
        assert server.children() == children
    finally:
        context.destroy(linger=0)


@pytest.mark.timeout(120)
def test_two_ranks_speak_with_one_voice(model: Path, example: ModuleType) -> None:
    with sglang.Engine(
        model_path=str(model),
        device="cpu",
        tp_size=2,
        page_size=PAGE,
        max_total_tokens=512,
        num_threads=1,
        kv_events_config=json.dumps(EVENTS),
    ) as engine:
        info = engine.get_server_info()["kv_events"]
        assert len(info["publishers"]) == 1
        with following(example, info) as follower:
            engine.generate(input_ids=list(range(5, 75)), sampling_params=GREEDY)
            stored = [event for event in settle(follower) if event["type"] == "BlockStored"]
        assert [event["token_ids"][0] for event in stored[:8]] == list(range(5, 69, PAGE))
        hashes = [event["block_hashes"][0] for event in stored]
        assert len(set(hashes)) == len(hashes) == 9


@pytest.mark.timeout(120)
def test_a_draft_that_reads_ahead(example: ModuleType, tmp_path: Path) -> None:
    """Its pages depend on the token behind them, which is not told: a page too much is foretold."""
    model = make_tiny_checkpoint(tmp_path / "model", num_hidden_layers=6)
    draft = make_tiny_draft(tmp_path / "draft")
    with ExitStack() as stack:
        engine = sglang.Engine(
            model_path=str(model),
            device="cpu",
            page_size=PAGE,
            max_total_tokens=512,
            num_threads=1,
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(draft),
            kv_events_config=json.dumps(EVENTS),
        )
        stack.enter_context(engine)
        info = engine.get_server_info()["kv_events"]
        follower = stack.enter_context(following(example, info))
        rng = random.Random(3)
        beginnings = [[rng.randrange(3, 190) for _ in range(6 * PAGE)] for _ in range(3)]
        num_used = num_exact = 0
        for _ in range(60):
            # All part right behind a page.
            prompt = rng.choice(beginnings)[: PAGE * rng.randrange(3, 7)]
            prompt = prompt + [rng.randrange(3, 6)] * (4 * PAGE + 1)
            settle(follower, 0.1)
            told = follower.view.matched_tokens(prompt)
            answer: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY)
            used = answer["meta_info"]["cached_tokens"]
            assert used <= told <= used + PAGE
            num_used += used
            num_exact += told == used
        assert num_used > 500 and 10 < num_exact < 60
        assert follower.num_gaps == 0
        engine.flush_cache()
        settle(follower)
        assert not follower.view.pages


@pytest.mark.timeout(120)
def test_a_restart_is_seen_even_when_it_was_missed(
    model: Path, example: ModuleType, tmp_path: Path
) -> None:
    events = {"endpoint": f"ipc://{tmp_path}/live", "replay_endpoint": f"ipc://{tmp_path}/again"}
    options: dict[str, Any] = {
        "model_path": str(model), "device": "cpu", "page_size": PAGE, "max_total_tokens": 512,
        "num_threads": 1, "kv_events_config": json.dumps(events),
    }  # fmt: skip

    def ask(engine: sglang.Engine, first: int) -> list[int]:
        prompt = list(range(first, first + 60))
        engine.generate(input_ids=prompt, sampling_params=GREEDY)
        return prompt

    with ExitStack() as stack:
        with sglang.Engine(**options) as engine:
            info = engine.get_server_info()["kv_events"]
            follower = stack.enter_context(following(example, info))
            asking = stack.enter_context(following(example, info))
            old = [ask(engine, first) for first in (5, 6, 7)][0]
            for each in (follower, asking):
                settle(each)
                assert each.view.matched_tokens(old) == 56
        assert not list(tmp_path.iterdir())
        engine = stack.enter_context(sglang.Engine(**options))
        # Of a server without requests there may be nothing to hear: one that asks learns of it.
        asking.catch_up()
        assert asking.view.held == {} and asking.view.pages == {}
        new = [ask(engine, first) for first in (100, 101, 102)][0]  # it is busy meanwhile
        for first in range(20, 60):
            ask(engine, first)
            if settle(follower):
                break
        late = stack.enter_context(following(example, info))
        settle(late)
        assert follower.view.held == late.view.held
        assert follower.view.matched_tokens(new) == late.view.matched_tokens(new) == 56
        assert follower.view.matched_tokens(old) == 0


@pytest.mark.timeout(60)
def test_a_taken_port_ends_the_start(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        events = {"endpoint": f"tcp://127.0.0.1:{taken.getsockname()[1]}"}
        start = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)),
                *("--device", "cpu", "--port", str(get_free_port())),
                *("--kv-events-config", json.dumps(events)),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert f"--kv-events-config: cannot listen on {events['endpoint']}" in done.stderr
    assert time.monotonic() - start < 30
