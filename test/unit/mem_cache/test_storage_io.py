"""The storage threads: what is read and written, in which order, and what survives which fault."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import StorageError
from sglang.srt.mem_cache.page_key import RadixKey, draft_page_key
from sglang.srt.mem_cache.storage_threads import (
    STORAGE_BATCH_SIZE,
    LiveOperations,
    StorageOperation,
    read_batch_size,
)
from sglang.test.fakes.controller_rig import (
    DRAFT_DIGEST,
    ControllerRig,
    Gate,
    MemoryStore,
    seed_for,
)

READ_BATCH = read_batch_size(1)  # these pages are tiny


@pytest.fixture
def make_rig():
    rigs: list[ControllerRig] = []

    def make(fingerprint: str = "w1", **options) -> ControllerRig:
        rig = ControllerRig(**options)
        rig.attach(fingerprint)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.store.hook = None
        rig.controller.shutdown()


def poison(pool, slots: torch.Tensor) -> None:
    for start in slots[:: pool.page_size].tolist():
        for buffer in pool.page_buffers(start):
            buffer[:] = b"\xaa" * buffer.nbytes


def is_poisoned(pool, slots: torch.Tensor) -> bool:
    starts = slots[:: pool.page_size].tolist()
    buffers = [buffer for start in starts for buffer in pool.page_buffers(start)]
    return all(bytes(buffer) == b"\xaa" * buffer.nbytes for buffer in buffers)


def storage_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hicache-")]


def long_rig(make_rig) -> tuple[ControllerRig, RadixKey]:
    """A rig whose storage holds a key of two reads; the host pool has room for just that."""
    num_pages = 2 * READ_BATCH
    rig = make_rig(page_size=1, device_pages=num_pages, host_pages=num_pages, layer_num=1)
    key = rig.key(num_pages)
    rig.to_storage(key)
    return rig, key


# -- content --------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_layers", [None, 2, 5])
def test_storage_gives_back_what_was_written(make_rig, draft_layers):
    rig = make_rig(draft_layers=draft_layers)
    key = rig.key(5)
    hashes = rig.to_storage(key)
    poison(rig.host, torch.arange(rig.host.size))
    operation, completed = rig.fetch(key)
    assert completed == operation.storage_hit_count == len(key)
    assert operation.hash_value == hashes
    assert operation.host_indices is not None
    rig.verify_host(operation.host_indices, key)


def test_a_longer_key_hits_as_far_as_storage_goes(make_rig):
    rig = make_rig()
    rig.to_storage(rig.key(3))
    operation, completed = rig.fetch(rig.key(7))
    assert completed == 3 * rig.page_size
    assert len(operation.hash_value) == 3


def test_a_prefetch_can_continue_a_known_page(make_rig):
    rig = make_rig()
    hashes = rig.to_storage(rig.key(5))
    rest = rig.key(5)[2 * rig.page_size :]
    operation = rig.controller.prefetch("rid", 0, rest, hashes[1], None)
    rig.wait_hit(operation)
    assert operation.hash_value == hashes[2:]


def test_pages_of_other_weights_or_namespaces_miss(make_rig):
    rig = make_rig(fingerprint="w1")
    rig.to_storage(rig.key(4))
    other = make_rig(fingerprint="w2", store=MemoryStore(rig.store.pages))
    assert other.fetch(other.key(4))[1] == 0
    salted = RadixKey(rig.key(4).raw, extra_key="b")
    assert rig.fetch(salted)[1] == 0
    assert rig.fetch(rig.key(4))[1] == len(salted)


def test_a_prefetch_keeps_the_identity_of_its_beginning(make_rig):
    fingerprint = ["w1"]
    rig = make_rig()
    rig.controller.detach_storage_backend()
    rig.controller.attach_storage_backend(
        backend="memory",
        extra_config={},
        seed_fn=lambda key: seed_for(fingerprint[0])(key),
    )
    rig.to_storage(rig.key(2))
    gate = Gate("exists")
    rig.store.hook = gate
    ahead, behind = rig.prefetch(rig.key(1, 900)), rig.prefetch(rig.key(2))
    assert gate.entered.wait(5)
    fingerprint[0] = "w2"
    gate.open()
    rig.wait_hit(behind)
    assert (ahead.storage_hit_count, behind.storage_hit_count) == (0, len(rig.key(2)))


def test_nothing_is_allocated_for_a_miss_nor_by_a_thread(make_rig):
    rig = make_rig()
    rig.to_storage(rig.key(3))
    operation = rig.prefetch(rig.key(3))
    miss = rig.prefetch(rig.key(3, 700))
    rig.wait_hit(miss)
    assert operation in rig.hits and miss.storage_hit_count == 0 and miss.hash_value == []
    assert rig.host.available_size() == rig.host.size


def test_long_spans_go_in_batches_and_stop_at_the_first_short_one(make_rig):
    num_pages = 3 * STORAGE_BATCH_SIZE
    rig = make_rig(page_size=1, device_pages=num_pages, host_pages=num_pages, layer_num=1)
    key = rig.key(num_pages)
    hashes = rig.to_storage(key)
    assert [len(keys) for method, keys in rig.store.calls if method == "set kv"] == [128] * 3
    del rig.store.pages[hashes[STORAGE_BATCH_SIZE + 5]]
    rig.store.calls.clear()
    operation, completed = rig.fetch(key)
    assert completed == operation.storage_hit_count == STORAGE_BATCH_SIZE + 5
    assert [len(keys) for method, keys in rig.store.calls if method == "exists"] == [128, 128]
    reads = [len(keys) for method, keys in rig.store.calls if method == "get kv"]
    assert max(reads) <= READ_BATCH and sum(reads) == completed


@pytest.mark.parametrize(
    ("page_bytes", "num_pages"), [(1, 128), (512 << 10, 128), (1 << 20, 64), (8 << 20, 32)]
)
def test_a_read_is_bounded_in_pages_and_in_bytes(page_bytes, num_pages):
    assert read_batch_size(page_bytes) == num_pages


def test_prefix_keys_are_passed_and_extended_not_changed(make_rig):
    num_pages = STORAGE_BATCH_SIZE + 1
    rig = make_rig(page_size=1, device_pages=num_pages, host_pages=num_pages, layer_num=1)
    key = rig.key(num_pages)
    hashes = rig.controller.page_hashes(key, None)
    before = [hashes[7], hashes[8]]
    host = rig.to_host(key)
    rig.controller.write_storage(host, hashes, before)
    rig.wait(lambda: len(rig.acks) == 1)
    assert rig.store.prefix_keys == [tuple(before), (*before, *hashes[:STORAGE_BATCH_SIZE])]
    rig.store.prefix_keys.clear()
    operation = rig.controller.prefetch("rid", 0, key, None, tuple(before))
    rig.wait_hit(operation)
    assert rig.store.prefix_keys == [tuple(before), (*before, *hashes[:STORAGE_BATCH_SIZE])]
    assert before == hashes[7:9]
    assert operation.prefix_keys == tuple(before)


# -- draft pages ----------------------------------------------------------------------------------


def draft_keys(rig: ControllerRig, key: RadixKey) -> list[str]:
    return [draft_page_key(h, DRAFT_DIGEST) for h in rig.controller.page_hashes(key, None)]


def test_draft_pages_are_written_and_read_before_the_targets(make_rig):
    rig = make_rig(draft_layers=1)
    key = rig.key(2)
    rig.to_storage(key)
    rig.fetch(key)
    methods = [method for method, _ in rig.store.calls]
    assert methods == ["set draft", "set kv", "exists", "exists", "get draft", "get kv"]
    assert set(draft_keys(rig, key)) < set(rig.store.pages)


@pytest.mark.parametrize("fault", ["missing", "bad"])
def test_clamp_ends_a_hit_where_a_draft_page_is_missing(make_rig, fault):
    rig = make_rig(draft_layers=1, draft_storage_policy="clamp")
    key = rig.key(4)
    rig.to_storage(key)
    draft_key = draft_keys(rig, key)[2]
    if fault == "missing":
        del rig.store.pages[draft_key]
    else:
        rig.store.bad_keys.add(draft_key)  # exists, but cannot be read
    operation, completed = rig.fetch(key)
    assert completed == 2 * rig.page_size
    assert operation.host_indices is not None
    rig.verify_host(operation.host_indices[:completed], key)


@pytest.mark.parametrize("fault", ["missing", "raises"])
def test_best_effort_zeroes_missing_draft_pages(make_rig, fault):
    rig = make_rig(draft_layers=1, draft_storage_policy="best_effort")
    key = rig.key(4)
    rig.to_storage(key)
    keys = draft_keys(rig, key)
    if fault == "missing":
        del rig.store.pages[keys[2]]
    poison(rig.draft_host, torch.arange(rig.host.size))

    def fail(method: str, _: list[str]) -> None:
        if method == "get draft":
            raise OSError("gone")

    if fault == "raises":
        rig.store.hook = fail
    operation, completed = rig.fetch(key)
    zeroed = [2] if fault == "missing" else [0, 1, 2, 3]
    assert completed == len(key)
    assert rig.controller.storage_stats.draft_pages_zeroed == len(zeroed)
    slots = rig.to_device(operation.host_indices)
    rig.kv.verify_prefix(slots, list(key.token_ids))
    for page in range(4):
        page_slots = slots[page * rig.page_size :][: rig.page_size]
        assert (rig.draft_kv.k_data[:, page_slots] == 0).all() == (page in zeroed)


def test_a_failed_draft_write_keeps_the_target_back_under_clamp_only(make_rig):
    for policy, num_targets in (("clamp", 1), ("best_effort", 3)):
        rig = make_rig(draft_layers=1, draft_storage_policy=policy)
        key = rig.key(3)
        hashes = rig.controller.page_hashes(key, None)
        rig.store.bad_keys.add(draft_keys(rig, key)[1])
        host = rig.to_host(key)
        rig.controller.write_storage(host, hashes, None)
        rig.wait(lambda rig=rig: len(rig.acks) == 1)
        assert [h in rig.store.pages for h in hashes] == [p < num_targets for p in range(3)]
        assert rig.acks[0].completed_tokens == num_targets * rig.page_size
        assert rig.controller.storage_stats.draft_write_failures == 1


def test_storage_refuses_a_draft_without_its_digest(make_rig):
    rig = make_rig(draft_layers=1)
    rig.controller.detach_storage_backend()
    rig.controller.host_pools.remove("draft")
    rig.controller.set_draft_kv_pool(rig.draft_kv, rig.draft_host)
    with pytest.raises(ValueError, match="digest"):
        rig.attach()
    assert not rig.controller.enable_storage


# -- faults of a backend --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft_layers", "method"),
    [(None, method) for method in ("exists", "get kv", "set kv")]
    + [(1, method) for method in ("exists", "get kv", "get draft", "set kv", "set draft")],
)
def test_an_exception_ends_one_operation_and_no_thread(make_rig, draft_layers, method):
    rig = make_rig(draft_layers=draft_layers)
    key, other = rig.key(3), rig.key(3, 500)
    rig.to_storage(key)
    num_raised = 0

    def fail_once(name: str, _: list[str]) -> None:
        nonlocal num_raised
        if name == method and not num_raised:
            num_raised += 1
            raise OSError(5, "input/output error")

    rig.store.hook = fail_once
    rig.acks.clear()
    host = rig.to_host(other)
    rig.controller.write_storage(host, rig.controller.page_hashes(other, None), None)
    rig.wait(lambda: len(rig.acks) == 1)
    assert rig.acks[0].completed_tokens == (0 if "set" in method else len(other))
    rig.host.free(host)
    operation, completed = rig.fetch(key)
    assert completed == (0 if method in ("exists", "get kv", "get draft") else len(key))
    assert num_raised == 1
    if operation.host_indices is not None and completed:
        rig.host.free(operation.host_indices)
    rig.wait_all_free()
    # The next ones work, and each was answered once.
    assert rig.fetch(key)[1] == len(key)
    assert len(rig.hits) == 2
    stats = rig.controller.storage_stats
    assert stats.query_failures + stats.read_failures + stats.write_failures == 1


def test_a_page_in_the_middle_that_does_not_come_ends_the_prefix(make_rig):
    rig = make_rig()
    key = rig.key(5)
    hashes = rig.to_storage(key)
    rig.store.bad_keys.add(hashes[2])
    poison(rig.host, torch.arange(rig.host.size))
    operation, completed = rig.fetch(key)
    assert completed == 2 * rig.page_size
    rig.verify_host(operation.host_indices[:completed], key)
    rig.wait(lambda: rig.host.available_size() == rig.host.size - completed)
    time.sleep(0.02)
    rig.drain()  # nothing comes twice
    rig.host.free(operation.host_indices[:completed])
    assert rig.host.available_size() == rig.host.size


def test_a_prefetch_whose_read_fails_is_over_at_once(make_rig):
    rig, key = long_rig(make_rig)
    rig.store.bad_keys.add(rig.controller.page_hashes(key, None)[2])
    started = time.monotonic()
    operation, completed = rig.fetch(key)
    # Nothing behind the first read is asked for, let alone counted.
    assert completed == 2 and operation.storage_hit_count == len(key)
    assert len([1 for method, _ in rig.store.calls if method == "get kv"]) == 1
    assert time.monotonic() - started < 1.0


def test_bytes_below_the_count_are_never_stale(make_rig):
    num_pages = 4 * READ_BATCH
    rig = make_rig(page_size=1, device_pages=num_pages, host_pages=num_pages, layer_num=1)
    key = rig.key(num_pages)
    rig.to_storage(key)
    poison(rig.host, torch.arange(rig.host.size))
    rig.store.hook = lambda method, keys: time.sleep(0.01)
    operation = rig.prefetch(key)
    rig.wait_hit(operation)
    slots = rig.allocate(operation)
    seen = set()
    while not operation.is_done:
        completed = operation.completed_tokens
        seen.add(completed)
        assert not any(is_poisoned(rig.host, slots[i : i + 1]) for i in range(completed))
    assert len(seen) > 2  # progress was visible on the way
    rig.verify_host(slots, key)


def test_a_failing_write_ends_the_backup_at_its_batch(make_rig):
    num_pages = 3 * STORAGE_BATCH_SIZE
    rig = make_rig(page_size=1, device_pages=num_pages, host_pages=num_pages, layer_num=1)
    key = rig.key(num_pages)
    hashes = rig.controller.page_hashes(key, None)
    rig.store.bad_keys.add(hashes[STORAGE_BATCH_SIZE + 3])
    host = rig.to_host(key)
    rig.controller.write_storage(host, hashes, None)
    rig.wait(lambda: len(rig.acks) == 1)
    assert rig.acks[0].completed_tokens == STORAGE_BATCH_SIZE + 3
    assert hashes[2 * STORAGE_BATCH_SIZE] not in rig.store.pages


# -- termination at each stage ---------------------------------------------------------------------


def test_waiting_for_the_query_is_not_completion(make_rig):
    rig = make_rig()
    gate = Gate("exists")
    rig.store.hook = gate
    operation = rig.prefetch(rig.key(2))
    assert gate.entered.wait(5)
    rig.drain()
    assert rig.hits == [] and not operation.is_done and operation.completed_tokens == 0
    gate.open()
    rig.wait_hit(operation)
    assert not operation.is_done


@pytest.mark.parametrize("stage", ["queued", "querying", "hit"])
def test_a_prefetch_terminated_before_it_has_pages_is_answered_once(make_rig, stage):
    rig, key = long_rig(make_rig)
    gate = Gate("exists")
    if stage == "hit":
        gate.open()
    rig.store.hook = gate
    ahead = rig.prefetch(rig.key(1)) if stage == "queued" else None
    operation = rig.prefetch(key)
    assert gate.entered.wait(5)
    if stage == "hit":
        rig.wait_hit(operation)
    assert rig.controller.terminate_prefetch(operation) == 0
    gate.open()
    rig.wait_hit(operation)
    assert operation.storage_hit_count == (len(key) if stage == "hit" else 0)
    if ahead is not None:
        assert rig.hits == [ahead, operation]
        assert len([1 for method, _ in rig.store.calls if method == "exists"]) == 1
    assert rig.hits.count(operation) == 1
    assert rig.host.available_size() == rig.host.size


@pytest.mark.parametrize(
    ("stage", "gated_call"), [("buffered", 1), ("reading", 1), ("between reads", 2), ("read", 0)]
)
def test_a_prefetch_terminated_with_pages_gives_the_rest_back(make_rig, stage, gated_call):
    rig, key = long_rig(make_rig)
    gate = Gate("get kv")
    ahead, operation = rig.prefetch(key[:1]), rig.prefetch(key)
    rig.wait_hit(operation)
    num_calls = 0

    def hook(method: str, keys: list[str]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == gated_call:
            gate(method, keys)

    rig.store.hook = hook
    if stage == "buffered":
        rig.allocate(ahead)
        assert gate.entered.wait(5)
        operation.storage_hit_count -= 1
        operation.hash_value = operation.hash_value[:-1]
    slots = rig.allocate(operation)
    if gated_call:
        assert gate.entered.wait(5)
    else:
        rig.wait(lambda: operation.is_done)
    kept = rig.controller.terminate_prefetch(operation)
    assert kept == {"read": len(key), "between reads": READ_BATCH}.get(stage, 0)
    gate.open()
    rig.wait(lambda: operation.is_done)
    # What came later does not count.
    assert operation.completed_tokens == kept == rig.controller.terminate_prefetch(operation)
    rig.host.free(slots[:kept])
    if stage == "buffered":
        rig.wait(lambda: ahead.is_done)
        assert ahead.host_indices is not None
        rig.host.free(ahead.host_indices)
    rig.wait_all_free()


def test_every_operation_takes_part_in_the_reduction(make_rig):
    shares: list[int] = []
    results = iter([2, 0, 0, 0, 3])

    def reduce(values: list[int]) -> list[int]:
        shares.extend(values)
        result = next(results)
        if len(shares) == 4:
            raise RuntimeError("a peer is gone")
        return [result]

    rig = make_rig(prefetch_min_reduce=reduce)
    rig.to_storage(rig.key(3))
    shortened = rig.prefetch(rig.key(3))  # the other rank has two pages
    rig.wait_hit(shortened)
    assert shortened.storage_hit_count == 2 * rig.page_size and len(shortened.hash_value) == 2
    gate = Gate("exists")
    rig.store.hook = gate
    held = rig.prefetch(rig.key(3, 800))
    assert gate.entered.wait(5)
    dead = rig.prefetch(rig.key(3))
    rig.controller.terminate_prefetch(dead)
    gate.open()
    rig.wait_hit(dead)
    failed = rig.prefetch(rig.key(3))
    rig.wait_hit(failed)
    assert shares == [3, 0, 0, 3]
    assert failed.storage_hit_count == 0 and failed.hash_value == []

    def fail(method: str, keys: list[str]) -> None:
        raise OSError("no")

    rig.store.hook = fail
    rig.wait_hit(rig.prefetch(rig.key(3)))
    assert shares == [3, 0, 0, 3, 0]
    assert held.storage_hit_count == 0
    exists = [keys for method, keys in rig.store.calls if method == "exists"]
    assert len(exists) == 4  # the terminated one asked nothing


# -- reset, discard, detach ------------------------------------------------------------------------


def test_reset_under_slow_reads_leaks_nothing(make_rig):
    rig = make_rig(host_pages=8)
    keys = [rig.key(4), rig.key(4, 500)]
    for key in keys:
        rig.to_storage(key)
    threads = storage_threads()
    rig.store.hook = lambda method, _: time.sleep(0.01)
    for turn in range(10):
        operations = [rig.prefetch(key) for key in keys]
        for operation in operations:
            rig.wait_hit(operation)
            rig.allocate(operation)
        rig.controller.prefetch_tokens_occupied = 16
        if turn % 3 == 1:
            rig.controller.terminate_prefetch(operations[0])
        elif turn % 3 == 2:
            rig.wait(lambda ops=operations: ops[0].is_done)
        rig.controller.reset()
        assert rig.controller.prefetch_tokens_occupied == 0
        free = torch.arange(rig.host.size)
        free = free[rig.host.is_free(free)]
        poison(rig.host, free)
        rig.wait(lambda ops=operations: all(op.is_done for op in ops))
        assert is_poisoned(rig.host, free)
        rig.wait_all_free()
        time.sleep(0.002)
        rig.drain()
        assert sorted(storage_threads()) == sorted(threads)
    rig.store.hook = None
    assert rig.fetch(keys[0])[1] == len(keys[0])


def test_backups_survive_a_reset_and_give_their_pages_back(make_rig):
    rig = make_rig()
    keys = [rig.key(2, first) for first in (100, 300, 500)]
    gate = Gate("set kv")
    hosts = [rig.to_host(key) for key in keys]
    hashes = [rig.controller.page_hashes(key, None) for key in keys]
    rig.controller.write_storage(hosts[0], hashes[0], None)
    # Acknowledged, but the scheduler has not looked yet.
    deadline = time.monotonic() + 5
    while rig.controller.ack_backup_queue.qsize() == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    rig.store.hook = gate
    for host, page_hashes in zip(hosts[1:], hashes[1:]):
        rig.controller.write_storage(host, page_hashes, None)
    assert gate.entered.wait(5)
    rig.controller.reset()
    rig.drain()
    assert rig.host.available_size() == rig.host.size - 2 * len(keys[0])
    rig.controller.reset()  # again, while they still go on
    free = torch.arange(rig.host.size)
    poison(rig.host, free[rig.host.is_free(free)])
    gate.open()
    rig.wait_all_free()
    assert len(rig.acks) == 3
    for key in keys:
        operation, completed = rig.fetch(key)
        assert completed == len(key)
        rig.verify_host(operation.host_indices, key)


def test_two_backups_of_one_page_give_it_back_once(make_rig):
    rig = make_rig()
    key = rig.key(2)
    gate = Gate("set kv")
    rig.store.hook = gate
    host = rig.to_host(key)
    for _ in range(2):
        rig.controller.write_storage(host, rig.controller.page_hashes(key, None), None)
    assert gate.entered.wait(5)
    rig.controller.reset()
    gate.open()
    rig.wait(lambda: len(rig.acks) == 2)
    rig.wait_all_free()


def test_a_hanging_read_keeps_only_its_own_pages(make_rig):
    rig = make_rig(host_pages=8, join_timeout_s=0.1)
    keys = [rig.key(2), rig.key(3, 500)]
    for key in keys:
        rig.to_storage(key)
    gate = Gate("get kv")
    rig.store.hook = gate
    hanging, behind = (rig.prefetch(key) for key in keys)
    rig.wait_hit(behind)
    held = rig.allocate(hanging)
    assert gate.entered.wait(5)
    rig.allocate(behind)
    started = time.monotonic()
    rig.controller.reset()
    assert time.monotonic() - started < 0.05
    rig.drain()
    everything = torch.arange(rig.host.size)
    free = everything[rig.host.is_free(everything)]
    assert set(everything.tolist()) - set(free.tolist()) == set(held.tolist())
    poison(rig.host, everything)
    # Detaching and shutting down are bounded, and what hangs keeps its pages.
    started = time.monotonic()
    with pytest.raises(StorageError, match="hicache-prefetch-io"):
        rig.controller.detach_storage_backend()
    assert time.monotonic() - started < 1.0
    assert not rig.controller.enable_storage
    with pytest.raises(StorageError, match="hang"):
        rig.attach()
    rig.controller.reset()
    rig.drain()
    assert not rig.host.is_free(held).any()
    gate.open()
    rig.wait_all_free()
    assert is_poisoned(rig.host, free) and not is_poisoned(rig.host, held)
    rig.wait(lambda: not any("prefetch-io" in name for name in storage_threads()))
    rig.controller.detach_storage_backend()
    assert rig.store.num_closed == 1
    rig.attach()
    assert rig.fetch(keys[1])[1] == len(keys[1])


def test_a_hanging_backup_answers_when_its_call_returns(make_rig):
    rig = make_rig(join_timeout_s=0.1)
    key = rig.key(2)
    gate = Gate("set kv")
    rig.store.hook = gate
    host = rig.to_host(key)
    hashes = rig.controller.page_hashes(key, None)
    for _ in range(2):
        rig.controller.write_storage(host, hashes, None)
    assert gate.entered.wait(5)
    started = time.monotonic()
    with pytest.raises(StorageError, match="hicache-backup"):
        rig.controller.detach_storage_backend()
    assert rig.controller.discard_queued_backups() == 1
    assert not rig.controller.clear_storage_backend()
    rig.controller.shutdown()
    assert time.monotonic() - started < 1.5
    rig.drain()
    assert rig.acks == [] and not rig.host.is_free(host).any()
    gate.open()
    rig.wait(lambda: len(rig.acks) == 2)
    # The one under way went through, the one behind it was not begun any more.
    assert [op.completed_tokens for op in rig.acks] == [len(key), 0]


def test_a_hanging_query_holds_nobody_up(make_rig):
    rig = make_rig(join_timeout_s=0.1)
    gate = Gate("exists")
    rig.store.hook = gate
    operation = rig.prefetch(rig.key(2))
    assert gate.entered.wait(5)
    started = time.monotonic()
    rig.controller.reset()
    with pytest.raises(StorageError, match="hicache-prefetch"):
        rig.controller.detach_storage_backend()
    rig.controller.shutdown()
    assert time.monotonic() - started < 1.0
    gate.open()
    rig.wait_hit(operation)
    assert operation.storage_hit_count == 0


def test_discarding_writes_nothing_more_and_answers_everything(make_rig):
    rig = make_rig(join_timeout_s=2.0)
    keys = [rig.key(2, first) for first in (100, 300, 500)]
    hosts = [rig.to_host(key) for key in keys]
    hashes = [rig.controller.page_hashes(key, None) for key in keys]
    gate = Gate("set kv")
    rig.store.hook = gate
    ids = [rig.controller.write_storage(h, p, None) for h, p in zip(hosts, hashes)]
    assert gate.entered.wait(5)
    threading.Timer(0.05, gate.open).start()
    assert rig.controller.discard_queued_backups() == 2
    rig.drain()  # the one in flight was waited for
    assert [op.id for op in rig.acks] == ids
    assert [op.completed_tokens for op in rig.acks] == [len(keys[0]), 0, 0]
    assert set(rig.store.pages) == set(hashes[0])
    rig.to_storage(rig.key(2, 700))  # later ones are written
    assert rig.controller.storage_stats.writes_discarded == 2


def test_clearing_leaves_nothing_behind(make_rig):
    rig = make_rig()
    key = rig.key(2)
    rig.to_storage(key)
    rig.store.hook = lambda method, _: time.sleep(0.01)
    host = rig.to_host(rig.key(2, 300))
    for first in (300, 400, 500):
        page_hashes = rig.controller.page_hashes(rig.key(2, first), None)
        rig.controller.write_storage(host, page_hashes, None)
    assert rig.controller.clear_storage_backend()
    rig.wait(lambda: len(rig.acks) == 4)
    assert rig.store.pages == {}


def test_detaching_answers_everything_and_is_idempotent(make_rig):
    rig = make_rig()
    key = rig.key(4)
    rig.to_storage(key)
    rig.acks.clear()
    rig.store.hook = lambda method, _: time.sleep(0.02)
    host = rig.to_host(rig.key(2, 300))
    for _ in range(4):
        page_hashes = rig.controller.page_hashes(rig.key(2, 300), None)
        rig.controller.write_storage(host, page_hashes, None)
    operation = rig.prefetch(key)
    rig.wait_hit(operation)
    rig.allocate(operation)
    queued = [rig.prefetch(key) for _ in range(3)]
    rig.controller.detach_storage_backend()
    rig.controller.detach_storage_backend()
    assert operation.is_done
    rig.drain()
    assert len(rig.acks) == 4 and all(query in rig.hits for query in queued)
    assert rig.store.num_closed == 1 and rig.controller.storage_backend is None
    assert not any(
        name.startswith(("hicache-prefetch", "hicache-backup")) for name in storage_threads()
    )
    completed = rig.controller.terminate_prefetch(operation)
    rig.host.free(operation.host_indices[:completed])
    rig.host.free(host)
    rig.wait_all_free()
    with pytest.raises(RuntimeError, match="no storage backend"):
        rig.prefetch(key)
    rig.store.hook = None
    for _ in range(3):  # again and again
        rig.attach()
        operation, completed = rig.fetch(key)
        assert completed == len(key)
        rig.host.free(operation.host_indices)
        rig.controller.detach_storage_backend()


def test_a_backend_that_cannot_be_made_changes_nothing(make_rig):
    rig = make_rig()
    with pytest.raises(StorageError, match="attached already"):
        rig.attach()
    rig.controller.detach_storage_backend()

    class Broken(MemoryStore):
        def register_mem_host_pool_v2(self, pool, name) -> None:
            raise StorageError("wrong layout")

    rig.store = Broken()
    before = storage_threads()
    with pytest.raises(StorageError, match="wrong layout"):
        rig.attach()
    assert rig.store.num_closed == 1
    assert storage_threads() == before and not rig.controller.enable_storage
    assert rig.controller.storage_backend is None
    rig.store = MemoryStore()
    rig.attach()


# -- waking and counting --------------------------------------------------------------------------


def test_results_wake_the_scheduler_at_once(make_rig):
    wake = threading.Event()
    rig = make_rig(on_progress=wake.set)
    key = rig.key(2)
    rig.to_storage(key)
    for step in ("hit", "read"):
        wake.clear()
        if step == "hit":
            operation = rig.prefetch(key)
        else:
            rig.allocate(operation)
        assert wake.wait(1.0)
        rig.drain()
        assert operation in rig.hits
    assert operation.is_done


def test_the_capacity_is_half_of_the_host_pool(make_rig):
    rig = make_rig(host_pages=8)
    assert rig.controller.prefetch_capacity_limit == rig.host.size // 2
    rig.controller.prefetch_tokens_occupied = rig.host.size // 2 - 1
    assert not rig.controller.prefetch_rate_limited()
    rig.controller.prefetch_tokens_occupied += 1
    assert rig.controller.prefetch_rate_limited()


def test_what_was_moved_is_counted(make_rig):
    rig = make_rig(draft_layers=1)
    rig.to_storage(rig.key(3))
    rig.fetch(rig.key(3))
    rig.wait_hit(rig.prefetch(rig.key(3, 900)))
    stats = rig.controller.storage_stats
    page_bytes = rig.host.bytes_per_page + rig.draft_host.bytes_per_page
    assert (stats.write_pages, stats.read_pages) == (3, 3)
    assert stats.write_bytes == stats.read_bytes == 3 * page_bytes
    assert stats.read_seconds > 0 and stats.write_seconds > 0 and stats.query_seconds > 0
    assert (stats.query_hits, stats.query_misses, stats.query_failures) == (1, 1, 0)


def test_finished_operations_are_forgotten():
    live: LiveOperations[StorageOperation] = LiveOperations()
    held = []
    for op_id in range(1000):
        operation = StorageOperation(op_id, torch.empty(0), [], None)
        live.add(operation)
        if op_id % 100 == 0:
            held.append(operation)
    del operation
    assert live.held() == held
    assert len(live._refs) < 200
