"""Two hundred concurrent streams with aborts and disconnects over a pool that is far too small.

Afterwards: every request has ended exactly once, no token came twice, the tokens of undisturbed
requests are those of a quiet server, and the idle scheduler accounts for every slot (a leak would
have ended it, `/health` and the exit code would tell).
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import requests

from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

register_cpu_ci(est_time=40, suite="stress")

NUM_REQUESTS = 200
NUM_NEW_TOKENS = 40
POOL_TOKENS = 640


@dataclass
class Stream:
    """What one client saw."""

    rid: str
    prompt: list[int]
    plan: str  # "stay", "abort", "disconnect"
    tokens: list[int] = field(default_factory=list)
    finishes: list[dict[str, Any]] = field(default_factory=list)
    retractions: int = 0


@pytest.fixture(scope="module", params=["1", "0"], ids=["overlap", "normal"])
def server(request, tmp_path_factory):
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)
    url = f"http://127.0.0.1:{get_free_port()}"
    args: list[str | float] = [
        "--max-total-tokens",
        POOL_TOKENS,
        "--page-size",
        4,
        "--chunked-prefill-size",
        64,
    ]
    args += ["--schedule-conservativeness", 0.1, "--random-seed", 1, "--num-threads", 1]
    env = {"SGLANG_ENABLE_OVERLAP_ON_CPU": request.param}
    process = popen_launch_server(str(model), url, 120, other_args=args, env=env)
    yield url
    assert process.poll() is None, f"the server ended with code {process.returncode}"
    terminate_and_kill_process_tree(process)


def _make_streams() -> list[Stream]:
    rng = random.Random(5)
    heads = [[rng.randrange(3, 200) for _ in range(40)] for _ in range(4)]
    streams = []
    for index in range(NUM_REQUESTS):
        prompt = rng.choice(heads)[: rng.randrange(40)] + [
            rng.randrange(3, 200) for _ in range(rng.randrange(1, 60))
        ]
        plan = rng.choices(["stay", "abort", "disconnect"], [6, 2, 2])[0]
        streams.append(Stream(f"soak-{index}-", prompt, plan))
    return streams


def _body(stream: Stream) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    return {
        "rid": stream.rid,
        "input_ids": stream.prompt,
        "sampling_params": params,
        "stream": True,
    }


async def _run_stream(client: httpx.AsyncClient, url: str, stream: Stream, delay: float) -> None:
    await asyncio.sleep(delay)
    leave_after = random.Random(stream.rid).randrange(1, NUM_NEW_TOKENS)
    async with client.stream("POST", f"{url}/generate", json=_body(stream)) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            ids = chunk["output_ids"]
            assert ids[: len(stream.tokens)] == stream.tokens, "a chunk took tokens back"
            stream.tokens = ids
            stream.retractions = chunk["meta_info"]["num_retractions"]
            if chunk["meta_info"]["finish_reason"]:
                stream.finishes.append(chunk["meta_info"]["finish_reason"])
            if stream.plan != "stay" and len(ids) >= leave_after:
                if stream.plan == "disconnect":
                    return
                await client.post(f"{url}/abort_request", json={"rid": stream.rid})


async def _soak(url: str, streams: list[Stream]) -> None:
    rng = random.Random(1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    async with httpx.AsyncClient(timeout=240, limits=limits) as client:
        await asyncio.gather(
            *(_run_stream(client, url, stream, rng.random() * 2) for stream in streams)
        )


def _load(url: str) -> dict[str, Any]:
    load: dict[str, Any] = requests.get(f"{url}/v1/loads", timeout=10).json()["loads"][0]
    return load


@pytest.mark.timeout(300)
def test_soak(server):
    streams = _make_streams()
    asyncio.run(_soak(server, streams))

    for stream in streams:
        if stream.plan == "disconnect":
            continue
        assert len(stream.finishes) == 1, f"{stream.rid} ended {len(stream.finishes)} times"
        if stream.finishes[0]["type"] != "abort":
            assert len(stream.tokens) == NUM_NEW_TOKENS
    assert sum(stream.retractions for stream in streams) > 0, "the pool was not small enough"

    _wait_idle(server)
    load = _load(server)
    assert load["num_used_tokens"] == 0
    assert requests.get(f"{server}/flush_cache", params={"timeout": 10}, timeout=20).ok

    for stream in [s for s in streams if s.plan == "stay"][:40]:
        quiet = requests.post(
            f"{server}/generate", json={**_body(stream), "stream": False}, timeout=60
        )
        assert quiet.json()["output_ids"] == stream.tokens, f"{stream.rid} differs from a quiet run"
    assert requests.get(f"{server}/health_generate", timeout=30).status_code == 200


def _wait_idle(url: str) -> None:
    for _ in range(100):
        load = _load(url)
        if load["num_running_reqs"] + load["num_waiting_reqs"] == 0:
            return
        asyncio.run(asyncio.sleep(0.1))
    raise AssertionError(f"requests are left over: {load}")
