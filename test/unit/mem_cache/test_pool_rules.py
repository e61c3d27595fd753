"""Pools of which a prefix needs only some pages: the rule, and storage that goes by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, MHATokenToKVPoolHost, PoolEntry
from sglang.srt.mem_cache.page_key import PageHash, RadixKey, make_storage_key
from sglang.srt.mem_cache.pool_transfer import (
    ALL_PAGES,
    PageRule,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    SpanPages,
    deepest_end,
)
from sglang.test.fakes.controller_rig import ControllerRig, MemoryStore
from sglang.test.fakes.fake_kv import FakeKV

WINDOW = 3


# -- the rule -------------------------------------------------------------------------------------


def test_what_a_prefix_needs() -> None:
    assert list(PageRule().needed(3)) == [0, 1, 2]
    assert list(PageRule(trailing=1).needed(3)) == [2]
    assert list(PageRule(trailing=2).needed(3)) == [1, 2]
    assert list(PageRule(trailing=5).needed(3)) == [0, 1, 2]
    assert (PageRule().policy, PageRule(trailing=1).policy) == (
        PoolHitPolicy.ALL_PAGES,
        PoolHitPolicy.TRAILING_PAGES,
    )
    with pytest.raises(ValueError):
        PageRule(trailing=0)


@given(present=st.lists(st.booleans(), max_size=12), trailing=st.sampled_from([None, 1, 2, 3, 7]))
def test_usable_ends_are_those_with_all_they_need(present: list[bool], trailing: int) -> None:
    rule = PageRule(trailing=trailing)
    expected = [
        all(present[position] for position in rule.needed(end))
        for end in range(1, len(present) + 1)
    ]
    assert rule.usable_ends(present) == expected
    deepest = max([0, *(end for end, usable in enumerate(expected, 1) if usable and end <= 5)])
    assert deepest_end(expected, 5) == deepest


def test_pages_within_a_part_of_a_span() -> None:
    pages = SpanPages(
        name=PoolName.SWA, positions=(1, 2, 5), host_indices=torch.tensor([8, 9, 4, 5, 0, 1])
    )
    part = pages.within(2, 6)
    assert (part.positions, part.host_indices.tolist()) == ((0, 3), [4, 5, 0, 1])
    assert pages.within(2).positions == (0, 3)
    nothing = pages.within(3, 5)
    assert (nothing.positions, nothing.host_indices.tolist()) == ((), [])
    assert nothing.within(0).positions == ()


def test_a_pool_with_the_anchors_slots_has_all_pages() -> None:
    kv = FakeKV(8, 2)
    host = MHATokenToKVPoolHost(kv, 8, "page_first")
    with pytest.raises(ValueError, match="wherever the anchor"):
        PoolEntry(name=PoolName.SWA, host_pool=host, device_pool=kv, rule=PageRule(trailing=1))
    group = HostPoolGroup(PoolEntry(name=PoolName.KV, host_pool=host, device_pool=kv), "direct")
    assert group.anchor.rule == ALL_PAGES


# -- look-ups -------------------------------------------------------------------------------------


def hash_of(number: int) -> PageHash:
    return PageHash(f"{number:064x}")


def test_existence_in_all_pools_by_their_rules() -> None:
    store = MemoryStore()
    hashes = [hash_of(number) for number in range(6)]
    for position in range(5):
        store.pages[hashes[position]] = b""
    window = [make_storage_key("swa", page_hash) for page_hash in hashes]
    draft = [make_storage_key("draft", page_hash) for page_hash in hashes]
    for position in (1, 2, 4, 5):
        store.pages[window[position]] = b""
    for position in (0, 1, 3):
        store.pages[draft[position]] = b""
    result = store.batch_exists_v2(
        hashes,
        [
            PoolTransfer(name=PoolName.SWA, keys=window, rule=PageRule(trailing=2)),
            PoolTransfer(name=PoolName.DRAFT, keys=draft),
        ],
    )
    assert result.kv_hit_pages == 5
    assert result.present[PoolName.SWA] == [False, True, True, False, True]
    assert result.present[PoolName.DRAFT] == [True, True]
    assert result.extra_pool_hit_pages == {PoolName.SWA: 3, PoolName.DRAFT: 2}


# -- a sliding window in storage ------------------------------------------------------------------


@pytest.fixture
def rig() -> Iterator[ControllerRig]:
    rig = ControllerRig(page_size=2, window_pages=WINDOW)
    rig.attach()
    yield rig
    rig.store.hook = None
    rig.controller.shutdown()


def write(rig: ControllerRig, key: RadixKey, positions: list[int]) -> list[PageHash]:
    """Write a key's KV, and of the window these pages, each filled with its number."""
    assert rig.window_host is not None
    host = rig.to_host(key)
    hashes = rig.controller.page_hashes(key, None)
    slots = rig.window_host.alloc(len(positions) * rig.page_size)
    assert slots is not None
    for position, start in zip(positions, slots[:: rig.page_size].tolist()):
        for buffer in rig.window_host.page_buffers(start):
            buffer[:] = bytes([position + 1]) * buffer.nbytes
    pages = SpanPages(name=PoolName.SWA, positions=tuple(positions), host_indices=slots)
    op_id = rig.controller.write_storage(host, hashes, None, [pages])
    rig.wait(lambda: any(op.id == op_id for op in rig.acks))
    rig.host.free(host)
    rig.window_host.free(slots)
    return hashes


