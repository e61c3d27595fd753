"""Request lives over the caches: chunks, finish, abort, retract, duplicates, pool equations."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams, InsertParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.page_key import RadixKey
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.mem_cache.tree_components.base import InvariantError
from sglang.test.fakes.fake_kv import FakeEngine, FakeKV, FakeReq

page_sizes = pytest.mark.parametrize("page_size", [1, 4, 16])


def started(engine: FakeEngine, tokens: list[int], num_tokens: int, extra: int = 0) -> FakeReq:
    req = FakeReq(rid="r", origin_input_ids=tokens)
    assert engine.admit(req)
    assert engine.extend(req, num_tokens, extra)
    engine.check()
    return req


@page_sizes
@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("disable", [False, True])
@pytest.mark.parametrize("over_allocate", [0, 1, 5])
@pytest.mark.parametrize("is_insert", [True, False])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_finish_matrix_gives_back_exactly_what_the_tree_does_not_keep(
    page_size: int,
    is_eagle: bool,
    disable: bool,
    over_allocate: int,
    is_insert: bool,
    num_chunks: int,
) -> None:
    """Middle chunks, decode, then finish (insert) or abort/retract (no insert)."""
    engine = FakeEngine(size=160, page_size=page_size, is_eagle=is_eagle, disable=disable)
    tokens = list(range(30))
    req = FakeReq(rid="r", origin_input_ids=tokens)
    assert engine.admit(req)
    in_tree = 0
    for _ in range(num_chunks):
        assert engine.extend(req, 7, over_allocate)
        engine.tree.cache_unfinished_req(req, chunked=True)
        units = req.kv_committed_len - is_eagle
        in_tree = 0 if disable else units // page_size * page_size
        assert req.cache_protected_len == engine.tree.protected_size() == in_tree
        assert len(req.prefix_indices) == req.kv_committed_len
        engine.check()
    assert engine.extend(req, 30 - req.kv_committed_len, over_allocate)
    req.output_ids = [100, 101, 102]
    assert engine.extend(req, 2)
    engine.check()
    committed = req.kv_committed_len
    engine.finish(req, is_insert)
    engine.check()
    if is_insert and not disable:
        in_tree = (committed - is_eagle) // page_size * page_size
    assert engine.tree.evictable_size() == in_tree
    assert engine.tree.protected_size() == 0
    assert engine.allocator.available_size() == 160 - in_tree
    assert req.last_node is None and len(req.prefix_indices) == 0
    # Once more changes nothing, also while the row is still there.
    engine.tree.cache_finished_req(req)
    engine.check()


def test_a_second_finish_before_the_row_is_freed_does_nothing() -> None:
    for disable in (False, True):
        engine = FakeEngine(disable=disable)
        req = started(engine, [1, 2, 3], 3)
        engine.tree.cache_finished_req(req)
        engine.tree.cache_finished_req(req)
        engine.tree.check_invariants(0)


@page_sizes
def test_two_requests_that_compute_the_same_tokens_end_with_one_copy(page_size: int) -> None:
    engine = FakeEngine(size=256, page_size=page_size)
    tokens = list(range(37))
    first, second = started(engine, tokens, 37), started(engine, tokens, 35)
    engine.tree.cache_unfinished_req(first)
    engine.check()
    before = engine.req_pool.read(second.req_pool_idx or 0, 0, 35)
    engine.tree.cache_unfinished_req(second, chunked=True)
    engine.check()
    aligned = 35 // page_size * page_size
    assert second.cache_protected_len == aligned
    assert torch.equal(second.prefix_indices[:aligned], first.prefix_indices[:aligned])
    assert torch.equal(second.prefix_indices[aligned:], before[aligned:])
    row = engine.req_pool.read(second.req_pool_idx or 0, 0, 35)
    assert torch.equal(row, second.prefix_indices)
    assert engine.extend(second, 2)
    engine.finish(first)
    engine.check()
    engine.finish(second)
    engine.check()
    assert engine.tree.total_size() == 37 // page_size * page_size


@page_sizes
def test_a_chunk_goes_on_in_the_page_it_left_open(page_size: int) -> None:
    engine = FakeEngine(size=128, page_size=page_size)
    req = FakeReq(rid="r", origin_input_ids=list(range(41)))
    assert engine.admit(req)
    for num_tokens in (3, 9, 1, 16, 12):
        assert engine.extend(req, num_tokens)
        engine.tree.cache_unfinished_req(req, chunked=True)
        engine.check()
    engine.finish(req)
    assert engine.run(list(range(41))) == 40 // page_size * page_size
    engine.check()


def test_a_finished_prompt_is_reused_and_its_answer_too() -> None:
    engine = FakeEngine(page_size=4)
    req = started(engine, list(range(10)), 10)
    req.output_ids = [50, 51, 52]
    assert engine.extend(req, 2)  # the last sampled token has no KV yet
    engine.finish(req)
    assert engine.run([*range(10), 50, 51, 52, 53]) == 12
    assert engine.run([*range(10), 50, 99, 52, 53]) == 8
    engine.check()


def test_retracted_requests_find_their_tokens_again() -> None:
    engine = FakeEngine(size=32, page_size=4)
    req = started(engine, list(range(10)), 10)
    req.output_ids = [60, 61, 62, 63]
    assert engine.extend(req, 3)
    engine.finish(req)
    engine.check()
    assert engine.admit(req)
    assert req.kv_committed_len == 12
    assert engine.extend(req, 1)
    engine.check()
    engine.finish(req)


def test_requests_of_other_namespaces_share_nothing() -> None:
    engine = FakeEngine()
    assert engine.run([1, 2, 3]) == 0
    assert engine.run([1, 2, 3], "a") == 0
    assert engine.run([1, 2, 3], "a") == 2
    assert engine.run([1, 2, 3]) == 2


def test_kv_of_two_weights_is_not_inserted() -> None:
    engine = FakeEngine(size=32, weights_fingerprint="w1")
    req = FakeReq(rid="r", origin_input_ids=list(range(12)))
    assert engine.admit(req)
    assert engine.extend(req, 4)
    engine.tree.cache_unfinished_req(req, chunked=True)
    assert req.cache_protected_len == 4
    engine.tree.set_weights_fingerprint("w2")
    assert engine.extend(req, 4)
    engine.tree.cache_unfinished_req(req, chunked=True)
    assert req.cache_protected_len == 4 and len(req.prefix_indices) == 8
    engine.tree.check_invariants(engine.num_private_slots())
    engine.finish(req)
    engine.check()
    assert engine.tree.total_size() == 4
    assert engine.run(list(range(12))) == 0
    engine.check()


def test_a_request_without_a_row_is_refused_or_only_unlocked() -> None:
    for disable in (False, True):
        engine = FakeEngine(disable=disable)
        req = FakeReq(rid="r", origin_input_ids=[1, 2])
        with pytest.raises(RuntimeError, match="no row"):
            engine.tree.cache_unfinished_req(req)
        engine.tree.cache_finished_req(req)
        engine.tree.check_invariants(0)


def test_a_request_that_lost_its_locked_prefix_raises() -> None:
    engine = FakeEngine()
    req = started(engine, [1, 2, 3, 4], 3)
    engine.tree.cache_unfinished_req(req)
    assert engine.extend(req, 1)
    req.extra_key = "another"
    with pytest.raises(InvariantError, match="locked 3 tokens and the tree has 0"):
        engine.tree.cache_finished_req(req)


def test_registry_chooses_and_page_sizes_must_agree() -> None:
    engine = FakeEngine(page_size=4)
    assert type(engine.tree) is RadixCache
    assert type(FakeEngine(disable=True).tree) is ChunkCache
    with pytest.raises(ValueError, match="page size 1"):
        create_tree_cache(
            CacheInitParams(
                req_to_token_pool=engine.req_pool,
                token_to_kv_pool_allocator=engine.allocator,
                page_size=1,
            )
        )


def test_chunk_cache_keeps_nothing() -> None:
    engine = FakeEngine(disable=True)
    tree = engine.tree
    assert engine.run([1, 2, 3]) == engine.run([1, 2, 3]) == 0
    tree.reset()
    assert tree.evict(5).num_tokens_evicted == 0
    assert tree.inc_lock_ref(None) == tree.dec_lock_ref(None) == tree.total_size() == 0
    with pytest.raises(RuntimeError, match="without a tree"):
        tree.insert(InsertParams(key=RadixKey([1]), value=torch.tensor([1])))
    engine.allocator.alloc(1)
    with pytest.raises(InvariantError, match="available 63"):
        tree.check_invariants(0)


def test_the_content_check_sees_a_foreign_slot() -> None:
    engine = FakeEngine()
    req = started(engine, [1, 2, 3, 4], 4)
    other = started(engine, [1, 2, 3, 5], 4)
    foreign = engine.req_pool.read(other.req_pool_idx or 0, 3, 4)
    engine.req_pool.write(req.req_pool_idx or 0, 3, foreign)
    with pytest.raises(AssertionError, match="position 3"):
        engine.check()


def test_fake_content_depends_on_all_it_should() -> None:
    kv, draft = FakeKV(8, 1), FakeKV(8, 1, is_draft=True)
    slots = torch.tensor([3, 1])
    kv.write_prefix(slots, [5, 6], 0, "ns", "w")
    kv.verify_prefix(slots, [5, 6, 7], "ns", "w")
    for wrong in (([5, 7], "ns", "w"), ([5, 6], None, "w"), ([5, 6], "ns", "v")):
        with pytest.raises(AssertionError, match="holds"):
            kv.verify_prefix(slots, *wrong)
    assert kv.get_key_buffer(0)[3] != kv.get_key_buffer(1)[3]
    draft.write_prefix(slots, [5, 6, 7])
    draft.verify_prefix(slots, [5, 6, 7])
    with pytest.raises(AssertionError, match="position 1"):
        draft.verify_prefix(slots, [5, 6, 8])


@page_sizes
@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("disable", [False, True])
def test_random_request_lives_in_a_small_pool(
    page_size: int, is_eagle: bool, disable: bool
) -> None:
    """Admission, chunks, decode, finish, abort and retraction in any order; nothing leaks."""
    rng = random.Random(100 * page_size + 10 * is_eagle + disable)
    engine = FakeEngine(
        size=page_size * 12 + 16 // page_size * page_size * 2,
        page_size=page_size,
        num_reqs=4,
        is_eagle=is_eagle,
        disable=disable,
    )
    waiting: list[FakeReq] = []
    for step in range(250):
        action = rng.random()
        if action < 0.3:
            pages = [rng.randint(0, 1) for _ in range(rng.randint(0, 4))]
            tokens = [page for page in pages for _ in range(page_size)] + [rng.randint(0, 2)]
            req = FakeReq(f"r{step}", tokens, extra_key=rng.choice([None, "a"]))
            if waiting and rng.random() < 0.5:
                req = waiting.pop()
            if not engine.admit(req):
                waiting.append(req)
        elif engine.running:
            req = rng.choice(engine.running)
            left = len(req.all_ids) - req.kv_committed_len
            if action < 0.7:
                if left <= 0:
                    req.output_ids.append(rng.randint(0, 1))
                    left = 1
                num_tokens = rng.randint(1, left)
                if not engine.extend(req, num_tokens, rng.randint(0, 3)):
                    engine.finish(req, is_insert=rng.random() < 0.5)  # retraction
                    waiting.append(req)
                elif rng.random() < 0.6:
                    engine.tree.cache_unfinished_req(req, chunked=num_tokens < left)
            else:
                engine.finish(req, is_insert=rng.random() < 0.7)
        engine.check()
    for req in list(engine.running):
        engine.finish(req)
        engine.check()
    engine.tree.evict(engine.tree.total_size())
    assert engine.allocator.available_size() == engine.allocator.size
