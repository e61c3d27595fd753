"""Storage -> host: the life of a prefetch, and what must not go wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_storage import StorageError
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.storage_threads import PrefetchOperation, read_batch_size
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq, TreeFactory
from sglang.test.fakes.hicache_model import Reduction

trees = pytest.mark.parametrize("make_tree", [HiRadixCache, UnifiedRadixCache, HiMambaRadixCache])
PAGE = 4


def prompt(num_pages: int, first: int = 0, extra: int = 1) -> list[int]:
    """Tokens of whole pages and ``extra`` more, which a match never covers."""
    return list(range(first, first + num_pages * PAGE + extra))


def warm_store(
    prompts: list[list[int]], store: MemoryStore | FaultStore | None = None, **options: object
) -> MemoryStore | FaultStore:
    """Return a store that holds these prompts."""
    store = store or MemoryStore()
    options = {"make_tree": HiMambaRadixCache, "num_states": 40} | options  # for trees of any kind
    sizes = {"size": 1000, "host_size": 1000, "max_context_len": 1000}
    writer = HiCacheEngine(page_size=PAGE, store=store, **sizes, **options)  # type: ignore[arg-type]
    for tokens in prompts:
        writer.serve(tokens)
    writer.settle()
    return store


def engine_over(store: MemoryStore | FaultStore, **options: object) -> HiCacheEngine:
    options = {"size": 160, "host_size": 160, "prefetch_policy": "wait_complete"} | options
    if options.get("make_tree") is HiMambaRadixCache:
        options = {"num_states": 40} | options
    return HiCacheEngine(page_size=PAGE, store=store, **options)  # type: ignore[arg-type]


def submitted(engine: HiCacheEngine, tokens: list[int], rid: str = "r") -> HiReq:
    req = HiReq(rid=rid, origin_input_ids=tokens)
    engine.submit(req)
    return req


def assert_nothing_held(engine: HiCacheEngine) -> None:
    """After a drain: no entries, no capacity, and host pages only in the tree."""
    engine.settle()
    engine.check()
    assert not engine.tree.ongoing_prefetch
    assert engine.tree.prefetch_tokens_occupied == 0
    in_tree = sum(len(node.key) for node in engine.tree.iter_nodes() if node.backuped)
    assert engine.host.available_size() + in_tree == engine.host.size


@trees
@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_a_fresh_instance_reads_from_a_warm_store(make_tree: TreeFactory, policy: str) -> None:
    tokens = prompt(10)
    engine = engine_over(warm_store([tokens]), make_tree=make_tree, prefetch_policy=policy)
    req = submitted(engine, tokens)
    engine.controller.step_all()
    engine.tick()
    engine.controller.step_all()
    engine.tick()
    assert engine.admit(req)
    assert (len(req.prefix_indices), req.loaded_tokens) == (40, 40)
    assert engine.extend(req, 1)
    engine.check()
    engine.check_host()
    engine.finish(req)
    assert_nothing_held(engine)


@trees
def test_aborted_prefetches_give_everything_back(make_tree: TreeFactory) -> None:
    prompts = [prompt(10, first=1000 * n) for n in range(21)]
    engine = engine_over(warm_store(prompts[20:]), make_tree=make_tree)
    for number, tokens in enumerate(prompts[:20]):
        req = submitted(engine, tokens, f"r{number}")
        for _ in range(number % 4):  # at each stage of its life
            engine.controller.step_query()
            engine.tick()
            engine.controller.step_read()
        engine.abort_waiting(req)
        engine.tree.release_aborted_request(req.rid)  # a second call does nothing
        engine.check()
    assert_nothing_held(engine)
    assert engine.serve(prompts[20]).loaded_tokens == 40


def test_abort_while_pages_are_allocated_and_unread() -> None:
    tokens = prompt(10)
    engine = engine_over(warm_store([tokens]))
    req = submitted(engine, tokens)
    engine.controller.step_query()
    engine.tick()
    assert engine.host.available_size() == 120
    engine.abort_waiting(req)
    engine.check()
    assert engine.tree.prefetch_tokens_occupied == 0
    assert_nothing_held(engine)
    assert engine.host.available_size() == 160


def test_progress_is_false_until_done_and_one_insert_follows() -> None:
    tokens = prompt(10)
    engine = engine_over(warm_store([tokens]))
    req = submitted(engine, tokens)
    seen = []
    for _ in range(3):
        seen.append(engine.tree.check_prefetch_progress(req.rid))
        engine.controller.step_query()
        engine.tick()
    engine.controller.step_all()
    engine.tick()
    seen.append(engine.tree.check_prefetch_progress(req.rid))
    assert seen == [False, False, False, True]
    assert len(list(engine.tree.iter_nodes())) == 1
    assert engine.tree.prefetch_tokens_occupied == 0


def test_nothing_planned_yet_is_not_complete() -> None:
    tokens = prompt(4)
    engine = engine_over(warm_store([tokens]))
    req = submitted(engine, tokens)
    for _ in range(3):
        engine.tick()  # the query has not run
        assert not engine.tree.check_prefetch_progress(req.rid)


def test_a_store_that_serves_half_frees_each_page_once() -> None:
    tokens = prompt(10)
    store = warm_store([tokens], FaultStore())
    assert isinstance(store, FaultStore)
    store.plans.append(FaultPlan(fault=Fault.FALSE, call="get", nth=5))
    engine = engine_over(store)
    assert engine.serve(tokens).loaded_tokens == 20
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_failed_read_ends_the_wait(num_good: int) -> None:
    tokens = prompt(6)
    store = warm_store([tokens], FaultStore())
    assert isinstance(store, FaultStore)
    store.plans.append(FaultPlan(fault=Fault.FALSE, call="get", nth=num_good))
    engine = engine_over(store)
    req = engine.serve(tokens)
    assert req.loaded_tokens == num_good * PAGE
    assert_nothing_held(engine)


def test_a_hit_below_the_threshold_is_revoked_and_ends_the_wait() -> None:
    store = warm_store([prompt(3)])
    engine = engine_over(store, extra_config='{"prefetch_threshold": 16}')
    req = engine.serve(prompt(8))
    assert req.loaded_tokens == 0
    assert_nothing_held(engine)
    assert not [call for call, _ in store.calls if call.startswith("get")]


@pytest.mark.parametrize("threshold_pages", [1, 4])
def test_a_short_host_pool_shortens_the_prefetch_or_revokes_it(threshold_pages: int) -> None:
    tokens = prompt(8)
    engine = engine_over(
        warm_store([tokens]),
        host_size=8 * PAGE,
        extra_config=f'{{"prefetch_threshold": {threshold_pages * PAGE}}}',
    )
    # Five of eight pages are taken by a node that is on the device, so it cannot be evicted.
    engine.serve(prompt(5, first=500, extra=0), rid="other")
    engine.settle()
    req = engine.serve(tokens)
    assert req.loaded_tokens == (3 * PAGE if threshold_pages == 1 else 0)
    assert_nothing_held(engine)


def test_a_miss_leaves_the_host_as_it_was_and_a_hit_evicts_only_the_shortfall() -> None:
    tokens = prompt(8)
    engine = engine_over(warm_store([tokens]), host_size=16 * PAGE)
    for number in range(8):  # 16 pages, in nodes of 2
        engine.serve(prompt(2, first=100 * (number + 1), extra=0), rid=f"f{number}")
        engine.settle()
    engine.evict_all()
    assert engine.host.available_size() == 0
    before = engine.dump()
    miss = submitted(engine, prompt(8, first=5000), "miss")
    engine.settle()
    assert engine.tree.check_prefetch_progress("miss")
    assert [row[:2] for row in engine.dump()] == [row[:2] for row in before]
    engine.abort_waiting(miss)
    # Four pages come free by themselves, so two nodes of two pages have to go.
    engine.tree.evict_host(4 * PAGE)
    req = submitted(engine, tokens, "hit")
    engine.settle()
    assert engine.tree.pop_prefetch_loaded_tokens("hit") == 8 * PAGE
    assert sum(node.key.raw[0] >= 100 or len(node.key) == 8 for node in engine.tree.iter_nodes())
    assert len(list(engine.tree.iter_nodes())) == 1 + 4
    engine.abort_waiting(req)


@trees
def test_a_late_query_of_an_earlier_attempt_is_ignored(make_tree: TreeFactory) -> None:
    first, second = prompt(8), prompt(6, first=700)
    engine = engine_over(warm_store([first, second]), make_tree=make_tree)
    old = submitted(engine, first, "x")
    engine.abort_waiting(old)
    new = submitted(engine, second, "x")
    engine.controller.step_query()  # the first one's
    engine.tick()
    assert engine.host.available_size() == engine.host.size
    assert not engine.tree.ongoing_prefetch["x"].is_allocated
    engine.controller.step_all()
    engine.tick()
    engine.controller.step_all()
    engine.tick()
    assert engine.admit(new)
    assert new.loaded_tokens == 24
    assert engine.extend(new, 1)
    engine.check()
    engine.finish(new)
    assert_nothing_held(engine)


def test_resubmitting_under_the_same_name_gives_up_the_earlier_attempt() -> None:
    tokens = prompt(8)
    engine = engine_over(warm_store([tokens]))
    submitted(engine, tokens, "x")
    engine.waiting.clear()
    submitted(engine, tokens, "x")
    assert engine.tree.prefetch_tokens_occupied == 32
    engine.check()
    assert_nothing_held(engine)


@trees
def test_namespaces_share_nothing_in_storage(make_tree: TreeFactory) -> None:
    tokens = prompt(6)
    store = MemoryStore()
    writer = engine_over(store, make_tree=HiMambaRadixCache)
    writer.serve(tokens, extra_key="a")
    writer.settle()
    engine = engine_over(store, make_tree=make_tree)
    assert engine.serve(tokens, extra_key="b").done_tokens == 0
    assert engine.serve(tokens).done_tokens == 0
    assert engine.serve(tokens, extra_key="a").loaded_tokens == 24
    assert_nothing_held(engine)


@trees
def test_pages_for_what_was_computed_meanwhile_are_adopted(make_tree: TreeFactory) -> None:
    """A host-only child must never hang below a node that only the device has."""
    tokens = prompt(8)
    engine = engine_over(
        warm_store([tokens]), make_tree=make_tree, write_policy="write_through_selective"
    )
    req = submitted(engine, tokens)
    engine.controller.step_query()
    engine.tick()
    engine.run(tokens[: 4 * PAGE])  # on the device only: hit once
    engine.controller.step_all()
    engine.tick()
    engine.check()  # what is on the host begins at the root
    assert engine.tree.pop_prefetch_loaded_tokens("r") == 16  # the other half was here
    engine.check_host()
    engine.abort_waiting(req)
    engine.evict_all()
    engine.check()
    assert engine.cached(tokens) == (0, 32)
    assert_nothing_held(engine)


@pytest.mark.parametrize("is_eagle", [False, True])
@pytest.mark.parametrize("extra", range(6))
def test_what_is_fetched_can_be_matched(is_eagle: bool, extra: int) -> None:
    """Also when the prompt ends with a page: one token must be computed, so its page is not asked
    for."""
    tokens = prompt(4, extra=extra)
    store = warm_store([prompt(6)], is_eagle=is_eagle)
    engine = engine_over(store, is_eagle=is_eagle)
    req = submitted(engine, tokens)
    engine.settle()
    fetched = sum(len(node.key) for node in engine.tree.iter_nodes())
    assert engine.admit(req)
    assert len(req.prefix_indices) == fetched == (len(tokens) - 1) // PAGE * PAGE
    assert engine.extend(req, len(tokens) - fetched)
    engine.check()


def test_a_suffix_is_fetched_in_whole_pages() -> None:
    store = warm_store([prompt(8)])
    engine = engine_over(store)
    engine.serve(prompt(2))
    store.calls.clear()
    submitted(engine, prompt(4, extra=3))
    assert [len(e.key) for e in engine.tree.ongoing_prefetch.values()] == [8]


def test_only_the_pages_before_a_missing_one_are_counted() -> None:
    tokens = prompt(3)
    store = warm_store([tokens])
    assert isinstance(store, MemoryStore)
    of_kv = [key for key in store.pages if ":" not in key]
    store.bad_keys.add(of_kv[1])  # leaves rubbish in the host page
    engine = engine_over(store)
    assert engine.serve(tokens).loaded_tokens == PAGE
    engine.check_host()
    assert_nothing_held(engine)


def test_best_effort_does_not_wait_for_a_query() -> None:
    engine = engine_over(MemoryStore(), prefetch_policy="best_effort")
    req = submitted(engine, prompt(8))
    assert engine.admit(req)  # no tick, no query
    assert engine.tree.prefetch_tokens_occupied == 0
    assert_nothing_held(engine)


def test_best_effort_takes_what_is_there_when_the_request_is_reached() -> None:
    batch = read_batch_size(1)  # these pages are tiny
    tokens = prompt(batch + 8)
    engine = engine_over(
        warm_store([tokens]),
        size=1000,
        host_size=1000,
        max_context_len=1000,
        prefetch_policy="best_effort",
    )
    req = submitted(engine, tokens)
    engine.controller.step_query()
    engine.tick()
    operation = engine.tree.ongoing_prefetch["r"].operation
    store = engine.store
    assert isinstance(store, MemoryStore)
    # The read goes in batches; the request is reached while the second one is read.
    reads = []

    def reach(method: str, keys: list[str]) -> None:
        if method == "get kv":
            reads.append(len(keys))
            if len(reads) == 2:
                assert engine.admit(req)

    store.hook = reach
    engine.controller.step_read()
    assert operation.is_done
    assert req.loaded_tokens == batch * PAGE
    assert engine.extend(req, len(tokens) - batch * PAGE)
    engine.check()
    engine.finish(req)
    assert_nothing_held(engine)


def test_timeout_grows_with_the_tokens_and_is_capped() -> None:
    config = (
        '{"prefetch_threshold": 1, "prefetch_timeout_base": 2,'
        ' "prefetch_timeout_per_ki_token": 1024, "prefetch_timeout_max": 30}'
    )
    engine = engine_over(MemoryStore(), prefetch_policy="timeout", extra_config=config)
    assert engine.tree.prefetch_timeout_s(8) == 10
    assert engine.tree.prefetch_timeout_s(1024) == 30
    req = submitted(engine, prompt(2))  # 8 tokens, and the query hangs
    engine.clock.now = 9.9
    engine.tick()
    assert not engine.tree.check_prefetch_progress(req.rid)
    engine.clock.now = 10.1
    engine.tick()
    assert engine.tree.check_prefetch_progress(req.rid)
    assert_nothing_held(engine)


def test_default_timeouts_of_the_classes() -> None:
    for make_tree, expected in ((HiRadixCache, 2.1), (UnifiedRadixCache, 1.25)):
        engine = engine_over(MemoryStore(), make_tree=make_tree)
        assert engine.tree.prefetch_timeout_s(1024) == pytest.approx(expected)


def test_wait_complete_gives_up_on_storage_that_hangs() -> None:
    engine = engine_over(MemoryStore())
    req = submitted(engine, prompt(8))
    engine.clock.now = 30
    engine.tick()
    assert not engine.tree.check_prefetch_progress(req.rid)
    engine.clock.now = 40
    engine.tick()
    assert engine.admit(req)
    assert_nothing_held(engine)


def test_capacity_limits_what_is_asked_for() -> None:
    engine = engine_over(MemoryStore(), host_size=40, size=40)
    for number in range(4):
        submitted(engine, prompt(3, first=100 * number), f"r{number}")
    # Half of the host pool, whatever the size of the device pool: the second reaches it.
    assert list(engine.tree.ongoing_prefetch) == ["r0", "r1"]
    assert engine.tree.prefetch_tokens_occupied == 24
    assert_nothing_held(engine)


@trees
def test_the_continuation_of_a_tail_that_only_the_device_has(make_tree: TreeFactory) -> None:
    """The chain of hashes goes through the tail, and the tail's pages become its host copy."""
    tokens = prompt(8)
    engine = engine_over(
        warm_store([tokens]), make_tree=make_tree, write_policy="write_through_selective"
    )
    engine.run(tokens[: 2 * PAGE])
    engine.run(tokens[: 2 * PAGE])  # backed up: hit twice
    engine.settle()
    engine.run(tokens[: 4 * PAGE])  # the tail of two pages: on the device only
    tail = engine.tree.match_prefix(MatchPrefixParams(key=engine.tree.make_key(tokens[: 4 * PAGE])))
    assert tail.last_host_node is not tail.best_match_node
    req = engine.serve(tokens)
    assert (req.done_tokens, req.loaded_tokens) == (32, 16)
    engine.check_host()
    assert_nothing_held(engine)


