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
from sglang.test.hicache_fault_server import (
    FULL,
    GREEDY,
    WAIT_S,
    FaultServer,
    from_storage,
    prompt,
    serve_with_faults,
)

register_cpu_ci(est_time=25, suite="hicache")

SLACK_S = 2.0  # two ranks on a busy machine


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with serve_with_faults(tmp_path_factory.mktemp("server"), "--tp", 2) as running:
        yield running


@pytest.fixture(scope="module")
def expected(case: FaultServer) -> list[list[int]]:
    return [case.ask(number)["output_ids"] for number in range(6)]


@pytest.fixture(autouse=True)
def well_afterwards(case: FaultServer, expected: list[list[int]]) -> Iterator[None]:
    case.switch.set(None)
    for number in range(len(expected)):
        case.ask(number)
    case.flush()
    children = case.server.children()
    yield
    case.switch.set(None)
    case.flush()
    answer = case.ask(0)
    assert (answer["output_ids"], from_storage(answer)) == (expected[0], FULL)
    assert case.server.children() == children


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
    case: FaultServer,
    expected: list[list[int]],
    rank: int,
    fault: Fault,
    call: str,
) -> None:
    case.switch.set(fault, call, rank=rank)
    start = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda number: case.ask(number), range(3)))
    assert time.monotonic() - start < WAIT_S + SLACK_S
    assert [answer["output_ids"] for answer in answers] == expected[:3]
    # What one rank lacks no rank uses.
    assert [from_storage(answer) for answer in answers] == [0, 0, 0]


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.HANG])
def test_one_rank_cannot_write(case: FaultServer, expected: list[list[int]], fault: Fault) -> None:
    case.switch.set(fault, "set", rank=1)
    new = range(20 + 4 * list(Fault).index(fault), 24 + 4 * list(Fault).index(fault))
    first = [case.ask(number)["output_ids"] for number in new]
    assert case.server.post("/flush_cache").status_code == 200
    assert [case.ask(number)["output_ids"] for number in new] == first
    case.switch.set(None)
    case.flush()
    for _ in range(2):
        answers = [case.ask(number) for number in new]
        assert [answer["output_ids"] for answer in answers] == first
        case.flush()
    assert [from_storage(answer) for answer in answers] == [FULL] * len(new)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_storm_while_one_rank_is_slow(
    case: FaultServer, expected: list[list[int]], rank: int
) -> None:
    rng = random.Random(rank)
    wrong: list[int] = []

    def call(number: int, patience_s: float) -> None:
        body: dict[str, Any] = {"input_ids": prompt(number), "sampling_params": GREEDY}
        try:
            reply = requests.post(f"{case.server.url}/generate", json=body, timeout=(1, patience_s))
        except requests.Timeout:
            return
        if reply.json()["output_ids"] != expected[number]:
            wrong.append(number)

    for _ in range(4):
        case.switch.set(None, delay_s=rng.choice([0.0, 0.01, 0.05]), rank=rank)
        case.server.post("/flush_cache")
        callers = [
            threading.Thread(target=call, args=(rng.randrange(6), rng.uniform(0.005, 0.4)))
            for _ in range(12)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert wrong == []
