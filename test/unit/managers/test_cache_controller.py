"""Copies between device and host: content, merging, fences, layer events."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sglang.srt.mem_cache.hicache_transfer import (
    CacheOperation,
    ThreadEvent,
    merge_ops,
)
from sglang.srt.mem_cache.page_key import RadixKey
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.test.fakes.controller_rig import ControllerRig, Gate


@pytest.fixture
def make_rig():
    rigs = []

    def make(**options) -> ControllerRig:
        rigs.append(ControllerRig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.controller.shutdown()


def slots_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def alloc(rig: ControllerRig, key: RadixKey) -> torch.Tensor:
    slots = rig.allocator.alloc(len(key))
    assert slots is not None
    return slots


# -- content and merging --------------------------------------------------------------------------


@pytest.mark.parametrize("draft_layers", [None, 1, 3, 5])
def test_what_comes_back_is_what_was_backed_up(make_rig, draft_layers):
    rig = make_rig(draft_layers=draft_layers)
    key = rig.key(4)
    host = rig.to_host(key)
    for pool in (rig.kv, rig.draft_kv):
        if pool is not None:
            pool.k_data.fill_(-1)
            pool.v_data.fill_(-1)
    rig.verify_device(rig.to_device(host), key)


def test_the_draft_is_seen_under_its_documented_names(make_rig):
    rig = make_rig()
    assert not rig.controller.has_draft
    assert rig.controller.mem_pool_device_draft is None
    rig = make_rig(draft_layers=1)
    assert rig.controller.has_draft
    assert rig.controller.mem_pool_device_draft is rig.draft_kv
    assert rig.controller.mem_pool_host_draft is rig.draft_host
    assert rig.draft_kv.layer_transfer_counter is rig.controller.layer_done_counter
    with pytest.raises(ValueError, match="registered already"):
        rig.controller.set_draft_kv_pool(rig.draft_kv, rig.draft_host)


def test_queued_copies_become_one_with_one_acknowledgement(make_rig):
    rig = make_rig()
    keys = [rig.key(2, first) for first in (100, 200, 300)]
    hosts = []
    for node_id, key in enumerate(keys):
        slots = alloc(rig, key)
        rig.fill_device(slots, key)
        hosts.append(rig.controller.write(slots, node_id))
    assert rig.controller.num_done_writes() == 0
    rig.controller.start_writing()
    (ack,) = rig.controller.take_write_acks(9)
    assert ack.node_ids == [0, 1, 2]
    assert ack.num_tokens == 3 * 2 * rig.page_size
    loaded = [rig.controller.load(host, 10 + index) for index, host in enumerate(hosts)]
    assert rig.controller.start_loading() == 0
    (ack,) = rig.controller.take_load_acks(9)
    assert ack.node_ids == [10, 11, 12]
    for slots, key in zip(loaded, keys):
        rig.verify_device(slots, key)


def test_merging_joins_the_pools_with_own_slots():
    def part(start: int) -> CacheOperation:
        slots = slots_of(start)
        state = PoolTransfer(
            name=PoolName.MAMBA, host_indices=slots + 1, device_indices=slots + 2, keys=["k"]
        )
        return CacheOperation(
            host_indices=slots, device_indices=slots, node_ids=[start], pool_transfers=[state]
        )

    (state,) = merge_ops([part(10), part(20)]).pool_transfers
    assert state.host_indices is not None and state.device_indices is not None
    assert state.host_indices.tolist() == [11, 21]
    assert state.device_indices.tolist() == [12, 22]
    assert state.keys == ["k", "k"]


def test_nothing_is_queued_when_a_pool_is_full(make_rig):
    rig = make_rig(device_pages=4, host_pages=2)
    slots = alloc(rig, rig.key(4))
    assert rig.controller.write(slots, 1) is None
    assert rig.controller.load(torch.arange(2), 1) is None
    rig.controller.start_writing()
    assert rig.controller.start_loading() == -1
    assert not rig.controller.has_pending_copies()
    assert rig.host.available_size() == rig.host.size


def test_returned_slots_are_the_callers_own(make_rig):
    rig = make_rig()
    key = rig.key(2)
    slots = alloc(rig, key)
    rig.fill_device(slots, key)
    host = rig.controller.write(slots, 1)
    kept, kept_slots = host.clone(), slots.clone()
    host.zero_()
    slots.zero_()
    rig.controller.start_writing()
    rig.controller.take_write_acks(1)
    rig.allocator.free(kept_slots)
    rig.verify_host(kept, key)


# -- fences ---------------------------------------------------------------------------------------


def test_a_backup_waits_for_the_forward_that_computes_its_pages(make_rig):
    fence = ThreadEvent()
    rig = make_rig(forward_fence=lambda: fence)
    key = rig.key(3)
    slots = alloc(rig, key)
    host = rig.controller.write(slots, 1)
    rig.controller.start_writing()
    time.sleep(0.05)
    assert rig.controller.num_done_writes() == 0
    rig.fill_device(slots, key)  # the forward, at last
    fence.record()
    rig.controller.take_write_acks(1)
    rig.verify_host(host, key)


def test_a_load_waits_for_a_forward_that_still_writes_its_slots(make_rig):
    fence = ThreadEvent()
    fence.record()
    rig = make_rig(forward_fence=lambda: fence)
    key = rig.key(3)
    host = rig.to_host(key)
    fence = ThreadEvent()
    slots = rig.controller.load(host, 1)
    index = rig.controller.start_loading()
    time.sleep(0.05)
    rig.kv.write_prefix(slots, list(range(len(slots))))  # of the request that had the slots before
    fence.record()
    rig.controller.set_consumer(index)
    rig.verify_device(slots, key)


def test_a_copy_is_not_done_before_its_bytes_are_there(make_rig):
    gate = Gate("write")
    rig = make_rig(copy_hook=gate)
    key = rig.key(2)
    slots = alloc(rig, key)
    rig.fill_device(slots, key)
    host = rig.controller.write(slots, 1)
    rig.controller.start_writing()
    assert gate.entered.wait(5)
    assert rig.controller.num_done_writes() == 0
    assert rig.controller.has_pending_copies()
    gate.open()
    rig.controller.take_write_acks(1)
    assert not rig.controller.has_pending_copies()
    rig.verify_host(host, key)


def test_a_failed_copy_is_never_taken_for_done(make_rig):
    def fail(kind: str, layer: int) -> None:
        raise OSError("no bytes")

    rig = make_rig(copy_hook=fail)
    rig.controller.write(alloc(rig, rig.key(1)), 1)
    rig.controller.start_writing()
    with pytest.raises(RuntimeError, match="copy between device and host failed"):
        rig.controller.take_write_acks(1)


def test_a_failed_load_stops_whoever_waits_for_a_layer(make_rig):
    def fail(kind: str, layer: int) -> None:
        if (kind, layer) == ("load", 1):
            raise OSError("no bytes")

    rig = make_rig(copy_hook=fail)
    host = rig.to_host(rig.key(1))
    rig.controller.load(host, 1)
    rig.controller.set_consumer(rig.controller.start_loading())
    rig.kv.get_key_buffer(0)
    with pytest.raises(RuntimeError, match="failed"):
        rig.kv.get_key_buffer(1)


# -- layer events ---------------------------------------------------------------------------------


class LayerGates:
    """Lets a load go on one layer at a time."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)

    def __call__(self, kind: str, layer: int) -> None:
        if kind == "load":
            assert self.allowed.acquire(timeout=20)


