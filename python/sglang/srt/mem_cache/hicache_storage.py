"""Interface between the hierarchical cache and storage (L3), and the backend in files.

Owns the abstract backend, what it is told, and ``HiCacheFile``. Does not own the names of pools and
the description of a transfer (``pool_transfer.py``, re-exported here), host memory
(``memory_pool_host.py``), keys (``page_key.py``) nor the storage threads
(``storage_io.py``). Other backends live in ``storage/``.

All calls of one backend come from the controller's storage threads and, for ``clear`` and
``close``, from the scheduler thread while those threads are quiet; ``batch_*`` may be called by two
threads at once (one reads, one writes).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.page_key import PageHash, parse_storage_key
from sglang.srt.mem_cache.pool_transfer import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.file_options import file_options
from sglang.srt.mem_cache.storage.folder_quota import FolderQuota
from sglang.srt.mem_cache.storage.page_file import (
    Expected,
    PageOwner,
    PageStatus,
    model_part,
)
from sglang.srt.mem_cache.storage.rate_limited_log import RateLimitedLog

__all__ = [
    "FAULT_COUNTERS",
    "HiCacheFile",
    "HiCacheStorage",
    "HiCacheStorageConfig",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageError",
]

logger = logging.getLogger(__name__)

FAULT_COUNTERS = ("io_errors", "outages", "dropped_pages")
"""Names that ``HiCacheStorage.fault_counts`` may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTransferResult:
    """What exists of a span.

    ``kv_hit_pages``: leading KV pages. ``present``: of each other pool, which of the pages asked
    for exist, by position, as far as the KV pages go (of an ``ALL_PAGES`` pool the leading ones).
    """

    kv_hit_pages: int
    present: dict[PoolName, list[bool]] = field(default_factory=dict)

    @property
    def extra_pool_hit_pages(self) -> dict[PoolName, int]:
        """How many pages exist of each other pool."""
        return {name: sum(flags) for name, flags in self.present.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheStorageConfig:
    """Who we are, for a backend; ``extra_config`` is what the user passed for it.

    ``rank_sharded_pools``: pools of which every rank holds a part of its own even though the model
    is MLA, whose latent KV is the same on all tensor-parallel ranks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = None
    enable_storage_metrics: bool = False
    extra_config: dict[str, Any] = field(default_factory=dict)
    rank_sharded_pools: frozenset[PoolName] = frozenset({PoolName.MAMBA})

    def is_shared(self, pool: PoolName) -> bool:
        """Whether the pages of a pool are the same on every rank, stored once for all of them."""
        return self.is_mla_model and pool not in self.rank_sharded_pools

    def writes(self, pool: PoolName) -> bool:
        """Whether this rank stores its pages of a pool; of shared ones the first rank does."""
        return self.tp_rank == 0 or not self.is_shared(pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheStorageExtraInfo:
    """What a backend may want to know about the pages of one call; all of one prefix.

    ``prefix_keys``: hashes of all pages before the first key of the call, when asked for.
    ``namespace_digest``: 32 bytes, ``CacheIdentity.digest()`` that the pages' hash chain was seeded
    with. Stored with what is written and compared on what is read, in addition to the key, which
    depends on it already; None: neither.
    """

    prefix_keys: tuple[PageHash, ...] | None = None
    extra_info: dict[str, Any] | None = None
    namespace_digest: bytes | None = None


class StorageError(RuntimeError):
    """A backend cannot do what was asked; the controller counts it and goes on."""


class HiCacheStorage(ABC):
    """A store of pages. A miss is a value, never an exception.

    Only whole, verified pages count as read: after ``batch_get_v2`` says True for a page, its host
    page holds exactly the bytes that were written under that key; where it says False the host
    page's content is undefined and the caller discards it. Keys are those of ``page_key.py``
    (``make_storage_key``), one a page; a backend never mutates what it is passed.
    """

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self.config = config
        self.pools: dict[PoolName, HostKVCache] = {}

    def register_mem_host_pool_v2(self, pool: HostKVCache, name: PoolName) -> None:
        """Tell the backend whose pages it will move; before any transfer, once a pool."""
        self.pools[name] = pool

    def unregister_mem_host_pool_v2(self, name: PoolName) -> None:
        """Forget a pool; nothing of it is in flight."""
        self.pools.pop(name, None)

    @abstractmethod
    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys are present (readable as far as a cheap look can tell)."""

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pools: Sequence[PoolTransfer] = (),
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Look up the KV pages ``keys`` of a span and, in other pools, the pages beside them.

        ``pools``: name, rule and one key for each KV page. Of a trailing pool most pages do not
        exist: each is looked for. A backend that answers many keys at once may do better than
        this, which asks ``batch_exists`` for the runs between them.
        """
        num_pages = min(max(int(self.batch_exists(keys, extra_info)), 0), len(keys))
        present: dict[PoolName, list[bool]] = {}
        for pool in pools:
            wanted = list(pool.keys or ())[:num_pages]
            flags: list[bool] = []
            while len(flags) < len(wanted):
                num_left = len(wanted) - len(flags)
                found = self.batch_exists(wanted[len(flags) :], extra_info)
                found = min(max(int(found), 0), num_left)
                flags += [True] * found
                if found == num_left or pool.rule.trailing is None:
                    break
                flags.append(False)
            present[pool.name] = flags
        return PoolTransferResult(kv_hit_pages=num_pages, present=present)

    @abstractmethod
    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Read pages into host pages, pool after pool in the given order; one verdict a page.

        Of KV a prefix counts: pages behind the first that fails may be left unread (False).
        """

    @abstractmethod
    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Write host pages, pool after pool in the given order; one verdict a page.

        A page that exists already and is whole counts as written. Pages of a pool behind the first
        that fails may be left unwritten (False).
        """

    @abstractmethod
    def clear(self) -> bool:
        """Delete our own pages (this model's, this rank's); False when that failed."""

    def get_stats(self) -> dict[str, float]:
        """Return counters since the start, by name, for metrics and reports."""
        return {}

    def num_damaged_pages(self) -> int:
        """Return how many pages since the start were damaged or not what their name says.

        Called on the scheduler thread, often: must not wait for the store.
        """
        return 0

    def fault_counts(self) -> dict[str, int]:
        """Return counts since the start under the names of ``FAULT_COUNTERS``; may lack some.

        ``io_errors``: calls and transfers that failed; ``outages``: times that the store went away;
        ``dropped_pages``: to be written and not written. Called like ``num_damaged_pages``.
        """
        return {}

    def close(self) -> None:  # noqa: B027 (nothing to release is a right answer)
        """Release everything; idempotent. No call follows."""


def page_indices(transfer: PoolTransfer, page_size: int) -> list[int]:
    """Return the first host slot of each page of a transfer, one a key.

    Raises ValueError when slots or keys are missing or do not match.
    """
    if transfer.keys is None or transfer.host_indices is None:
        raise ValueError(f"a storage transfer of {transfer.name} needs host slots and keys")
    if len(transfer.host_indices) != len(transfer.keys) * page_size:
        raise ValueError(
            f"{transfer.name}: {len(transfer.host_indices)} host slots are not "
            f"{len(transfer.keys)} pages of {page_size}"
        )
    return transfer.host_indices[::page_size].tolist()


_TOUCH_STEP_NS = 5_000_000
_MAX_KNOWN_FILES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """One page of a call. ``touch_ns``: the recency that it gets."""

    path: str
    expected: Expected
    buffers: list[memoryview]
    touch_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is done with each page; with ``stops`` no page is begun after one that failed."""

    handle: Callable[[_Page], bool]
    stops: bool


class HiCacheFile(HiCacheStorage):
    """One file a page in a flat folder that several ranks and servers may share.

    Files are verified when read; what is short, torn, foreign or corrupt is a miss, is counted and
    removed, and the next write heals it. Room is kept by ``FolderQuota``. No OSError leaves a
    ``batch_*`` call: on a full, read-only or vanished folder writes are dropped and reads miss.

    Recency: a page that is read or found written gets a new modification time, a page's the earlier
    the further behind it is in its prefix, so that eviction takes tails first: a page behind a
    missing one cannot be reached. Across calls that needs ``prefix_keys``.

    Raises ValueError for bad options and StorageError when the folder cannot be made.
    """

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        options = file_options(config.extra_config)
        try:
            os.makedirs(options.folder, exist_ok=True)
            self._quota = FolderQuota(options.folder, options.limits())
        except OSError as error:
            raise StorageError(f"folder of the file backend cannot be used: {error}") from error
        self.folder = options.folder
        model = model_part(config.model_name)
        pp = {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
        self._rank_owner = PageOwner(
            model=model, tp_rank=config.tp_rank, tp_size=config.tp_size, **pp
        )
        shared = page_file.SHARED_RANK
        self._shared_owner = PageOwner(model=model, tp_rank=shared, tp_size=shared, **pp)
        self._stats: Counter[str] = Counter()
        self._stats_lock = threading.Lock()
        self._log = RateLimitedLog(logger)
        # Directories with something in them where a page belongs: named once each.
        self._blocked: set[str] = set()
        # Damaged files that could not be removed, by path: inode. Counted and named once each.
        self._undeletable: dict[str, int] = {}
        # Files whose header has been checked, by path: (inode, length). Presence is never cached.
        self._known: dict[str, tuple[int, int]] = {}
        self._readers = ThreadPoolExecutor(options.read_threads, "hicache-file-read")
        self._writers = ThreadPoolExecutor(options.write_threads, "hicache-file-write")
        self._num_threads = {
            self._readers: options.read_threads,
            self._writers: options.write_threads,
        }
        self._closed = False
        self._start()

    def _start(self) -> None:
        limits = self._quota.limits
        try:
            self._quota.start()
        except OSError as error:
            self._log.warning("start", "cannot write to %s (%s): reading only", self.folder, error)
        logger.info(
            "L3 in %s: %s of %s bytes used, %d bytes of the disk left free, fast checksum: %s",
            self.folder,
            self._quota.last_used_bytes,
            "unlimited" if limits.max_bytes is None else limits.max_bytes,
            limits.min_free_bytes,
            page_file.HAS_FAST_CHECKSUM,
        )
        used = self._quota.last_used_bytes
        if limits.max_bytes is not None and used > limits.max_bytes:
            logger.warning(
                "max_size of %d bytes is less than the %d that %s holds: the next write deletes "
                "what was used least recently",
                limits.max_bytes,
                used,
                self.folder,
            )

    def register_mem_host_pool_v2(self, pool: HostKVCache, name: PoolName) -> None:
        """See the base class; warns where no page of the pool can be written."""
        super().register_mem_host_pool_v2(pool, name)
        try:
            obstacle = self._quota.obstacle(page_file.HEADER_BYTES + pool.bytes_per_page)
        except OSError as error:
            obstacle = str(error)
        if obstacle is not None:
            logger.warning("no page of %s can be written to %s: %s", name, self.folder, obstacle)

    # -- the interface --

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys have a file with a right header and length."""
        for position, key in enumerate(keys):
            path, expected = self._locate(key, extra_info)
            if not self._is_present(path, expected):
                return position
        return len(keys)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Read files straight into host pages; several at once within a pool."""
        now_ns = time.time_ns()
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            pages = self._pages(transfer, extra_info, now_ns)
            # Other pools may have holes that their policy knows how to fill.
            work = _Work(handle=self._read, stops=transfer.name == PoolName.KV)
            found = self._for_each(self._readers, pages, work)
            verdicts.setdefault(transfer.name, []).extend(found)
        return verdicts

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Write host pages; a pool is complete before the next one begins."""
        now_ns = time.time_ns()
        namespace = extra_info.namespace_digest if extra_info else None
        verdicts: dict[PoolName, list[bool]] = {}

        def write(page: _Page) -> bool:
            return self._write(page, namespace)

        work = _Work(handle=write, stops=True)
        for transfer in transfers:
            pages = self._pages(transfer, extra_info, now_ns)
            written = self._for_each(self._writers, pages, work)
            self._count(dropped=written.count(False))
            verdicts.setdefault(transfer.name, []).extend(written)
        return verdicts

    def clear(self) -> bool:
        """Delete the pages of this model and rank, of all its weights; others' stay."""
        own = {self._rank_owner.file_suffix}
        if self.config.is_mla_model:
            own.add(self._shared_owner.file_suffix)

        def is_ours(name: str) -> bool:
            parsed = page_file.parse_file_name(name)
            return parsed is not None and parsed.owner in own

        try:
            num_removed = self._quota.remove_all(is_ours)
        except OSError as error:
            self._log.warning("clear", "%s was not cleared: %s", self.folder, error)
            return False
        self._known.clear()
        logger.info("removed %d pages from %s", num_removed, self.folder)
        return True

    def get_stats(self) -> dict[str, float]:
        """Return counts of pages and bytes.

        ``hits``, ``misses`` (no file), ``corrupt`` and ``foreign`` (files removed: misses too),
        ``written``, ``existing`` (already there), ``dropped`` (asked for and not written),
        ``evicted``, ``io_errors``, ``bytes_read`` (payload), ``bytes_written``, ``used_bytes`` of
        the whole folder, ``max_bytes`` (0: no limit).
        """
        names = ("hits", "misses", "corrupt", "foreign", "written", "existing", "dropped")
        stats = dict.fromkeys((*names, "io_errors", "bytes_read", "bytes_written"), 0.0)
        with self._stats_lock:
            stats.update({name: float(value) for name, value in self._stats.items()})
        stats["evicted"] = float(self._quota.num_evicted)
        stats["used_bytes"] = float(self._quota.last_used_bytes)
        stats["max_bytes"] = float(self._quota.limits.max_bytes or 0)
        return stats

    def close(self) -> None:
        """End the threads after what they are doing."""
        if self._closed:
            return
        self._closed = True
        self._readers.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        self._quota.close()
        self._log.flush()

    def num_damaged_pages(self) -> int:
        """See the base class."""
        with self._stats_lock:
            return self._stats["corrupt"] + self._stats["foreign"]

    def fault_counts(self) -> dict[str, int]:
        """See the base class; a folder has no outages."""
        with self._stats_lock:
            return {
                "io_errors": self._stats["io_errors"],
                "dropped_pages": self._stats["dropped"],
            }

    # -- one page --

    def _read(self, page: _Page) -> bool:
        result = page_file.read_page(page.path, page.buffers, page.expected, page.touch_ns)
        if result.status is PageStatus.OK:
            self._count(hits=1, bytes_read=sum(buffer.nbytes for buffer in page.buffers))
            return True
        if result.status is PageStatus.MISSING:
            self._count(misses=1)
        else:
            self._discard(page.path, result)
        return False

    def _write(self, page: _Page, namespace: bytes | None) -> bool:
        if self._is_present(page.path, page.expected):
            page_file.touch_page(page.path, page.touch_ns)
            self._count(existing=1)
            return True
        if page.path in self._blocked and os.path.isdir(page.path):
            return False
        owner = page.expected.owner
        namespace = namespace or owner.default_namespace
        payload_bytes = sum(buffer.nbytes for buffer in page.buffers)
        size = page_file.HEADER_BYTES + payload_bytes
        reservation = self._quota.reserve(size)
        if reservation is None:
            why = self._quota.obstacle(size) or "nothing more to delete"
            self._log.warning("full", "no room in %s, pages are not written: %s", self.folder, why)
            return False
        try:
            num_written = page_file.write_page(
                reservation.fd, page.buffers, page.expected, namespace, page.touch_ns
            )
        except BaseException:
            self._quota.abort(reservation)
            raise
        self._quota.commit(reservation, page.path)
        self._count(written=1, bytes_written=num_written)
        return True

    def _is_present(self, path: str, expected: Expected) -> bool:
        """Whether the file is there with a right header and length; removes one that is not."""
        try:
            known = self._known.get(path)
            if known is not None:
                info = os.stat(path, follow_symlinks=False)
                if known == (info.st_ino, info.st_size):
                    return True
            result = page_file.probe_page(path, expected)
        except FileNotFoundError:
            self._known.pop(path, None)
            return False
        except OSError as error:
            if not self._is_directory(path):
                self._count(io_errors=1)
                self._log.warning("probe", "cannot look at %s: %s", path, error)
            return False
        if result.status is PageStatus.OK:
            if len(self._known) >= _MAX_KNOWN_FILES:
                self._known.clear()
            self._known[path] = (result.inode, result.size)
            return True
        self._known.pop(path, None)
        if result.status is not PageStatus.MISSING:
            self._discard(path, result)
        return False

    def _is_directory(self, path: str) -> bool:
        """Whether a directory is in a page's place; an empty one is removed, others are named."""
        if os.path.islink(path) or not os.path.isdir(path):
            return False
        try:
            os.rmdir(path)
        except OSError as error:
            if path not in self._blocked:
                self._blocked.add(path)
                self._count(io_errors=1)
                logger.warning(
                    "%s is a directory in the place of a page and cannot be removed (%s): that "
                    "page is not kept until the directory is moved away",
                    path,
                    error.strerror,
                )
            return True
        self._count(corrupt=1)
        self._log.warning("discard", "%s was an empty directory: removed", path)
        return True

    def _discard(self, path: str, result: page_file.PageRead) -> None:
        """Remove a file that is not the page it should be; one that stays counts once."""
        self._known.pop(path, None)
        removed = "removed"
        try:
            self._quota.remove(path, result.inode)
            self._undeletable.pop(path, None)
        except OSError as error:
            if self._undeletable.get(path) == result.inode:
                return
            if len(self._undeletable) >= _MAX_KNOWN_FILES:
                self._undeletable.clear()
            self._undeletable[path] = result.inode
            removed = f"cannot be removed ({error.strerror or error})"
        is_foreign = result.status is PageStatus.FOREIGN
        self._count(**{"foreign" if is_foreign else "corrupt": 1})
        message = "%s is %s: %s, counts as a miss"
        self._log.warning("discard", message, path, result.status.value, removed)

    # -- a call's pages --

    def _locate(
        self,
        key: str,
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> tuple[str, Expected]:
        """The file of a key and what its header must say. Raises ValueError for a bad key."""
        pool_name = PoolName(parse_storage_key(key).pool)
        owner = self._shared_owner if self.config.is_shared(pool_name) else self._rank_owner
        pool = self.pools.get(pool_name)
        expected = Expected(
            key=key,
            owner=owner,
            namespace=extra_info.namespace_digest if extra_info else None,
            payload_bytes=None if pool is None else pool.bytes_per_page,
        )
        return f"{self.folder}/{page_file.file_name(key, owner)}", expected

    def _pages(
        self,
        transfer: PoolTransfer,
        extra_info: HiCacheStorageExtraInfo | None,
        now_ns: int,
    ) -> list[_Page]:
        pool = self.pools.get(transfer.name)
        if pool is None:
            raise ValueError(f"no host pool is registered as {transfer.name}")
        num_before = len(extra_info.prefix_keys or ()) if extra_info else 0
        pages = []
        for position, index in enumerate(page_indices(transfer, pool.page_size)):
            assert transfer.keys is not None
            path, expected = self._locate(transfer.keys[position], extra_info)
            touch_ns = now_ns - (num_before + position) * _TOUCH_STEP_NS
            buffers = pool.page_buffers(index)
            pages.append(_Page(path=path, expected=expected, buffers=buffers, touch_ns=touch_ns))
        return pages

    def _for_each(
        self, executor: ThreadPoolExecutor, pages: Sequence[_Page], work: _Work
    ) -> list[bool]:
        """Handle pages in order, several at once.

        The calling thread takes part: a call never waits behind another one's pages. Whatever
        happens, no thread touches the pages any more when this returns or raises.
        """
        verdicts = [False] * len(pages)
        failed = threading.Event()
        counter = itertools.count()

        def handle_some() -> None:
            while not self._closed:
                position = next(counter)
                if position >= len(pages) or (work.stops and failed.is_set()):
                    return
                verdicts[position] = self._guarded(work, pages[position])
                if not verdicts[position]:
                    failed.set()

        num_helpers = 0 if self._closed else min(self._num_threads[executor], len(pages)) - 1
        helpers = [executor.submit(handle_some) for _ in range(num_helpers)]
        try:
            handle_some()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return verdicts

    def _guarded(self, work: _Work, page: _Page) -> bool:
        try:
            return work.handle(page)
        except OSError as error:
            if not self._is_directory(page.path):
                self._count(io_errors=1)
                self._log.warning("io", "%s: %s", page.path, error)
            return False

    def _count(self, **amounts: int) -> None:
        with self._stats_lock:
            self._stats.update(amounts)