def test_prefix_keys_name_all_pages_before_the_fetch() -> None:
    config = '{"prefetch_threshold": 1, "hicache_storage_pass_prefix_keys": true}'
    tokens = prompt(6)
    store = warm_store([tokens])
    assert isinstance(store, MemoryStore)
    engine = engine_over(store, extra_config=config)
    engine.serve(tokens[: 2 * PAGE])
    store.prefix_keys.clear()
    engine.serve(tokens)
    hashes = engine.tree.make_key(tokens).page_hashes(
        PAGE, engine.tree._hash_seed(engine.tree.make_key(tokens)), None
    )
    assert store.prefix_keys[0] == tuple(hashes[:2])


def test_a_query_that_raises_is_a_miss_and_the_next_one_works() -> None:
    tokens = prompt(6)
    store = warm_store([tokens], FaultStore())
    assert isinstance(store, FaultStore)
    store.plans.append(FaultPlan(fault=Fault.RAISE, call="exists"))
    engine = engine_over(store)
    assert engine.serve(tokens, rid="first").loaded_tokens == 0
    engine.flush()
    assert engine.serve(tokens, rid="second").loaded_tokens == 24
    assert_nothing_held(engine)


def test_other_identities_miss() -> None:
    tokens = prompt(6)
    store = warm_store([tokens])
    for options in ({"weights_fingerprint": "w1"}, {"is_eagle": True}):
        engine = engine_over(store, **options)
        assert engine.serve(tokens).done_tokens == 0, options
    other = HiCacheEngine(page_size=2, size=160, host_size=160, store=store)
    assert other.serve(tokens).done_tokens == 0
    assert engine_over(store).serve(tokens).loaded_tokens == 24


