"""Host pools: free list, sizes, layouts, copies of every pool of a group, pages as bytes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sglang.srt import platforms
from sglang.srt.mem_cache import host_copy
from sglang.srt.mem_cache.host_pool_sizing import HostPoolLimits, host_pool_tokens
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    LAYOUTS,
    PAGE_ROOM_BYTES,
    HostPoolGroup,
    MHATokenToKVPoolHost,
    PoolEntry,
)
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.srt.platforms import init_platform
from sglang.srt.platforms.base import MemoryInfo

GB = 10**9
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _own_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test choose the device of the process."""
    monkeypatch.setattr(platforms, "_current", None)


def make_device_pool(
    page_size: int,
    layers: int,
    *,
    size: int = 48,
    heads: int = 2,
    head_dim: int = 8,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(
        size, page_size, dtype, heads, head_dim, layers, device, v_head_dim=v_head_dim
    )
    for data in (pool.k_data, pool.v_data):
        data.view(torch.uint8).random_(0, 256)
    return pool


def make_entry(
    name: PoolName,
    device_pool: MHATokenToKVPool,
    layout: str,
    *,
    num_tokens: int = 64,
    share: bool = True,
) -> PoolEntry:
    return PoolEntry(
        name=name,
        host_pool=MHATokenToKVPoolHost(device_pool, num_tokens, layout),
        device_pool=device_pool,
        share_indices_with_anchor=share,
    )


def make_group(
    page_size: int, layout: str, io_backend: str, device: str = "cpu", unit: int = 8
) -> HostPoolGroup:
    """Target of 3 layers, a draft of 5 with other heads, and a pool with slots of its own."""
    pools = [
        make_device_pool(page_size, 3, head_dim=unit, device=device),
        make_device_pool(page_size, 5, heads=1, head_dim=unit, v_head_dim=3 * unit, device=device),
        make_device_pool(1, 2, size=8, heads=1, head_dim=3, dtype=torch.float32, device=device),
    ]
    group = HostPoolGroup(make_entry(PoolName.KV, pools[0], layout), io_backend)
    group.add(make_entry(PoolName.DRAFT, pools[1], layout))
    group.add(make_entry(PoolName.MAMBA, pools[2], layout, num_tokens=5, share=False))
    return group


def scattered_slots(page_size: int, num_pages: int, seed: int) -> torch.Tensor:
    """Some device slots in whole pages, in no order, page 0 left out."""
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[:7] + 1
    return (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)


def content(entry: PoolEntry, slots: torch.Tensor) -> list[torch.Tensor]:
    pool = entry.device_pool
    assert isinstance(pool, MHATokenToKVPool)
    return [data.view(torch.uint8).cpu()[:, slots] for data in (pool.k_data, pool.v_data)]


def overwrite(entry: PoolEntry) -> None:
    pool = entry.device_pool
    assert isinstance(pool, MHATokenToKVPool)
    for data in (pool.k_data, pool.v_data):
        data.view(torch.uint8).fill_(0x5A)


def round_trip(group: HostPoolGroup, page_size: int) -> dict[PoolName, bool]:
    """Back up, overwrite the device, load; says which pools came back byte for byte."""
    device_slots = scattered_slots(page_size, 48 // page_size, 1)
    host_slots = group.alloc(device_slots.numel(), {PoolName.MAMBA: 3})
    assert host_slots is not None
    own = PoolTransfer(
        name=PoolName.MAMBA,
        host_indices=host_slots[PoolName.MAMBA],
        device_indices=torch.tensor([7, 1, 4]),
    )
    slots = {entry.name: device_slots for entry in group.entries}
    assert own.device_indices is not None
    slots[PoolName.MAMBA] = own.device_indices
    before = {entry.name: content(entry, slots[entry.name]) for entry in group.entries}
    group.backup(host_slots[PoolName.KV], device_slots, [own])
    for entry in group.entries:
        overwrite(entry)
    for layer in range(group.num_layers):
        group.load_layer(layer, host_slots[PoolName.KV], device_slots, [own])
    same = {
        entry.name: all(map(torch.equal, content(entry, slots[entry.name]), before[entry.name]))
        for entry in group.entries
    }
    untouched = torch.ones(48 + page_size, dtype=torch.bool)
    untouched[device_slots] = False
    for kept in content(group.anchor, untouched.nonzero().squeeze(1)):
        assert (kept == 0x5A).all(), "a page that was not named was written"
    return same


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("io_backend", host_copy.IO_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pool_comes_back_byte_for_byte(
    layout: str, page_size: int, io_backend: str, device: str
) -> None:
    platform = init_platform(device)
    group = make_group(page_size, layout, io_backend, device)
    with platform.use_stream(platform.stream()):
        platform.synchronize()
        same = round_trip(group, page_size)
    assert same == {PoolName.KV: True, PoolName.DRAFT: True, PoolName.MAMBA: True}
    group.destroy()
    group.destroy()


@pytest.mark.cuda
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_pieces_and_the_default_stream(layout: str) -> None:
    init_platform("cuda")
    for unit in (8192, 8):  # a piece of 128 KiB and more; a small one
        for io_backend in host_copy.IO_BACKENDS:
            group = make_group(4, layout, io_backend, "cuda", unit)
            assert all(round_trip(group, 4).values())
            group.destroy()


@pytest.mark.cuda
def test_copies_are_queued_not_waited_for() -> None:
    platform = init_platform("cuda")
    group = make_group(4, "page_first", "direct", "cuda", 8192)
    slots, device_slots = torch.arange(48), torch.arange(48) + 4
    stream, gate = platform.stream(), platform.event()
    with platform.use_stream(stream):
        torch.cuda._sleep(200_000_000)
        group.backup(slots, device_slots)
        gate.record()
    assert not gate.query()
    gate.synchronize()
    group.destroy()


def test_a_pool_left_out_of_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The round trip can fail: one layer of one pool that is not copied makes it."""
    group = make_group(4, "page_first", "kernel")
    draft = group.get(PoolName.DRAFT)
    assert draft is not None
    load = draft.host_pool.load_to_device_per_layer

    def without_layer_4(*args: object) -> None:
        if args[3] != 4:
            load(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(draft.host_pool, "load_to_device_per_layer", without_layer_4)
    assert round_trip(group, 4) == {
        PoolName.KV: True,
        PoolName.DRAFT: False,
        PoolName.MAMBA: True,
    }


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.float16])
def test_long_runs_and_other_types(dtype: torch.dtype) -> None:
    device_pool = make_device_pool(4, 2, heads=3, head_dim=5, dtype=dtype)
    entry = make_entry(PoolName.KV, device_pool, "page_first")
    group = HostPoolGroup(entry, "direct")
    host_slots, device_slots = torch.arange(48), torch.arange(4, 52)
    before = content(entry, device_slots)
    group.backup(host_slots, device_slots)
    overwrite(entry)
    for layer in range(2):
        group.load_layer(layer, host_slots, device_slots)
    assert all(map(torch.equal, content(entry, device_slots), before))
    page = entry.host_pool.get_data_page(8)
    assert page.dtype == dtype and page.nbytes == entry.host_pool.bytes_per_page


def test_bad_transfers_are_refused() -> None:
    group = make_group(4, "page_first", "kernel")
    slots = torch.arange(8)
    for bad in (torch.arange(1, 9), torch.arange(7), torch.tensor([4, 5, 6, 7, 3, 2, 1, 0])):
        with pytest.raises(ValueError, match="whole pages"):
            group.backup(bad, bad)
    with pytest.raises(ValueError, match="cannot go with"):
        group.backup(slots, torch.arange(4))
    for outside in (torch.arange(64, 68), torch.arange(-4, 0)):
        with pytest.raises(IndexError, match="pages"):
            group.backup(outside, torch.arange(4))
    with pytest.raises(ValueError, match="slots of its own"):
        group.backup(slots, slots, [transfer(PoolName.DRAFT)])
    with pytest.raises(ValueError, match="lacks its slots"):
        group.backup(slots, slots, [PoolTransfer(name=PoolName.MAMBA)])
    host_pool, device_pool = group.anchor.host_pool, group.anchor.device_pool
    with pytest.raises(ValueError, match="copy backend"):
        host_pool.backup_from_device_all_layer(device_pool, slots, slots, "magic")
    with pytest.raises(IndexError, match="layer 3 of 3"):
        host_pool.load_to_device_per_layer(device_pool, slots, slots, 3, "kernel")
    empty = torch.empty(0, dtype=torch.int64)
    group.backup(empty, empty)


def transfer(name: PoolName) -> PoolTransfer:
    return PoolTransfer(name=name, host_indices=torch.arange(4), device_indices=torch.arange(4))


def test_group_checks_what_is_registered() -> None:
    group = make_group(4, "page_first", "kernel")
    names = [entry.name for entry in group.entries]
    assert names == [PoolName.KV, PoolName.DRAFT, PoolName.MAMBA]
    assert group.anchor.name == PoolName.KV and group.num_layers == 3
    # Keys and values of two bytes a number: 2 heads of 8 in 3 layers, 1 head of 8 and 24 in 5.
    assert group.bytes_per_token == 2 * (3 * 2 * 16 + 5 * 32)
    with pytest.raises(ValueError, match="already"):
        group.add(group.entries[1])
    with pytest.raises(ValueError, match="anchor"):
        group.remove(PoolName.KV)
    draft = group.remove(PoolName.DRAFT)
    assert group.get(PoolName.DRAFT) is None
    with pytest.raises(KeyError):
        group.remove(PoolName.DRAFT)
    assert isinstance(draft.device_pool, MHATokenToKVPool)
    with pytest.raises(ValueError, match="60 host slots"):
        group.add(make_entry(PoolName.DRAFT, draft.device_pool, "page_first", num_tokens=60))
    with pytest.raises(ValueError, match="44 device slots"):
        small = make_device_pool(4, 1, size=44)
        group.add(make_entry(PoolName.DRAFT, small, "page_first"))
    group.add(draft)


def test_group_allocates_all_or_nothing() -> None:
    group = make_group(4, "page_first", "kernel")
    free = [entry.host_pool.available_size() for entry in group.entries]
    assert group.alloc(8, {PoolName.MAMBA: 6}) is None
    assert group.alloc(68, {PoolName.MAMBA: 1}) is None
    assert [entry.host_pool.available_size() for entry in group.entries] == free
    taken = group.alloc(0, {PoolName.MAMBA: 5})
    assert taken is not None and {name: len(slots) for name, slots in taken.items()} == {
        PoolName.KV: 0,
        PoolName.MAMBA: 5,
    }
    group.free(taken)
    with pytest.raises(ValueError, match="own"):
        group.alloc(4, {PoolName.DRAFT: 4})
    group.alloc(64, {PoolName.MAMBA: 5})
    group.clear()
    assert [entry.host_pool.available_size() for entry in group.entries] == free


@pytest.mark.parametrize("page_size", [1, 4])
def test_free_list_against_an_oracle(page_size: int) -> None:
    pool = MHATokenToKVPoolHost(make_device_pool(page_size, 1), 40, "page_first")
    rng = random.Random(page_size)
    held: list[torch.Tensor] = []
    for _ in range(600):
        free = 40 - sum(map(len, held))
        assert pool.available_size() == free
        if rng.random() < 0.55:
            need = page_size * rng.randrange(0, 12 // page_size + 1)
            slots = pool.alloc(need)
            assert (slots is None) == (need > free)
            if slots is not None:
                assert slots.dtype == torch.int64 and len(slots) == need
                held.append(slots)
        elif held:
            slots = held.pop(rng.randrange(len(held)))
            cut = page_size * rng.randrange(0, len(slots) // page_size + 1)
            assert pool.free(slots[:cut]) == cut  # a view of what was handed out
            if cut < len(slots):
                held.append(slots[cut:])
        taken = torch.cat(held) if held else torch.empty(0, dtype=torch.int64)
        assert len(taken.unique()) == len(taken)
        expected = torch.ones(40, dtype=torch.bool)
        expected[taken] = False
        assert torch.equal(pool.is_free(torch.arange(40)), expected)


def test_freeing_twice_raises_and_changes_nothing() -> None:
    pool = MHATokenToKVPoolHost(make_device_pool(4, 1), 40, "layer_first")
    slots = pool.alloc(12)
    assert slots is not None
    pool.free(slots[:4])
    page = slots[4:8]
    for bad in (slots, slots[:4], torch.cat((page, page)), torch.arange(40, 44)):
        with pytest.raises(RuntimeError, match="host pages"):
            pool.free(bad)
        assert pool.available_size() == 32
        assert pool.is_free(slots).tolist() == [True] * 4 + [False] * 8
    for bad in (slots[5:9], slots[4:7], torch.tensor([5, 4, 6, 7])):
        with pytest.raises(ValueError, match="whole pages"):
            pool.free(bad)
    with pytest.raises(ValueError, match="whole pages"):
        pool.alloc(6)
    slots.zero_()  # the caller's own: the free list does not see it
    assert pool.alloc(32) is not None and pool.alloc(4) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_as_bytes(layout: str) -> None:
    pool = MHATokenToKVPoolHost(make_device_pool(4, 3), 32, layout)
    flat = torch.randn(pool.bytes_per_page // 2).to(torch.bfloat16)
    pool.set_from_flat_data_page(8, flat)
    data = flat.view(torch.uint8).numpy().tobytes()
    assert torch.equal(pool.get_data_page(8).view(torch.int16), flat.view(torch.int16))
    buffers = pool.page_buffers(8)
    assert len(buffers) == (6 if layout == "layer_first" else 1)
    assert b"".join(buffers) == data
    for other in (4, 12):
        assert not pool.get_data_page(other).view(torch.uint8).any()
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(4, 12))
    assert addresses[len(buffers) :] == [np.frombuffer(b, np.uint8).ctypes.data for b in buffers]
    assert sizes == [pool.bytes_per_page // len(buffers)] * 2 * len(buffers)
    buffers[0][:2] = b"\x01\x02"
    assert pool.get_data_page(8).view(torch.uint8)[:2].tolist() == [1, 2]
    dummy = pool.get_dummy_flat_data_page()
    assert dummy.shape == flat.shape and dummy.dtype == flat.dtype
    with pytest.raises(ValueError, match="bytes"):
        pool.set_from_flat_data_page(8, flat[1:])
    for bad in (7, 32, -4):
        with pytest.raises(IndexError, match="begins at"):
            pool.page_buffers(bad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_in_one_piece_have_room_in_front_that_nothing_else_touches(layout: str) -> None:
    device_pool = make_device_pool(4, 3)
    pool = MHATokenToKVPoolHost(device_pool, 32, layout)
    blocks = [pool.page_with_room(slot) for slot in range(0, 32, 4)]
    if layout == "layer_first":
        assert blocks == [None] * 8
        return
    for slot, block in zip(range(0, 32, 4), blocks):
        assert block is not None and len(block) == PAGE_ROOM_BYTES + pool.bytes_per_page
        (page,) = pool.page_buffers(slot)
        page[:] = bytes([slot]) * len(page)
        block[:PAGE_ROOM_BYTES] = b"\xa5" * PAGE_ROOM_BYTES
        assert bytes(block[PAGE_ROOM_BYTES:]) == bytes(page)
    slots = torch.arange(32)
    for data in device_pool.buffers():
        data.fill_(1)
    pool.backup_from_device_all_layer(device_pool, slots[:8], slots[4:12], "direct")
    for slot, block in zip(range(0, 32, 4), blocks):
        assert block is not None and set(block[:PAGE_ROOM_BYTES]) == {0xA5}
        if slot >= 8:
            assert set(block[PAGE_ROOM_BYTES:]) == {slot}
    with pytest.raises(IndexError, match="begins at"):
        pool.page_with_room(2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stored_order_is_the_documented_one(layout: str) -> None:
    device_pool = make_device_pool(4, 3)
    pool = MHATokenToKVPoolHost(device_pool, 32, layout)
    pool.backup_from_device_all_layer(device_pool, torch.arange(4), torch.arange(8, 12), "kernel")
    page = pool.get_data_page(0, flat=False)
    layer_dim = 0 if layout == "page_first" else 1
    for layer in range(3):
        for kv, data in enumerate((device_pool.k_data, device_pool.v_data)):
            stored = page.select(layer_dim, layer)[kv]
            assert torch.equal(stored.view(torch.int16), data[layer, 8:12].view(torch.int16))


def test_tags_are_equal_exactly_where_pages_are_interchangeable() -> None:
    variants = [
        make_device_pool(4, 3),
        make_device_pool(4, 2),
        make_device_pool(2, 3),
        make_device_pool(4, 3, heads=1),
        make_device_pool(4, 3, head_dim=16),
        make_device_pool(4, 3, v_head_dim=4),
        make_device_pool(4, 3, dtype=torch.float16),
    ]
    tags = {MHATokenToKVPoolHost(pool, 32, "page_first").byte_layout_tag() for pool in variants}
    assert len(tags) == len(variants)
    by_layout = [
        MHATokenToKVPoolHost(variants[0], 32, layout).byte_layout_tag() for layout in LAYOUTS
    ]
    assert by_layout[0] == by_layout[2] != by_layout[1]


def test_unequal_head_sizes_have_no_shape() -> None:
    pool = MHATokenToKVPoolHost(make_device_pool(4, 3, v_head_dim=4), 32, "page_first")
    with pytest.raises(ValueError, match="flat only"):
        pool.get_data_page(0, flat=False)
    with pytest.raises(ValueError, match="unknown host layout"):
        MHATokenToKVPoolHost(make_device_pool(4, 3), 32, "page_head")
    with pytest.raises(ValueError, match="whole pages"):
        MHATokenToKVPoolHost(make_device_pool(4, 3), 30, "page_first")


@pytest.mark.parametrize(
    ("limits", "memory_gb", "expected"),
    [
        # 1000 device tokens of 1 MB in pages of 64; a tenth of the total is kept back.
        (HostPoolLimits(), (100, 50), 1984),  # twice the device, rounded down
        (HostPoolLimits(), (10, 2.0), 960),  # free - reserve
        (HostPoolLimits(memory_fraction=0.4), (10, 2.0), 768),  # 0.4 of what is free
        (HostPoolLimits(memory_fraction=0.4, local_ranks=2), (10, 2.0), 384),
        (HostPoolLimits(ratio=0.5), (100, 50), 448),
        (HostPoolLimits(ratio=1.0, memory_fraction=0.1), (10, 2.0), 960),  # fraction is for auto
        (HostPoolLimits(ratio=0.001), (100, 50), 128),  # two pages at least
        (HostPoolLimits(size_gb=0.5), (100, 50), 448),
        (HostPoolLimits(size_gb=0.5, ratio=9), (100, 50), 448),  # the size wins
        (HostPoolLimits(size_gb=30), (400, 45), 29952),  # the reserve ends at 10 GiB
    ],
)
def test_size(limits: HostPoolLimits, memory_gb: tuple[float, float], expected: int) -> None:
    total, free = (int(gb * GB) for gb in memory_gb)
    tokens = host_pool_tokens(
        limits,
        device_tokens=1000,
        bytes_per_token=10**6,
        page_size=64,
        memory=MemoryInfo(total_bytes=total, free_bytes=free),
    )
    assert tokens == expected


@pytest.mark.parametrize(
    ("limits", "free_gb", "message"),
    [
        (
            HostPoolLimits(size_gb=45),
            45,
            r"--hicache-size 45 needs 44\.992 GB .* only 34\.263 GB of",
        ),
        (
            HostPoolLimits(ratio=3, local_ranks=4),
            20,
            r"--hicache-ratio 3 .* each of 4 rank.*a smaller ratio\.$",
        ),
        (HostPoolLimits(), 10, r"smallest host pool needs 0\.128 GB .* only 0\.000 GB"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_in_one_sentence(
    limits: HostPoolLimits, free_gb: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        host_pool_tokens(
            limits,
            device_tokens=1000,
            bytes_per_token=10**6,
            page_size=64,
            memory=MemoryInfo(total_bytes=400 * GB, free_bytes=free_gb * GB),
        )
