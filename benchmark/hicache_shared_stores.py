"""How fast the backends of shared stores move pages, against the store's own batch calls.

Part of ``bench_hicache_storage.py``. Owns a store of its own on loopback, the pool and two ways.
Ours: ``batch_set_v2`` and ``batch_get_v2``, with header, checksum and verification, between the
store and host pages. The store's: the same pages under other names by its own batch calls, from and
to whatever is best for it (Mooncake: the same registered memory; RESP: ready ``bytes``, by redis-py
with its parser in C). Both move as many pages a call as the cache does, and alternate (A-B-B-A).
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.storage.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.redis_store import RedisStore
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.srt.mem_cache.storage_threads import STORAGE_BATCH_SIZE, read_batch_size
from sglang.test.fakes.host_pages import make_host_pool, page_hash
from sglang.test.fakes.store_servers import MooncakeServers, RespServer, StoreServers

FLOOR = 0.8
_HEAD_DIM, _PAGE_SIZE = 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRow:
    """One setting; MB are 10**6 bytes of pages, ratios are medians of the rounds' own ratios."""

    backend: str
    layout: str
    page_mib: float
    read_mb_s: float
    plain_read_mb_s: float
    read_ratio: float
    write_mb_s: float
    plain_write_mb_s: float
    write_ratio: float
    exists_us_per_page: float


class PlainCalls(ABC):
    """The store's own batch calls over the pages of a pool."""

    def __init__(self, store: SharedPageStore, pool: HostKVCache) -> None:
        self.pool = pool
        self.slots = list(range(0, pool.size, pool.page_size))

    @abstractmethod
    def put(self, names: Sequence[str], first: int) -> None:
        """Write pages ``first`` and following under these names."""

    @abstractmethod
    def get(self, names: Sequence[str], first: int) -> None:
        """Read them back. Raises RuntimeError when one is missing."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Delete them."""


class MooncakeCalls(PlainCalls):
    """Between registered host memory and the store, without copies."""

    def __init__(self, store: SharedPageStore, pool: HostKVCache) -> None:
        super().__init__(store, pool)
        assert isinstance(store, MooncakeStore)
        self._client = store._client
        self._addresses, _ = pool.get_page_buffer_meta(torch.arange(pool.size))

    def _place(self, names: Sequence[str], first: int) -> tuple[list[str], list[int], list[int]]:
        addresses = self._addresses[first : first + len(names)]
        return list(names), addresses, [self.pool.bytes_per_page] * len(names)

    def put(self, names: Sequence[str], first: int) -> None:
        if min(self._client.batch_put_from(*self._place(names, first))) < 0:
            raise RuntimeError("pages were not written")

    def get(self, names: Sequence[str], first: int) -> None:
        if min(self._client.batch_get_into(*self._place(names, first))) < 0:
            raise RuntimeError("pages are missing")

    def remove(self, names: Sequence[str]) -> None:
        self._client.batch_remove(list(names), True)


class RespCalls(PlainCalls):
    """MGET and pipelined SET of ``bytes`` that lie ready."""

    def __init__(self, store: SharedPageStore, pool: HostKVCache) -> None:
        super().__init__(store, pool)
        assert isinstance(store, RedisStore)
        address = store.options.address
        self._client: Any = importlib.import_module("redis").Redis(address.host, address.port)
        self._values = [b"".join(pool.page_buffers(slot)) for slot in self.slots]

    def put(self, names: Sequence[str], first: int) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for name, value in zip(names, self._values[first:]):
                pipeline.set(name, value)
            pipeline.execute()

    def get(self, names: Sequence[str], first: int) -> None:
        if None in self._client.mget(list(names)):
            raise RuntimeError("pages are missing")

    def remove(self, names: Sequence[str]) -> None:
        self._client.unlink(*names)


class _Bench:
    """A store on loopback, a pool, and the two ways."""

    def __init__(self, backend: str, layout: str, page_bytes: int, num_pages: int) -> None:
        layers = max(page_bytes // (8 * _PAGE_SIZE * _HEAD_DIM), 1)
        self.pool = make_host_pool(num_pages, _PAGE_SIZE, layers, layout, _HEAD_DIM)
        self.pool.memory.array[:] = np.random.default_rng(0).integers(
            0, 256, self.pool.memory.num_bytes, dtype=np.uint8
        )
        self._folder = tempfile.TemporaryDirectory()
        room = 4 * self.pool.memory.num_bytes + (64 << 20)
        folder = Path(self._folder.name)
        self._servers: StoreServers
        self._servers = (
            MooncakeServers(folder, room) if backend == "mooncake" else RespServer(folder)
        )
        self._servers.start()
        config = HiCacheStorageConfig(
            model_name="bench",
            extra_config=self._servers.extra_config(timeout=10)
            if backend == "redis"
            else self._servers.extra_config(transfer_timeout=10),
        )
        self.store: SharedPageStore
        self.store = MooncakeStore(config) if backend == "mooncake" else RedisStore(config)
        self.store.register_mem_host_pool_v2(self.pool, PoolName.KV)
        calls = MooncakeCalls if backend == "mooncake" else RespCalls
        self.plain: PlainCalls = calls(self.store, self.pool)
        self._read_batch = read_batch_size(self.pool.bytes_per_page)
        self._num_rounds = 0

    def close(self) -> None:
        """End everything."""
        self.store.close()
        self._servers.close()
        self._folder.cleanup()

    def _mb_s(self, move: Callable[[int, int], None], batch: int) -> float:
        started = time.perf_counter()
        for first in range(0, self.pool.page_num, batch):
            move(first, min(batch, self.pool.page_num - first))
        num_bytes = self.pool.page_num * self.pool.bytes_per_page
        return num_bytes / (time.perf_counter() - started) / 1e6

    def ours(self) -> tuple[float, float]:
        """Write and read all pages once through the backend; MB/s of both."""
        self._num_rounds += 1
        keys = [page_hash(f"{self._num_rounds}/{page}") for page in range(self.pool.page_num)]

        def transfer(first: int, count: int) -> PoolTransfer:
            slots = torch.arange(first * _PAGE_SIZE, (first + count) * _PAGE_SIZE)
            return PoolTransfer(
                name=PoolName.KV, host_indices=slots, keys=list(keys[first : first + count])
            )

        def write(first: int, count: int) -> None:
            if not all(self.store.batch_set_v2([transfer(first, count)])[PoolName.KV]):
                raise RuntimeError("pages were not written")

        def read(first: int, count: int) -> None:
            if not all(self.store.batch_get_v2([transfer(first, count)])[PoolName.KV]):
                raise RuntimeError("pages are missing")

        rates = self._mb_s(write, STORAGE_BATCH_SIZE), self._mb_s(read, self._read_batch)
        self.store.clear()
        return rates

    def theirs(self) -> tuple[float, float]:
        """The same by the store's own calls."""
        self._num_rounds += 1
        names = [f"plain/{self._num_rounds}/{page}" for page in range(self.pool.page_num)]

        def write(first: int, count: int) -> None:
            self.plain.put(names[first : first + count], first)

        def read(first: int, count: int) -> None:
            self.plain.get(names[first : first + count], first)

        rates = self._mb_s(write, STORAGE_BATCH_SIZE), self._mb_s(read, self._read_batch)
        self.plain.remove(names)
        return rates

    def exists_us(self) -> float:
        """Microseconds a page of a look at pages that are not there, 128 at a time."""
        keys = [page_hash(f"none/{number}") for number in range(STORAGE_BATCH_SIZE)]
        started = time.perf_counter()
        self.store.batch_exists(keys)
        return (time.perf_counter() - started) / len(keys) * 1e6


def measure_shared(
    backend: str, layout: str, page_bytes: int, num_pages: int, rounds: int
) -> SharedRow:
    """Alternate the two ways."""
    bench = _Bench(backend, layout, page_bytes, num_pages)
    try:
        bench.ours(), bench.theirs()  # warm-up: connections, memory of the store
        pairs = []
        for round_ in range(rounds):
            order = (bench.ours, bench.theirs) if round_ % 2 == 0 else (bench.theirs, bench.ours)
            first, second = order[0](), order[1]()
            pairs.append((first, second) if round_ % 2 == 0 else (second, first))
        exists_us = bench.exists_us()
        page_mib = bench.pool.bytes_per_page / 2**20
    finally:
        bench.close()

    def median(of: Callable[[tuple[float, float], tuple[float, float]], float]) -> float:
        return statistics.median(of(ours, theirs) for ours, theirs in pairs)

    return SharedRow(
        backend=backend,
        layout=layout,
        page_mib=round(page_mib, 3),
        write_mb_s=round(median(lambda ours, theirs: ours[0]), 1),
        plain_write_mb_s=round(median(lambda ours, theirs: theirs[0]), 1),
        write_ratio=round(median(lambda ours, theirs: ours[0] / theirs[0]), 3),
        read_mb_s=round(median(lambda ours, theirs: ours[1]), 1),
        plain_read_mb_s=round(median(lambda ours, theirs: theirs[1]), 1),
        read_ratio=round(median(lambda ours, theirs: ours[1] / theirs[1]), 3),
        exists_us_per_page=round(exists_us, 2),
    )


def format_shared(rows: Sequence[SharedRow]) -> str:
    """Return the table."""
    lines = [
        f"{'backend':<9} {'layout':<18} {'page MiB':>8} {'read':>7} {'plain':>7} {'ratio':>6} "
        f"{'write':>7} {'plain':>7} {'ratio':>6} {'exists us':>9}   (MB/s)"
    ]
    lines += [
        f"{r.backend:<9} {r.layout:<18} {r.page_mib:>8.2f} {r.read_mb_s:>7.0f} "
        f"{r.plain_read_mb_s:>7.0f} {r.read_ratio:>6.2f} {r.write_mb_s:>7.0f} "
        f"{r.plain_write_mb_s:>7.0f} {r.write_ratio:>6.2f} {r.exists_us_per_page:>9.2f}"
        for r in rows
    ]
    return "\n".join(lines)
