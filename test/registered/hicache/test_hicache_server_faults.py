"""A served model over storage that raises, lies, loses pages or never returns.

Whatever storage does: no request fails, no token is wrong, nobody waits longer than a cold prompt
plus the time that the policy allows, host memory comes back, and the server goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.fault_store import Fault
from sglang.test.fakes.served_fault_store import FaultSwitch
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, metric, serve

register_cpu_ci(est_time=40, suite="hicache")

PAGE = 16
WAIT_S = 0.4  # that the prefetch policy allows
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
HOST_USED = "sglang:hicache_host_used_tokens"
# Scheduling noise of a busy machine, on top of what a cold prompt takes and the policy allows.
SLACK_S = 1.0


def prompt(number: int, length: int = 200) -> list[int]:
    return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(length)]


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
        *("--max-total-tokens", 1024, "--page-size", PAGE, "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "dynamic", "--hicache-storage-prefetch-policy", "timeout"),
        *("--hicache-storage-backend-extra-config", config),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def cold(server: SmallServer) -> dict[int, list[int]]:
    """Tokens of the prompts while storage is well."""
    return {number: ask(server, number)["output_ids"] for number in range(12)}


@pytest.fixture(autouse=True)
def well_afterwards(
    server: SmallServer, switch: FaultSwitch, cold: dict[int, list[int]]
) -> Iterator[None]:
    """Each test begins with full storage and empty caches; the server survives it unharmed."""
    switch.set(None)
    for number in cold:
        ask(server, number)
    flush(server)
    children = server.children()
    yield
    switch.set(None)
    flush(server)
    wait_until(lambda: metric(server, HOST_USED) == 0)
    again = ask(server, 0)
    assert again["output_ids"] == cold[0]
    assert server.children() == children


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def ask(server: SmallServer, number: int) -> dict[str, Any]:
    return server.generate(input_ids=prompt(number), sampling_params=GREEDY)


def flush(server: SmallServer) -> None:
    reply = server.post("/flush_cache?timeout=30")
    assert reply.status_code == 200, reply.text


def from_storage(answer: dict[str, Any]) -> int:
    return (answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0)


def timed(server: SmallServer, number: int) -> tuple[float, dict[str, Any]]:
    start = time.monotonic()
    answer = ask(server, number)
    return time.monotonic() - start, answer


def test_well_storage_serves_what_was_flushed(
    server: SmallServer, cold: dict[int, list[int]]
) -> None:
    answer = ask(server, 3)
    assert answer["output_ids"] == cold[3]
    details = answer["meta_info"]["cached_tokens_details"]
    # Of storage that is no HiCacheFile the class is named, too.
    assert details == {
        "device": 0,
        "host": 0,
        "storage": 192,
        "storage_backend": "ServedFaultStore",
    }


@pytest.mark.parametrize("call", ["exists", "get", "set"])
@pytest.mark.parametrize("fault", [Fault.RAISE, Fault.FALSE])
def test_failing_calls(
    server: SmallServer,
    switch: FaultSwitch,
    cold: dict[int, list[int]],
    call: str,
    fault: Fault,
) -> None:
    switch.set(fault, call)
    for number in range(6):
        seconds, answer = timed(server, number)
        assert answer["output_ids"] == cold[number]
        assert seconds < WAIT_S + SLACK_S
        assert from_storage(answer) == (0 if call != "set" else 192)
    switch.set(None)
    for number in range(6):
        assert ask(server, number)["output_ids"] == cold[number]


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
    server: SmallServer,
    switch: FaultSwitch,
    cold: dict[int, list[int]],
    call: str,
    fault: Fault,
) -> None:
    new = range(20, 24)
    switch.set(fault, call)
    answers = {number: ask(server, number)["output_ids"] for number in new}
    for number in range(6):
        assert ask(server, number)["output_ids"] == cold[number]
    flush(server)
    for number in new:  # damaged where they were written under the fault
        assert ask(server, number)["output_ids"] == answers[number]
    switch.set(None)
    flush(server)
    for number in new:
        assert ask(server, number)["output_ids"] == answers[number]
    flush(server)
    # Whatever was damaged has been written anew.
    for number in new:
        answer = ask(server, number)
        assert answer["output_ids"] == answers[number]
        assert from_storage(answer) == 192


@pytest.mark.parametrize("call", ["exists", "get"])
def test_reads_that_never_return(
    server: SmallServer, switch: FaultSwitch, cold: dict[int, list[int]], call: str
) -> None:
    switch.set(Fault.HANG, call)
    before = switch.num_calls(call)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda number: timed(server, number), range(6)))
    assert switch.num_calls(call) > before
    for number, (seconds, answer) in enumerate(results):
        assert answer["output_ids"] == cold[number]
        assert seconds < WAIT_S + SLACK_S
        assert from_storage(answer) == 0
    # The device goes on serving.
    ask(server, 0)
    assert ask(server, 0)["meta_info"]["cached_tokens"] == 192
    # An immediate flush does not wait for storage.
    assert server.post("/flush_cache").status_code == 200
    seconds, answer = timed(server, 1)
    assert answer["output_ids"] == cold[1] and seconds < WAIT_S + SLACK_S
    switch.set(None)
    flush(server)
    assert from_storage(ask(server, 2)) == 192


def test_writes_that_never_return(
    server: SmallServer, switch: FaultSwitch, cold: dict[int, list[int]]
) -> None:
    switch.set(Fault.HANG, "set")
    # More than the host can hold while nothing leaves it: the device must do without.
    first = {number: ask(server, number)["output_ids"] for number in range(30, 50)}
    for number, tokens in first.items():
        assert ask(server, number)["output_ids"] == tokens
    assert metric(server, HOST_USED) <= metric(server, "sglang:hicache_host_total_tokens")
    reply = server.post("/flush_cache?timeout=0.5")  # waits for storage, in vain
    assert reply.status_code == 400 and "Timed out" in reply.text
    assert server.post("/flush_cache").status_code == 200
    assert ask(server, 0)["output_ids"] == cold[0]


def test_waiting_for_storage_takes_no_cpu(server: SmallServer, switch: FaultSwitch) -> None:
    """Neither an idle server nor one that waits for storage that hangs runs in circles."""
    scheduler = next(
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "scheduler" in " ".join(child.cmdline())
    )
    assert share_of_cpu(scheduler, 1.0) < 0.08
    switch.set(Fault.HANG, "set", "exists")
    ask(server, 60)
    assert share_of_cpu(scheduler, 1.0) < 0.08


def share_of_cpu(process: psutil.Process, seconds: float) -> float:
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


def test_clients_that_leave_while_storage_is_read(
    server: SmallServer, switch: FaultSwitch, cold: dict[int, list[int]]
) -> None:
    for delay_s in (0.0, 0.02, 0.1):
        switch.set(None, delay_s=delay_s)
        server.post("/flush_cache")
        leavers = [
            threading.Thread(target=ask_and_leave, args=(server, number, 0.005 * number))
            for number in range(1, 12)
        ]
        for leaver in leavers:
            leaver.start()
        for leaver in leavers:
            leaver.join()
        server.post("/abort_request", json={"abort_all": True})
        seconds, answer = timed(server, 0)
        assert answer["output_ids"] == cold[0]
        assert seconds < WAIT_S + SLACK_S
    switch.set(None)
    flush(server)
    assert from_storage(ask(server, 5)) == 192  # prefetching works as before


def ask_and_leave(server: SmallServer, number: int, after_s: float) -> None:
    body: dict[str, Any] = {
        "input_ids": prompt(number),
        "sampling_params": {**GREEDY, "max_new_tokens": 200},
    }
    try:
        requests.post(f"{server.url}/generate", json=body, timeout=(1, max(after_s, 0.001)))
    except requests.Timeout:
        return


def test_storage_endpoints_need_an_admin_key(server: SmallServer) -> None:
    for method in ("GET", "PUT", "DELETE"):
        reply = server.request(method, "/hicache/storage-backend", json={})
        assert reply.status_code == 400
        assert "admin" in reply.text


def test_clear_is_no_lie(
    server: SmallServer, switch: FaultSwitch, cold: dict[int, list[int]]
) -> None:
    assert from_storage(ask(server, 4)) == 192
    flush(server)
    assert server.post("/hicache/storage-backend/clear").status_code == 200
    answer = ask(server, 4)
    assert answer["output_ids"] == cold[4]
    assert answer["meta_info"]["cached_tokens"] == 0


def test_ends_at_once_while_storage_hangs(tmp_path: Path) -> None:
    own = FaultSwitch(tmp_path / "faults.json")
    model = make_tiny_checkpoint(tmp_path / "tiny")
    with serve(
        str(model),
        *("--page-size", PAGE, "--enable-hierarchical-cache"),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", own.extra_config(prefetch_threshold=PAGE)),
    ) as running:
        own.set(Fault.HANG, "set", "get", "exists")
        ask(running, 1)
        start = time.monotonic()
    assert time.monotonic() - start < 5
