"""Recurrent states on host and in storage: where a prefix may end, and whose the slots are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_key import draft_page_key, state_page_key
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.tree_components.base import ComponentType, TreeNode
from sglang.test.fakes.controller_rig import DRAFT_DIGEST, MemoryStore
from sglang.test.fakes.fake_kv import FakeKV
from sglang.test.fakes.fake_states import FakeStates, TieredStates
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq

PAGE = 4


def prompt(num_pages: int, first: int = 100, extra: int = 1) -> list[int]:
    return list(range(first, first + num_pages * PAGE + extra))


def engine_over(store: MemoryStore | None = None, **options: Any) -> HiCacheEngine:
    options = {
        "size": 160,
        "host_size": 160,
        "num_states": 12,
        "prefetch_policy": "wait_complete",
        "extra_config": '{"prefetch_threshold": 1}',
        **options,
    }
    return HiCacheEngine(HiMambaRadixCache, page_size=PAGE, store=store, **options)


def states_of(engine: HiCacheEngine) -> TieredStates:
    assert engine.states is not None
    return engine.states


def warm_store(*prompts: list[int]) -> MemoryStore:
    """Storage after another process has served these prompts, one after the other."""
    store = MemoryStore()
    writer = engine_over(store)
    for tokens in prompts:
        writer.run(tokens)
        writer.settle()
    return store


def hashes_of(engine: HiCacheEngine, tokens: list[int]) -> list[str]:
    key = engine.tree.make_key(tokens).page_aligned(PAGE)
    return [str(page_hash) for page_hash in engine.controller.page_hashes(key, None)]


def state_keys(engine: HiCacheEngine, tokens: list[int]) -> list[str]:
    return [state_page_key(page_hash) for page_hash in hashes_of(engine, tokens)]  # type: ignore


def hit_of(store: MemoryStore, tokens: list[int], **options: Any) -> int:
    """Tokens that a new process begins with, all of them from storage, which stays as it is."""
    engine = engine_over(MemoryStore(dict(store.pages)), **options)
    req = engine.serve(tokens)
    assert_idle(engine)
    assert req.loaded_tokens >= req.done_tokens
    return req.done_tokens


def assert_idle(engine: HiCacheEngine) -> None:
    """Everything is over, and every slot of every pool is in the tree or free."""
    engine.settle()
    engine.check()
    engine.check_host()
    tree = engine.tree
    assert not tree.has_pending_transfers() and tree.prefetch_tokens_occupied == 0
    assert tree._num_returning_pages == 0
    nodes = list(tree.iter_nodes())
    on_host = sum(len(node.key) for node in nodes if node.backuped)
    assert engine.host.available_size() + on_host == engine.host.size
    states = sum(node.data[ComponentType.MAMBA].host_value is not None for node in nodes)
    assert states_of(engine).host.available_size() + states == states_of(engine).host.size


def node_ending(engine: HiCacheEngine, num_tokens: int) -> TreeNode:
    """The node of the only path that ends after so many tokens."""
    for node in engine.tree.iter_nodes():
        end, current = 0, node
        while current.parent is not None:
            end, current = end + len(current.key), current.parent
        if end == num_tokens:
            return node
    raise AssertionError(f"no node ends at {num_tokens}")


def test_usage_counts_states_of_requests_and_snapshots() -> None:
    engine = engine_over()
    rows = engine.tree.req_to_token_pool
    engine.run(prompt(6))
    engine.settle()
    pool = engine.tree.side_pools()["mamba"]
    assert (pool.total, pool.used) == (12 + rows.size, 0) and pool.evictable > 0
    req = HiReq(rid="r", origin_input_ids=prompt(6))
    assert engine.admit(req)
    busy = engine.tree.side_pools()["mamba"]
    # Its own state, and the snapshot that it begins with.
    assert (busy.used, busy.evictable) == (2, pool.evictable - 1)
    engine.finish(req)
    assert engine.tree.side_pools()["mamba"].used == 0


# -- through storage ------------------------------------------------------------------------------


def test_a_state_comes_back_from_storage_as_it_was() -> None:
    tokens = prompt(6)
    store = warm_store(tokens)
    engine = engine_over(store)
    assert store.pages.keys() >= {state_keys(engine, tokens)[5]}
    assert sum(key.startswith("m:") for key in store.pages) == 1
    req = engine.serve(tokens)  # its first forward looks at the state, layer by layer
    assert (req.done_tokens, req.loaded_tokens, req.host_tokens) == (24, 24, 24)
    assert_idle(engine)


def test_the_state_is_there_before_the_page_that_it_belongs_to() -> None:
    store = warm_store(prompt(3))
    writes = [method for method, _ in store.calls if method.startswith("set")]
    assert writes == ["set mamba", "set kv"]


def test_the_state_is_read_before_any_page_of_kv() -> None:
    tokens = prompt(3)
    store = warm_store(tokens)
    store.calls.clear()
    engine_over(store).serve(tokens)
    reads = [method for method, _ in store.calls if method.startswith("get")]
    assert reads == ["get mamba", "get kv"]


def test_a_hit_ends_at_the_deepest_state() -> None:
    tokens = prompt(6)
    store = warm_store(tokens[: 2 * PAGE + 1], tokens[: 5 * PAGE + 1], tokens)
    engine = engine_over(store)
    keys = state_keys(engine, tokens)
    assert [key in store.pages for key in keys] == [False, True, False, False, True, True]
    assert hit_of(store, tokens) == 24
    del store.pages[keys[5]]
    assert hit_of(store, tokens) == 20
    del store.pages[keys[4]]
    assert hit_of(store, tokens) == 8


def test_without_a_state_nothing_is_found_and_nothing_is_taken() -> None:
    tokens = prompt(6)
    store = warm_store(tokens)
    del store.pages[state_keys(engine_over(), tokens)[5]]
    engine = engine_over(store)
    engine.submit(HiReq(rid="r", origin_input_ids=tokens))
    engine.settle()
    assert not engine.tree.ongoing_prefetch
    assert engine.host.available_size() == engine.host.size
    assert states_of(engine).host.available_size() == states_of(engine).host.size
    assert not [method for method, _ in store.calls if method.startswith("get")]


@pytest.mark.parametrize("num_tokens", range(4 * PAGE, 5 * PAGE + 1))
def test_every_length_finds_all_that_it_may(num_tokens: int) -> None:
    """A prefix ends one token before the prompt does, at a page end, at a state."""
    tokens = prompt(5)[:num_tokens]
    store = warm_store(tokens)
    end = num_tokens // PAGE * PAGE
    # The state after all of it cannot be used by the same prompt, only by longer ones.
    assert hit_of(store, tokens) == (end if num_tokens > end else 0)
    assert hit_of(store, [*tokens[:end], 7, 8]) == end


@pytest.mark.parametrize("pool", ["kv", "mamba"])
@pytest.mark.parametrize("fault", ["missing", "bad", "raises"])
def test_a_span_that_does_not_come_whole_is_not_taken(pool: str, fault: str) -> None:
    """Least of all with the state of its end."""
    tokens = prompt(5)
    store = warm_store(tokens)
    engine = engine_over(store)
    key = hashes_of(engine, tokens)[3] if pool == "kv" else state_keys(engine, tokens)[4]

    def disturb(method: str, keys: list[str]) -> None:
        if method == f"get {pool}":
            if fault == "raises":
                raise OSError(5, "input/output error")
            store.pages.pop(key)

    if fault == "bad":
        store.bad_keys.add(key)
    else:
        store.hook = disturb
    req = engine.serve(tokens)
    assert (req.done_tokens, req.loaded_tokens) == (0, 0)
    store.hook = None
    assert_idle(engine)
    nodes = list(engine.tree.iter_nodes())
    assert [len(node.key) for node in nodes] == [20]  # what was computed


def test_a_state_that_was_not_written_keeps_its_page_back_until_it_is() -> None:
    tokens = prompt(4)
    store = MemoryStore()
    engine = engine_over(store)
    hashes, key = hashes_of(engine, tokens), state_keys(engine, tokens)[3]
    store.bad_keys.add(key)
    engine.run(tokens)
    engine.settle()
    assert [page_hash in store.pages for page_hash in hashes] == [True, True, True, False]
    assert node_ending(engine, 16).unstored_from == 3
    store.bad_keys.clear()
    engine.run(tokens)  # a hit makes up for it
    assert_idle(engine)
    assert hit_of(store, tokens) == 16


def test_little_room_on_the_host_shortens_a_hit_to_an_earlier_state() -> None:
    tokens = prompt(8)
    store = warm_store(tokens[: 3 * PAGE + 1], tokens[: 6 * PAGE + 1], tokens)
    assert hit_of(store, tokens, host_size=7 * PAGE) == 24
    assert hit_of(store, tokens, host_size=5 * PAGE) == 12
    assert hit_of(store, tokens, host_size=2 * PAGE) == 0


def test_ranks_intersect_where_prefixes_may_end() -> None:
    """The smaller of two deepest ends need not be one of both ranks."""
    tokens = prompt(6)
    store = warm_store(tokens[: 2 * PAGE + 1], tokens[: 4 * PAGE + 1], tokens)
    # The other rank: KV of all, states after 2 and 5 pages.
    others = [False, True, False, False, True, False]
    vectors: list[list[int]] = []

    def reduce(values: list[int]) -> list[int]:
        vectors.append(values)
        return [min(mine, int(other)) for mine, other in zip(values, others)]

    assert hit_of(store, tokens, controller_options={"prefetch_min_reduce": reduce}) == 8
    assert vectors == [[0, 1, 0, 1, 0, 1]]


def test_ranks_that_read_unequally_take_the_same() -> None:
    """One rank has all of a span, another one does not: neither takes it, both free alike."""
    tokens = prompt(5)
    store = warm_store(tokens)
    released: list[int] = []

    def reduce(values: list[int]) -> list[int]:
        if len(values) == 6:
            released.append(values[5])
        # Of the second vectors those of a prefetch are [completed, done, stop].
        return [PAGE * 2, values[1], values[2]] if len(values) == 3 else values

    engine = engine_over(store, min_reduce=reduce)
    req = HiReq(rid="r", origin_input_ids=tokens)
    engine.submit(req)
    engine.settle()
    assert not engine.tree.ongoing_prefetch
    assert list(engine.tree.iter_nodes()) == []
    assert sum(released) == 1
    assert_idle(engine)


# -- what came later than its KV ------------------------------------------------------------------


def test_a_later_state_of_an_inner_node_follows_its_kv() -> None:
    tokens, other = prompt(6), [*prompt(3, extra=0), 900, 901]
    store = warm_store()
    engine = engine_over(store)
    engine.run(tokens)
    engine.settle()
    assert hit_of(store, [*tokens[: 3 * PAGE], 7]) == 0  # no state there yet
    engine.run(other)  # ends there: splits the node and leaves its state
    engine.settle()
    inner = node_ending(engine, 12)
    assert inner.children and inner.data[ComponentType.MAMBA].host_value is not None
    assert_idle(engine)
    assert hit_of(store, [*tokens[: 3 * PAGE], 7]) == 12
    # Nothing of KV was copied or is written twice but the page that the state goes with.
    assert len([keys for method, keys in store.calls if method == "set kv"][-1]) == 1


@pytest.mark.parametrize("write_policy", ["write_through_selective", "write_back"])
def test_a_later_state_is_saved_as_the_policy_says(write_policy: str) -> None:
    tokens, other = prompt(6), [*prompt(3, extra=0), 900, 901]
    engine = engine_over(write_policy=write_policy)
    for _ in range(2):
        engine.run(tokens)
        engine.settle()
    engine.evict_all()
    engine.run(other)
    engine.run(other)
    engine.settle()
    engine.evict_all()
    assert_idle(engine)
    assert engine.cached(tokens) == (0, 24)
    assert engine.cached(other) == (0, 12)


def test_under_write_back_a_state_is_saved_before_it_goes_alone() -> None:
    tokens = prompt(9)
    engine = engine_over(write_policy="write_back", num_states=2)
    for num_pages in (3, 6, 9):  # the third state takes the slot of the first
        engine.run(tokens[: num_pages * PAGE + 1])
        engine.check()
    engine.settle()
    inner = node_ending(engine, 12)
    assert inner.value is not None
    assert inner.data[ComponentType.MAMBA].value is None
    assert_idle(engine)
    assert engine.cached([*tokens[: 3 * PAGE], 7]) == (0, 12)
    assert engine.run([*tokens[: 3 * PAGE], 7]) == 12


# -- slots ----------------------------------------------------------------------------------------


def test_host_states_go_by_themselves_the_oldest_first() -> None:
    prompts = [prompt(2, first=1000 * n) for n in range(6)]
    engine = engine_over(num_host_states=3)
    for tokens in prompts:
        engine.run(tokens)
        engine.settle()
    engine.evict_all()
    assert_idle(engine)
    assert engine.host.size - engine.host.available_size() == 6 * 2 * PAGE  # KV stays
    assert [engine.cached(tokens)[1] for tokens in prompts] == [0, 0, 0, 8, 8, 8]


def test_a_host_state_that_is_being_copied_stays() -> None:
    engine = engine_over(num_host_states=1, storage_backend=None)
    first, second = prompt(2), prompt(2, first=900)
    engine.run(first)
    engine.controller.start_writing()  # and the copy hangs
    engine.run(second)  # finds no room for its state
    engine.settle()
    assert_idle(engine)
    engine.evict_all()
    assert (engine.cached(first), engine.cached(second)) == ((0, 8), (0, 0))
    engine.run(second)
    engine.settle()
    engine.evict_all()
    assert (engine.cached(first), engine.cached(second)) == ((0, 0), (0, 8))


def test_a_fetched_state_goes_to_the_end_of_what_was_fetched() -> None:
    """Also where the tree has had the beginning of it, without a state."""
    tokens = prompt(6)
    engine = engine_over(warm_store(tokens))
    engine.run(tokens[: 3 * PAGE + 1])
    engine.settle()
    inner = node_ending(engine, 12)
    engine.evict_all()
    states = engine.tree.components[ComponentType.MAMBA]
    assert states.make_host_room(1) == 1
    req = engine.serve(tokens)
    assert (req.done_tokens, req.loaded_tokens) == (24, 12)
    assert inner.data[ComponentType.MAMBA].host_value is None
    assert node_ending(engine, 24).parent is inner
    assert_idle(engine)


def test_a_load_takes_one_state_whatever_lies_on_its_path() -> None:
    tokens = prompt(9)
    engine = engine_over()
    for num_pages in (3, 6, 9):
        engine.run(tokens[: num_pages * PAGE + 1])
    engine.settle()
    engine.evict_all()
    num_free = states_of(engine).allocator.available_size()
    assert engine.run(tokens) == 36
    assert num_free - states_of(engine).allocator.available_size() == 1
    # What was left out is loaded when it is asked for, alone.
    kv_free = engine.allocator.available_size()
    assert engine.run([*tokens[: 6 * PAGE], 7]) == 24
    assert engine.allocator.available_size() == kv_free
    assert_idle(engine)


@pytest.mark.parametrize("stage", range(5))
@pytest.mark.parametrize("how", ["abort", "flush", "detach"])
def test_given_up_prefetches_give_every_slot_back(stage: int, how: str) -> None:
    tokens = prompt(8)
    engine = engine_over(warm_store(tokens))
    for _ in range(10):
        req = HiReq(rid="r", origin_input_ids=tokens)
        engine.submit(req)
        for step in (engine.controller.step_query, engine.tick, engine.controller.step_read)[
            : min(stage, 3)
        ]:
            step()
        if stage == 4:
            engine.tree.terminate_prefetch("r")
        if how == "abort":
            engine.abort_waiting(req)
        elif how == "flush":
            engine.flush()
        else:
            assert engine.tree.detach_storage_backend()[0]
            engine.abort_waiting(req)
            assert engine.tree.attach_storage_backend(
                storage_backend="memory",
                storage_backend_extra_config_json='{"prefetch_threshold": 1}',
            )[0]
        engine.check()
        if stage == 4:
            engine.flush()
    assert_idle(engine)
    engine.flush()
    assert states_of(engine).host.available_size() == states_of(engine).host.size
    assert engine.serve(tokens).loaded_tokens == 32


def test_a_reset_leaves_states_that_are_being_written_alone() -> None:
    tokens = prompt(8)
    store = MemoryStore()
    engine = engine_over(store, num_host_states=1)
    engine.run(tokens)
    engine.tick()
    engine.controller.write_engine.step()
    engine.tick()
    assert engine.tree.ongoing_backup
    engine.flush()
    assert states_of(engine).host.available_size() == 0
    engine.run(prompt(4, first=900))  # finds no room for its state
    engine.tick()
    engine.controller.write_engine.step()
    engine.controller.step_backup()
    assert_idle(engine)
    assert hit_of(store, tokens) == 32


# -- beside a draft -------------------------------------------------------------------------------


def test_a_draft_travels_beside_the_states() -> None:
    tokens = prompt(4)
    store = MemoryStore()

    def with_draft() -> tuple[HiCacheEngine, FakeKV]:
        engine = engine_over(store, storage_backend=None)
        draft = FakeKV(engine.kv.size, PAGE, 5, is_draft=True)
        host = MHATokenToKVPoolHost(draft, engine.host.size, "page_first")
        engine.controller.set_draft_kv_pool(draft, host, lambda: DRAFT_DIGEST)
        engine.tree.attach_storage_backend(
            storage_backend="memory",
            storage_backend_extra_config_json='{"prefetch_threshold": 1}',
        )
        return engine, draft

    def path_slots(engine: HiCacheEngine) -> torch.Tensor:
        value = node_ending(engine, 16).value
        assert value is not None
        return value

    writer, draft = with_draft()
    writer.run(tokens)
    draft.write_prefix(path_slots(writer), tokens)
    writer.settle()
    assert [m for m, _ in store.calls if m.startswith("set")] == [
        "set mamba",
        "set draft",
        "set kv",
    ]
    reader, draft = with_draft()
    assert reader.serve(tokens).loaded_tokens == 16
    draft.verify_prefix(path_slots(reader), tokens)
    assert_idle(reader)
    # A missing draft page ends the hit before it, where there is no state.
    del store.pages[draft_page_key(hashes_of(reader, tokens)[2], DRAFT_DIGEST)]  # type: ignore
    reader, _ = with_draft()
    assert reader.serve(tokens).loaded_tokens == 0
    assert_idle(reader)


# -- the host pool --------------------------------------------------------------------------------


def test_a_snapshot_is_one_block_of_bytes_and_comes_back_equal() -> None:
    device = FakeStates(5)
    host = MambaPoolHost(device, 4)
    assert host.bytes_per_page == device.bytes_per_slot
    for slot in range(1, 6):
        device.write_state(torch.tensor([slot]), list(range(slot)))
    slots = host.alloc(3)
    assert slots is not None
    sources = torch.tensor([4, 1, 5])
    host.backup_from_device_all_layer(device, slots, sources, "direct")
    for host_slot, slot in zip(slots.tolist(), sources.tolist()):
        buffers = host.page_buffers(host_slot)
        assert len(buffers) == 1
        assert bytes(buffers[0]) == device.page_bytes(list(range(slot)), None, None)
    before = [data.clone() for data in device.buffers()]
    device.clear()
    targets = torch.tensor([4, 1, 5])
    for layer in range(device.layer_num):
        host.load_to_device_per_layer(device, slots, targets, layer, "direct")
    for data, old in zip(device.buffers(), before):
        assert torch.equal(data[:, targets], old[:, targets])
        assert not data[:, [2, 3]].any()


def test_pages_of_states_of_other_shapes_are_other_pages() -> None:
    assert MambaPoolHost(FakeStates(2), 2).byte_layout_tag() != (
        MambaPoolHost(FakeStates(2, layer_num=4), 2).byte_layout_tag()
    )


def test_states_are_registered_with_slots_of_their_own() -> None:
    engine = engine_over()
    group = engine.controller.host_pools
    assert [entry.name for entry in group.own_slot_entries] == [PoolName.MAMBA]
    assert group.alloc(PAGE, {PoolName.MAMBA: 99}) is None  # all or nothing
    assert engine.host.available_size() == engine.host.size
