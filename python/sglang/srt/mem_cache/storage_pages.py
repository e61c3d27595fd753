"""Which pages of which pools a span has in storage: look-ups, reads and writes of a backend.

Owns how pages of all registered pools go together: keys, order of calls, and how many leading KV
pages may count. It knows a pool by its ``PageRule`` (``pool_transfer.py``) and by whether it shares
the anchor's slots. Owns neither operations nor threads (``storage_io.py``, its only user), nor
slots. Storage threads.

Order of every call, so that whoever sees a KV page finds what belongs to it: pages of pools with
slots of their own, the draft's, then KV.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageError,
)
from sglang.srt.mem_cache.memory_pool_host import HostKVCache, HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.page_key import PageHash, draft_page_key, make_storage_key
from sglang.srt.mem_cache.pool_transfer import SpanPages
from sglang.srt.mem_cache.storage_threads import CallWatch, StorageStats, read_batch_size

logger = logging.getLogger(__name__)

DRAFT_STORAGE_POLICIES = ("clamp", "best_effort")


def leading(verdicts: Sequence[bool] | None, limit: int) -> int:
    """Return how many of the first ``limit`` verdicts are True before the first that is not."""
    return sum(1 for _ in itertools.takewhile(bool, (verdicts or ())[:limit]))


class StoragePages:
    """See the module docstring.

    ``draft_storage_policy``: ``clamp`` (a hit ends where a draft page is missing) or
    ``best_effort`` (such a page is zeroed and counted).
    """

    def __init__(
        self,
        host_pools: HostPoolGroup,
        page_size: int,
        storage_config: HiCacheStorageConfig,
        draft_storage_policy: str,
    ) -> None:
        if draft_storage_policy not in DRAFT_STORAGE_POLICIES:
            raise ValueError(f"draft storage policy {draft_storage_policy!r} is unknown")
        self.host_pools = host_pools
        self.page_size = page_size
        self.draft_storage_policy = draft_storage_policy
        self.storage_stats = StorageStats()
        self.storage_backend: HiCacheStorage | None = None
        self.call_watch = CallWatch()
        self._storage_config = storage_config

    @property
    def _trailing_entries(self) -> list[PoolEntry]:
        """Pools of which a prefix needs only its last pages: not every length is usable."""
        return [entry for entry in self.host_pools.entries if entry.rule.trailing is not None]

    @property
    def mem_pool_host_draft(self) -> HostKVCache | None:
        """The draft's host pool."""
        entry = self.host_pools.get(PoolName.DRAFT)
        return entry.host_pool if entry else None

    @property
    def _bytes_per_page(self) -> int:
        return self.host_pools.bytes_per_token * self.page_size

    def _backend(self) -> HiCacheStorage:
        """The backend, for one call that a storage thread makes now."""
        if self.storage_backend is None:
            raise StorageError("no storage backend is attached")
        self.call_watch.begin()
        return self.storage_backend

    def _stores(self, pool: PoolName) -> bool:
        """Whether this rank writes its pages of a pool; else another one writes the same bytes."""
        raise NotImplementedError

    # -- look-up ---------------------------------------------------------------------------------

    def _num_present(
        self,
        hashes: list[PageHash],
        draft_digest: bytes | None,
        extra: HiCacheStorageExtraInfo | None,
    ) -> PoolTransferResult:
        """Return how many leading pages exist in all pools that must have every page.

        Also which of those pages each trailing pool has.
        """
        pools = [
            PoolTransfer(name=entry.name, keys=_keys(entry.name, hashes), rule=entry.rule)
            for entry in self.host_pools.own_slot_entries
        ]
        if draft_digest is not None and self.draft_storage_policy == "clamp":
            keys = [draft_page_key(page_hash, draft_digest) for page_hash in hashes]
            pools.append(PoolTransfer(name=PoolName.DRAFT, keys=keys))
        result = self._backend().batch_exists_v2(hashes, pools, extra)
        found = max(min(result.kv_hit_pages, len(hashes)), 0)
        present: dict[PoolName, list[bool]] = {}
        for pool in pools:
            flags = result.present.get(pool.name, [])
            if pool.rule.trailing is None:
                found = leading(flags, found)
            else:
                present[pool.name] = flags
        for name, flags in present.items():
            present[name] = (flags + [False] * found)[:found]
        return PoolTransferResult(kv_hit_pages=found, present=present)

    # -- reads -----------------------------------------------------------------------------------

    def _extra_page_get(
        self,
        hashes: Sequence[PageHash],
        pages: SpanPages,
        extra: HiCacheStorageExtraInfo | None,
    ) -> bool:
        """Read pages of a pool with slots of its own; whether all have come. ``hashes``: a span."""
        entry = self.host_pools.get(pages.name)
        assert entry is not None
        batch_size = read_batch_size(entry.host_pool.bytes_per_page)
        page = entry.host_pool.page_size
        for start in range(0, len(pages.positions), batch_size):
            positions = pages.positions[start : start + batch_size]
            transfer = PoolTransfer(
                name=pages.name,
                host_indices=pages.host_indices[start * page :][: len(positions) * page],
                keys=_keys(pages.name, [hashes[position] for position in positions]),
            )
            verdicts = self._backend().batch_get_v2([transfer], extra)
            found = leading(verdicts.get(pages.name), len(positions))
            self.storage_stats.read_bytes += found * entry.host_pool.bytes_per_page
            if found < len(positions):
                self.storage_stats.extra_pages_missed += len(positions) - found
                return False
        return True

    def _page_get(
        self,
        hashes: list[PageHash],
        host_indices: torch.Tensor,
        draft_digest: bytes | None,
        extra: HiCacheStorageExtraInfo | None,
    ) -> int:
        """Read pages of the pools that share the anchor's slots, the draft's first.

        Returns how many leading ones are complete.
        """
        num_pages = len(hashes)
        if draft_digest is not None:
            num_pages = self._draft_page_get(hashes, host_indices, draft_digest, extra)
        if num_pages == 0:
            return 0
        transfer = PoolTransfer(
            name=self.host_pools.anchor.name,
            host_indices=host_indices[: num_pages * self.page_size],
            keys=list(hashes[:num_pages]),
        )
        verdicts = self._backend().batch_get_v2([transfer], extra)
        return leading(verdicts.get(transfer.name), num_pages)

    def _draft_transfer(
        self, hashes: list[PageHash], host_indices: torch.Tensor, draft_digest: bytes
    ) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName.DRAFT,
            host_indices=host_indices,
            keys=[draft_page_key(page_hash, draft_digest) for page_hash in hashes],
        )

    def _draft_page_get(
        self,
        hashes: list[PageHash],
        host_indices: torch.Tensor,
        draft_digest: bytes,
        extra: HiCacheStorageExtraInfo | None,
    ) -> int:
        """Read the draft's pages; return how many leading target pages may be used.

        ``best_effort``: all of them; a draft page that did not come is zeros, never old bytes.
        """
        transfer = self._draft_transfer(hashes, host_indices, draft_digest)
        verdicts: list[bool]
        try:
            verdicts = self._backend().batch_get_v2([transfer], extra).get(PoolName.DRAFT, [])
        except Exception as error:  # noqa: BLE001 - the target's pages may still be of use
            if self.draft_storage_policy == "clamp":
                raise
            logger.warning("Storage read of draft pages failed: %r", error)
            verdicts = []
        if self.draft_storage_policy == "clamp":
            return leading(verdicts, len(hashes))
        verdicts = verdicts + [False] * (len(hashes) - len(verdicts))
        starts = host_indices[:: self.page_size].tolist()
        for start, is_read in zip(starts, verdicts):
            if not is_read:
                self._zero_draft_page(start)
        return len(hashes)

    def num_whole_drafts(
        self, path_indices: Callable[[], torch.Tensor], num_pages: int
    ) -> int | None:
        """Return how many of the last ``num_pages`` of a path have the draft that was computed.

        None: all. ``path_indices`` returns the host slots of the path, from the root on. A draft
        that was replaced by zeros must not reach storage, nor what was computed behind it: there it
        would count as whole. Scheduler thread.
        """
        pool = self.mem_pool_host_draft
        if pool is None or not self.storage_stats.draft_pages_zeroed:
            return None
        is_blank = pool.blank_pages(path_indices())
        blank = is_blank.nonzero()
        return None if len(blank) == 0 else max(int(blank[0]) - (len(is_blank) - num_pages), 0)

    def _zero_draft_page(self, start: int) -> None:
        pool = self.mem_pool_host_draft
        assert pool is not None
        for buffer in pool.page_buffers(start):
            buffer.cast("B")[:] = bytes(buffer.nbytes)
        self.storage_stats.draft_pages_zeroed += 1

    # -- writes ----------------------------------------------------------------------------------

    def _extra_page_set(
        self,
        hashes: Sequence[PageHash],
        pages: SpanPages,
        extra: HiCacheStorageExtraInfo | None,
    ) -> int:
        """Write pages of a pool with slots of its own; return how many KV pages may follow.

        The KV page whose page here is not written waits, and so do all behind it: it is written
        when this one is.
        """
        entry = self.host_pools.get(pages.name)
        assert entry is not None
        if not pages.positions or not self._stores(pages.name):
            return len(hashes)
        transfer = PoolTransfer(
            name=pages.name,
            host_indices=pages.host_indices,
            keys=_keys(pages.name, [hashes[position] for position in pages.positions]),
        )
        if extra is not None and extra.prefix_keys is not None:
            before = tuple(hashes[: pages.positions[0]])
            extra = replace(extra, prefix_keys=extra.prefix_keys + before)
        verdicts = self._backend().batch_set_v2([transfer], extra)
        written = leading(verdicts.get(pages.name), len(pages.positions))
        self.storage_stats.write_bytes += written * entry.host_pool.bytes_per_page
        return len(hashes) if written == len(pages.positions) else pages.positions[written]

    def _page_set(
        self,
        hashes: list[PageHash],
        host_indices: torch.Tensor,
        draft_digest: bytes | None,
        extra: HiCacheStorageExtraInfo | None,
        extra_pages: Sequence[SpanPages] = (),
        num_drafts: int | None = None,
    ) -> int:
        """Write pages of all pools, KV last: a KV page that is there has all that goes with it.

        ``num_drafts``: draft pages that may be written; None: all. Returns how many leading ones
        are written, by this rank or by the one that writes for all.
        """
        num_pages = len(hashes)
        for pages in extra_pages:
            num_pages = min(num_pages, self._extra_page_set(hashes, pages, extra))
        host_indices = host_indices[: num_pages * self.page_size]
        if draft_digest is not None and num_pages:
            num_pages = self._draft_page_set(
                hashes[:num_pages], host_indices, draft_digest, extra, num_drafts
            )
        if num_pages == 0 or not self._stores(self.host_pools.anchor.name):
            return num_pages
        transfer = PoolTransfer(
            name=self.host_pools.anchor.name,
            host_indices=host_indices[: num_pages * self.page_size],
            keys=list(hashes[:num_pages]),
        )
        verdicts = self._backend().batch_set_v2([transfer], extra)
        return leading(verdicts.get(transfer.name), num_pages)

    def _draft_page_set(
        self,
        hashes: list[PageHash],
        host_indices: torch.Tensor,
        draft_digest: bytes,
        extra: HiCacheStorageExtraInfo | None,
        num_drafts: int | None,
    ) -> int:
        """Write the draft's pages; return how many leading target pages may follow."""
        if not self._stores(PoolName.DRAFT) or num_drafts == 0:
            return len(hashes)
        wanted = hashes if num_drafts is None else hashes[:num_drafts]
        transfer = self._draft_transfer(
            wanted, host_indices[: len(wanted) * self.page_size], draft_digest
        )
        num_written = 0
        try:
            verdicts = self._backend().batch_set_v2([transfer], extra)
            num_written = leading(verdicts.get(PoolName.DRAFT), len(wanted))
        except Exception as error:  # noqa: BLE001 - the target's pages may still be of use
            if self.draft_storage_policy == "clamp":
                raise
            logger.warning("Storage write of draft pages failed: %r", error)
        self.storage_stats.draft_write_failures += int(num_written < len(wanted))
        return num_written if self.draft_storage_policy == "clamp" else len(hashes)


def _keys(name: PoolName, hashes: Sequence[PageHash]) -> list[str]:
    return [make_storage_key(name, page_hash) for page_hash in hashes]
