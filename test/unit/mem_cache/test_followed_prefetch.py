"""Requests that wait for the same pages: one fetch, whoever comes late, leaves or hangs."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq, TreeFactory

PAGE = 4
trees = pytest.mark.parametrize("make_tree", [HiRadixCache, UnifiedRadixCache, HiMambaRadixCache])
HEAD = list(range(40))
TAILS = {"a": list(range(100, 109)), "b": list(range(200, 217)), "short": [300]}


def warm_store(make_tree: TreeFactory, prompts: list[list[int]]) -> MemoryStore:
    store = MemoryStore()
    writer = engine_over(store, make_tree)
    for tokens in prompts:
        writer.serve(tokens)
    writer.settle()
    store.calls.clear()
    return store


def engine_over(store: MemoryStore, make_tree: TreeFactory, **options: object) -> HiCacheEngine:
    settings: dict[str, object] = {"size": 400, "host_size": 400, "prefetch_policy": "timeout"}
    if make_tree is HiMambaRadixCache:
        settings["num_states"] = 40
    return HiCacheEngine(page_size=PAGE, store=store, make_tree=make_tree, **(settings | options))  # type: ignore[arg-type]


def submitted(engine: HiCacheEngine, tokens: list[int], rid: str) -> HiReq:
    req = HiReq(rid=rid, origin_input_ids=tokens)
    engine.submit(req)
    return req


def pages_read(store: MemoryStore) -> int:
    return sum(len(keys) for method, keys in store.calls if method == "get kv")


def admitted_in_the_end(engine: HiCacheEngine, req: HiReq) -> int:
    """Step until a request is admitted; how much of it was cached."""
    for _ in range(12):
        if engine.admit(req):
            return len(req.prefix_indices)
        engine.controller.step_all()
        engine.tick()
    raise AssertionError(f"{req.rid} was never admitted")


def finish(engine: HiCacheEngine, req: HiReq) -> None:
    req.done_tokens = req.kv_committed_len
    assert engine.extend(req, len(req.origin_input_ids) - req.kv_committed_len)
    engine.check()
    engine.finish(req)


@trees
def test_pages_that_many_wait_for_are_read_once(make_tree: TreeFactory) -> None:
    # With states, nothing of use ends where the short one does.
    kept = [name for name in TAILS if name != "short" or make_tree is not HiMambaRadixCache]
    prompts = [HEAD + TAILS[name] for name in kept]
    store = warm_store(make_tree, prompts)
    engine = engine_over(store, make_tree)
    reqs = [submitted(engine, tokens, f"r{i}") for i, tokens in enumerate(prompts * 2)]
    assert len(engine.tree.ongoing_prefetch) == 1
    assert not any(engine.tree.check_prefetch_progress(req.rid) for req in reqs)
    for req in reqs:
        num_cached = admitted_in_the_end(engine, req)
        assert num_cached == (len(req.origin_input_ids) - 1) // PAGE * PAGE
        finish(engine, req)
    if make_tree is not HiMambaRadixCache:  # with states a span is read to its end or not at all
        in_storage = {
            tuple(tokens[:end]) for tokens in prompts for end in range(PAGE, len(tokens), PAGE)
        }
        assert pages_read(store) <= len(in_storage)
    engine.settle()
    engine.check()
    assert not engine.tree.ongoing_prefetch and not engine.tree._following


@trees
def test_a_follower_goes_on_when_the_first_one_leaves(make_tree: TreeFactory) -> None:
    prompts = [HEAD + tail for tail in TAILS.values()]
    engine = engine_over(warm_store(make_tree, prompts), make_tree)
    first, second, third = (
        submitted(engine, tokens, tokens_name) for tokens, tokens_name in zip(prompts, "abc")
    )
    engine.controller.step_query()
    engine.tick()
    engine.abort_waiting(first)
    engine.abort_waiting(third)
    assert "c" not in engine.tree._following
    assert admitted_in_the_end(engine, second) == (len(second.origin_input_ids) - 1) // PAGE * PAGE
    finish(engine, second)


def test_best_effort_waits_for_nobody() -> None:
    prompts = [HEAD + tail for tail in TAILS.values()]
    store = warm_store(HiRadixCache, prompts)
    engine = engine_over(store, HiRadixCache, prefetch_policy="best_effort")
    reqs = [submitted(engine, tokens, f"r{i}") for i, tokens in enumerate(prompts)]
    assert all(engine.admit(req) for req in reversed(reqs))
    assert not engine.tree._following


def test_slow_storage_is_waited_for_once() -> None:
    """A follower's own fetch has what the one that it waited for has left of its time."""
    prompts = [HEAD + tail for tail in TAILS.values()]
    engine = engine_over(warm_store(HiRadixCache, prompts), HiRadixCache)
    reqs = [submitted(engine, tokens, f"r{i}") for i, tokens in enumerate(prompts)]
    engine.clock.now += 1000.0
    for _ in range(3):  # nothing comes: the first is given up, and so are those that follow
        engine.tick()
        still = [req for req in reqs if not engine.admit(req)]
        reqs = still
    assert not reqs


def test_other_namespaces_and_short_heads_are_not_followed() -> None:
    prompts = [HEAD + TAILS["a"], HEAD[:4] + list(range(500, 540))]
    engine = engine_over(warm_store(HiRadixCache, prompts), HiRadixCache)
    engine.tree.storage_options = type(engine.tree.storage_options)(prefetch_threshold=8)
    for number, tokens in enumerate(prompts):
        submitted(engine, tokens, f"r{number}")
    other = HiReq(rid="other", origin_input_ids=prompts[0], extra_key="x")
    engine.submit(other)
    assert set(engine.tree.ongoing_prefetch) == {"r0", "r1", "other"}