def test_a_window_is_written_before_its_kv_and_read_where_it_is_needed(rig: ControllerRig) -> None:
    key = rig.key(8)
    hashes = write(rig, key, [3, 4, 5, 6, 7])
    assert [method for method, _ in rig.store.calls] == ["set swa", "set kv"]
    rig.store.calls.clear()
    operation = rig.prefetch(key)
    rig.wait_hit(operation)
    assert operation.usable_ends == [False] * 5 + [True] * 3
    assert rig.window_host is not None
    slots = rig.window_host.alloc(WINDOW * rig.page_size)
    assert slots is not None
    operation.extra = (SpanPages(name=PoolName.SWA, positions=(5, 6, 7), host_indices=slots),)
    rig.allocate(operation)
    rig.wait(lambda: operation.is_done)
    assert operation.is_complete
    wanted = [make_storage_key("swa", hashes[position]) for position in (5, 6, 7)]
    assert [keys for method, keys in rig.store.calls if method == "get swa"] == [wanted]
    for position, start in zip((5, 6, 7), slots[:: rig.page_size].tolist()):
        for buffer in rig.window_host.page_buffers(start):
            assert bytes(buffer) == bytes([position + 1]) * buffer.nbytes


def test_a_short_prefix_needs_all_of_its_window(rig: ControllerRig) -> None:
    write(rig, rig.key(6), [0, 1, 2, 4, 5])
    operation = rig.prefetch(rig.key(6))
    rig.wait_hit(operation)
    # Pages 0..2 serve the first three ends; none of the later windows is whole.
    assert operation.usable_ends == [True, True, True]
    assert operation.storage_hit_count == 3 * rig.page_size


def test_a_missing_window_page_ends_an_operation_before_kv_is_read(rig: ControllerRig) -> None:
    key = rig.key(8)
    hashes = write(rig, key, [5, 6, 7])
    rig.store.bad_keys.add(make_storage_key("swa", hashes[6]))
    operation = rig.prefetch(key)
    rig.wait_hit(operation)
    assert rig.window_host is not None
    slots = rig.window_host.alloc(WINDOW * rig.page_size)
    assert slots is not None
    operation.extra = (SpanPages(name=PoolName.SWA, positions=(5, 6, 7), host_indices=slots),)
    rig.allocate(operation)
    rig.wait(lambda: operation.is_done)
    assert (operation.completed_tokens, operation.taken()[PoolName.KV].numel()) == (0, 0)
    assert PoolName.SWA not in operation.taken()
    assert not [method for method, _ in rig.store.calls if method == "get kv"]
    # The reader gave its pages back, one an item.
    released = rig.controller.extra_host_mem_release_queues[PoolName.SWA]
    pages = [released.get_nowait() for _ in range(released.qsize())]
    assert [page.numel() for page in pages] == [rig.page_size] * WINDOW
    assert torch.equal(torch.cat(pages), slots)
    assert rig.controller.storage_stats.extra_pages_missed == 2


def test_a_window_page_that_is_not_written_keeps_kv_back_from_there(rig: ControllerRig) -> None:
    key = rig.key(8)
    hashes = rig.controller.page_hashes(key, None)
    rig.store.bad_keys.add(make_storage_key("swa", hashes[6]))
    write(rig, key, [5, 6, 7])
    assert [page_hash in rig.store.pages for page_hash in hashes] == [True] * 6 + [False] * 2
    assert rig.acks[-1].completed_tokens == 6 * rig.page_size
