"""Device <-> host -> storage: backups, eviction, load back, reset, attach, weights, events."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq, TreeFactory
from sglang.test.fakes.tier_cases import (
    PAGE,
    all_trees,
    engine_of,
    fresh_hit,
    only_node,
    policies,
    prompt,
)

# -- write policies --------------------------------------------------------------------------------


@all_trees
def test_write_through_evict_load_back(make_tree: TreeFactory) -> None:
    tokens = prompt(10)
    engine = engine_of(make_tree)
    assert engine.run(tokens) == 0
    engine.settle()
    engine.check_host()
    engine.evict_all()
    assert engine.allocator.available_size() == engine.allocator.size
    assert engine.cached(tokens) == (0, 40)
    assert engine.run(tokens) == 40
    engine.settle()
    engine.check()


@policies
def test_when_a_policy_backs_up(write_policy: str) -> None:
    tokens = prompt(4)
    engine = engine_of(write_policy=write_policy)
    backed_up = []
    for _ in range(2):
        engine.run(tokens)
        engine.settle()
        backed_up.append(only_node(engine).backuped)
    engine.evict_all()
    backed_up.append(engine.cached(tokens) == (0, 16))
    expected = {
        "write_through": [True, True, True],
        "write_through_selective": [False, True, True],
        "write_back": [False, False, True],
    }
    assert backed_up == expected[write_policy]
    engine.check()
    engine.check_host()


@all_trees
def test_chunks_are_backed_up_and_do_not_count_as_uses(make_tree: TreeFactory) -> None:
    tokens = prompt(12)
    engine = engine_of(make_tree)
    req = HiReq(rid="r", origin_input_ids=tokens)
    assert engine.admit(req)
    for _ in range(3):
        assert engine.extend(req, 4 * PAGE)
        engine.tree.cache_unfinished_req(req, chunked=True)
        engine.settle()
        engine.check()
    assert all(node.backuped and node.hit_count == 0 for node in engine.tree.iter_nodes())
    engine.finish(req, is_insert=False)  # aborted: what its chunks left is still on the host
    engine.evict_all()
    assert engine.run(tokens) == 48


def test_selective_still_needs_two_requests_when_prompts_come_in_chunks() -> None:
    tokens = prompt(8, extra=0)
    engine = engine_of(write_policy="write_through_selective")
    for expected in (False, True):
        req = HiReq(rid="r", origin_input_ids=tokens)
        assert engine.admit(req)
        while req.kv_committed_len < len(tokens):
            assert engine.extend(req, min(2 * PAGE, len(tokens) - req.kv_committed_len))
            engine.tree.cache_unfinished_req(req, chunked=req.kv_committed_len < 32)
        engine.finish(req)
        first = next(iter(engine.tree.iter_nodes()))
        assert first.backuped is expected


@all_trees
def test_ancestors_that_are_not_on_the_host_are_backed_up_first(make_tree: TreeFactory) -> None:
    engine = engine_of(make_tree, host_size=2 * PAGE)
    engine.run(prompt(4, extra=0))  # no room on the host
    engine.settle()
    assert not any(node.backuped for node in engine.tree.iter_nodes())
    engine = engine_of(make_tree, write_policy="write_through_selective")
    engine.run(prompt(4, extra=0))
    engine.run(prompt(8, extra=0))
    leaf = next(node for node in engine.tree.iter_nodes() if not node.children)
    assert leaf.parent is not None and not leaf.backuped
    assert engine.tree.write_backup(leaf) > 0
    assert leaf.backuped and leaf.parent.backuped
    engine.check()
    engine.settle()
    engine.check_host()
    engine.evict_all()
    engine.check()


def test_write_back_writes_the_shared_head_too() -> None:
    store = MemoryStore()
    engine = engine_of(write_policy="write_back", store=store)
    prompts = [prompt(4, extra=0) + prompt(3, first=1000 * n) for n in range(1, 4)]
    for tokens in prompts:
        engine.run(tokens)
    engine.tree.evict(3 * PAGE)  # one tail only: the head stays on the device
    engine.settle()
    engine.check()
    hits = [fresh_hit(store, tokens) for tokens in prompts]
    assert sorted(hits) == [16, 16, 28]


@all_trees
def test_write_back_without_room_drops_and_makes_progress(make_tree: TreeFactory) -> None:
    engine = engine_of(make_tree, write_policy="write_back", host_size=8 * PAGE)
    pinned = engine.host.alloc(8 * PAGE)
    assert pinned is not None
    engine.run(prompt(6))
    assert engine.tree.evict(6 * PAGE).num_tokens_evicted == 24
    assert list(engine.tree.iter_nodes()) == []
    assert engine.allocator.available_size() == engine.allocator.size
    engine.host.free(pinned)
    engine.check()


def test_write_back_frees_slots_only_after_the_copies() -> None:
    engine = engine_of(write_policy="write_back")
    engine.run(prompt(8))
    free_at_copy: list[int] = []
    step = engine.controller.write_engine.step

    def spying_step() -> bool:
        free_at_copy.append(engine.allocator.available_size())
        return step()

    engine.controller.write_engine.step = spying_step  # type: ignore[method-assign]
    engine.tree.evict(8 * PAGE)
    assert free_at_copy == [160 - 32]
    assert engine.allocator.available_size() == 160
    engine.check()
    engine.check_host()


@all_trees
def test_a_node_whose_copy_is_under_way_keeps_its_slots(make_tree: TreeFactory) -> None:
    tokens = prompt(8)
    engine = engine_of(make_tree)
    engine.run(tokens)
    engine.tree.check_hicache_events()  # the copy is submitted and not done
    engine.evict_all()
    assert engine.allocator.available_size() == 160 - 32
    assert engine.tree.protected_size() == 32
    engine.settle()
    engine.check_host()
    engine.evict_all()
    assert engine.allocator.available_size() == 160
    engine.check()


def test_a_split_while_the_copy_is_under_way_loses_nothing_in_storage() -> None:
    store = MemoryStore()
    engine = engine_of(store=store)
    tokens = prompt(8, extra=0)
    engine.run(tokens)
    engine.tree.check_hicache_events()
    assert engine.cached(tokens[:-1])[0] == 28  # splits the node
    assert len(list(engine.tree.iter_nodes())) == 2
    engine.check()
    engine.settle()
    engine.check()
    assert fresh_hit(store, [*tokens, 1]) == 32


def test_a_split_while_the_write_to_storage_is_under_way() -> None:
    store = FaultStore(plans=[FaultPlan(fault=Fault.FALSE, call="set", nth=5)])
    engine = engine_of(store=store)
    tokens = prompt(8, extra=0)
    engine.run(tokens)
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    assert only_node(engine).storage_op_id is not None
    engine.cached(tokens[:16])
    engine.cached(tokens[:24])
    engine.check()
    engine.settle()
    nodes = sorted(engine.tree.iter_nodes(), key=lambda node: int(node.key.token_ids[0]))
    assert [(len(node.key), node.unstored_from) for node in nodes] == [(16, None), (8, 1), (8, 0)]


def test_a_failed_write_to_storage_is_made_up_for_at_the_next_hit() -> None:
    store = FaultStore(plans=[FaultPlan(fault=Fault.FALSE, call="set", nth=5)])
    engine = engine_of(store=store)
    tokens = prompt(10)
    engine.run(tokens)
    engine.settle()
    assert len(store.pages) == 9  # what is written behind the gap cannot be found
    assert only_node(engine).unstored_from == 5
    store.calls.clear()
    engine.run(tokens)
    engine.settle()
    assert len(store.pages) == 10
    assert len(store.calls) == 5  # the missing suffix alone
    engine.run(tokens)
    engine.settle()
    assert len(store.calls) == 5
    assert fresh_hit(store, tokens) == 40
    engine.check()


def test_a_store_that_raises_once_pins_nothing() -> None:
    store = FaultStore(plans=[FaultPlan(fault=Fault.RAISE, call="set")])
    engine = engine_of(store=store)
    engine.run(prompt(4))
    engine.run(prompt(4, first=100))
    engine.settle()
    assert len(store.pages) == 4
    assert not engine.tree.ongoing_backup
    engine.evict_all()
    assert engine.tree.evict_host(160) == 32
    engine.check()


def test_ticks_alone_bring_pages_to_storage() -> None:
    engine = engine_of()
    engine.run(prompt(4))
    engine.settle()  # no request follows
    assert len(engine.store.pages) == 4  # type: ignore[attr-defined]
    assert not engine.tree.has_pending_transfers()


# -- load back -------------------------------------------------------------------------------------


def _evicted(engine: HiCacheEngine, tokens: list[int], keep_pages: int) -> None:
    """Serve ``tokens`` so that only the first pages stay on the device."""
    engine.run(tokens[: keep_pages * PAGE])
    engine.run(tokens)
    engine.settle()
    if keep_pages:
        node = engine.tree.match_prefix(
            MatchPrefixParams(key=engine.tree.make_key(tokens[: keep_pages * PAGE]))
        ).last_device_node
        engine.tree.inc_lock_ref(node)
        engine.evict_all()
        engine.tree.dec_lock_ref(node)
    else:
        engine.evict_all()


@pytest.mark.parametrize(("tail_pages", "comes_back"), [(2, False), (3, True)])
def test_a_short_tail_behind_a_resident_prefix_is_not_loaded(
    tail_pages: int, comes_back: bool
) -> None:
    engine = engine_of()
    tokens = prompt(4 + tail_pages)
    _evicted(engine, tokens, keep_pages=4)
    assert engine.cached(tokens) == (16, tail_pages * PAGE)
    assert engine.run(tokens) == 16 + tail_pages * PAGE * comes_back
    engine.settle()
    engine.check()


def test_a_short_prefix_with_nothing_resident_is_loaded() -> None:
    engine = engine_of()
    tokens = prompt(1)
    _evicted(engine, tokens, keep_pages=0)
    assert engine.run(tokens) == PAGE


@pytest.mark.parametrize(("quota", "num_loaded"), [(31, None), (32, 32), (None, 32)])
def test_load_back_respects_the_quota(quota: int | None, num_loaded: int | None) -> None:
    engine = engine_of()
    tokens = prompt(8)
    _evicted(engine, tokens, keep_pages=0)
    loaded = engine.tree.load_back(only_node(engine), quota)
    assert (None if loaded is None else len(loaded)) == num_loaded
    engine.tree.ready_to_load_host_cache()
    engine.settle()
    engine.check()


@all_trees
def test_load_back_without_room_leaves_everything_as_it_was(make_tree: TreeFactory) -> None:
    engine = engine_of(make_tree)
    tokens = prompt(8)
    _evicted(engine, tokens, keep_pages=0)
    taken = engine.allocator.alloc(160 - 16)
    assert taken is not None
    before = engine.dump()
    node = next(iter(engine.tree.iter_nodes()))
    assert engine.tree.load_back(node) is None
    assert engine.dump() == before
    engine.allocator.free(taken)
    engine.check()


def test_host_pages_stay_until_the_load_has_ended() -> None:
    """A tiny host pool, a slow load, and somebody who wants to be backed up meanwhile."""
    engine = engine_of(host_size=8 * PAGE)
    tokens = prompt(8)
    _evicted(engine, tokens, keep_pages=0)
    req = HiReq(rid="r", origin_input_ids=tokens)
    assert engine.admit(req)
    engine.run(prompt(4, first=500))
    assert engine.tree.evict_host(160) == 0
    assert engine.extend(req, 1)  # the load happens now
    engine.check()
    engine.finish(req)
    engine.settle()
    engine.check()


@all_trees
def test_loads_that_follow_each_other(make_tree: TreeFactory) -> None:
    engine = engine_of(make_tree, size=400, host_size=400, num_reqs=8)
    prompts = [prompt(8, first=1000 * n) for n in range(6)]
    for tokens in prompts:
        engine.run(tokens)
    engine.settle()
    engine.evict_all()
    reqs = [HiReq(rid=f"r{n}", origin_input_ids=tokens) for n, tokens in enumerate(prompts)]
    for req in reqs:
        assert engine.admit(req)  # four and more loads before anything is consumed
    for req in reqs:
        assert len(req.prefix_indices) == 32
        assert engine.extend(req, 1)
        engine.check()
    for req in reqs:
        engine.finish(req)
    engine.settle()
    assert not engine.tree.has_pending_copies()


def test_a_request_that_goes_on_with_loaded_slots_waits_for_the_load() -> None:
    """The load belongs to a request that was not admitted, so no batch waits for it."""
    engine = engine_of()
    tokens = prompt(8)
    req = HiReq(rid="slow", origin_input_ids=tokens)
    assert engine.admit(req)  # computes everything itself
    assert engine.extend(req, len(tokens))
    engine.run(tokens)
    engine.settle()
    engine.evict_all()
    assert engine.tree.load_back(only_node(engine)) is not None  # queued, never started
    engine.tree.cache_unfinished_req(req)
    engine.check()  # looks at the content of what the request uses now
    engine.finish(req)
    engine.settle()
    engine.check()


# -- reset -----------------------------------------------------------------------------------------


@all_trees
def test_reset_is_immediate_and_loses_nothing_in_storage(make_tree: TreeFactory) -> None:
    store = MemoryStore()
    engine = engine_of(make_tree, store=store)
    tokens = prompt(8)
    engine.run(tokens)  # neither on the host nor in storage yet
    engine.flush()
    engine.check()
    assert engine.cached(tokens) == (0, 0)
    assert engine.tree.total_size() == 0
    engine.run(prompt(4, first=900))  # the pools are in use again while the backup goes on
    engine.settle()
    engine.check()
    engine.check_host()
    assert fresh_hit(store, tokens) == 32


def test_pages_of_a_backup_stay_out_of_the_free_list_until_it_is_over() -> None:
    engine = engine_of()
    engine.run(prompt(8))
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    engine.flush()
    assert engine.host.available_size() == 160 - 32
    assert engine.tree.has_pending_transfers()
    engine.controller.step_backup()
    engine.tick()
    assert engine.host.available_size() == 160
    assert not engine.tree.has_pending_transfers()
    engine.check()


@pytest.mark.parametrize("stage", range(4))
def test_resets_during_prefetches_leave_the_pools_exact(stage: int) -> None:
    tokens = prompt(8)
    store = MemoryStore()
    writer = engine_of(store=store)
    writer.run(tokens)
    writer.settle()
    engine = engine_of(store=store, prefetch_policy="wait_complete")
    for _ in range(10):
        req = HiReq(rid="r", origin_input_ids=tokens)
        engine.submit(req)
        if stage > 0:
            engine.controller.step_query()
        if stage > 1:
            engine.tick()
        if stage > 2:
            engine.controller.step_read()
        engine.flush()
        assert engine.tree.prefetch_tokens_occupied == 0
        engine.check()
    engine.settle()
    engine.check()
    assert engine.host.available_size() == 160
    assert engine.serve(tokens).loaded_tokens == 32
