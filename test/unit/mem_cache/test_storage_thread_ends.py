"""Storage threads go on after whatever a backend raises; what one leaves behind is answered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.storage_threads import StorageOperation, call_bounded
from sglang.test.fakes.controller_rig import ControllerRig


class Panic(BaseException):
    """What a backend in another language raises; no Exception."""


@pytest.fixture
def rig() -> Iterator[ControllerRig]:
    rig = ControllerRig(join_timeout_s=0.5)
    rig.attach()
    yield rig
    rig.store.hook = None
    rig.controller.shutdown()


@pytest.mark.parametrize("error", [asyncio.CancelledError("cancelled"), Panic("it is over")])
@pytest.mark.parametrize("method", ["exists", "get kv", "set kv"])
def test_what_is_no_exception_ends_one_operation_and_no_thread(
    rig: ControllerRig, method: str, error: BaseException
) -> None:
    key, other = rig.key(3), rig.key(3, 500)
    rig.to_storage(key)
    rig.acks.clear()

    def fail_once(name: str, keys: list[str]) -> None:
        if name == method:
            rig.store.hook = None
            raise error

    rig.store.hook = fail_once
    host = rig.to_host(other)
    rig.controller.write_storage(host, rig.controller.page_hashes(other, None), None)
    rig.wait(lambda: len(rig.acks) == 1)
    assert rig.acks[0].completed_tokens == (0 if method == "set kv" else len(other))
    rig.host.free(host)
    for num_expected in (0 if method != "set kv" else len(key), len(key)):
        operation, completed = rig.fetch(key)
        assert completed == num_expected
        if completed:
            assert operation.host_indices is not None
            rig.host.free(operation.host_indices)
    rig.wait_all_free()


@pytest.mark.parametrize("method", ["clear", "close"])
def test_the_scheduler_survives_what_is_no_exception(rig: ControllerRig, method: str) -> None:
    def fail() -> None:
        raise Panic("it is over")

    setattr(rig.store, method, fail)
    assert not rig.controller.clear_storage_backend() or method == "close"
    rig.controller.detach_storage_backend()
    assert rig.controller.storage_backend is None
    with pytest.raises(RuntimeError, match="last words failed.*it is over"):
        call_bounded("last words", fail, 1.0)


def test_queues_of_threads_that_ended_early_are_answered_and_empty(rig: ControllerRig) -> None:
    controller, key = rig.controller, rig.key(3)
    rig.to_storage(key)
    rig.acks.clear()
    operation = rig.prefetch(key)
    rig.wait_hit(operation)
    queues: list[Any] = [
        controller.prefetch_queue,
        controller.prefetch_buffer,
        controller.backup_queue,
    ]
    for source in queues:
        source.put(None)
    deadline = time.monotonic() + 5
    while len(controller._threads.alive()) > 1:  # but for the one that watches
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rig.allocate(operation)
    rig.prefetch(key)
    host = rig.to_host(key)
    controller.write_storage(host, controller.page_hashes(key, None), None)
    operation.terminate()
    controller.detach_storage_backend()
    rig.drain()
    assert operation.is_done and [op.is_acked for op in rig.acks] == [True]
    rig.host.free(host)
    rig.wait_all_free()
    rig.attach()
    for _ in range(2):
        again, completed = rig.fetch(key)
        assert completed == len(key)
        assert again.host_indices is not None
        rig.host.free(again.host_indices)


def test_whoever_has_seen_an_acknowledgement_finds_the_backup_over() -> None:
    operation = StorageOperation(1, torch.arange(2), [], None)
    seen: list[bool] = []
    reader = threading.Thread(target=lambda: seen.append(operation.is_acked))

    def post(acked: StorageOperation) -> None:
        reader.start()
        reader.join(0.05)

    operation.finish(post, lambda slots: None)
    reader.join(5)
    assert seen == [True]
