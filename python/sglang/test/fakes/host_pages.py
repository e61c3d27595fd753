"""Small host pools with known content, and transfers over them, for tests of storage backends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import HostKVCache, MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_key import PageHash
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer


def make_host_pool(
    num_pages: int = 16,
    page_size: int = 4,
    layer_num: int = 2,
    layout: str = "page_first",
    head_dim: int = 8,
) -> MHATokenToKVPoolHost:
    """Return a pool of one float32 head; a page has ``8 * page_size * layer_num * head_dim``
    bytes."""
    device_pool = MHATokenToKVPool(
        size=page_size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=head_dim,
        layer_num=layer_num,
        device="cpu",
    )
    return MHATokenToKVPoolHost(device_pool, num_pages * page_size, layout)


def page_content(seed: int | str, num_bytes: int) -> bytes:
    """Return the bytes that a page with this seed holds, the same in every process."""
    digest = hashlib.sha256(str(seed).encode()).digest()
    return np.random.default_rng(list(digest[:8])).bytes(num_bytes)


def fill_page(pool: HostKVCache, page: int, seed: int | str) -> None:
    """Write known content to a page (pages count from 0)."""
    content = memoryview(page_content(seed, pool.bytes_per_page))
    start = 0
    for buffer in pool.page_buffers(page * pool.page_size):
        buffer[:] = content[start : start + buffer.nbytes]
        start += buffer.nbytes


def read_page(pool: HostKVCache, page: int) -> bytes:
    """Return a page's bytes in storage order."""
    return b"".join(bytes(view) for view in pool.page_buffers(page * pool.page_size))


def holds(pool: HostKVCache, page: int, seed: int | str) -> bool:
    """Whether a page has exactly this content."""
    return read_page(pool, page) == page_content(seed, pool.bytes_per_page)


def page_hash(seed: int | str) -> PageHash:
    """Return a page hash that belongs to the seed."""
    return PageHash(hashlib.sha256(f"hash of {seed}".encode()).hexdigest())


def transfer(
    pool: HostKVCache,
    pages: Sequence[int],
    keys: Sequence[str],
    name: PoolName = PoolName.KV,
) -> PoolTransfer:
    """Describe a copy of whole pages."""
    first = torch.tensor(list(pages), dtype=torch.int64) * pool.page_size
    slots = (first[:, None] + torch.arange(pool.page_size)).flatten()
    return PoolTransfer(name=name, host_indices=slots, keys=list(keys))


def make_file_store(
    folder: Path,
    pool: HostKVCache | None = None,
    model_name: str = "org/model",
    tp_rank: int = 0,
    tp_size: int = 1,
    is_mla_model: bool = False,
    **options: object,
) -> HiCacheFile:
    """Return a file backend with a registered KV pool and no limits but the ones given."""
    extra: dict[str, object] = {"max_size": 0, "min_free_space": 0, "read_threads": 2}
    extra |= {"write_threads": 2, "file_storage_path": str(folder)} | options
    config = HiCacheStorageConfig(
        model_name=model_name,
        tp_rank=tp_rank,
        tp_size=tp_size,
        is_mla_model=is_mla_model,
        extra_config=extra,
    )
    store = HiCacheFile(config)
    if pool is not None:
        store.register_mem_host_pool_v2(pool, PoolName.KV)
    return store


def put(store: HiCacheStorage, pool: HostKVCache, seeds: Sequence[int | str]) -> list[bool]:
    """Fill the first pages with the seeds' content and write them under the seeds' hashes."""
    for page, seed in enumerate(seeds):
        fill_page(pool, page, seed)
    keys = [page_hash(seed) for seed in seeds]
    return store.batch_set_v2([transfer(pool, range(len(seeds)), keys)])[PoolName.KV]


def get(store: HiCacheStorage, pool: HostKVCache, seeds: Sequence[int | str]) -> list[bool]:
    """Read the seeds' pages into the first pages; True only where the bytes are right as well."""
    for page in range(len(seeds)):
        fill_page(pool, page, "stale")
    keys = [page_hash(seed) for seed in seeds]
    found = store.batch_get_v2([transfer(pool, range(len(seeds)), keys)])[PoolName.KV]
    for page, seed in enumerate(seeds):
        if found[page] and not holds(pool, page, seed):
            raise AssertionError(f"page of {seed!r} counts as read and has other bytes")
    return found
