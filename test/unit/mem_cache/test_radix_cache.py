"""The radix tree alone: match, insert, split, lock, evict, namespaces, its own self-check."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    LoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.evict_policy import EVICT_POLICIES
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.mem_cache.tree_components.base import ComponentType, InvariantError
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.fake_kv import FakeEngine


def tree_of(engine: FakeEngine) -> RadixCache:
    assert isinstance(engine.tree, RadixCache)
    return engine.tree


def put(
    engine: FakeEngine, tokens: list[int], extra_key: str | None = None, priority: int = 0
) -> TreeNode:
    """Insert a sequence whose KV was just computed; duplicates are freed."""
    tree, page = tree_of(engine), engine.page_size
    slots = engine.allocator.alloc(len(tokens) // page * page)
    assert slots is not None
    engine.kv.write_prefix(slots, tokens, 0, extra_key, tree.weights_fingerprint)
    key = tree.make_key(tokens, extra_key)
    result = tree.insert(InsertParams(key=key, value=slots, priority=priority))
    aligned = len(key) // page * page
    engine.allocator.free(torch.cat([slots[: result.prefix_len], slots[aligned:]]))
    engine.check()
    assert result.node is not None
    return result.node


def match(engine: FakeEngine, tokens: list[int], extra_key: str | None = None) -> MatchResult:
    """Match and verify the content of what was found."""
    result = engine.tree.match_prefix(MatchPrefixParams(key=RadixKey(tokens, extra_key)))
    engine.kv.verify_prefix(
        result.device_indices, tokens, extra_key, engine.tree.weights_fingerprint
    )
    engine.check()
    return result


def hit(engine: FakeEngine, tokens: list[int], extra_key: str | None = None) -> int:
    return len(match(engine, tokens, extra_key).device_indices)


# -- match, insert, split -------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_match_in_the_middle_splits_at_a_page(page_size: int) -> None:
    engine = FakeEngine(page_size=page_size)
    end = put(engine, list(range(8)))
    result = match(engine, [0, 1, 2, 3, 4, 5, 99, 98])
    expected = 6 if page_size == 1 else 4
    assert len(result.device_indices) == expected
    assert result.last_device_node is result.best_match_node is end.parent
    assert result.last_host_node is tree_of(engine).root_node
    assert result.host_hit_length == 0
    assert len(end.key) == 8 - expected
    assert hit(engine, list(range(20))) == 8
    assert hit(engine, [5, 6, 7]) == 0


def test_prompts_shorter_than_a_page_leave_nothing() -> None:
    engine = FakeEngine(page_size=4)
    node = put(engine, [1, 2, 3])
    assert node is tree_of(engine).root_node
    assert hit(engine, [1, 2, 3]) == hit(engine, []) == 0
    assert engine.allocator.available_size() == 64


@pytest.mark.parametrize("num_tokens", range(4 * 2, 4 * 2 + 6))
@pytest.mark.parametrize("page_size", [1, 4])
def test_keys_need_as_many_further_tokens_as_kv_depends_on(page_size: int, num_tokens: int) -> None:
    engine = FakeEngine(page_size=page_size, lookahead=3)
    tokens = list(range(num_tokens))
    put(engine, tokens)
    aligned = (num_tokens - 3) // page_size * page_size
    assert engine.tree.is_eagle and engine.tree.total_size() == aligned
    assert hit(engine, tokens) == aligned
    for num_shared in range(num_tokens):
        parted = [*tokens[:num_shared], *range(100, 100 + num_tokens - num_shared)]
        assert hit(engine, parted) == max(num_shared - 3, 0) // page_size * page_size
    # A node that is divided keeps whole units on both sides.
    put(engine, [*tokens[:7], 50, 51, 52, 53, 54])
    engine.check()
    assert hit(engine, tokens) == aligned


@pytest.mark.parametrize("num_tokens", range(4 * 2, 4 * 2 + 6))
def test_bigram_keys_need_the_next_token(num_tokens: int) -> None:
    engine = FakeEngine(page_size=4, is_eagle=True)
    tokens = list(range(num_tokens))
    put(engine, tokens)
    aligned = (num_tokens - 1) // 4 * 4
    assert engine.tree.total_size() == aligned
    assert hit(engine, tokens) == aligned
    assert hit(engine, [*tokens[:4], 99, 98, 97, 96]) == 0
    assert hit(engine, [*tokens[:5], 99, 98, 97]) == 4


def test_insert_reports_what_the_tree_had() -> None:
    engine = FakeEngine(page_size=1)
    put(engine, [1, 2, 3])
    before = match(engine, [1, 2, 3]).device_indices
    tree = tree_of(engine)
    slots = engine.allocator.alloc(4)
    assert slots is not None
    engine.kv.write_prefix(slots, [1, 2, 9, 8])
    result = tree.insert(InsertParams(key=RadixKey([1, 2, 9, 8]), value=slots))
    assert result.prefix_len == 2
    engine.allocator.free(slots[:2])
    engine.check()
    assert torch.equal(match(engine, [1, 2, 9, 8]).device_indices[:2], before[:2])
    slots.zero_()  # the tree kept a copy
    assert hit(engine, [1, 2, 9, 8]) == 4
    with pytest.raises(ValueError, match="slots for a key"):
        tree.insert(InsertParams(key=RadixKey([1, 2]), value=slots[:1]))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_split_is_impossible_at_its_ends_and_inside_a_page(page_size: int) -> None:
    engine = FakeEngine(page_size=page_size)
    node = put(engine, list(range(8)))
    tree = tree_of(engine)
    bad = [0, 8, -page_size] + ([1, 3, 5] if page_size == 4 else [])
    for num_units in bad:
        with pytest.raises(InvariantError, match="cannot be split"):
            tree._split(node, num_units)
    with pytest.raises(InvariantError):
        tree._split(tree.root_node, page_size)
    engine.check()


sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=12), st.sampled_from([None, "a"])),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(sequences, sequences, st.sampled_from([1, 2, 4]), st.booleans())
def test_matches_equal_the_longest_common_prefix_of_all_inserted(
    inserted: list[tuple[list[int], str | None]],
    asked: list[tuple[list[int], str | None]],
    page_size: int,
    is_eagle: bool,
) -> None:
    engine = FakeEngine(size=256, page_size=page_size, is_eagle=is_eagle)
    known: list[RadixKey] = []
    for (tokens, extra_key), (query, query_extra) in zip(inserted, asked + inserted):
        put(engine, tokens, extra_key)
        known.append(engine.tree.make_key(tokens, extra_key))
        query_key = engine.tree.make_key(query, query_extra)
        candidates = [k for k in known if k.extra_key == query_extra]
        expected = max((query_key.match(k, page_size) for k in candidates), default=0)
        assert hit(engine, query, query_extra) == expected


# -- namespaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4])
def test_namespaces_never_share(page_size: int) -> None:
    engine = FakeEngine(page_size=page_size)
    tokens = list(range(8))
    for extra_key in (None, "", "a", "b"):
        assert hit(engine, tokens, extra_key) == 0
        put(engine, tokens, extra_key)
        assert hit(engine, tokens, extra_key) == 8
    assert engine.tree.total_size() == 32


def test_new_weights_never_match_old_nodes_and_old_weights_do_again() -> None:
    engine = FakeEngine(weights_fingerprint="w1")
    tokens = list(range(8))
    put(engine, tokens)
    engine.tree.set_weights_fingerprint("w2")
    assert hit(engine, tokens) == 0
    put(engine, tokens)
    assert hit(engine, tokens) == 8
    engine.tree.set_weights_fingerprint("w1")
    assert hit(engine, tokens) == 8
    assert engine.tree.evict(16).num_tokens_evicted == 16
    assert hit(engine, tokens) == 0


# -- locks and eviction ---------------------------------------------------------------------------


def test_a_locked_path_is_never_evicted() -> None:
    engine = FakeEngine(page_size=1)
    put(engine, [1, 2, 3, 4])
    locked = put(engine, [1, 2, 5, 6])
    tree = engine.tree
    assert tree.inc_lock_ref(locked) == -4
    assert tree.inc_lock_ref(locked) == 0
    engine.check()
    assert (tree.evictable_size(), tree.protected_size()) == (2, 4)
    assert tree.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 2
    engine.check()
    assert hit(engine, [1, 2, 5, 6]) == 4
    # A split below a lock: both halves stay locked and unlock together.
    assert hit(engine, [1, 2, 5, 9]) == 3
    assert tree.evict(100).num_tokens_evicted == 0
    assert tree.dec_lock_ref(locked) == 0
    assert tree.dec_lock_ref(locked) == 4
    with pytest.raises(InvariantError, match="once too often"):
        tree.dec_lock_ref(locked)


def test_unlocking_once_too_often_raises() -> None:
    engine = FakeEngine()
    node = put(engine, [1, 2])
    with pytest.raises(InvariantError, match="once too often"):
        engine.tree.dec_lock_ref(node)
    assert engine.tree.dec_lock_ref(None) == engine.tree.inc_lock_ref(None) == 0
    assert engine.tree.inc_lock_ref(tree_of(engine).root_node) == 0


def test_eviction_goes_from_the_leaves_up_and_no_further_than_asked() -> None:
    engine = FakeEngine(page_size=4)
    put(engine, list(range(12)))
    put(engine, [0, 1, 2, 3, 90, 91, 92, 93])
    assert engine.tree.evict(1).num_tokens_evicted == 8  # the older leaf, whole
    engine.check()
    assert hit(engine, list(range(12))) == 4
    assert engine.tree.evict(5).num_tokens_evicted == 8
    assert engine.tree.total_size() == 0
    assert engine.allocator.available_size() == 64
    assert engine.tree.evict(1).num_tokens_evicted == 0


def eviction_order(engine: FakeEngine) -> str:
    """Names (first tokens) in the order in which leaves go."""
    order = ""
    tree = tree_of(engine)
    while tree.evictable_size():
        before = {node.key.token_ids[0] for node in tree.iter_nodes()}
        tree.evict(1)
        engine.check()
        after = {node.key.token_ids[0] for node in tree.iter_nodes()}
        (gone,) = before - after
        order += "abcd"[gone]
    return order


# Made in the order a b c d; inserted again: b twice, a once; matched last: c, then a.
@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "dbca"),
        ("lfu", "dcab"),
        ("slru", "dcba"),
        ("fifo", "abcd"),
        ("filo", "dcba"),
        ("priority", "bdca"),
    ],
)
def test_eviction_order_of_each_policy(policy: str, order: str) -> None:
    engine = FakeEngine(eviction_policy=policy)
    for name, priority in ((0, 3), (1, 0), (2, 2), (3, 1)):
        put(engine, [name, name], priority=priority)
    for name in (1, 1, 0):
        put(engine, [name, name])
    for name in (2, 0):
        assert hit(engine, [name, name]) == 2
    assert eviction_order(engine) == order


def test_priorities_below_zero_go_first_and_a_reinsert_only_raises() -> None:
    engine = FakeEngine(eviction_policy="priority")
    for name, priority in ((0, 0), (1, -5), (2, -7), (3, 1)):
        put(engine, [name, name], priority=priority)
    put(engine, [2, 2], priority=2)
    put(engine, [3, 3], priority=-9)
    assert eviction_order(engine) == "badc"


def test_both_halves_of_a_split_keep_hits_priority_and_age() -> None:
    engine = FakeEngine()
    lower = put(engine, [1, 2, 3, 4], priority=3)
    put(engine, [1, 2, 3, 4], priority=3)
    born = lower.creation_time
    upper = match(engine, [1, 2]).last_device_node
    assert upper is not None and upper is lower.parent
    for half in (upper, lower):
        assert (half.hit_count, half.priority, half.creation_time) == (2, 3, born)
    assert upper.last_access_time > lower.last_access_time


def test_page_hashes_are_divided_with_their_node() -> None:
    engine = FakeEngine(page_size=2)
    lower = put(engine, list(range(6)))
    hashes = lower.key.page_hashes(2, b"seed")
    lower.hash_value = list(hashes)
    upper = match(engine, [0, 1, 2, 3]).last_device_node
    assert upper is not None
    assert (upper.hash_value, lower.hash_value) == (hashes[:2], hashes[2:])


def test_every_policy_has_an_order_test_and_unknown_ones_raise() -> None:
    assert set(EVICT_POLICIES) == {"lru", "lfu", "slru", "fifo", "filo", "priority"}
    with pytest.raises(ValueError, match="mru"):
        FakeEngine(eviction_policy="mru")


# -- nodes that only the host holds ---------------------------------------------------------------


class DemotingTree(UnifiedRadixCache):
    """Keeps an evicted leaf as a host-only node, as the hierarchical layer will."""

    def _evict_leaf(self, node: TreeNode) -> int:
        node.data[ComponentType.FULL].host_value = torch.arange(
            10 * self.page_size, 10 * self.page_size + len(node.key)
        )
        return self._release_device(node)


def demoting_engine(page_size: int) -> FakeEngine:
    engine = FakeEngine(page_size=page_size)
    engine.tree = DemotingTree(
        CacheInitParams(
            req_to_token_pool=engine.req_pool,
            token_to_kv_pool_allocator=engine.allocator,
            page_size=page_size,
        )
    )
    return engine


@pytest.mark.parametrize("page_size", [1, 4])
def test_host_only_nodes_are_matched_split_and_taken_back(page_size: int) -> None:
    engine = demoting_engine(page_size)
    tree = engine.tree
    assert isinstance(tree, DemotingTree)
    tokens = list(range(12))
    engine.run(tokens)
    engine.run([*tokens[:4], 77, 77, 77, 77])
    assert tree.evict(8).num_tokens_evicted == 8
    engine.check()

    def ask(asked: list[int]) -> MatchResult:
        found = tree.match_prefix(MatchPrefixParams(key=tree.make_key(asked)))
        engine.kv.verify_prefix(found.device_indices, asked)
        engine.check()
        return found

    found = ask(tokens)
    assert (len(found.device_indices), found.host_hit_length) == (4, 8)
    assert found.last_host_node is found.best_match_node is not found.last_device_node
    assert found.best_match_node is not None and found.best_match_node.evicted
    with pytest.raises(InvariantError, match="nothing on the device"):
        tree.inc_lock_ref(found.best_match_node)
    found = ask([*tokens[:8], 55, 55, 55, 55])  # splits the host-only node
    assert (len(found.device_indices), found.host_hit_length) == (4, 4)
    # A request computes the first part again: the node takes its slots, the rest stays below.
    assert engine.run([*tokens[:8], 55, 55, 55, 55]) == 4
    engine.check()
    found = ask(tokens)
    assert (len(found.device_indices), found.host_hit_length) == (8, 4)
    while tree.evictable_size():
        tree.evict(1)
        engine.check()
    assert engine.allocator.available_size() == 64
    assert ask(tokens).host_hit_length == 12


def test_calls_of_the_hierarchy_do_nothing_without_tiers() -> None:
    tree = FakeEngine().tree
    tree.check_hicache_events()
    tree.prefetch_from_storage("r", None, [1, 2])
    tree.terminate_prefetch("r")
    tree.release_aborted_request("r")
    tree.flush_write_through_acks()
    tree.shutdown()
    assert tree.check_prefetch_progress("r")
    assert tree.ready_to_load_host_cache() == -1
    assert tree.pop_prefetch_loaded_tokens("r") == 0
    assert tree.take_events() == []
    assert not tree.has_pending_transfers()
    assert not tree.attach_storage_backend()[0] and not tree.detach_storage_backend()[0]
    assert not tree.clear_storage_backend()
    params = LoadBackParams(best_match_node=None, last_device_node=None, host_hit_length=0)
    loaded = tree.init_load_back(params)
    assert loaded.last_node is None and len(loaded.device_indices) == 0


# -- random operations ----------------------------------------------------------------------------


def brute_force_hit(tree: RadixCache, key: RadixKey) -> int:
    """Longest common prefix with any path of the tree, without walking as the tree does."""
    best = 0
    for node in tree.iter_nodes():
        if node.key.namespace != key.namespace:
            continue
        path = [node]
        while path[0].parent is not tree.root_node:
            assert path[0].parent is not None
            path.insert(0, path[0].parent)
        units = [unit for part in path for unit in part.key]
        common = 0
        for ours, theirs in zip(units, key):
            if ours != theirs:
                break
            common += 1
        best = max(best, common // tree.page_size * tree.page_size)
    return best


@pytest.mark.parametrize("policy", ["lru", "priority"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_eagle", [False, True])
def test_random_operations_keep_every_invariant(
    policy: str, page_size: int, is_eagle: bool
) -> None:
    rng = random.Random(page_size * 2 + is_eagle)
    engine = FakeEngine(
        size=page_size * 24, page_size=page_size, eviction_policy=policy, is_eagle=is_eagle
    )
    tree = tree_of(engine)
    locked: list[TreeNode] = []
    for _ in range(150):
        # Few distinct pages: many shared prefixes at every page size.
        pages = [rng.randint(0, 1) for _ in range(rng.randint(0, 6))]
        tokens = [page for page in pages for _ in range(page_size)]
        tokens += [rng.randint(0, 2) for _ in range(rng.randint(0, page_size))]
        extra_key = rng.choice([None, "a"])
        action = rng.random()
        if action < 0.4:
            shortfall = len(tokens) - engine.allocator.available_size()
            if shortfall <= 0 or tree.evict(shortfall).num_tokens_evicted >= shortfall:
                put(engine, tokens, extra_key, priority=rng.randint(0, 2))
        elif action < 0.6:
            expected = brute_force_hit(tree, tree.make_key(tokens, extra_key))
            assert hit(engine, tokens, extra_key) == expected
        elif action < 0.7:
            node = match(engine, tokens, extra_key).last_device_node
            assert node is not None
            tree.inc_lock_ref(node)
            locked.append(node)
        elif action < 0.85 and locked:
            tree.dec_lock_ref(locked.pop(rng.randrange(len(locked))))
        else:
            want = rng.randint(0, 4 * page_size)
            evictable, protected = tree.evictable_size(), tree.protected_size()
            assert tree.evict(want).num_tokens_evicted >= min(want, evictable)
            assert tree.protected_size() == protected
        engine.check()
    for node in locked:
        tree.dec_lock_ref(node)
    tree.evict(tree.total_size())
    engine.check()
    assert engine.allocator.available_size() == engine.allocator.size


def test_reset_forgets_everything() -> None:
    engine = FakeEngine()
    put(engine, [1, 2, 3])
    engine.tree.reset()
    engine.allocator.clear()
    assert hit(engine, [1, 2, 3]) == 0
    assert engine.tree.total_size() == 0
    put(engine, [1, 2, 3])
    assert hit(engine, [1, 2, 3]) == 3


# -- the self-check itself must be able to fail ---------------------------------------------------


def break_size(tree: RadixCache, node: TreeNode) -> None:
    tree.components[ComponentType.FULL].evictable_size += 1


def break_slot_shared(tree: RadixCache, node: TreeNode) -> None:
    assert node.parent is not None and node.parent.value is not None
    node.data[0].value = node.parent.value[: len(node.key)].clone()


def break_slot_freed(tree: RadixCache, node: TreeNode) -> None:
    assert node.value is not None
    tree.token_to_kv_pool_allocator.free(node.value)


def break_lock(tree: RadixCache, node: TreeNode) -> None:
    node.data[0].lock_ref += 1


def break_leaf_set(tree: RadixCache, node: TreeNode) -> None:
    tree.evictable_leaves.discard(node)


def break_heap(tree: RadixCache, node: TreeNode) -> None:
    node.is_in_heap = False


def break_length(tree: RadixCache, node: TreeNode) -> None:
    assert node.value is not None
    node.data[0].value = node.value[:-1]


def break_page(tree: RadixCache, node: TreeNode) -> None:
    assert node.value is not None
    node.data[0].value = node.value.flip(0)


def break_tier(tree: RadixCache, node: TreeNode) -> None:
    node.data[0].value = None


def break_link(tree: RadixCache, node: TreeNode) -> None:
    node.key = tree.make_key([8] * len(node.key))


def break_hashes(tree: RadixCache, node: TreeNode) -> None:
    node.hash_value = []


def break_key(tree: RadixCache, node: TreeNode) -> None:
    node.key = node.key[:1]


@pytest.mark.parametrize(
    "damage",
    [
        break_size,
        break_slot_shared,
        break_slot_freed,
        break_lock,
        break_leaf_set,
        break_heap,
        break_length,
        break_page,
        break_tier,
        break_link,
        break_hashes,
        break_key,
    ],
)
def test_check_invariants_finds_damage(damage: Callable[[RadixCache, TreeNode], None]) -> None:
    engine = FakeEngine(page_size=2)
    put(engine, [1, 1, 2, 2])
    node = put(engine, [1, 1, 3, 3])
    damage(tree_of(engine), node)
    with pytest.raises(InvariantError):
        engine.tree.check_invariants(0)


def test_check_invariants_finds_a_lost_slot_and_a_lock_missing_above() -> None:
    engine = FakeEngine()
    engine.allocator.alloc(1)
    engine.tree.check_invariants()
    with pytest.raises(InvariantError, match="available 63"):
        engine.tree.check_invariants(0)
    engine = FakeEngine()
    put(engine, [1, 2])
    node = put(engine, [1, 3])
    engine.tree.inc_lock_ref(node)
    assert node.parent is not None
    node.parent.data[0].lock_ref = 0
    with pytest.raises(InvariantError, match="lock_ref 0, children 1"):
        engine.tree.check_invariants()