def test_each_layer_is_readable_as_soon_as_it_has_arrived(make_rig):
    gates = LayerGates()
    rig = make_rig(copy_hook=gates, draft_layers=5)
    key = rig.key(2)
    host = rig.to_host(key)
    rig.kv.k_data.fill_(-1)
    slots = rig.controller.load(host, 1)
    rig.controller.set_consumer(rig.controller.start_loading())
    read: list[int] = []

    def forward() -> None:
        for layer in range(3):
            content = rig.kv.get_key_buffer(layer)[slots].flatten()
            assert (content != -1).all()
            read.append(layer)
        rig.draft_kv.get_key_buffer(4)  # beyond the target's: complete with its last layer
        read.append(4)

    thread = threading.Thread(target=forward)
    thread.start()
    for layer in range(3):
        time.sleep(0.02)
        assert read == list(range(layer))
        gates.allowed.release()
        deadline = time.monotonic() + 5
        while len(read) <= layer and time.monotonic() < deadline:
            time.sleep(0.001)
    thread.join(5)
    assert read == [0, 1, 2, 4]
    rig.controller.take_load_acks(1)
    rig.verify_device(slots, key)


def test_a_batch_without_a_load_waits_for_nothing(make_rig):
    gates = LayerGates()
    rig = make_rig(copy_hook=gates)
    host = rig.to_host(rig.key(1))
    rig.controller.load(host, 1)
    index = rig.controller.start_loading()
    rig.controller.set_consumer(-1)
    rig.kv.get_key_buffer(2)  # would hang
    for _ in range(3):
        gates.allowed.release()
    rig.controller.set_consumer(index)
    rig.kv.get_key_buffer(2)


