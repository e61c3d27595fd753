"""A served model over storage that raises, lies, loses pages or never returns.

Whatever storage does: no request fails, no token is wrong, nobody waits longer than a cold prompt
plus the time that the policy allows, host memory comes back, and the server goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.fault_store import Fault
from sglang.test.fakes.store_servers import (
    MooncakeServers,
    RespServer,
    StoreServers,
    why_no_mooncake,
)
from sglang.test.hicache_fault_server import (
    GREEDY,
    WAIT_S,
    FaultServer,
    from_storage,
    prompt,
    serve_with_faults,
)
from sglang.test.small_server import metric

register_cpu_ci(est_time=120, suite="hicache")

HOST_USED = "sglang:hicache_host_used_tokens"
# Scheduling noise of a busy machine, on top of what a cold prompt takes and the policy allows.
SLACK_S = 1.0


@pytest.fixture(scope="module", params=["memory", "mooncake", "redis"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoreServers | None]:
    """Where the pages are; the faults come between it and the server."""
    if request.param == "memory":
        yield None
        return
    if request.param == "mooncake" and why_no_mooncake() and not os.environ.get("CI"):
        pytest.skip(str(why_no_mooncake()))
    folder = tmp_path_factory.mktemp("store")
    store = MooncakeServers(folder) if request.param == "mooncake" else RespServer(folder)
    store.start()
    yield store
    store.close()


@pytest.fixture(scope="module")
def case(
    store: StoreServers | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultServer]:
    folder = tmp_path_factory.mktemp("server")
    with serve_with_faults(folder, "--enable-metrics", store=store) as running:
        yield running


@pytest.fixture(scope="module")
def cold(case: FaultServer) -> dict[int, list[int]]:
    """Tokens of the prompts while storage is well."""
    return {number: case.tokens(number) for number in range(12)}


@pytest.fixture(autouse=True)
def well_afterwards(case: FaultServer, cold: dict[int, list[int]]) -> Iterator[None]:
    """Each test begins with full storage and empty caches; the server survives it unharmed."""
    case.switch.set(None)
    for number in cold:
        case.ask(number)
    case.flush()
    children = case.server.children()
    yield
    case.switch.set(None)
    case.flush()
    wait_until(lambda: metric(case.server, HOST_USED) == 0)
    again = case.ask(0)
    assert again["output_ids"] == cold[0]
    assert case.server.children() == children


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_well_storage_serves_what_was_flushed(
    case: FaultServer, cold: dict[int, list[int]]
) -> None:
    answer = case.ask(3)
    assert answer["output_ids"] == cold[3]
    details = answer["meta_info"]["cached_tokens_details"]
    # Of storage that is no HiCacheFile the class is named, too.
    assert details == {
        "device": 0,
        "host": 0,
        "storage": 192,
        "storage_backend": case.class_name,
    }


@pytest.mark.parametrize("call", ["exists", "get", "set"])
@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.FALSE])
def test_failing_calls(
    case: FaultServer,
    cold: dict[int, list[int]],
    call: str,
    fault: Fault,
) -> None:
    case.switch.set(fault, call)
    for number in range(6):
        seconds, answer = case.timed(number)
        assert answer["output_ids"] == cold[number]
        assert seconds < WAIT_S + SLACK_S
        assert from_storage(answer) == (0 if call != "set" else 192)
    case.switch.set(None)
    for number in range(6):
        assert case.ask(number)["output_ids"] == cold[number]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ("get", Fault.TRUNCATE),
        ("set", Fault.TRUNCATE),
        ("set", Fault.FLIP),
        ("exists", Fault.VANISH),
    ],
    ids=lambda value: value if isinstance(value, str) else value.value,
)
def test_damaged_and_vanishing_pages(
    case: FaultServer,
    cold: dict[int, list[int]],
    call: str,
    fault: Fault,
) -> None:
    new = range(20, 24)
    case.switch.set(fault, call)
    answers = {number: case.ask(number)["output_ids"] for number in new}
    for number in range(6):
        assert case.ask(number)["output_ids"] == cold[number]
    case.flush()
    for number in new:  # damaged where they were written under the fault
        assert case.ask(number)["output_ids"] == answers[number]
    case.switch.set(None)
    case.flush()
    for number in new:
        assert case.ask(number)["output_ids"] == answers[number]
    case.flush()
    # Whatever was damaged has been written anew.
    for number in new:
        answer = case.ask(number)
        assert answer["output_ids"] == answers[number]
        assert from_storage(answer) == 192


@pytest.mark.parametrize("call", ["exists", "get"])
def test_reads_that_never_return(case: FaultServer, cold: dict[int, list[int]], call: str) -> None:
    case.switch.set(Fault.HANG, call)
    before = case.switch.num_calls(call)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda number: case.timed(number), range(6)))
    assert case.switch.num_calls(call) > before
    for number, (seconds, answer) in enumerate(results):
        assert answer["output_ids"] == cold[number]
        assert seconds < WAIT_S + SLACK_S
        assert from_storage(answer) == 0
    # The device goes on serving.
    case.ask(0)
    assert case.ask(0)["meta_info"]["cached_tokens"] == 192
    # An immediate flush does not wait for storage.
    assert case.server.post("/flush_cache").status_code == 200
    seconds, answer = case.timed(1)
    assert answer["output_ids"] == cold[1] and seconds < WAIT_S + SLACK_S
    case.switch.set(None)
    case.flush()
    assert from_storage(case.ask(2)) == 192


def test_writes_that_never_return(case: FaultServer, cold: dict[int, list[int]]) -> None:
    case.switch.set(Fault.HANG, "set")
    # More than the host can hold while nothing leaves it: the device must do without.
    first = {number: case.ask(number)["output_ids"] for number in range(30, 50)}
    for number, tokens in first.items():
        assert case.ask(number)["output_ids"] == tokens
    assert metric(case.server, HOST_USED) <= metric(case.server, "sglang:hicache_host_total_tokens")
    reply = case.server.post("/flush_cache?timeout=0.5")  # waits for storage, in vain
    assert reply.status_code == 400 and "Timed out" in reply.text
    assert case.server.post("/flush_cache").status_code == 200
    assert case.ask(0)["output_ids"] == cold[0]


def test_waiting_for_storage_takes_no_cpu(case: FaultServer) -> None:
    """Neither an idle server nor one that waits for storage that hangs runs in circles."""
    scheduler = next(
        child
        for child in psutil.Process(case.server.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    )
    assert share_of_cpu(scheduler, 1.0) < 0.08
    case.switch.set(Fault.HANG, "set", "exists")
    case.ask(60)
    assert share_of_cpu(scheduler, 1.0) < 0.08


def share_of_cpu(process: psutil.Process, seconds: float) -> float:
    """The least of two times: what is left to do behind an answer may fall into the first."""
    shares = []
    for _ in range(2):
        before = sum(process.cpu_times()[:2])
        time.sleep(seconds)
        shares.append((sum(process.cpu_times()[:2]) - before) / seconds)
    return min(shares)


def test_clients_that_leave_while_storage_is_read(
    case: FaultServer, cold: dict[int, list[int]]
) -> None:
    for delay_s in (0.0, 0.02, 0.1):
        case.switch.set(None, delay_s=delay_s)
        case.server.post("/flush_cache")
        leavers = [
            threading.Thread(target=ask_and_leave, args=(case, number, 0.005 * number))
            for number in range(1, 12)
        ]
        for leaver in leavers:
            leaver.start()
        for leaver in leavers:
            leaver.join()
        case.server.post("/abort_request", json={"abort_all": True})
        seconds, answer = case.timed(0)
        assert answer["output_ids"] == cold[0]
        assert seconds < WAIT_S + SLACK_S
    case.switch.set(None)
    case.flush()
    assert from_storage(case.ask(5)) == 192  # prefetching works as before


def ask_and_leave(case: FaultServer, number: int, after_s: float) -> None:
    body: dict[str, Any] = {
        "input_ids": prompt(number),
        "sampling_params": {**GREEDY, "max_new_tokens": 200},
    }
    try:
        requests.post(f"{case.server.url}/generate", json=body, timeout=(1, max(after_s, 0.001)))
    except requests.Timeout:
        return


def test_storage_endpoints_need_an_admin_key(case: FaultServer) -> None:
    for method in ("GET", "PUT", "DELETE"):
        reply = case.server.request(method, "/hicache/storage-backend", json={})
        assert reply.status_code == 400
        assert "admin" in reply.text


def test_clear_is_no_lie(case: FaultServer, cold: dict[int, list[int]]) -> None:
    assert from_storage(case.ask(4)) == 192
    case.flush()
    assert case.server.post("/hicache/storage-backend/clear").status_code == 200
    answer = case.ask(4)
    assert answer["output_ids"] == cold[4]
    assert answer["meta_info"]["cached_tokens"] == 0