def test_cached_tokens_split_by_source() -> None:
    """device = prefix - host, storage = min(loaded, host), host = the rest."""
    tokens = prompt(10)
    engine = engine_over(warm_store([tokens]))
    engine.serve(tokens[: 2 * PAGE], rid="device")
    req = engine.serve(tokens)
    assert (req.done_tokens, req.host_tokens, req.loaded_tokens) == (40, 32, 32)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_agree_on_a_prefetch_that_got_differently_far(stage: int) -> None:
    """Each rank reads another number of pages; both insert the smaller one and free the rest."""
    tokens = prompt(6)
    ticks, queries = Reduction(2), Reduction(2)
    engines = []
    for rank in range(2):
        store = warm_store([tokens], FaultStore())
        assert isinstance(store, FaultStore)
        store.plans.append(FaultPlan(fault=Fault.FALSE, call="get", nth=2 + 3 * rank))
        engines.append(
            engine_over(
                store,
                min_reduce=ticks.of_rank(rank),
                controller_options={"prefetch_min_reduce": queries.of_rank(rank)},
            )
        )
    with ThreadPoolExecutor(2) as pool:

        def both(function: Callable[[HiCacheEngine], object]) -> None:
            list(pool.map(function, engines))

        for engine in engines:
            submitted(engine, tokens)
        both(lambda engine: engine.controller.step_query())
        both(lambda engine: engine.tick())
        engines[0].controller.step_read()
        for _ in range(stage):
            both(lambda engine: engine.tick())
        engines[1].controller.step_read()
        for _ in range(4):
            both(lambda engine: engine.tick())
        loaded = [engine.tree.pop_prefetch_loaded_tokens("r") for engine in engines]
        assert loaded[0] == loaded[1] == 8
        assert engines[0].dump() == engines[1].dump()
        free = [engine.host.available_size() for engine in engines]
        assert free[0] == free[1] == 160 - 8
    assert ticks.num_calls[0] == ticks.num_calls[1]


