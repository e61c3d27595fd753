"""Two tensor-parallel ranks, one of which has bad storage: they stay in step.

Ranks that disagree about a hit, a stop or an admission would run different batches: they hang, or
give wrong tokens.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.fault_store import Fault
from sglang.test.fakes.served_fault_store import FaultSwitch
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=25, suite="hicache")

PAGE = 16
FULL = 192
WAIT_S = 0.4
SLACK_S = 2.0  # two ranks on a busy machine
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(200)]


@pytest.fixture(scope="module")
def switch(tmp_path_factory: pytest.TempPathFactory) -> FaultSwitch:
    return FaultSwitch(tmp_path_factory.mktemp("switch") / "faults.json")


@pytest.fixture(scope="module")
def server(switch: FaultSwitch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)
    config = switch.extra_config(
        prefetch_threshold=PAGE, prefetch_timeout_base=WAIT_S, prefetch_timeout_per_ki_token=0.0
    )
    with serve(
        str(model),
        *("--max-total-tokens", 1024, "--page-size", PAGE, "--tp", 2),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", "timeout"),
        *("--hicache-storage-backend-extra-config", config),
    ) as running:
        yield running


def ask(server: SmallServer, number: int) -> dict[str, Any]:
    answer: dict[str, Any] = server.generate(input_ids=prompt(number), sampling_params=GREEDY)
    return answer


def flush(server: SmallServer) -> None:
    reply = server.post("/flush_cache?timeout=30")
    assert reply.status_code == 200, reply.text


def from_storage(answer: dict[str, Any]) -> int:
    return int((answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0))


@pytest.fixture(scope="module")
def expected(server: SmallServer) -> list[list[int]]:
    return [ask(server, number)["output_ids"] for number in range(6)]


@pytest.fixture(autouse=True)
def well_afterwards(
    server: SmallServer, switch: FaultSwitch, expected: list[list[int]]
) -> Iterator[None]:
    switch.set(None)
    for number in range(len(expected)):
        ask(server, number)
    flush(server)
    children = server.children()
    yield
    switch.set(None)
    flush(server)
    answer = ask(server, 0)
    assert (answer["output_ids"], from_storage(answer)) == (expected[0], FULL)
    assert server.children() == children


@pytest.mark.parametrize(
    ("rank", "fault", "call"),
    [
        (0, Fault.HANG, "exists"),
        (1, Fault.HANG, "get"),
        (1, Fault.RAISE, "exists"),
        (1, Fault.FALSE, "get"),
    ],
    ids=lambda value: value.value if isinstance(value, Fault) else str(value),
)
def test_one_rank_cannot_read(
    server: SmallServer,
    switch: FaultSwitch,
    expected: list[list[int]],
    rank: int,
    fault: Fault,
    call: str,
) -> None:
    switch.set(fault, call, rank=rank)
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda number: ask(server, number), range(3)))
    assert time.monotonic() - start < WAIT_S + SLACK_S
    assert [answer["output_ids"] for answer in answers] == expected[:3]
    # What one rank lacks no rank uses.
    assert [from_storage(answer) for answer in answers] == [0, 0, 0]


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.HANG])
def test_one_rank_cannot_write(
    server: SmallServer, switch: FaultSwitch, expected: list[list[int]], fault: Fault
) -> None:
    switch.set(fault, "set", rank=1)
    new = range(20 + 4 * list(Fault).index(fault), 24 + 4 * list(Fault).index(fault))
    first = [ask(server, number)["output_ids"] for number in new]
    assert server.post("/flush_cache").status_code == 200
    assert [ask(server, number)["output_ids"] for number in new] == first
    switch.set(None)
    flush(server)
    for _ in range(2):
        answers = [ask(server, number) for number in new]
        assert [answer["output_ids"] for answer in answers] == first
        flush(server)
    assert [from_storage(answer) for answer in answers] == [FULL] * len(new)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_storm_while_one_rank_is_slow(
    server: SmallServer, switch: FaultSwitch, expected: list[list[int]], rank: int
) -> None:
    rng = random.Random(rank)
    wrong: list[int] = []

    def call(number: int, patience_s: float) -> None:
        body: dict[str, Any] = {"input_ids": prompt(number), "sampling_params": GREEDY}
        try:
            reply = requests.post(f"{server.url}/generate", json=body, timeout=(1, patience_s))
        except requests.Timeout:
            return
        if reply.json()["output_ids"] != expected[number]:
            wrong.append(number)

    for _ in range(4):
        switch.set(None, delay_s=rng.choice([0.0, 0.01, 0.05]), rank=rank)
        server.post("/flush_cache")
        callers = [
            threading.Thread(target=call, args=(rng.randrange(6), rng.uniform(0.005, 0.4)))
            for _ in range(12)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []
