"""Latent KV pools on device and host: rows, views, layouts, round trips, who writes to storage."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache import host_copy
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    LAYOUTS,
    DevicePool,
    HostPoolGroup,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PoolEntry,
    make_host_pool,
)
from sglang.srt.mem_cache.page_key import RadixKey
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.platforms import init_platform
from sglang.srt.platforms.cpu import CpuPlatform

PAGE = 4
SIZE = 48
RANK, ROPE = 6, 4


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)
    init_platform("cpu")


def random_(pool: KVCache | DevicePool) -> None:
    for buffer in pool.buffers():
        buffer.view(torch.uint8).random_(0, 256)


def make_mla(layers: int = 3, dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(SIZE, PAGE, dtype, RANK, ROPE, layers, "cpu")
    random_(pool)
    return pool


def make_mha(layers: int) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(SIZE, PAGE, torch.bfloat16, 2, 8, layers, "cpu")
    random_(pool)
    return pool


def test_rows_views_and_sizes() -> None:
    pool = MLATokenToKVPool(8, PAGE, torch.float16, RANK, ROPE, 2, "cpu", start_layer=10)
    layer = SimpleNamespace(layer_id=11)
    slots = torch.tensor([4, 11])
    pool.set_mla_kv_buffer(layer, slots, torch.ones(2, RANK), torch.full((2, ROPE), 2.0))
    keys, values = pool.get_kv_buffer(11)
    assert keys.shape == (12, 1, RANK + ROPE) and values.shape == (12, 1, RANK)
    assert keys[slots, 0, :RANK].eq(1).all() and keys[slots, 0, RANK:].eq(2).all()
    assert values[slots].eq(1).all() and values.data_ptr() == keys.data_ptr()
    assert keys.sum() == 2 * RANK + 4 * ROPE and not pool.get_key_buffer(10).any()
    whole = torch.full((1, 1, RANK + ROPE), 5.0)
    pool.set_kv_buffer(layer, torch.tensor([5]), whole, whole[..., :RANK])
    assert keys[5].eq(5).all()
    assert sum(pool.get_kv_size_bytes()) == 2 * 12 * (RANK + ROPE) * 2
    assert [buffer.shape for buffer in pool.buffers()] == [(2, 12, 1, RANK + ROPE)]
    with pytest.raises(IndexError, match="layer"):
        pool.get_value_buffer(12)


def test_moves_read_all_before_they_write() -> None:
    pool = make_mla()
    before = pool.kv_data.clone()
    slots, targets = torch.tensor([[4, 5], [6, 7]]), torch.tensor([[5, 6], [7, 8]])
    pool.move(slots, targets)
    equal = pool.kv_data.view(torch.int16) == before.view(torch.int16)
    assert torch.equal(pool.kv_data[:, 5:9].view(torch.int16), before[:, 4:8].view(torch.int16))
    assert equal[:, :5].all() and equal[:, 9:].all()


def test_layers_are_waited_for() -> None:
    pool, waited = make_mla(), list[int]()
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    pool.get_key_buffer(2)
    pool.get_value_buffer(1)
    pool.buffers()
    assert waited == [2, 1]


def make_group(layout: str, io_backend: str) -> HostPoolGroup:
    """A latent target of 3 layers, and a draft with heads of 5."""
    target, draft = make_mla(), make_mha(5)
    hosts = [make_host_pool(pool, 64, layout) for pool in (target, draft)]
    assert isinstance(hosts[0], MLATokenToKVPoolHost) and hosts[0].is_replicated
    assert isinstance(hosts[1], MHATokenToKVPoolHost) and not hosts[1].is_replicated
    group = HostPoolGroup(
        PoolEntry(name=PoolName.KV, host_pool=hosts[0], device_pool=target), io_backend
    )
    group.add(PoolEntry(name=PoolName.DRAFT, host_pool=hosts[1], device_pool=draft))
    return group


def content(group: HostPoolGroup, slots: torch.Tensor) -> list[torch.Tensor]:
    """Every registered buffer of every pool."""
    pools = [entry.device_pool for entry in group.entries]
    return [b[:, slots].view(torch.uint8).clone() for pool in pools for b in pool.buffers()]


@pytest.mark.parametrize(("layout", "io"), [*itertools.product(LAYOUTS, host_copy.IO_BACKENDS)])
def test_every_buffer_comes_back_byte_for_byte(layout: str, io: str) -> None:
    group = make_group(layout, io)
    pages = torch.tensor([9, 2, 3, 4, 11])
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    others = torch.tensor(sorted(set(range(SIZE + PAGE)) - set(slots.tolist())))
    taken = group.alloc(len(slots))
    assert taken is not None
    before = content(group, slots)
    assert len(before) == 3
    group.backup(taken[PoolName.KV], slots)
    for entry in group.entries:
        random_(entry.device_pool)
    kept = content(group, others)
    for layer in range(group.num_layers):
        group.load_layer(layer, taken[PoolName.KV], slots)
    assert all(map(torch.equal, content(group, slots), before))
    assert all(map(torch.equal, content(group, others), kept))
    assert group.bytes_per_token == 2 * (3 * (RANK + ROPE) + 5 * 2 * 16)
    group.destroy()


def test_pages_have_one_order_in_every_layout() -> None:
    device_pool = make_mla()
    pages = {}
    for layout in LAYOUTS:
        pool = MLATokenToKVPoolHost(device_pool, 32, layout)
        slots = torch.arange(8, 12)
        pool.backup_from_device_all_layer(device_pool, torch.arange(4, 8), slots, "kernel")
        page = pool.get_data_page(4, flat=False)
        assert page.shape == (3, PAGE, 1, RANK + ROPE)
        expected = device_pool.kv_data[:, slots]
        assert torch.equal(page.view(torch.int16), expected.view(torch.int16))
        pages[layout] = b"".join(pool.page_buffers(4))
        assert len(pool.page_buffers(4)) == (3 if layout == "layer_first" else 1)
        pool.set_from_flat_data_page(12, pool.get_data_page(4))
        assert b"".join(pool.page_buffers(12)) == pages[layout]
        with pytest.raises(ValueError, match="bytes"):
            pool.set_from_flat_data_page(12, pool.get_data_page(4)[1:])
    assert len(set(pages.values())) == 1


def test_tags_are_equal_exactly_where_pages_are_interchangeable() -> None:
    tags = {MLATokenToKVPoolHost(make_mla(), 32, layout).byte_layout_tag() for layout in LAYOUTS}
    assert len(tags) == 1
    for other in (
        make_mla(2),
        make_mla(dtype=torch.float16),
        MLATokenToKVPool(SIZE, 2, torch.bfloat16, RANK, ROPE, 3, "cpu"),
        MLATokenToKVPool(SIZE, PAGE, torch.bfloat16, RANK + 2, ROPE - 2, 3, "cpu"),
    ):
        tags.add(MLATokenToKVPoolHost(other, 32, "page_first").byte_layout_tag())
    assert len(tags) == 5


class Rank:
    """The storage half of one rank of a server: the same target, a draft part of its own."""

    def __init__(self, folder: Path, rank: int, draft: KVCache | None, tp_size: int = 2) -> None:
        self.target = make_mla()
        host = MLATokenToKVPoolHost(self.target, 64, "page_first")
        group = HostPoolGroup(
            PoolEntry(name=PoolName.KV, host_pool=host, device_pool=self.target), "direct"
        )
        allocator = create_token_to_kv_pool_allocator(SIZE, PAGE)
        self.controller = HiCacheController(
            allocator,
            group,
            page_size=PAGE,
            platform=CpuPlatform(),
            storage_config=HiCacheStorageConfig(
                tp_rank=rank, tp_size=tp_size, is_mla_model=True, model_name="m"
            ),
        )
        if draft is not None:
            draft_host = make_host_pool(draft, 64, "page_first")
            assert draft_host is not None
            self.controller.set_draft_kv_pool(draft, draft_host, lambda: b"draft digest")
        self.controller.attach_storage_backend(
            backend="file",
            extra_config={"file_storage_path": str(folder), "max_size": 0, "min_free_space": 0},
            seed_fn=lambda key: b"seed",
        )

    def write(self, key: RadixKey) -> None:
        slots = torch.arange(PAGE, PAGE + len(key))
        host = self.controller.write(slots, node_id=0)
        assert host is not None
        self.controller.start_writing()
        self.controller.take_write_acks(1)
        hashes = self.controller.page_hashes(key, None)
        self.controller.write_storage(host, hashes, None)
        operation = self.controller.ack_backup_queue.get(timeout=5)
        assert operation.completed_tokens == len(key)

    def num_hits(self, key: RadixKey) -> int:
        self.controller.prefetch("r", 0, key, None, None)
        return self.controller.prefetch_hit_queue.get(timeout=5).storage_hit_count

    def close(self) -> None:
        backend = self.controller.storage_backend
        assert isinstance(backend, HiCacheFile)
        self.controller.detach_storage_backend()


def owners(folder: Path) -> Counter[str]:
    """How many pages of the target, and of the draft by owner."""
    found: Counter[str] = Counter()
    for path in folder.glob("*.bin"):
        pool = "draft" if f".{PoolName.DRAFT}" in path.name else "kv"
        found[f"{pool}{path.stem.partition('_m')[2]}"] += 1
    return found


@pytest.mark.parametrize("kind", ["none", "heads", "latent"])
def test_what_all_ranks_hold_is_stored_once(kind: str, tmp_path: Path) -> None:
    def make_draft() -> KVCache | None:
        if kind == "none":
            return None
        return make_mha(2) if kind == "heads" else make_mla()

    key = RadixKey(list(range(4 * PAGE)))
    ranks = [Rank(tmp_path, rank, make_draft()) for rank in (0, 1)]
    ranks[1].write(key)
    # The second rank writes what only it has.
    assert owners(tmp_path) == ({"draft_1_2": 4} if kind == "heads" else {})
    ranks[0].write(key)
    expected = {"kv": 4}
    if kind == "heads":
        expected |= {"draft_0_2": 4, "draft_1_2": 4}
    elif kind == "latent":
        expected |= {"draft": 4}
    assert owners(tmp_path) == expected
    assert [rank.num_hits(key) for rank in ranks] == [4 * PAGE] * 2
    # A server of one rank finds what does not depend on ranks.
    alone = Rank(tmp_path, 0, make_draft(), tp_size=1)
    assert alone.num_hits(key) == (0 if kind == "heads" else 4 * PAGE)
    for rank in (*ranks, alone):
        rank.close()