def test_a_place_in_the_ring_is_reused_only_after_its_load(make_rig):
    gates = LayerGates()
    rig = make_rig(copy_hook=gates, device_pages=32)
    keys = [rig.key(1, 100 * index) for index in range(4)]
    hosts = [rig.to_host(key) for key in keys]
    counter = rig.controller.layer_done_counter
    indices: list[int] = []
    loaded = [rig.controller.load(hosts[0], 0)]
    indices.append(rig.controller.start_loading())
    first = counter.loading_event(0)
    counter.set_consumer(0)  # a slow batch: waits for its layers only after the others began
    for index in (1, 2):
        loaded.append(rig.controller.load(hosts[index], index))
        indices.append(rig.controller.start_loading())
    loaded.append(rig.controller.load(hosts[3], 3))
    fourth = threading.Thread(target=lambda: indices.append(rig.controller.start_loading()))
    fourth.start()
    time.sleep(0.05)
    assert indices == [0, 1, 2] and counter.loading_event(0) is first
    for _ in range(3):
        gates.allowed.release()
    fourth.join(5)
    assert indices == [0, 1, 2, 0] and counter.loading_event(0) is not first
    # The slow batch depends on its own load, which is over, not on the one that has the place now.
    counter.wait_until(2)
    rig.kv.verify_prefix(loaded[0], list(keys[0].token_ids))
    for _ in range(9):
        gates.allowed.release()
    rig.controller.take_load_acks(4)
    for slots, key in zip(loaded, keys):
        rig.verify_device(slots, key)


def test_copies_of_both_directions_go_on_side_by_side(make_rig):
    gate = Gate("write")
    armed = threading.Event()
    rig = make_rig(copy_hook=lambda kind, layer: gate(kind, layer) if armed.is_set() else None)
    key = rig.key(2)
    host = rig.to_host(key)
    armed.set()
    other = alloc(rig, rig.key(2, 500))
    rig.controller.write(other, 1)
    rig.controller.start_writing()
    assert gate.entered.wait(5)
    rig.verify_device(rig.to_device(host), key)
    gate.open()
    rig.controller.take_write_acks(1)


# -- reset ----------------------------------------------------------------------------------------


def test_reset_waits_for_running_copies_and_forgets_queued_ones(make_rig):
    gate = Gate("write")
    rig = make_rig(copy_hook=gate)
    rig.controller.write(alloc(rig, rig.key(2)), 1)
    rig.controller.start_writing()
    rig.controller.write(alloc(rig, rig.key(2)), 2)
    assert gate.entered.wait(5)
    threading.Timer(0.05, gate.open).start()
    rig.controller.prefetch_tokens_occupied = 8
    rig.controller.reset()
    assert gate.entered.is_set() and not rig.controller.has_pending_copies()
    assert rig.host.available_size() == rig.host.size
    assert rig.controller.prefetch_tokens_occupied == 0
    rig.controller.start_writing()
    assert not rig.controller.has_pending_copies()
    key = rig.key(3)
    rig.allocator.clear()
    rig.verify_host(rig.to_host(key), key)