def test_storage_errors_are_not_the_schedulers() -> None:
    class Broken(MemoryStore):
        def batch_get_v2(self, *args: object, **kwargs: object) -> dict:
            raise StorageError("gone")

    tokens = prompt(4)
    pages = warm_store([tokens]).pages
    engine = engine_over(Broken(pages))
    assert engine.serve(tokens).loaded_tokens == 0
    assert_nothing_held(engine)


# -- what the device has and the host has not ------------------------------------------------------


@trees
@pytest.mark.parametrize("write_policy", ["write_back", "write_through_selective"])
@pytest.mark.parametrize(
    ("num_wanted", "num_stored", "calls"),
    [(4, 4, set()), (5, 5, set()), (8, 5, {"exists"}), (8, 8, {"exists", "get kv"})],
)
def test_only_what_the_device_lacks_is_worth_a_fetch(
    make_tree: TreeFactory, write_policy: str, num_wanted: int, num_stored: int, calls: set[str]
) -> None:
    """Four pages are computed here, and two more at least are worth a fetch."""
    store = warm_store([prompt(num_stored)])
    engine = engine_over(
        store,
        make_tree=make_tree,
        write_policy=write_policy,
        extra_config=f'{{"prefetch_threshold": {2 * PAGE}}}',
    )
    engine.run(prompt(4))
    engine.settle()
    assert engine.cached(prompt(num_wanted)) == (4 * PAGE, 0)
    store.calls.clear()
    req = engine.serve(prompt(num_wanted))
    assert {call for call, _ in store.calls if call in ("exists", "get kv")} == calls
    assert req.loaded_tokens == (4 * PAGE if "get kv" in calls else 0)
    engine.check_host()
    assert_nothing_held(engine)


