"""Host pages to and from storage (L3): the threads, their queues and the operations under way.

Owns the backend, the storage threads and the named queues. Does not allocate, does not decide and
knows no node: threads post results, the scheduler thread takes them. Which pages of which pools an
operation covers: ``storage_pages.py``, its base. Base of ``HiCacheController``, which adds the
copies between device and host. Who owns a host page when: ``storage_threads.py``.

Threads while storage is attached (input -> output):

- ``prefetch_thread_func``      prefetch_queue -> hit query, MIN over ranks -> prefetch_hit_queue
- ``prefetch_io_aux_func``      prefetch_buffer -> reads -> the operation, host_mem_release_queue
- ``backup_thread_func``        backup_queue -> writes -> ack_backup_queue
- ``CallWatch.watch``           tells of calls of the others that do not return
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    StorageError,
)
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.memory_pool_host import (
    DevicePool,
    HostKVCache,
    HostPoolGroup,
    PoolEntry,
)
from sglang.srt.mem_cache.page_key import PageHash, RadixKey
from sglang.srt.mem_cache.pool_transfer import SpanPages, deepest_end
from sglang.srt.mem_cache.storage.backend_factory import create_storage_backend
from sglang.srt.mem_cache.storage_control import MinReduce
from sglang.srt.mem_cache.storage_pages import StoragePages
from sglang.srt.mem_cache.storage_threads import (
    JOIN_TIMEOUT_S,
    STORAGE_BATCH_SIZE,
    LiveOperations,
    PoolSlots,
    PrefetchOperation,
    StorageOperation,
    StorageThreads,
    call_bounded,
    read_batch_size,
)

logger = logging.getLogger(__name__)

BackendFactory = Callable[[str, HiCacheStorageConfig], HiCacheStorage]


def _nothing() -> None:
    return


class HostStorageIO(StoragePages):
    """See the module docstring. Scheduler thread, except the thread functions.

    ``prefetch_min_reduce``: MIN over ranks for the prefetch thread alone, over a group of its own;
    None for one rank. ``on_progress``: called by storage threads when they have posted something,
    to wake the scheduler. ``draft_storage_policy``: ``clamp`` (a hit ends where a draft page is
    missing) or ``best_effort`` (such a page is zeroed and counted).
    """

    def __init__(
        self,
        host_pools: HostPoolGroup,
        *,
        page_size: int,
        backend_factory: BackendFactory = create_storage_backend,
        storage_config: HiCacheStorageConfig | None = None,
        draft_storage_policy: str = "clamp",
        prefetch_min_reduce: MinReduce | None = None,
        on_progress: Callable[[], None] | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        super().__init__(
            host_pools, page_size, storage_config or HiCacheStorageConfig(), draft_storage_policy
        )
        self.mem_pool_host: HostKVCache = host_pools.anchor.host_pool
        self._backend_factory = backend_factory
        self._prefetch_min_reduce = prefetch_min_reduce
        self._on_progress = on_progress or _nothing
        self._join_timeout_s = join_timeout_s
        self._threads = StorageThreads()
        self._seed_fn: Callable[[RadixKey], bytes] | None = None
        self._draft_digest_fn: Callable[[], bytes] | None = None  # set with the draft's pool
        self._next_operation_id = 0
        # Only to find what is under way at a reset; queues and threads hold what they work on.
        self._prefetches: LiveOperations[PrefetchOperation] = LiveOperations()
        self._backups: LiveOperations[StorageOperation] = LiveOperations()
        self.enable_storage = False
        self.storage_backend_type: str | None = None
        # Tokens asked for by prefetches that have not ended; the tree adds and subtracts.
        self.prefetch_tokens_occupied = 0
        self.prefetch_capacity_limit = self.mem_pool_host.size // 2
        self.prefetch_queue: queue.Queue[PrefetchOperation | None] = queue.Queue()
        self.prefetch_hit_queue: queue.Queue[PrefetchOperation] = queue.Queue()
        self.prefetch_buffer: queue.Queue[PrefetchOperation | None] = queue.Queue()
        self.backup_queue: queue.Queue[StorageOperation | None] = queue.Queue()
        self.ack_backup_queue: queue.Queue[StorageOperation] = queue.Queue()
        self.host_mem_release_queue: queue.Queue[torch.Tensor] = queue.Queue()
        self.extra_host_mem_release_queues: dict[PoolName, queue.Queue[torch.Tensor]] = {
            entry.name: queue.Queue() for entry in self.host_pools.own_slot_entries
        }

    # -- the draft model's pool --------------------------------------------------------------

    @property
    def _draft_entry(self) -> PoolEntry | None:
        return self.host_pools.get(PoolName.DRAFT)

    @property
    def has_draft(self) -> bool:
        """Whether a draft model's KV travels with the target's."""
        return self._draft_entry is not None

    @property
    def mem_pool_device_draft(self) -> DevicePool | None:
        """The draft's device pool."""
        return self._draft_entry.device_pool if self._draft_entry else None

    def set_draft_kv_pool(
        self,
        device_pool: KVCache,
        host_pool: HostKVCache,
        digest_fn: Callable[[], bytes] | None = None,
    ) -> None:
        """Let a draft model's KV travel with the target's, at the same slots, in every copy.

        ``digest_fn()``: digest of the draft's ``CacheIdentity`` now, part of its storage keys;
        needed as soon as storage is attached. Raises ValueError for a second draft, for unequal
        slots, or when the digest is missing. Call while nothing is in flight.
        """
        if self.enable_storage and digest_fn is None:
            raise ValueError("draft pages go to storage only under the draft's digest")
        self.host_pools.add(
            PoolEntry(name=PoolName.DRAFT, host_pool=host_pool, device_pool=device_pool)
        )
        self._draft_digest_fn = digest_fn
        if self.storage_backend is not None:
            self.storage_backend.config = self._config_for(self.storage_backend.config.extra_config)
            self.storage_backend.register_mem_host_pool_v2(host_pool, PoolName.DRAFT)

    def _draft_digest(self) -> bytes | None:
        """The digest for an operation that begins now; None: it carries no draft pages."""
        if not self.has_draft:
            return None
        if self._draft_digest_fn is None:
            raise ValueError("draft pages go to storage only under the draft's digest")
        return self._draft_digest_fn()

    # -- attach and detach ----------------------------------------------------------------------

    def attach_storage_backend(
        self,
        *,
        backend: str,
        extra_config: dict[str, Any],
        seed_fn: Callable[[RadixKey], bytes],
        make: Callable[[], HiCacheStorage] | None = None,
    ) -> None:
        """Make a backend and start the threads.

        ``seed_fn(key)``: digest of the ``CacheIdentity`` of the key's namespace, now. ``make()``:
        gives what ``make_storage_backend`` has made earlier. Raises StorageError when one is
        attached or a thread of before still hangs in its backend, ValueError without a draft
        digest, and whatever the backend raises; nothing has changed then.
        """
        if self.enable_storage:
            raise StorageError(f"storage backend {self.storage_backend_type} is attached already")
        self._finish_detach(0.0)
        self._draft_digest()  # raises now rather than at the first backup
        created = make() if make else self.make_storage_backend(backend, extra_config)
        # Every operation of an earlier attachment is over: what it found is of no use.
        _clear_queue(self.prefetch_hit_queue)
        self.storage_backend, self.storage_backend_type = created, backend
        self._seed_fn = seed_fn
        watched: queue.Queue[None] = queue.Queue()
        self._threads.start(
            {
                "hicache-prefetch": (self.prefetch_thread_func, self.prefetch_queue),
                "hicache-prefetch-io": (self.prefetch_io_aux_func, self.prefetch_buffer),
                "hicache-backup": (self.backup_thread_func, self.backup_queue),
                "hicache-watch": (lambda: self.call_watch.watch(watched, backend), watched),
            }
        )
        self.enable_storage = True

    def make_storage_backend(self, backend: str, extra_config: dict[str, Any]) -> HiCacheStorage:
        """Make a backend that knows the host pools. Any thread; raises whatever it raises."""
        created = self._backend_factory(backend, self._config_for(extra_config))
        try:
            for entry in self.host_pools.entries:
                created.register_mem_host_pool_v2(entry.host_pool, entry.name)
        except Exception:
            created.close()
            raise
        return created

    def _config_for(self, extra_config: dict[str, Any]) -> HiCacheStorageConfig:
        """Who we are, with the pools that each rank holds a part of."""
        sharded = {e.name for e in self.host_pools.entries if not e.host_pool.is_replicated}
        return replace(
            self._storage_config,
            extra_config=dict(extra_config),
            rank_sharded_pools=self._storage_config.rank_sharded_pools | sharded,
        )

    def _stores(self, pool: PoolName) -> bool:
        """See ``StoragePages``."""
        return self._config_for({}).writes(pool)

    def detach_storage_backend(self, wait_s: float | None = None) -> None:
        """Answer every operation, stop the threads and close the backend; idempotent.

        Queued backups are acknowledged with what was written, prefetches end where they are; the
        caller drains the queues before and after. Raises StorageError when a thread hangs in its
        backend for longer than ``wait_s`` (None: the join timeout): storage is off then, but the
        operations it holds stay unanswered and keep their pages, and nothing can be attached, until
        the call returns.
        """
        if self.enable_storage:
            self.enable_storage = False
            self._finish_detach(self._join_timeout_s if wait_s is None else wait_s)
        else:
            self._finish_detach(0.0)

    def _finish_detach(self, timeout_s: float) -> None:
        if hanging := self._threads.stop(timeout_s):
            raise StorageError(
                f"storage threads hang in backend {self.storage_backend_type}: "
                f"{', '.join(hanging)}; they keep their pages until their calls return. Storage is "
                "off meanwhile; detach again when they have returned"
            )
        self._answer_what_is_left()
        backend, self.storage_backend = self.storage_backend, None
        if backend is None:
            return
        name, self.storage_backend_type = self.storage_backend_type, None
        try:
            call_bounded(f"close of {name}", backend.close, self._join_timeout_s)
        except Exception as error:  # noqa: BLE001 - a backend's last words change nothing
            logger.warning("Closing storage backend %s failed: %r", name, error)

    def _answer_what_is_left(self) -> None:
        """Answer what a thread that ended early has left in its queue; no thread runs."""
        for prefetch in _clear_queue(self.prefetch_buffer):
            if prefetch is not None:
                prefetch.terminate()
                prefetch.finish_io(self.release_pages)
        for backup in _clear_queue(self.backup_queue):
            if backup is not None:
                backup.finish(self.ack_backup_queue.put, self.release_pages)
        # These have no pages yet; nobody waits for them, since the tree has given them up.
        _clear_queue(self.prefetch_queue)

    def clear_storage_backend(self) -> bool:
        """Drop queued backups, then delete our pages from storage; False where that failed."""
        backend = self.storage_backend
        if not self.enable_storage or backend is None:
            return False
        self.discard_queued_backups()
        try:
            return bool(call_bounded("clear of storage", backend.clear, self._join_timeout_s))
        except Exception as error:  # noqa: BLE001 - any backend, any failure: the answer is no
            logger.warning("Clearing storage failed: %r", error)
            return False

    def _held_by_storage(self) -> dict[PoolName, torch.Tensor]:
        """End prefetches, orphan backups; return by pool bool [host size]: slots they still hold.

        Of the anchor and of pools with slots of their own.
        """
        held = _HeldSlots(self.host_pools)
        # What no thread has taken yet need not wait for one that may hang.
        for operation in _clear_queue(self.prefetch_buffer):
            if operation is None:
                self.prefetch_buffer.put(None)
            else:
                operation.terminate()
                operation.finish_io(self.release_pages)
        for prefetch in self._prefetches.held():
            held.add(prefetch.abandon(self.release_pages))
        backups = {op for op in self._backups.held() if not op.is_acked}
        # Acknowledged but not yet drained; looked up second, so that none slips through.
        backups.update(_items_of(self.ack_backup_queue))
        # Two backups may cover one page: the later one gives it back.
        for backup in sorted(backups, key=lambda op: op.id, reverse=True):
            held.add(backup.orphan(held.not_yet(backup.slots), self.release_pages))
        # Last: pages move from operations to these queues, never back.
        for name, pages in self._release_queues().items():
            for page in _items_of(pages):
                held.add({name: page})
        return held.masks

    def _release_queues(self) -> dict[PoolName, queue.Queue[torch.Tensor]]:
        """The queues through which pages come back, by pool, the anchor's first."""
        anchor = self.host_pools.anchor.name
        return {anchor: self.host_mem_release_queue, **self.extra_host_mem_release_queues}

    # -- operations --------------------------------------------------------------------------

    def page_hashes(self, key: RadixKey, last_hash: PageHash | None) -> list[PageHash]:
        """Hash the whole pages of ``key``, which continues ``last_hash``; for writes as for reads.

        Raises RuntimeError while no storage was ever attached.
        """
        return key.page_hashes(self.page_size, self._seed(key), last_hash)

    def _seed(self, key: RadixKey) -> bytes:
        if self._seed_fn is None:
            raise RuntimeError("pages have no hashes before storage is attached")
        return self._seed_fn(key)

    def prefetch_rate_limited(self) -> bool:
        """Return whether prefetches under way have asked for half of the host pool."""
        return self.prefetch_tokens_occupied >= self.prefetch_capacity_limit

    def prefetch(
        self,
        request_id: str,
        attempt: int,
        key: RadixKey,
        last_hash: PageHash | None,
        prefix_keys: Sequence[PageHash] | None,
    ) -> PrefetchOperation:
        """Start a prefetch of ``key`` (whole pages) behind the page ``last_hash``.

        Posts one item to ``prefetch_hit_queue``, whatever happens. Allocates nothing and counts
        nothing in ``prefetch_tokens_occupied``. ``prefix_keys``: hashes of all pages before the
        key, when the backend is to be told.
        """
        self._check_attached()
        operation = PrefetchOperation(
            request_id,
            attempt,
            key.page_aligned(self.page_size),
            last_hash,
            prefix_keys,
            seed=self._seed(key),
            draft_digest=self._draft_digest(),
        )
        self._prefetches.add(operation)
        self.prefetch_queue.put(operation)
        return operation

    def terminate_prefetch(self, operation: PrefetchOperation) -> int:
        """Freeze a prefetch; return its completed tokens, whose slots are the caller's from now on.

        Also the way to take the result of one that ``is_done``. The slots behind them come back
        through ``host_mem_release_queue`` after the last touch.
        """
        return operation.terminate()

    def write_storage(
        self,
        host_indices: torch.Tensor,
        hash_value: Sequence[PageHash],
        prefix_keys: Sequence[PageHash] | None,
        extra: Sequence[SpanPages] = (),
        num_drafts: int | None = None,
    ) -> int:
        """Queue a backup host -> storage of whole pages; return the operation's id.

        ``extra``: pages of pools with slots of their own; each is written before the KV page that
        it goes with. ``num_drafts``: see ``num_whole_drafts``. Ends with one item in
        ``ack_backup_queue``; the host slots must stay taken until then.
        """
        self._check_attached()
        if len(hash_value) * self.page_size != host_indices.numel():
            raise ValueError(
                f"{len(hash_value)} page hashes for {host_indices.numel()} slots in pages of "
                f"{self.page_size}"
            )
        self._next_operation_id += 1
        operation = StorageOperation(
            self._next_operation_id,
            host_indices.clone(),
            hash_value,
            prefix_keys,
            draft_digest=self._draft_digest(),
            extra=tuple(extra),
            num_drafts=num_drafts,
        )
        self._backups.add(operation)
        self.backup_queue.put(operation)
        return operation.id

    def _check_attached(self) -> None:
        if not self.enable_storage:
            raise RuntimeError("no storage backend is attached")

    def discard_queued_backups(self) -> int:
        """Write nothing any more of what is queued; return how many backups wrote nothing at all.

        Each is acknowledged, except behind a write that hangs until that returns. Waits for the
        write under way, at most for the join timeout.
        """
        pending = [op for op in self._backups.held() if not op.is_acked]
        num_dropped = sum([op.discard() for op in pending])
        deadline = time.monotonic() + self._join_timeout_s
        late = [op for op in pending if not op.wait_acked(max(deadline - time.monotonic(), 0.0))]
        if late:
            logger.warning("%d backups hang in %s", len(late), self.storage_backend_type)
        return num_dropped

    def wait_for_backups(self, timeout_s: float) -> bool:
        """Block until no backup is queued or under way; False when that takes longer."""
        deadline = time.monotonic() + timeout_s
        pending = [op for op in self._backups.held() if not op.is_acked]
        return all(op.wait_acked(max(deadline - time.monotonic(), 0.0)) for op in pending)

    # -- threads -----------------------------------------------------------------------------

    def prefetch_thread_func(self) -> None:
        """Query thread: count what exists, agree over ranks, post every operation. No decision."""

        def query(operation: PrefetchOperation) -> None:
            started = time.monotonic()
            ends = [False] * (len(operation.key) // self.page_size)
            try:
                ends = self._storage_hit_query(operation)
            finally:
                self.call_watch.end()
                # Also with nothing to say: the other ranks wait for our share.
                ends = self._agree_on_ends(ends)
            num_pages = deepest_end(ends, len(ends))
            operation.usable_ends = ends[:num_pages] if self._trailing_entries else None
            operation.hash_value = operation.hash_value[:num_pages]
            operation.storage_hit_count = num_pages * self.page_size
            self.storage_stats.query_seconds += time.monotonic() - started

        def post(operation: PrefetchOperation, failed: bool) -> None:
            stats = self.storage_stats
            if failed:
                operation.hash_value, operation.storage_hit_count = [], 0
                stats.query_failures += 1
            elif operation.storage_hit_count:
                stats.query_hits += 1
            else:
                stats.query_misses += 1
            self.prefetch_hit_queue.put(operation)

        self._serve("query", self.prefetch_queue, query, post)

    def prefetch_io_aux_func(self) -> None:
        """Read thread: fill the host pages of operations that were given some."""

        def post(operation: PrefetchOperation, failed: bool) -> None:
            planned = len(operation.hash_value) * self.page_size
            if not operation.is_terminated and operation.completed_tokens < planned:
                operation.has_failed = True
                self.storage_stats.read_failures += 1
            operation.finish_io(self.release_pages)

        self._serve("read", self.prefetch_buffer, self._page_transfer, post)

    def backup_thread_func(self) -> None:
        """Write thread: host pages to storage, one acknowledgement an operation."""

        def post(operation: StorageOperation, failed: bool) -> None:
            operation.finish(self.ack_backup_queue.put, self.release_pages)

        self._serve("write", self.backup_queue, self._page_backup, post)

    def _serve(
        self,
        what: str,
        source: queue.Queue[Any],
        work: Callable[[Any], None],
        post: Callable[[Any, bool], None],
    ) -> None:
        """Loop of a storage thread: whatever a backend throws, each operation is posted once."""
        torch.set_grad_enabled(False)
        while (operation := source.get()) is not None:
            failed = False
            try:
                work(operation)
            except BaseException as error:  # noqa: BLE001 - backends are not ours; the op has failed
                failed = True
                logger.warning("Storage %s failed: %r", what, error, exc_info=True)
            self.call_watch.end()
            post(operation, failed)
            # Neither this frame nor a traceback keeps what the scheduler is done with.
            del operation
            self._on_progress()

    def release_pages(self, slots: PoolSlots) -> None:
        """Put host pages into the release queues, one an item."""
        queues = self._release_queues()
        for name, of_pool in slots.items():
            entry = self.host_pools.get(name)
            assert entry is not None
            for page in of_pool.split(entry.host_pool.page_size):
                if page.numel():
                    queues[name].put(page)

    def _agree_on_ends(self, ends: list[bool]) -> list[bool]:
        """Keep the lengths that are usable on every rank. Collective, whatever ``ends`` holds.

        Where some pool needs its last pages only, usable lengths have gaps: ranks intersect them.
        """
        if self._prefetch_min_reduce is None:
            return ends
        if self._trailing_entries:
            return [flag > 0 for flag in self._prefetch_min_reduce([int(end) for end in ends])]
        num_pages = self._prefetch_min_reduce([sum(ends)])[0]
        return [position < num_pages for position in range(len(ends))]

    def _is_stopped(self, operation: PrefetchOperation) -> bool:
        return operation.is_terminated or self._threads.stop_event.is_set()

    @staticmethod
    def _extra_info(
        prefix_keys: tuple[PageHash, ...] | None, before: Sequence[PageHash]
    ) -> HiCacheStorageExtraInfo | None:
        if prefix_keys is None:
            return None
        return HiCacheStorageExtraInfo(prefix_keys=prefix_keys + tuple(before))

    def _storage_hit_query(self, operation: PrefetchOperation) -> list[bool]:
        """Hash the key, set ``hash_value``; return for each length in pages whether it is usable.

        That is: storage has the first so many pages here, and what other pools need of them.
        """
        num_pages = len(operation.key) // self.page_size
        nothing = [False] * num_pages
        if self._is_stopped(operation):
            return nothing
        hashes = operation.key.page_hashes(self.page_size, operation.seed, operation.last_hash)
        operation.hash_value = hashes
        num_found = 0
        present: dict[PoolName, list[bool]] = {entry.name: [] for entry in self._trailing_entries}
        for start in range(0, num_pages, STORAGE_BATCH_SIZE):
            if self._is_stopped(operation):
                return nothing
            batch = hashes[start : start + STORAGE_BATCH_SIZE]
            extra = self._extra_info(operation.prefix_keys, hashes[:start])
            result = self._num_present(batch, operation.draft_digest, extra)
            num_found += result.kv_hit_pages
            for name, flags in result.present.items():
                present[name] += flags
            if result.kv_hit_pages < len(batch):
                break
        if self._is_stopped(operation):
            return nothing
        ends = [True] * num_found
        for entry in self._trailing_entries:
            of_pool = entry.rule.usable_ends(present[entry.name])
            ends = [end and other for end, other in zip(ends, of_pool)]
        return ends + nothing[num_found:]

    def _page_transfer(self, operation: PrefetchOperation) -> None:
        """Read an operation's pages, in order, up to the first that does not come."""
        hashes, slots = operation.hash_value, operation.host_indices
        if slots is None:
            raise RuntimeError(f"prefetch of {operation.request_id} was given no host pages")
        if not self._extra_transfer(operation):
            return
        batch_size = read_batch_size(self._bytes_per_page)
        for start in range(0, len(hashes), batch_size):
            if self._is_stopped(operation):
                return
            batch = hashes[start : start + batch_size]
            batch_slots = slots[start * self.page_size :][: len(batch) * self.page_size]
            extra = self._extra_info(operation.prefix_keys, hashes[:start])
            started = time.monotonic()
            num_pages = self._page_get(batch, batch_slots, operation.draft_digest, extra)
            seconds = time.monotonic() - started
            self.storage_stats.read_seconds += seconds
            operation.io_seconds += seconds
            # Counted only now: whoever sees the count may use the bytes.
            if not operation.add_completed(num_pages * self.page_size):
                return
            self.storage_stats.read_pages += num_pages
            self.storage_stats.read_bytes += num_pages * self._bytes_per_page
            if num_pages < len(batch):
                return

    def _extra_transfer(self, operation: PrefetchOperation) -> bool:
        """Read what other pools need at the span's end; without it no KV page is of any use."""
        hashes = operation.hash_value
        for pages in operation.extra:
            if self._is_stopped(operation):
                return False
            extra = self._extra_info(operation.prefix_keys, hashes[: pages.positions[0]])
            if not self._extra_page_get(hashes, pages, extra):
                return False
        return True

    def _page_backup(self, operation: StorageOperation) -> None:
        """Write an operation's pages, in order, up to the first batch that fails."""
        stats = self.storage_stats
        if self._threads.stop_event.is_set() or not operation.start():
            stats.writes_discarded += 1
            return
        hashes = operation.hash_value
        for start in range(0, len(hashes), STORAGE_BATCH_SIZE):
            if self._threads.stop_event.is_set() or operation.is_discarded:
                return
            batch = hashes[start : start + STORAGE_BATCH_SIZE]
            slots = operation.host_indices[start * self.page_size :][: len(batch) * self.page_size]
            extra = self._extra_info(operation.prefix_keys, hashes[:start])
            started = time.monotonic()
            num_pages = 0
            try:
                num_pages = self._page_set(
                    batch,
                    slots,
                    operation.draft_digest,
                    extra,
                    [pages.within(start, start + len(batch)) for pages in operation.extra],
                    None if operation.num_drafts is None else max(operation.num_drafts - start, 0),
                )
            finally:
                seconds = time.monotonic() - started
                stats.write_seconds += seconds
                operation.io_seconds += seconds
                stats.write_failures += int(num_pages < len(batch))
            operation.completed_tokens += num_pages * self.page_size
            stats.write_pages += num_pages
            stats.write_bytes += num_pages * self._bytes_per_page
            if num_pages < len(batch):
                return


class _HeldSlots:
    """Which host slots storage operations hold, by pool."""

    def __init__(self, host_pools: HostPoolGroup) -> None:
        entries = (host_pools.anchor, *host_pools.own_slot_entries)
        self.masks = {
            entry.name: torch.zeros(entry.host_pool.size, dtype=torch.bool) for entry in entries
        }

    def add(self, slots: PoolSlots) -> None:
        """Mark slots."""
        for name, of_pool in slots.items():
            self.masks[name][of_pool] = True

    def not_yet(self, slots: PoolSlots) -> dict[PoolName, torch.Tensor]:
        """Return those that are not marked."""
        return {name: of_pool[~self.masks[name][of_pool]] for name, of_pool in slots.items()}


def _items_of(items: queue.Queue[Any]) -> list[Any]:
    """Look at a queue without taking anything."""
    with items.mutex:
        return list(items.queue)


def _clear_queue(items: queue.Queue[Any]) -> list[Any]:
    """Take everything that is in a queue now."""
    taken = []
    while True:
        try:
            taken.append(items.get_nowait())
        except queue.Empty:
            return taken
