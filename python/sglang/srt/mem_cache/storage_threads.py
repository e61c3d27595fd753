"""Storage operations, their life across threads, and the set of threads that works on them.

Owns who may touch a host page of an operation at any moment, and start and stop of the threads.
Does not own what a thread does (``storage_io.py``) nor the host free list: pages
come back to the scheduler thread through release queues, one page an item.

Rule that everything rests on: **a host page that an operation was given stays the operation's
until the operation itself gives it back**, whatever happens meanwhile: termination, reset,
detaching, a backend call that never returns. A late read can therefore only write into pages that
nobody else has.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Generic, TypeVar

import torch

from sglang.srt.mem_cache.page_key import PageHash, RadixKey
from sglang.srt.mem_cache.pool_transfer import PoolName, SpanPages, deepest_end, slots_by_pool

logger = logging.getLogger(__name__)

STORAGE_BATCH_SIZE = 128  # pages of one look-up or write
# Of one read, which is what is counted, or lost by a stop, at once. Backends check pages while the
# next ones come, for which a read must be several of their transfers (mooncake_store.py: 24 MiB).
_READ_BATCH_BYTES = 64 << 20
_READ_BATCH_PAGES = (32, STORAGE_BATCH_SIZE)
JOIN_TIMEOUT_S = 10.0
HANG_WARNING_S = 5.0  # a call of a backend that takes longer is told about
_WATCH_INTERVAL_S = 1.0
_HANG_WARNING_INTERVAL_S = 60.0  # between warnings of one thread: slow storage is late every time

PoolSlots = Mapping[PoolName, torch.Tensor]
"""Host slots (whole pages, may be empty) by pool."""

PostPages = Callable[[PoolSlots], None]
"""Gives slots back, one page an item."""


def read_batch_size(page_bytes: int) -> int:
    """Return the most pages of ``page_bytes`` bytes each that one read asks for."""
    least, most = _READ_BATCH_PAGES
    return min(max(_READ_BATCH_BYTES // page_bytes, least), most)


@dataclass(slots=True)
class StorageStats:
    """Counters since the start; each is written by one thread."""

    # prefetch thread
    query_hits: int = 0  # operations with at least one page
    query_misses: int = 0
    query_failures: int = 0
    query_seconds: float = 0.0
    # io thread
    read_pages: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    read_failures: int = 0  # operations that ended before their last page
    draft_pages_zeroed: int = 0
    extra_pages_missed: int = 0  # pages of trailing pools that did not come
    # backup thread
    write_pages: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    write_failures: int = 0
    writes_discarded: int = 0
    draft_write_failures: int = 0


class StorageOperation:
    """One backup host -> storage. Ends in ``ack_backup_queue`` exactly once, whatever happened.

    ``extra``: pages of pools with slots of their own that go with these. ``num_drafts``: leading
    draft pages that may be written; None: all. ``completed_tokens``: written prefix, with all that
    goes with it; grows while the backup thread works.
    """

    def __init__(
        self,
        op_id: int,
        host_indices: torch.Tensor,
        hash_value: Sequence[PageHash],
        prefix_keys: Sequence[PageHash] | None,
        draft_digest: bytes | None = None,
        extra: tuple[SpanPages, ...] = (),
        num_drafts: int | None = None,
    ) -> None:
        self.id = op_id
        self.host_indices = host_indices
        self.extra = extra
        self.num_drafts = num_drafts
        self.hash_value = list(hash_value)
        self.prefix_keys = None if prefix_keys is None else tuple(prefix_keys)
        self.draft_digest = draft_digest
        self.completed_tokens = 0
        self.io_seconds = 0.0  # in the backend; set by the I/O thread before it ends
        self._lock = threading.Lock()
        self._started = False
        self._discarded = False
        self._acked = threading.Event()
        self._orphaned: PoolSlots | None = None

    @property
    def slots(self) -> dict[PoolName, torch.Tensor]:
        """All host slots that it reads, by pool."""
        return slots_by_pool(self.host_indices, self.extra)

    @property
    def is_discarded(self) -> bool:
        """Whether nothing more is to be written."""
        return self._discarded

    @property
    def is_acked(self) -> bool:
        """Whether it is over for the backup thread.

        Under the lock: an acknowledgement that has been seen in the queue means yes.
        """
        with self._lock:
            return self._acked.is_set()

    def start(self) -> bool:
        """Begin; False when it was discarded before. Backup thread."""
        with self._lock:
            self._started = not self._discarded
            return self._started

    def discard(self) -> bool:
        """Write nothing more; True when nothing was begun. Scheduler thread."""
        with self._lock:
            self._discarded = True
            return not self._started

    def wait_acked(self, timeout_s: float) -> bool:
        """Block until it is over; False when that takes longer."""
        return self._acked.wait(timeout_s)

    def orphan(self, slots: PoolSlots, release: PostPages) -> PoolSlots:
        """Let it give ``slots`` of its own back itself at its end: the tree has forgotten it.

        Returns the slots that it holds from now on: none where it is over (they are given back
        now). A second call changes nothing. Scheduler thread.
        """
        with self._lock:
            is_over = self._acked.is_set()
            if self._orphaned is None:
                self._orphaned = slots
                if is_over:
                    release(slots)
            return {} if is_over else self._orphaned

    def finish(self, post_ack: Callable[[StorageOperation], None], release: PostPages) -> None:
        """End it: acknowledge, and give orphaned pages back. Backup thread, once."""
        with self._lock:
            post_ack(self)
            if self._orphaned is not None:
                release(self._orphaned)
            self._acked.set()


class PrefetchOperation:
    """One prefetch storage -> host.

    Life: prefetch_queue -> (query) -> prefetch_hit_queue -> scheduler allocates, sets
    ``host_indices`` -> prefetch_buffer -> (I/O) -> completion seen through ``completed_tokens`` and
    ``is_done``. ``(request_id, attempt)`` is its identity. ``terminate()`` freezes
    ``completed_tokens`` under a lock; the I/O side releases [completed, end) itself, after its last
    touch, one page an item, into ``host_mem_release_queue``.

    ``extra`` (pages of pools with slots of their own, set with ``host_indices``) is read before any
    KV page, so it is complete when all KV pages are. It belongs to whoever has the last KV page:
    the caller where everything came, else the I/O side.
    """

    def __init__(
        self,
        request_id: str,
        attempt: int,
        key: RadixKey,
        last_hash: PageHash | None,
        prefix_keys: Sequence[PageHash] | None,
        *,
        seed: bytes,
        draft_digest: bytes | None = None,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.key = key  # the pages asked for
        self.last_hash = last_hash
        self.prefix_keys = None if prefix_keys is None else tuple(prefix_keys)
        # The identity at the time of asking: it may change before the query runs.
        self.seed = seed
        self.draft_digest = draft_digest
        self.start_time = time.monotonic()
        self.hash_value: list[PageHash] = []  # set by the query: one a page, cut to the hit
        self.storage_hit_count = 0  # tokens; set by the query (MIN over ranks)
        # Which lengths in pages have what every pool needs, on all ranks; set by the query. None:
        # all up to the hit.
        self.usable_ends: list[bool] | None = None
        self.host_indices: torch.Tensor | None = None  # set by the scheduler at allocation
        self.extra: tuple[SpanPages, ...] = ()  # with it
        self.io_seconds = 0.0  # in the backend; grows while the I/O thread reads
        self.has_failed = False  # storage gave less than planned though nobody stopped it
        self._lock = threading.Lock()
        self._completed_tokens = 0
        self._terminated = False
        self._io_done = False

    @property
    def slots(self) -> dict[PoolName, torch.Tensor]:
        """All host slots that it was given, by pool; none before."""
        return {} if self.host_indices is None else slots_by_pool(self.host_indices, self.extra)

    def usable_pages(self, num_pages: int) -> int:
        """Return the longest usable prefix of so many pages."""
        if self.usable_ends is None:
            return num_pages
        return deepest_end(self.usable_ends, num_pages)

    @property
    def is_complete(self) -> bool:
        """Whether all that was planned has come."""
        return self.host_indices is not None and self._completed_tokens == len(self.host_indices)

    @property
    def completed_tokens(self) -> int:
        """Leading tokens whose bytes are in their host pages."""
        return self._completed_tokens

    @property
    def is_terminated(self) -> bool:
        """Whether ``completed_tokens`` is frozen."""
        return self._terminated

    @property
    def is_done(self) -> bool:
        """Whether the I/O side has finished, in full or not, and touches nothing any more."""
        return self._io_done

    def terminate(self) -> int:
        """Stop where it is; return the tokens that are complete, for good. Scheduler thread.

        Slots [0, completed) of ``host_indices`` belong to the caller now, those of ``extra`` too
        where that is all. Idempotent.
        """
        with self._lock:
            self._terminated = True
            return self._completed_tokens

    def add_completed(self, num_tokens: int) -> bool:
        """Count what was read; False (nothing counted) when terminated. I/O thread."""
        with self._lock:
            if self._terminated:
                return False
            self._completed_tokens += num_tokens
            return True

    def finish_io(self, release: PostPages) -> None:
        """Give [completed, end) back: no thread will touch a page again. Once.

        The I/O thread; or the scheduler thread for an operation that no thread ever took.
        """
        with self._lock:
            release(self._with_io_side())
            self._io_done = True

    def _with_io_side(self) -> PoolSlots:
        if self.host_indices is None:
            return {}
        extra = () if self.is_complete else self.extra
        return slots_by_pool(self.host_indices[self._completed_tokens :], extra)

    def taken(self) -> PoolSlots:
        """Return the caller's slots of a terminated operation."""
        if self.host_indices is None:
            return {}
        extra = self.extra if self.is_complete else ()
        return slots_by_pool(self.host_indices[: self._completed_tokens], extra)

    def abandon(self, release: PostPages) -> PoolSlots:
        """Stop; every page that the tree has not taken goes the way of the release queue.

        Returns the slots that are still with the I/O side (none where it is done: they are nowhere
        but in the queue). Scheduler thread.
        """
        with self._lock:
            if self._io_done and not self._terminated:
                release(self.taken())
            if not self._io_done and not self._terminated:
                self._completed_tokens = 0
            self._terminated = True
            return {} if self._io_done else self._with_io_side()


