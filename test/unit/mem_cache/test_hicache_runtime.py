"""Tiers while serving: attach and detach, weights, events, self-check, protection, collectives."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_metrics import MetricsHook
from sglang.srt.mem_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.tree_components.base import InvariantError, TreeNode
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.event_oracle import EventOracle
from sglang.test.fakes.fault_store import FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq
from sglang.test.fakes.tier_cases import (
    PAGE,
    engine_of,
    fresh_hit,
    only_node,
    prompt,
)

# -- attach, detach, clear -------------------------------------------------------------------------


def test_chains_begin_at_the_root_when_storage_is_attached_late() -> None:
    store = MemoryStore()
    engine = engine_of(store=store, storage_backend=None)
    a, b, c = (prompt(3, first=first, extra=0) for first in (0, 100, 200))
    engine.run(a + b)
    engine.settle()
    assert engine.tree.attach_storage_backend(
        storage_backend="memory", storage_backend_extra_config_json='{"prefetch_threshold": 1}'
    )[0]
    engine.check()
    engine.run(a + b + c)
    engine.settle()
    assert fresh_hit(store, [*c, 1]) == 0
    assert fresh_hit(store, [*b, 1]) == 0
    assert fresh_hit(store, [*a, *b, *c, 1]) == 36


def test_attach_and_detach_are_idempotent_and_keep_policies_on_failure() -> None:
    engine = engine_of(storage_backend=None)
    tree = engine.tree
    assert tree.storage_backend_name() is None
    assert tree.detach_storage_backend()[0]
    bad: list[dict[str, Any]] = [
        {"storage_backend": "memory", "hicache_write_policy": "sometimes"},
        {"storage_backend": "memory", "storage_backend_extra_config_json": "{"},
        {"storage_backend": "memory", "storage_backend_extra_config_json": "[1]"},
    ]
    for wrong in bad:
        success, message = tree.attach_storage_backend(
            **{"hicache_storage_prefetch_policy": "best_effort"} | wrong
        )
        assert not success and message
        assert tree.prefetch_stop_policy == "timeout" and not tree.enable_storage
    config: dict[str, Any] = {
        "storage_backend": "memory",
        "hicache_storage_prefetch_policy": "best_effort",
    }
    assert tree.attach_storage_backend(**config)[0]
    assert tree.prefetch_stop_policy == "best_effort"
    assert tree.storage_backend_name() == "MemoryStore"
    # The same again changes the policies only; another one is refused.
    assert tree.attach_storage_backend(**config | {"hicache_write_policy": "write_back"})[0]
    assert tree.write_policy == "write_back"
    assert not tree.attach_storage_backend(**config | {"storage_backend": "other"})[0]
    assert tree.detach_storage_backend()[0]
    assert tree.detach_storage_backend()[0]
    assert not tree.enable_storage


def adding_to(counted: Counter[str]) -> MetricsHook:
    def count(name: str, amount: float, **labels: str) -> None:
        counted.update({name: amount})

    return count


def test_damage_that_storage_finds_is_counted_once_and_for_each_attachment() -> None:
    counted: Counter[str] = Counter()
    store = MemoryStore()
    engine = engine_of(store=store, metrics=adding_to(counted))
    damaged = 0
    store.num_damaged_pages = lambda: damaged  # type: ignore[method-assign]
    for number, damaged in enumerate((0, 2, 2, 5)):  # noqa: B007
        engine.run(prompt(2, first=100 * number))
        engine.settle()
        assert counted["hicache_damaged_pages"] == damaged
    damaged = 6
    assert engine.tree.detach_storage_backend()[0]
    assert counted["hicache_damaged_pages"] == 6
    damaged = 1  # another object counts from 0
    assert engine.tree.attach_storage_backend(storage_backend="memory")[0]
    engine.run(prompt(2, first=900))
    engine.settle()
    assert counted["hicache_damaged_pages"] == 7


def test_faults_of_storage_are_counted_for_each_attachment() -> None:
    counted: Counter[str] = Counter()
    store = MemoryStore()
    engine = engine_of(store=store, metrics=adding_to(counted))
    faults = {"io_errors": 3, "outages": 1, "dropped_pages": 7}
    store.fault_counts = lambda: faults  # type: ignore[method-assign]
    for _ in range(2):
        for first in (0, 100):
            engine.run(prompt(2, first=first))
            engine.settle()
        assert engine.tree.detach_storage_backend()[0]
        assert engine.tree.attach_storage_backend(storage_backend="memory")[0]
    for name, count in faults.items():
        assert counted[f"storage_{name}"] == 2 * count


@pytest.mark.parametrize("broken", ["num_damaged_pages", "fault_counts"])
@pytest.mark.parametrize("answer", [OSError("away"), None, {"io_errors": "many"}])
def test_a_backend_whose_counts_fail_costs_the_counts_alone(
    caplog: pytest.LogCaptureFixture, broken: str, answer: Any
) -> None:
    counted: Counter[str] = Counter()

    def count() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    engine = engine_of(metrics=adding_to(counted))
    setattr(engine.store, broken, count)
    for first in (0, 100):
        engine.run(prompt(2, first=first))
        engine.settle()
    assert engine.tree.detach_storage_backend()[0]
    assert counted["storage_write_bytes"] > 0 and not counted["storage_io_errors"]
    told = [record for record in caplog.records if "cannot say what" in record.message]
    assert len(told) == 1  # however often it fails


def test_counts_under_names_of_a_backends_own_are_left_out() -> None:
    counted: Counter[str] = Counter()
    engine = engine_of(metrics=adding_to(counted))
    engine.store.fault_counts = lambda: {"moods": 3, "outages": 2}  # type: ignore[method-assign]
    engine.run(prompt(2))
    engine.settle()
    assert counted["storage_outages"] == 2 and "storage_moods" not in counted


def test_storage_traffic_is_counted() -> None:
    store = MemoryStore()
    for way in ("write", "read"):
        counted: Counter[str] = Counter()
        engine = engine_of(
            store=store,
            prefetch_policy="wait_complete",
            metrics=adding_to(counted),
        )
        engine.serve(prompt(3))
        engine.settle()
        stats = engine.tree.cache_controller.storage_stats
        num_bytes, seconds = getattr(stats, f"{way}_bytes"), getattr(stats, f"{way}_seconds")
        assert counted[f"storage_{way}_bytes"] == num_bytes > 0
        assert counted[f"storage_{way}_seconds"] == pytest.approx(seconds) != 0


def test_a_backend_that_cannot_be_made_changes_nothing() -> None:
    engine = engine_of(storage_backend=None)

    def refuse(name: str, config: object) -> Any:
        raise OSError("no such folder")

    engine.controller._backend_factory = refuse
    success, message = engine.tree.attach_storage_backend(
        storage_backend="memory", hicache_write_policy="write_back"
    )
    assert not success and "no such folder" in message
    assert engine.tree.write_policy == "write_through"


def test_detach_with_everything_under_way_leaves_nothing_behind() -> None:
    tokens = prompt(8)
    store = MemoryStore()
    writer = engine_of(store=store)
    writer.run(tokens)
    writer.settle()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    engine.submit(HiReq(rid="allocated", origin_input_ids=tokens))
    engine.controller.step_query()
    engine.tick()
    engine.submit(HiReq(rid="asked", origin_input_ids=prompt(8, first=300)))
    engine.run(prompt(4, first=600))
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    assert engine.tree.ongoing_backup and len(engine.tree.ongoing_prefetch) == 2
    assert engine.tree.detach_storage_backend()[0]
    engine.check()
    assert not engine.tree.ongoing_backup and not engine.tree.ongoing_prefetch
    in_tree = sum(len(node.key) for node in engine.tree.iter_nodes() if node.backuped)
    assert engine.host.available_size() + in_tree == 160
    assert all(engine.tree.check_prefetch_progress(req.rid) for req in engine.waiting)
    engine.evict_all()
    assert engine.run(prompt(4, first=600)) == 16  # the host tier works on


def test_clear_storage_tells_what_the_backend_says_and_pages_come_again_when_hit() -> None:
    store = FaultStore()
    engine = engine_of(store=store)
    tokens = prompt(6)
    engine.run(tokens)
    engine.settle()
    store.clear_result = False
    assert engine.tree.clear_storage_backend() is False
    store.clear_result = True
    assert engine.tree.clear_storage_backend() is True
    engine.settle()
    assert not store.pages
    engine.run(tokens)
    engine.settle()
    assert len(store.pages) == 6
    engine.tree.detach_storage_backend()
    assert engine.tree.clear_storage_backend() is False


def test_clearing_while_writes_are_queued_lets_no_page_come_back() -> None:
    store = FaultStore()
    engine = engine_of(store=store)
    engine.run(prompt(6))
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    assert engine.tree.clear_storage_backend()
    engine.settle()
    assert not store.pages
    assert only_node(engine).unstored_from == 0
    engine.check()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_is_fetched_while_storage_is_cleared_is_written_again(num_steps: int) -> None:
    tokens = prompt(5)
    store = MemoryStore()
    writer = engine_of(store=store)
    writer.run(tokens)
    writer.settle()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    req = HiReq(rid="r", origin_input_ids=tokens)
    engine.submit(req)
    for step in (engine.controller.step_query, engine.controller.step_read)[:num_steps]:
        step()
        if num_steps == 2 and step == engine.controller.step_query:
            engine.tick()  # it gets its host pages
    assert engine.tree.clear_storage_backend()
    engine.check()
    engine.settle()
    assert engine.admit(req) and engine.extend(req, len(tokens) - req.kv_committed_len)
    engine.finish(req)
    engine.settle()
    longer = [*tokens[:-1], *range(900, 904)]
    engine.run([*longer, 7])
    engine.settle()
    assert fresh_hit(store, [*longer, 7]) == 6 * PAGE


def test_leaving_write_back_needs_prefixes_on_the_host() -> None:
    engine = engine_of(write_policy="write_back")
    engine.run(prompt(4, extra=0))
    engine.run(prompt(8))
    upper = engine.tree.match_prefix(
        MatchPrefixParams(key=engine.tree.make_key(prompt(4, extra=0)))
    ).last_device_node
    assert upper is not None
    lower = next(iter(upper.children.values()))
    lower.data[0].host_value = torch.arange(16)
    with pytest.raises(InvariantError, match="on the host below"):
        engine.tree._apply_storage_runtime_config("write_through", "timeout")
    assert engine.tree.write_policy == "write_back"


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_flush", [True, False])
def test_new_weights_never_get_pages_of_old_ones(with_flush: bool) -> None:
    store = MemoryStore()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    tokens = prompt(8)
    engine.run(tokens)
    engine.settle()
    engine.tree.prepare_weights_update()
    engine.tree.finish_weights_update("w1")
    if with_flush:
        engine.flush()
    assert engine.serve(tokens).done_tokens == 0
    engine.settle()
    engine.check()
    engine.check_host()
    # Back to the old weights: their pages are valid again.
    engine.tree.prepare_weights_update()
    engine.tree.finish_weights_update("w0")
    engine.flush()
    assert engine.serve(tokens).loaded_tokens == 32
    assert len(store.pages) == 16


def test_backups_queued_at_an_update_are_dropped_and_old_nodes_are_never_written() -> None:
    store = MemoryStore()
    engine = engine_of(store=store)
    engine.run(prompt(4))
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()  # queued for storage
    engine.run(prompt(4, first=100))  # copy to the host under way
    engine.tree.prepare_weights_update()
    engine.run(prompt(4, first=200))  # between preparation and end
    engine.settle()
    engine.tree.finish_weights_update("w1")
    engine.settle()
    assert not store.pages
    assert engine.tree.ongoing_backup == {}
    engine.check()
    engine.run(prompt(4))
    engine.settle()
    assert len(store.pages) == 4


def test_prefetches_end_at_an_update_and_none_begins_during_it() -> None:
    tokens = prompt(8)
    store = MemoryStore()
    writer = engine_of(store=store)
    writer.run(tokens)
    writer.settle()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    engine.submit(HiReq(rid="a", origin_input_ids=tokens))
    engine.controller.step_query()
    engine.tick()
    engine.tree.prepare_weights_update()
    engine.submit(HiReq(rid="b", origin_input_ids=tokens))
    assert not engine.tree.ongoing_prefetch
    engine.tree.finish_weights_update("w1")
    engine.settle()
    engine.check()
    assert engine.host.available_size() == 160


# -- events ----------------------------------------------------------------------------------------


def _counted(engine: HiCacheEngine) -> Counter[tuple[str, str]]:
    return Counter(
        (type(event).__name__, "" if isinstance(event, AllBlocksCleared) else str(event.medium))
        for event in engine.tree.take_events()
    )


def test_events_follow_the_pages_from_tier_to_tier() -> None:
    engine = engine_of(enable_kv_cache_events=True, prefetch_policy="wait_complete")
    tokens = prompt(4)
    gpu, cpu = str(StorageMedium.GPU), str(StorageMedium.CPU)
    engine.run(tokens)
    assert _counted(engine) == {("BlockStored", gpu): 4}
    engine.tick()
    engine.cached(tokens[:8])  # a split during the copy: both parts are published
    engine.settle()
    assert _counted(engine) == {("BlockStored", cpu): 4}
    engine.evict_all()
    assert _counted(engine) == {("BlockRemoved", gpu): 4}
    engine.run(tokens)
    assert _counted(engine) == {("BlockStored", gpu): 4}
    engine.settle()
    engine.evict_all()
    engine.tree.evict_host(160)
    assert _counted(engine) == {("BlockRemoved", gpu): 4, ("BlockRemoved", cpu): 4}
    engine.serve(tokens)
    assert _counted(engine) == {("BlockStored", cpu): 4, ("BlockStored", gpu): 4}
    engine.settle()
    engine.flush()
    assert _counted(engine) == {("AllBlocksCleared", ""): 1}


def test_events_name_pages_by_their_chain() -> None:
    engine = engine_of(enable_kv_cache_events=True)
    engine.run(prompt(3, extra=0), extra_key="lora")
    events = engine.tree.take_events()
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.parent_block_hash for event in stored] == [
        None,
        stored[0].block_hashes[0],
        stored[1].block_hashes[0],
    ]
    assert [event.token_ids for event in stored] == [
        list(range(start, start + PAGE)) for start in (0, 4, 8)
    ]
    assert {event.cache_salt for event in stored} == {"lora"}
    assert all(-(2**63) <= event.block_hashes[0] < 2**63 for event in stored)
    engine.settle()
    engine.evict_all()
    removed = [event for event in engine.tree.take_events() if isinstance(event, BlockRemoved)]
    removed.reverse()  # a page leaves before the one it follows
    assert [event.block_hashes for event in removed] == [event.block_hashes for event in stored]


def test_events_tell_of_the_present_weights_only() -> None:
    engine = engine_of(enable_kv_cache_events=True)
    oracle = EventOracle(engine.tree)
    engine.run(prompt(3))
    engine.settle()
    oracle.follow()
    held = {medium: set(blocks) for medium, blocks in oracle.held.items()}
    assert all(len(blocks) == 3 for blocks in held.values())
    engine.tree.finish_weights_update("w1")
    oracle.follow()
    assert not any(oracle.held.values())
    engine.run(prompt(2, extra=1))
    engine.settle()
    oracle.follow()
    # Back to the first weights: what is left of their KV can be found again.
    engine.tree.finish_weights_update("w0")
    oracle.follow()
    assert oracle.held == held
    engine.tree.finish_weights_update("w0")
    assert engine.tree.take_events() == []


def test_no_events_unless_asked_for() -> None:
    engine = engine_of()
    engine.run(prompt(3))
    assert engine.tree.take_events() == []


# -- the check itself ------------------------------------------------------------------------------


def _lose_a_host_page(engine: HiCacheEngine, node: TreeNode) -> None:
    engine.host.alloc(PAGE)


def _free_a_page_in_use(engine: HiCacheEngine, node: TreeNode) -> None:
    assert node.host_value is not None
    engine.host.free(node.host_value[:PAGE])


def _orphan_on_the_host(engine: HiCacheEngine, node: TreeNode) -> None:
    engine.tree.insert(InsertParams(key=engine.tree.make_key(prompt(8)), value=torch.arange(4, 36)))
    assert node.parent is not None
    for child in node.children.values():
        child.data[0].host_value = torch.arange(100, 100 + len(child.key))
    node.data[0].host_value = None


def _forget_a_lock(engine: HiCacheEngine, node: TreeNode) -> None:
    node.data[0].host_lock_ref += 1


def _mark_a_copy(engine: HiCacheEngine, node: TreeNode) -> None:
    engine.tree.ongoing_write_through[node.id] = engine.tree.ongoing_write_through.get(
        node.id
    ) or _entry(node)


def _entry(node: TreeNode) -> Any:
    from sglang.srt.mem_cache.hicache_records import WriteThroughEntry

    return WriteThroughEntry(locked=node, nodes=(node,), backup_len=len(node.key), start_time=0.0)


def _leak_capacity(engine: HiCacheEngine, node: TreeNode) -> None:
    engine.controller.prefetch_tokens_occupied += 1


@pytest.mark.parametrize(
    "breach",
    [
        _lose_a_host_page,
        _free_a_page_in_use,
        _orphan_on_the_host,
        _forget_a_lock,
        _mark_a_copy,
        _leak_capacity,
    ],
)
def test_the_check_finds(breach: Any) -> None:
    engine = engine_of()
    engine.run(prompt(4, extra=0))
    engine.settle()
    engine.tree.check_invariants()
    breach(engine, only_node(engine))
    with pytest.raises(InvariantError):
        engine.tree.check_invariants()


# -- protection of what is under way ---------------------------------------------------------------


def test_a_copy_of_old_weights_that_ends_late_is_not_written_to_storage() -> None:
    store = MemoryStore()
    engine = engine_of(store=store)
    engine.run(prompt(4))
    engine.tick()  # the copy to the host is under way
    engine.tree.set_weights_fingerprint("w1")
    engine.settle()
    assert only_node(engine).backuped and not store.pages
    engine.check()


def test_pages_that_are_being_written_to_storage_stay_on_the_host() -> None:
    store = MemoryStore()
    engine = engine_of(store=store)
    tokens = prompt(4)
    engine.run(tokens)
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    engine.evict_all()
    assert engine.tree.evict_host(160) == 0
    engine.check()
    engine.settle()
    assert fresh_hit(store, tokens) == 16
    assert engine.tree.evict_host(160) == 16


def test_the_node_that_a_prefetch_continues_stays_on_the_host() -> None:
    store = MemoryStore()
    tokens = prompt(8)
    writer = engine_of(store=store)
    writer.run(tokens)
    writer.settle()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    engine.run(tokens[: 2 * PAGE])
    engine.settle()
    engine.evict_all()
    req = HiReq(rid="r", origin_input_ids=tokens)
    engine.submit(req)
    assert engine.tree.evict_host(160) == 0
    engine.settle()
    engine.check()
    assert engine.admit(req)
    assert len(req.prefix_indices) == 32
    assert engine.extend(req, 1)
    engine.check()
    engine.finish(req)


def test_nothing_is_written_to_storage_before_its_copy_to_the_host_has_ended() -> None:
    store = MemoryStore()
    engine = engine_of(store=store)
    tokens = prompt(4)
    engine.run(tokens)
    engine.tick()
    assert engine.tree.clear_storage_backend()  # marks what is to be written again
    engine.run(tokens)  # a hit, which makes up for what is marked
    assert not engine.tree.ongoing_backup
    engine.settle()
    assert fresh_hit(store, tokens) == 16


def test_a_state_that_only_the_host_has_is_loaded_alone() -> None:
    tokens = prompt(4)
    engine = engine_of(HiMambaRadixCache)
    engine.run(tokens)
    engine.settle()
    engine.evict_all()
    assert engine.states is not None
    slots = engine.states.allocator
    taken = slots.alloc(slots.available_size())
    assert taken is not None
    assert engine.run(tokens) == 0  # no slot for the state: computed again, without a snapshot
    assert only_node(engine).value is not None
    assert engine.cached(tokens) == (0, 16)
    assert engine.run(tokens) == 0  # still no slot
    slots.free(taken)
    num_free = engine.allocator.available_size()
    assert engine.run(tokens) == 16
    assert engine.allocator.available_size() == num_free  # its KV was there
    assert engine.cached(tokens) == (16, 0)
    engine.settle()
    engine.check()
    engine.check_host()


# -- collectives -----------------------------------------------------------------------------------


def test_every_tick_makes_its_collective_whatever_there_is_to_do() -> None:
    calls: list[int] = []

    def reduce(values: list[int]) -> list[int]:
        calls.append(len(values))
        return values

    engine = engine_of(min_reduce=reduce, prefetch_policy="best_effort")
    engine.tick()
    assert calls == [5]  # writes, loads, hits, backups, releases
    calls.clear()
    engine.submit(HiReq(rid="r", origin_input_ids=prompt(8)))
    engine.tick()
    for _ in range(3):
        engine.tree.check_prefetch_progress("r")  # no collective
    assert calls == [5]
    calls.clear()
    engine.abort_waiting(engine.waiting[0])
    engine.run(prompt(4))
    engine.settle()
    # One more in the tick that ends the write to storage: how much of it every rank has written.
    assert sorted(calls) == [1, 5, 5, 5, 5, 5, 5]


def test_storage_is_attached_on_all_ranks_or_on_none() -> None:
    engine = engine_of(storage_backend=None, min_reduce=lambda values: [0] * len(values))
    success, message = engine.tree.attach_storage_backend(storage_backend="memory")
    assert not success and "nother rank" in message
    assert not engine.tree.enable_storage
    engine.check()


def test_a_policy_that_may_not_be_left_is_a_refusal() -> None:
    engine = engine_of(write_policy="write_back")
    engine.run(prompt(4, extra=0))
    engine.run(prompt(8))
    lower = next(node for node in engine.tree.iter_nodes() if not node.children)
    lower.data[0].host_value = torch.arange(len(lower.key))
    success, message = engine.tree.attach_storage_backend(
        storage_backend="memory", hicache_write_policy="write_through"
    )
    assert not success and "on the host below" in message
    assert engine.tree.write_policy == "write_back"