@pytest.mark.parametrize(("host_pages", "num_loaded"), [(5, 0), (6, 2)])
def test_a_short_host_pool_that_has_room_only_for_what_the_device_has(
    host_pages: int, num_loaded: int
) -> None:
    tokens = prompt(8)
    engine = engine_over(
        warm_store([tokens]),
        write_policy="write_back",
        host_size=host_pages * PAGE,
        extra_config=f'{{"prefetch_threshold": {2 * PAGE}}}',
    )
    engine.run(prompt(4))
    assert engine.serve(tokens).loaded_tokens == num_loaded * PAGE
    assert_nothing_held(engine)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_read_that_ends_while_a_tick_looks_at_it_is_not_thrown_away(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    tokens = prompt(10)
    reduction = None if num_ranks == 1 else lambda values: values
    engine = engine_over(warm_store([tokens]), min_reduce=reduction)
    req = submitted(engine, tokens)
    engine.controller.step_query()
    engine.tick()
    looks = [vars(PrefetchOperation)[name].fget for name in ("is_done", "completed_tokens")]

    def looking(look: Callable[[PrefetchOperation], int]) -> Callable[[PrefetchOperation], int]:
        def then_reading(operation: PrefetchOperation) -> int:
            seen = look(operation)
            engine.controller.step_read()  # the other thread gets its turn behind each look
            return seen

        return then_reading

    for name, look in zip(("is_done", "completed_tokens"), looks):
        monkeypatch.setattr(PrefetchOperation, name, property(looking(look)))
    engine.tick()
    monkeypatch.undo()
    engine.tick()
    assert engine.admit(req)
    assert req.loaded_tokens == 40
    engine.finish(req)
    assert_nothing_held(engine)