Operation = TypeVar("Operation", StorageOperation, PrefetchOperation)


class LiveOperations(Generic[Operation]):
    """The operations that somebody still holds: a queue, a thread or the tree.

    Not a ``WeakSet``: that one changes in whichever thread drops the last reference, also while
    another iterates. Scheduler thread only.
    """

    _MIN_LIMIT = 64

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Operation]] = []
        self._limit = self._MIN_LIMIT

    def add(self, operation: Operation) -> None:
        """Remember an operation for as long as it is held elsewhere."""
        if len(self._refs) >= self._limit:
            self._refs = [ref for ref in self._refs if ref() is not None]
            self._limit = max(2 * len(self._refs), self._MIN_LIMIT)
        self._refs.append(weakref.ref(operation))

    def held(self) -> list[Operation]:
        """Return them, oldest first."""
        return [operation for ref in self._refs if (operation := ref()) is not None]


class StorageThreads:
    """The storage threads of one attachment: started together, stopped together.

    Each thread ends at the None that ``stop`` puts behind the last operation, so every operation
    is answered, and every rank makes the same number of collective calls. Scheduler thread only.
    """

    def __init__(self) -> None:
        self.stop_event = threading.Event()  # set: touch the backend no more, only answer
        self._threads: list[threading.Thread] = []
        self._inputs: list[Queue] = []

    def alive(self) -> list[str]:
        """Return the names of threads that run."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return [thread.name for thread in self._threads]

    def start(self, loops: Mapping[str, tuple[Callable[[], None], Queue]]) -> None:
        """Start name -> (loop, its input). Raises RuntimeError while a thread of before runs."""
        if names := self.alive():
            raise RuntimeError(f"storage threads of before still run: {', '.join(names)}")
        self.stop_event.clear()
        self._inputs = [source for _, source in loops.values()]
        self._threads = [
            threading.Thread(target=loop, name=name, daemon=True)
            for name, (loop, _) in loops.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> list[str]:
        """Ask all to end and wait, ``timeout_s`` in all; return the names of those that did not.

        A thread that hangs in a backend call is left alone: it owns what it touches and ends when
        the call does.
        """
        self.stop_event.set()
        for source in self._inputs:
            source.put(None)
        self._inputs = []  # one None a thread: a second one would end a thread of later
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return self.alive()


class CallWatch:
    """Tells of backend calls that do not return: once a call, and seldom where many are late.

    A storage thread calls ``begin`` before each call of the backend and ``end`` when it turns to
    something else; ``watch`` is the loop of a thread of its own. Any thread.
    """

    def __init__(self, hang_warning_s: float = HANG_WARNING_S) -> None:
        self.hang_warning_s = hang_warning_s
        self._lock = threading.Lock()
        self._begun: dict[str, float] = {}  # by thread name
        self._told: set[str] = set()  # threads whose present call has been told about
        self._told_at: dict[str, float] = {}

    def begin(self) -> None:
        """The calling thread enters the backend."""
        self._switch(time.monotonic())

    def end(self) -> None:
        """The calling thread is in the backend no more."""
        self._switch(None)

    def _switch(self, begins: float | None) -> None:
        name, now = threading.current_thread().name, time.monotonic()
        with self._lock:
            begun = self._begun.pop(name, now)
            was_told = name in self._told
            self._told.discard(name)
            if begins is not None:
                self._begun[name] = begins
        if was_told:
            logger.warning("Storage call of %s returned after %.0f s", name, now - begun)

    def check(self, backend: str | None) -> None:
        """Log what is late now."""
        now = time.monotonic()
        with self._lock:
            late = [
                (name, now - begun)
                for name, begun in self._begun.items()
                if now - begun >= self.hang_warning_s
                and name not in self._told
                and now - self._told_at.get(name, -math.inf) >= _HANG_WARNING_INTERVAL_S
            ]
            for name, _ in late:
                self._told.add(name)
                self._told_at[name] = now
        for name, seconds in late:
            logger.warning(
                "Storage backend %s hangs: a call of %s has not returned for %.0f s; requests go "
                "on without it",
                backend,
                name,
                seconds,
            )

    def watch(self, source: Queue[None], backend: str) -> None:
        """Check until ``source`` has something."""
        interval_s = min(_WATCH_INTERVAL_S, self.hang_warning_s)
        while True:
            try:
                source.get(timeout=interval_s)
                return
            except Empty:
                self.check(backend)


def call_bounded(name: str, call: Callable[[], object], timeout_s: float) -> object:
    """Run a backend call that may hang and return its result.

    Raises TimeoutError when it takes longer (it goes on in its thread), RuntimeError when the call
    raised anything: what is no Exception must not end the caller's thread.
    """
    outcome: list[object] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - told to the caller
            failure.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"{name} has not returned after {timeout_s:g} s")
    if failure:
        raise RuntimeError(f"{name} failed: {failure[0]!r}") from failure[0]
    return outcome[0]
