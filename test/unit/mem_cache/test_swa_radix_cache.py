"""The tree of window and full-attention KV: where a match may end, locks, eviction, healing.

Content is checked by ``HiCacheEngine``: whatever a request looks back on must be its own tokens'.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.hicache_records import PREFETCH_POLICIES, WRITE_POLICIES
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.srt.mem_cache.tree_components.base import InvariantError, TreeNode
from sglang.srt.mem_cache.tree_components.swa import swa_data
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq
from sglang.test.fakes.hicache_model import HiCacheModel, ModelConfig

WINDOW = 6
NUM_STEPS = 90


def make(
    page_size: int = 1,
    rows: int = 64,
    host_rows: int = 64,
    window: int = WINDOW,
    **options: Any,
) -> HiCacheEngine:
    """Without storage; the host is filled only where a test lets copies move."""
    return HiCacheEngine(
        SWARadixCache,
        size=96,
        host_size=96,
        page_size=page_size,
        window=window,
        num_window_rows=rows,
        num_host_window_rows=host_rows,
        storage_backend=None,
        **options,
    )


def tree_of(engine: HiCacheEngine) -> SWARadixCache:
    assert isinstance(engine.tree, SWARadixCache)
    return engine.tree


def hit(engine: HiCacheEngine, tokens: list[int]) -> int:
    """Device tokens that a match finds; their window must be there."""
    tree = tree_of(engine)
    result = tree.match_prefix(MatchPrefixParams(key=tree.make_key(tokens)))
    num_hit = len(result.device_indices)
    rows = tree._windows.allocator.swa_rows(result.device_indices[-(WINDOW - 1) :])
    assert num_hit == 0 or (rows > 0).all()
    engine.check()
    return num_hit


def drop_rows(engine: HiCacheEngine, num_rows: int) -> int:
    """Evict window rows alone."""
    freed = tree_of(engine).evict(EvictParams(num_tokens=0, num_swa_tokens=num_rows))
    engine.check()
    return freed.num_swa_tokens_evicted


def settle(engine: HiCacheEngine) -> None:
    engine.settle()
    engine.check()


A = list(range(100, 130))


def test_a_long_prompt_keeps_its_last_window_longest() -> None:
    engine = make(write_policy="write_through_selective")  # the host does not help
    engine.run(A)
    assert hit(engine, A) == 30
    assert drop_rows(engine, 1) == 25
    # All slots are still there, and the end can be continued from.
    assert engine.tree.total_size() == 30
    assert hit(engine, A) == 30
    assert hit(engine, [*A, 1]) == 30
    # Nothing else can: a window before any other end is gone.
    assert hit(engine, A[:29]) == 0
    assert engine.cached(A[:29]) == (0, 0)
    assert hit(engine, [*A[:20], 1]) == 0
    assert drop_rows(engine, 64) == 5
    assert hit(engine, A) == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_match_needs_the_window_and_no_more(page_size: int) -> None:
    engine = make(page_size)
    engine.run(A)
    settle(engine)
    drop_rows(engine, 1)
    end = 30 // page_size * page_size
    tail = -(-(WINDOW - 1) // page_size) * page_size
    assert hit(engine, A) == end
    nodes = sorted(engine.tree.iter_nodes(), key=lambda node: len(node.key))
    assert [len(node.key) for node in nodes] == [tail, end - tail]
    assert [swa_data(node).value is None for node in nodes] == [False, True]


def test_short_prefixes_need_all_of_themselves() -> None:
    engine = make()
    engine.run([1, 2, 3])
    settle(engine)
    assert [hit(engine, [1, 2, 3][:n]) for n in (1, 2, 3)] == [1, 2, 3]
    assert drop_rows(engine, 1) == 1
    assert hit(engine, [1, 2, 3]) < 3
    drop_rows(engine, 64)
    assert hit(engine, [1, 2, 3]) == 0


def test_a_lock_holds_one_window_and_not_the_prompt_before_it() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    req = HiReq(rid="r", origin_input_ids=[*A, 7, 8])
    assert engine.admit(req)
    tree = tree_of(engine)
    assert tree.protected_size() == 30
    assert (tree.swa_protected_size(), tree.swa_evictable_size()) == (5, 25)
    [(name, pool)] = tree.side_pools().items()
    assert (name, pool.total, pool.used, pool.evictable) == ("swa", 64, 5, 25)
    assert drop_rows(engine, 64) == 25
    assert engine.extend(req, 2)
    engine.finish(req)
    settle(engine)
    assert tree.swa_protected_size() == 0
    assert hit(engine, [*A, 7, 8]) == 32


def test_a_divided_node_divides_its_locks() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    req = HiReq(rid="r", origin_input_ids=[*A, 7])
    assert engine.admit(req)
    tree = tree_of(engine)
    before = tree.swa_protected_size()
    # Cuts at every place of the locked tail, from outside in.
    for end in (27, 28, 26):
        hit(engine, A[:end])
        assert tree.swa_protected_size() == before
    engine.finish(req, is_insert=False)
    engine.check()
    assert tree.swa_protected_size() == 0
    assert tree._windows._locks == {}


@pytest.mark.parametrize("window", [1, 2, WINDOW])
def test_a_match_locks_no_row_where_a_copy_is_under_way(window: int) -> None:
    engine = make(window=window)
    tree = tree_of(engine)
    engine.run(A)
    assert next(tree.iter_nodes()).write_through_pending_id is not None
    evictable = tree.swa_evictable_size()
    tree.match_prefix(MatchPrefixParams(key=tree.make_key(A[:20])))
    assert tree.swa_evictable_size() == evictable
    settle(engine)
    assert tree.swa_evictable_size() == 30


def test_locks_of_several_users_reach_as_far_as_each_needs() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    tree = tree_of(engine)
    shorter = HiReq(rid="a", origin_input_ids=[*A[:26], 1])
    longer = HiReq(rid="b", origin_input_ids=[*A, 2])
    assert engine.admit(shorter) and engine.admit(longer)
    assert tree.swa_protected_size() == 9  # positions 21 .. 30
    engine.finish(shorter, is_insert=False)
    assert tree.swa_protected_size() == 5
    engine.finish(longer, is_insert=False)
    assert tree.swa_protected_size() == 0
    engine.check()


def test_computing_again_gives_a_node_its_rows_back_in_place() -> None:
    engine = make(write_policy="write_through_selective")  # the host does not help
    engine.run(A)
    drop_rows(engine, 1)
    tree = tree_of(engine)
    user = HiReq(rid="user", origin_input_ids=[*A, 7])
    assert engine.admit(user)
    slots = tree._path_indices(user.last_node)
    # Another prompt needs a window in the middle, so it computes all of that again.
    other = HiReq(rid="other", origin_input_ids=[*A[:20], 1])
    assert engine.admit(other) and len(other.prefix_indices) == 0
    assert engine.extend(other, 21)
    engine.tree.cache_unfinished_req(other)
    engine.check()
    assert hit(engine, A[:20]) == 20
    # The first request's slots are what they were: only their rows came back.
    assert torch.equal(tree._path_indices(user.last_node), slots)
    assert engine.extend(user, 1)
    for req in (user, other):
        engine.finish(req)
    settle(engine)
    assert (hit(engine, A[:20]), hit(engine, [*A, 7])) == (20, 31)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_gives_back_the_rows_behind_its_window(page_size: int) -> None:
    engine = make(page_size, rows=48)
    windows = tree_of(engine)._windows
    req = HiReq(rid="r", origin_input_ids=A[:3])
    assert engine.admit(req) and engine.extend(req, 3)
    for token in range(60):
        req.output_ids.append(token)
        assert engine.extend(req, 1)
        engine.check()
        held = windows.allocator.size_swa - windows.allocator.available_swa_size()
        assert held <= windows.allocator.rows_of_decode(1)
    # What is cached of it ends where a window is.
    engine.finish(req)
    settle(engine)
    whole = (63 // page_size) * page_size
    assert hit(engine, req.all_ids) == whole


def test_a_request_lets_go_of_the_window_of_its_prompt() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    req = HiReq(rid="r", origin_input_ids=[*A, 7])
    assert engine.admit(req) and engine.extend(req, 1)
    engine.tree.cache_unfinished_req(req)
    settle(engine)
    tree = tree_of(engine)
    held = []
    for token in range(9):
        req.output_ids.append(token)
        assert engine.extend(req, 1)
        held.append(tree.swa_protected_size())
    # From the sixth token on the window holds nothing of the prompt.
    assert held == [5, 5, 5, 5, 5, 0, 0, 0, 0]
    drop_rows(engine, 96)
    req.output_ids.append(9)
    assert engine.extend(req, 1)
    engine.check()
    engine.finish(req)
    settle(engine)
    assert tree.swa_protected_size() == 0
    assert hit(engine, req.all_ids) == 41


def test_full_eviction_takes_the_rows_along() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    tree = tree_of(engine)
    tree.evict(96)
    engine.check()
    assert tree.total_size() == 0 and tree.swa_evictable_size() == 0
    assert tree._windows.allocator.available_swa_size() == 64


def test_what_goes_for_its_rows_counts_as_evicted() -> None:
    engine = make()
    tree, counted = tree_of(engine), Counter[str]()

    def count(name: str, amount: float, **labels: str) -> None:
        counted[name] += int(amount)

    tree._metrics = count
    engine.run(A[:2])  # a leaf shorter than the window: nothing could end there without its rows
    settle(engine)
    held = tree.evictable_size()
    while tree.swa_evictable_size():
        drop_rows(engine, 1)
    assert counted["evicted_tokens"] == held - tree.evictable_size() > 0


def test_least_recently_used_rows_go_first() -> None:
    engine = make()
    first, second = [1] * 12, [2] * 12
    engine.run(first)
    engine.run(second)
    settle(engine)
    hit(engine, first)
    assert drop_rows(engine, 12) == 12
    assert (hit(engine, first), hit(engine, second)) == (12, 0)


def test_rows_that_are_copied_to_the_host_stay_until_they_are() -> None:
    engine = make()
    engine.run(A)  # its backup is queued
    tree = tree_of(engine)
    hit(engine, A[:12])  # divides the node that is being copied
    assert tree.swa_evictable_size() == 0
    assert drop_rows(engine, 64) == 0
    settle(engine)
    assert tree.swa_protected_size() == 0
    engine.check_host()
    assert drop_rows(engine, 64) == 30


def test_only_the_window_comes_back_from_the_host() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    engine.evict_all()
    tree = tree_of(engine)
    assert tree._windows.allocator.available_swa_size() == 64
    req = HiReq(rid="r", origin_input_ids=[*A, 7])
    assert engine.admit(req) and req.host_tokens == 30
    assert 64 - tree._windows.allocator.available_swa_size() == 5
    settle(engine)
    assert engine.extend(req, 1)
    engine.check()
    engine.finish(req)
    settle(engine)


def test_a_window_that_only_the_host_has_is_loaded_beside_resident_slots() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    other = HiReq(rid="other", origin_input_ids=A[:28])
    assert engine.admit(other)  # holds the slots, and the window before 27
    drop_rows(engine, 64)
    req = HiReq(rid="r", origin_input_ids=[*A[:20], 9])
    assert engine.admit(req)
    assert len(req.prefix_indices) == 20 and req.host_tokens == 20
    settle(engine)
    assert engine.extend(req, 1)
    engine.check()
    for running in (req, other):
        engine.finish(running, is_insert=False)
    settle(engine)


def test_a_window_comes_back_above_an_end_that_the_host_does_not_have() -> None:
    engine = make()
    engine.run(A[:20])
    settle(engine)
    drop_rows(engine, 64)
    assert engine.cached(A[:20]) == (0, 20)
    # Computed behind it, and not copied to the host yet.
    req = HiReq(rid="r", origin_input_ids=[*A[:20], 1, 2, 3])
    assert engine.admit(req) and engine.extend(req, 3)
    engine.tree.write_policy = "write_back"
    engine.finish(req)
    tree = tree_of(engine)
    for _ in range(4):
        engine.controller.step_all()
        engine.tick()
    lower = tree.match_prefix(MatchPrefixParams(key=tree.make_key(req.all_ids))).last_device_node
    assert lower is not None and lower.parent is not None and not lower.backuped
    tree._windows.drop_rows(lower.parent)
    engine.check()
    again = HiReq(rid="again", origin_input_ids=[*req.all_ids, 4])
    assert engine.admit(again) and len(again.prefix_indices) == 23
    settle(engine)
    assert engine.extend(again, 1)
    engine.check()
    engine.finish(again)
    settle(engine)


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_rows_of_an_inner_node_are_saved_before_they_go_alone(write_policy: str) -> None:
    engine = make(write_policy=write_policy)
    head = A[:20]
    engine.run(head)
    engine.run([*head, *range(50, 55)])
    settle(engine)
    assert drop_rows(engine, 20) == 20
    settle(engine)
    assert engine.cached([*head, 9]) == (0, 20)
    assert engine.run([*head, 9]) == 20  # read back by what verifies each window
    settle(engine)
    engine.check_host()


def test_rows_before_the_last_window_of_a_long_leaf_are_saved_too() -> None:
    engine = make(write_policy="write_back")
    engine.run(A)
    assert drop_rows(engine, 25) == 25
    settle(engine)
    assert (hit(engine, A), engine.cached(A[:25])) == (30, (0, 25))
    engine.check_host()


@pytest.mark.parametrize("host_rows", [14, 18])
def test_rows_to_be_loaded_stay_while_room_is_made_for_them(host_rows: int) -> None:
    engine = make(write_policy="write_back", rows=96, host_rows=host_rows)
    prompts = [A[:12], *([n, *A[:4]] for n in range(18))]
    engine.run(A[:9])
    engine.run(prompts[0])
    engine.evict_all()
    for tokens in prompts[1:]:
        engine.run(tokens)
    settle(engine)
    # Twelve slots, of which six are free: several others go to the host, their windows too.
    again = HiReq(rid="again", origin_input_ids=[*prompts[0], 7])
    engine.submit(again)
    assert engine.admit(again) and again.host_tokens == 12
    assert engine.extend(again, 1)  # looks at the window
    engine.check()
    engine.finish(again)
    settle(engine)
    engine.check_host()


def test_without_room_on_the_host_slots_are_backed_up_without_their_rows() -> None:
    engine = make(host_rows=4)
    engine.run(A)
    settle(engine)
    assert all(node.backuped for node in engine.tree.iter_nodes())
    assert all(swa_data(node).host_value is None for node in engine.tree.iter_nodes())
    engine.evict_all()
    assert (engine.tree.total_size(), hit(engine, A)) == (0, 0)


def test_rows_that_find_room_later_are_backed_up_later() -> None:
    engine = make(host_rows=32)
    engine.run(A)
    settle(engine)
    engine.run([5] * 30)  # takes the room of the first prompt's rows
    settle(engine)
    engine.run(A)  # seen again
    settle(engine)
    engine.check_host()
    engine.evict_all()
    assert engine.cached(A) == (0, 30)


def some_node(engine: HiCacheEngine) -> TreeNode:
    return max(engine.tree.iter_nodes(), key=lambda node: len(node.key))


def test_the_self_check_sees_what_is_wrong() -> None:
    engine = make()
    engine.run(A)
    settle(engine)
    tree = tree_of(engine)
    windows = tree._windows
    node = some_node(engine)
    rows = swa_data(node).value
    assert rows is not None
    swa_data(node).value = rows.flip(0)
    with pytest.raises(InvariantError, match="its slots"):
        tree.check_invariants(0)
    swa_data(node).value = rows
    windows.evictable_size -= 1
    with pytest.raises(InvariantError, match="evictable"):
        tree.check_invariants(0)
    windows.evictable_size += 1
    lost = windows.allocator.swa_allocator.alloc(1)
    assert lost is not None
    with pytest.raises(InvariantError, match="window rows"):
        tree.check_invariants(0)
    windows.allocator.swa_allocator.free(lost)
    tree.check_invariants(0)
    with pytest.raises(InvariantError, match="once too often"):
        tree.dec_lock_ref(node)


# -- random lives --------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """The faults of the stores are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def model_config(page_size: int, **options: Any) -> ModelConfig:
    return ModelConfig(
        make_tree=SWARadixCache,
        page_size=page_size,
        window={1: 3, 4: 6, 16: 40}[page_size],
        window_pages=11,
        host_window_pages=10,
        **options,
    )


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_random_lives(quiet: None, write_policy: str, prefetch_policy: str) -> None:
    for seed, (page_size, is_eagle) in enumerate(zip((1, 4, 16), itertools.cycle((True, False)))):
        config = model_config(
            page_size,
            is_eagle=is_eagle,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
        )
        HiCacheModel(config, seed).run(NUM_STEPS)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
def test_two_ranks_stay_in_step(quiet: None, write_policy: str) -> None:
    HiCacheModel(model_config(4, write_policy=write_policy, num_ranks=2), 3).run(NUM_STEPS)


def test_windows_come_back_from_storage(quiet: None) -> None:
    """Lives that get much out of every tier, or the ones above would prove nothing."""
    config = model_config(4, prefetch_policy="wait_complete", with_faults=False)
    counts: Counter[str] = Counter()
    for seed in (7, 8):
        model = HiCacheModel(config, seed)
        model.run(5 * NUM_STEPS)
        counts.update(model.counts)
        counts["reused"] += model.num_reused
    assert counts["reused"] > 100, counts
    assert counts["prefetched_tokens"] > 20, counts
    assert counts["load_back_tokens"] > 20, counts
