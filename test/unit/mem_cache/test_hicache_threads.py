"""The trees over the real controller: its threads, and storage that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_base import HiCacheTreeBase
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.storage_threads import StorageOperation
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.controller_rig import Gate, MemoryStore
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq, TreeFactory
from sglang.test.fakes.hicache_model import Reduction

PAGE = 4


def prompt(num_pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_pages * PAGE + 1))


def threaded(make_tree: TreeFactory = HiRadixCache, **options: Any) -> HiCacheEngine:
    options = {"size": 160, "host_size": 160, "prefetch_policy": "wait_complete", **options}
    return HiCacheEngine(make_tree, page_size=PAGE, controller_class=HiCacheController, **options)


def tick_until(engine: HiCacheEngine, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        engine.tick()
        time.sleep(0.0005)
    engine.check()


def settled(engine: HiCacheEngine) -> None:
    tick_until(engine, lambda: not engine.tree.has_pending_transfers())


def serve(engine: HiCacheEngine, tokens: list[int], rid: str = "run") -> HiReq:
    req = HiReq(rid=rid, origin_input_ids=tokens)
    engine.submit(req)
    tick_until(engine, lambda: engine.admit(req))
    req.is_loading = False
    if req.consumer_index >= 0:
        engine.any_controller.set_consumer(req.consumer_index)
        engine.kv.get_key_buffer(engine.kv.layer_num - 1)
        engine.any_controller.set_consumer(-1)
    req.done_tokens = req.kv_committed_len
    assert engine.extend(req, len(tokens) - req.kv_committed_len)
    engine.check()
    engine.finish(req)
    return req


@pytest.mark.parametrize("make_tree", [HiRadixCache, UnifiedRadixCache, HiMambaRadixCache])
def test_the_round_trip_through_all_tiers(make_tree: TreeFactory) -> None:
    has_state = make_tree is HiMambaRadixCache
    options: dict[str, Any] = {"num_states": 8} if has_state else {}
    engine = threaded(make_tree, **options)
    tokens = prompt(10)
    serve(engine, tokens)
    settled(engine)
    engine.check_host()
    engine.evict_all()
    assert serve(engine, tokens).host_tokens == 40
    settled(engine)
    engine.flush()
    assert serve(engine, tokens).loaded_tokens == 40
    settled(engine)
    engine.check_host()
    engine.tree.shutdown()
    engine.tree.shutdown()


def test_resets_leave_no_thread_and_write_into_no_page_that_is_not_theirs() -> None:
    tokens = prompt(8)
    store = MemoryStore()
    engine = threaded(store=store)
    serve(engine, tokens)
    settled(engine)
    engine.flush()
    store.hook = lambda method, keys: time.sleep(0.002)
    num_threads = threading.active_count()
    for round_number in range(10):
        engine.submit(HiReq(rid="r", origin_input_ids=tokens))
        for _ in range(round_number % 4):
            engine.tick()
            time.sleep(0.001)
        engine.flush()
        engine.check()
        assert engine.tree.prefetch_tokens_occupied == 0
        # Other content at once: a late read of before must not reach it.
        serve(engine, prompt(6, first=500 + round_number), "other")
        settled(engine)
        engine.check_host()
    tick_until(engine, lambda: engine.tree._num_returning_pages == 0)
    engine.flush()
    tick_until(engine, lambda: engine.host.available_size() == 160)
    assert threading.active_count() <= num_threads + 1  # the copy threads begin when needed
    engine.tree.shutdown()


@pytest.mark.parametrize("method", ["exists", "get kv", "set kv"])
def test_storage_that_hangs_never_blocks_the_scheduler(method: str) -> None:
    tokens = prompt(8)
    store = MemoryStore()
    writer = threaded(store=store)
    serve(writer, tokens)
    settled(writer)
    writer.tree.shutdown()
    gate = Gate(method)
    engine = threaded(store=store, prefetch_policy="timeout")
    store.hook = gate
    began = time.monotonic()
    engine.submit(HiReq(rid="stuck", origin_input_ids=tokens))
    engine.run(prompt(4, first=900))
    tick_until(engine, gate.entered.is_set)
    for _ in range(20):
        engine.tick()
    engine.clock.now = 100
    if method != "set kv":
        tick_until(engine, lambda: engine.tree.check_prefetch_progress("stuck"))
    engine.abort_waiting(engine.waiting[0])
    engine.flush()
    engine.check()
    assert engine.run(tokens) == 0
    engine.check()
    assert time.monotonic() - began < 5
    gate.open()
    tick_until(engine, lambda: engine.tree._num_returning_pages == 0)
    settled(engine)
    in_tree = sum(len(node.key) for node in engine.tree.iter_nodes())
    assert engine.host.available_size() == 160 - in_tree
    engine.check_host()
    engine.tree.shutdown()


def test_detaching_from_storage_that_hangs_is_refused_until_it_lets_go() -> None:
    store = MemoryStore()
    engine = threaded(store=store)
    gate = Gate("set kv")
    store.hook = gate
    engine.run(prompt(4))
    tick_until(engine, gate.entered.is_set)
    success, message = engine.tree.detach_storage_backend()
    assert not success and "hang" in message
    engine.check()
    assert not engine.tree.attach_storage_backend(storage_backend="memory")[0]
    gate.open()
    deadline = time.monotonic() + 5
    while not engine.tree.detach_storage_backend()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    engine.check()
    assert engine.tree.attach_storage_backend(storage_backend="memory")[0]
    settled(engine)
    engine.evict_all()
    assert engine.tree.evict_host(160) == 16  # nothing is pinned any more
    engine.tree.shutdown()


def test_ranks_stay_in_step_where_storage_hangs_on_one_of_them() -> None:
    ticks, queries = Reduction(2), Reduction(2)
    hanging = FaultStore(plans=[FaultPlan(fault=Fault.HANG, call="set", nth=None)])
    ranks = [
        threaded(
            store=store,
            host_size=4 * PAGE,
            min_reduce=ticks.of_rank(rank),
            controller_options={"prefetch_min_reduce": queries.of_rank(rank)},
        )
        for rank, store in enumerate((hanging, FaultStore()))
    ]

    def on_all(action: Callable[[HiCacheEngine], Any]) -> list[Any]:
        return list(pool.map(action, ranks))

    def ticked(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            on_all(HiCacheEngine.tick)
        on_all(HiCacheEngine.check)
        assert ranks[0].dump() == ranks[1].dump()
        assert ranks[0].tree.has_pending_transfers() == ranks[1].tree.has_pending_transfers()

    with ThreadPoolExecutor(2) as pool:
        on_all(lambda engine: engine.run(prompt(2)))
        ticked(lambda: all(engine.tree.ongoing_backup for engine in ranks))
        hanging.wait_until_hanging()
        acks = ranks[1].any_controller.ack_backup_queue
        ticked(lambda: acks.qsize() == 1)
        attempts = (
            HiCacheTreeBase.detach_storage_backend,
            # Goes well on the other rank, where it is undone.
            lambda tree: tree.attach_storage_backend(storage_backend="memory"),
            HiCacheTreeBase.detach_storage_backend,
        )
        for attempt in attempts:

            def tried(
                engine: HiCacheEngine, attempt: Callable[..., tuple[bool, str]] = attempt
            ) -> tuple[bool, str]:
                return attempt(engine.tree)

            outcomes = on_all(tried)
            assert [success for success, _ in outcomes] == [False, False]
            ticked(lambda: True)
        assert all(engine.tree.ongoing_backup for engine in ranks)
        hanging.release()
        ticked(lambda: not any(engine.tree.has_pending_transfers() for engine in ranks))
        for first in (100, 200):  # the host is full and has to evict
            tokens = prompt(2, first=first)
            on_all(lambda engine: engine.run(tokens))  # noqa: B023 - called at once
            on_all(HiCacheEngine.evict_all)
            ticked(lambda: True)
        assert all(on_all(lambda engine: engine.tree.detach_storage_backend()[0]))
        ticked(lambda: True)
        on_all(lambda engine: engine.tree.shutdown())


def test_a_flush_right_behind_the_last_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    posted, taken = threading.Event(), threading.Event()
    finish = StorageOperation.finish

    def slowly(operation: StorageOperation, post_ack: Any, release: Any) -> None:
        def post(acked: StorageOperation) -> None:
            post_ack(acked)
            posted.set()
            taken.wait(0.1)  # the tick has the acknowledgement, this thread has not gone on

        finish(operation, post, release)

    monkeypatch.setattr(StorageOperation, "finish", slowly)
    engine = threaded()
    engine.run(prompt(2))
    tick_until(engine, posted.is_set)
    engine.tick()
    assert not engine.tree.has_pending_transfers()
    engine.flush()
    taken.set()
    settled(engine)
    assert engine.host.available_size() == 160 and engine.tree._num_returning_pages == 0
    engine.tree.shutdown()


def test_an_update_does_not_wait_for_ever_for_storage_that_hangs() -> None:
    store = MemoryStore()
    engine = threaded(store=store)
    gate = Gate("set kv")
    store.hook = gate
    engine.run(prompt(4))
    tick_until(engine, gate.entered.is_set)
    engine.run(prompt(4, first=100))
    tick_until(engine, lambda: len(engine.tree.ongoing_backup) == 2)
    began = time.monotonic()
    engine.tree.prepare_weights_update()
    engine.tree.finish_weights_update("w1")
    engine.flush()
    assert time.monotonic() - began < 3
    gate.open()
    settled(engine)
    assert len(store.pages) <= 4  # the one that was being written, under the old weights' keys
    engine.tree.shutdown()
