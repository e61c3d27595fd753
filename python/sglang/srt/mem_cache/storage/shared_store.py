"""Pages in a store that many servers share over a network: what all such backends have in common.

Owns the names of records, their header and checksum, what counts as a miss, counters, and what
happens while the store is away. A backend adds how records are looked up, moved and removed
(``mooncake_store.py``, ``redis_store.py``). Threads: see ``HiCacheStorage``.

A record is one page, both halves (keys and values) of it, as in a file of the file backend: a
header of ``page_file.HEADER_BYTES`` bytes, then the page in the host pool's storage order. Its name
is ``<prefix>/<owner>/<storage key>``: the storage key is seeded with the page's ``CacheIdentity``,
and the owner is a digest of the model's name and of the rank that the page belongs to. So a name
never stands for two different contents, and stores that keep the first value may be used.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransferResult,
    page_indices,
)
from sglang.srt.mem_cache.page_key import parse_storage_key
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.availability import Availability
from sglang.srt.mem_cache.storage.checksums import checksums
from sglang.srt.mem_cache.storage.page_file import (
    HEADER_BYTES,
    Buffers,
    Expected,
    PageMeta,
    PageOwner,
    model_part,
)
from sglang.srt.mem_cache.storage.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

DEFAULT_PREFIX = "hispec1"  # changes with the format of a record
_COUNTERS = ("hits", "misses", "corrupt", "foreign", "written", "existing", "dropped")


class StoreUnreachable(RuntimeError):
    """The store did not answer a call; it is not called again until it does."""


class StoreRefused(RuntimeError):
    """The store answered a call, and did not do what was asked: it is not away."""


class Outcome(Enum):
    """What became of one record of a read or a write."""

    DONE = "done"
    MISSING = "missing"  # read: not there
    DAMAGED = "corrupt"  # read: short, torn, flipped, of an unknown version
    FOREIGN = "foreign"  # read: whole, and of another key, owner, namespace or size
    FAILED = "failed"  # the transfer failed, or the store has no room


class Record(NamedTuple):
    """One page of a call. ``first_slot``: of its host page; ``buffers``: the page's bytes."""

    name: str
    expected: Expected
    first_slot: int
    buffers: Buffers

    @property
    def payload_bytes(self) -> int:
        """Bytes of the page."""
        assert self.expected.payload_bytes is not None
        return self.expected.payload_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the record in the store."""
        return HEADER_BYTES + self.payload_bytes


def judge(record: Record, header: Buffer, payload_checksum: int) -> Outcome:
    """Compare the header and the checksum of what was read with what was asked for."""
    meta = page_file.parse_header(header)
    if meta is None:
        return Outcome.DAMAGED
    if not record.expected.accepts(meta):
        return Outcome.FOREIGN
    is_whole = payload_checksum == meta.payload_checksum
    return Outcome.DONE if is_whole else Outcome.DAMAGED


def check_prefix(prefix: str) -> str:
    """Return a prefix of names that needs no escaping anywhere. Raises ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", prefix, re.ASCII):
        raise ValueError(f"key_prefix must be letters, digits, '-' and '_', not {prefix!r}")
    return prefix


def owner_digest(owner: PageOwner) -> str:
    """Return 16 hex digits for an owner: names need no escaping whatever the model is called."""
    return hashlib.sha256(owner.file_suffix.encode()).hexdigest()[:16]


def chunks(records: Sequence[Record], max_bytes: float) -> Iterator[Sequence[Record]]:
    """Cut into runs of at most ``max_bytes`` bytes, at least one record each."""
    start = total = 0
    for position, record in enumerate(records):
        if position > start and total + record.num_bytes > max_bytes:
            yield records[start:position]
            start, total = position, 0
        total += record.num_bytes
    if start < len(records):
        yield records[start:]


# Reads of one record that fail, one after another, until it no longer counts as there.
_MOST_FAILED_READS = 3
_MOST_REMEMBERED = 65_536
_REFUSED_READS_S = 10.0  # after a refused read: nothing counts as there for so long

# The headers of records, which are about to be written.
HeaderMaker = Callable[[Sequence[Record]], list[bytes]]


class SharedPageStore(HiCacheStorage):
    """See the module docstring. No failure of the store leaves a ``batch_*`` call as an exception.

    The abstract methods below raise StoreUnreachable when the store does not answer, and
    StoreRefused when it will not do what was asked.
    """

    display_name = "the store"

    def __init__(self, config: HiCacheStorageConfig, prefix: str) -> None:
        super().__init__(config)
        model = model_part(config.model_name)
        pp = {"pp_rank": config.pp_rank, "pp_size": config.pp_size}
        shared = page_file.SHARED_RANK
        self._owners = {
            False: PageOwner(model=model, tp_rank=config.tp_rank, tp_size=config.tp_size, **pp),
            True: PageOwner(model=model, tp_rank=shared, tp_size=shared, **pp),
        }
        self._prefixes = {
            is_shared: f"{prefix}/{owner_digest(owner)}/"
            for is_shared, owner in self._owners.items()
        }
        self._pool_prefixes = {
            str(pool): self._prefixes[config.is_shared(pool)] for pool in PoolName
        }
        self._stats: Counter[str] = Counter()
        self._stats_lock = threading.Lock()
        self._log = RateLimitedLog(logger)
        # Changed and read by several threads, one operation of a dictionary at a time.
        self._failed_reads: dict[str, int] = {}  # in a row, by name of the record
        self._bad: set[str] = set()  # names of bad records that could not be removed: counted once
        self._reads_refused_until = -math.inf  # monotonic, s
        self._read_failure = "a node of it is away"  # why the last read failed, as far as known
        self.availability = Availability(self.display_name, self._probe)

    # -- what a backend adds --

    @abstractmethod
    def _probe(self) -> bool:
        """Return whether the store answers now."""

    @abstractmethod
    def _look_up(self, names: Sequence[str]) -> list[bool]:
        """Return which records exist, by one call of the store."""

    @abstractmethod
    def _read(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        """Fill host pages; DONE only for what ``judge`` accepted. May end early."""

    @abstractmethod
    def _write(
        self, pool: PoolName, records: Sequence[Record], make_headers: HeaderMaker
    ) -> list[Outcome]:
        """Store host pages that do not exist yet, each behind its header. May end early.

        ``make_headers`` reads the whole pages: call it for those of a run when their turn comes.
        """

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> None:
        """Delete records, whoever may be reading them. Raises StoreRefused where one stays."""

    @abstractmethod
    def _remove_prefix(self, prefix: str) -> int:
        """Delete all records whose names begin so; return how many."""

    def _refresh(self, names: Sequence[str]) -> None:
        """Note that records were used, where the store wants to be told."""

    # -- the interface --

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys have a record; one call of the store."""
        flags = self._readable(self._names(keys))
        return flags.index(False) if False in flags else len(flags)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pools: Sequence[PoolTransfer] = (),
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """See the base class; one call of the store for all pools."""
        asked = [list(keys), *(list(pool.keys or ()) for pool in pools)]
        names = self._names([key for part in asked for key in part])
        flags = self._readable(names)
        num_pages = flags[: len(keys)].index(False) if False in flags[: len(keys)] else len(keys)
        present: dict[PoolName, list[bool]] = {}
        start = len(keys)
        for pool, part in zip(pools, asked[1:]):
            of_pool = flags[start : start + len(part)][:num_pages]
            start += len(part)
            if pool.rule.trailing is None and False in of_pool:
                of_pool = of_pool[: of_pool.index(False)]
            present[pool.name] = of_pool
        return PoolTransferResult(kv_hit_pages=num_pages, present=present)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """See the base class. A record that is not what it should be is removed."""
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            records = self._records(transfer, extra_info)
            outcomes = self._read_guarded(transfer.name, records)
            self._finish_reads(records, outcomes)
            found = [outcome is Outcome.DONE for outcome in outcomes]
            found += [False] * (len(records) - len(found))
            verdicts.setdefault(transfer.name, []).extend(found)
        return verdicts

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """See the base class; what exists is not sent again."""
        namespace = extra_info.namespace_digest if extra_info else None
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            records = self._records(transfer, extra_info)
            written = self._write_guarded(transfer.name, records, namespace)
            self._count(dropped=written.count(False))
            verdicts.setdefault(transfer.name, []).extend(written)
        return verdicts

    def clear(self) -> bool:
        """Delete the pages of this model and rank, of all its weights; others' stay."""
        own = [self._prefixes[False]]
        if self.config.is_mla_model:
            own.append(self._prefixes[True])
        num_removed = self._guarded("clear", lambda: sum(map(self._remove_prefix, own)), None)
        if num_removed is None:
            return False
        logger.info("removed %d pages from %s", num_removed, self.display_name)
        return True

    def get_stats(self) -> dict[str, float]:
        """Return counts of pages and bytes.

        ``hits``, ``misses`` (not there), ``corrupt`` and ``foreign`` (removed: misses too),
        ``written``, ``existing`` (already there), ``dropped`` (asked for and not written),
        ``io_errors`` (transfers and calls that failed), ``bytes_read`` (payload),
        ``bytes_written``, ``outages`` (times that the store went away).
        """
        stats = dict.fromkeys((*_COUNTERS, "io_errors", "bytes_read", "bytes_written"), 0.0)
        with self._stats_lock:
            stats.update({name: float(value) for name, value in self._stats.items()})
        stats["outages"] = float(self.availability.num_outages)
        return stats

    def close(self) -> None:
        """Miss from now on; backends end their connections as well."""
        self.availability.close()
        self._log.flush()

    def num_damaged_pages(self) -> int:
        """See the base class."""
        with self._stats_lock:
            return self._stats["corrupt"] + self._stats["foreign"]

    def fault_counts(self) -> dict[str, int]:
        """See the base class."""
        with self._stats_lock:
            stats = {"io_errors": self._stats["io_errors"], "dropped_pages": self._stats["dropped"]}
        return {**stats, "outages": self.availability.num_outages}

    # -- records --

    def _names(self, keys: Sequence[str]) -> list[str]:
        """Names of the records of keys. Raises ValueError for a bad key."""
        prefixes = self._pool_prefixes
        return [prefixes[parse_storage_key(key).pool] + key for key in keys]

    def _records(
        self, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[Record]:
        pool = self.pools.get(transfer.name)
        if pool is None:
            raise ValueError(f"no host pool is registered as {transfer.name}")
        slots = page_indices(transfer, pool.page_size)
        keys = transfer.keys or []
        owner = self._owners[self.config.is_shared(transfer.name)]
        namespace = extra_info.namespace_digest if extra_info else None
        return [
            Record(
                name=name,
                expected=Expected(
                    key=key, owner=owner, namespace=namespace, payload_bytes=pool.bytes_per_page
                ),
                first_slot=slot,
                buffers=pool.page_buffers(slot),
            )
            for name, key, slot in zip(self._names(keys), keys, slots)
        ]

    def _headers(self, records: Sequence[Record], namespace: bytes) -> list[bytes]:
        sums = checksums([record.buffers for record in records])
        return [
            page_file.pack_header(
                PageMeta(
                    key=record.expected.key,
                    owner=record.expected.owner,
                    namespace=namespace,
                    payload_bytes=record.payload_bytes,
                    payload_checksum=payload_checksum,
                    created_ns=time.time_ns(),
                )
            )
            for record, payload_checksum in zip(records, sums)
        ]

    def _readable(self, names: Sequence[str]) -> list[bool]:
        """Return which records are there and worth a read."""
        nothing = [False] * len(names)
        if time.monotonic() < self._reads_refused_until:
            return nothing
        return self._guarded("look", lambda: self._present(names), nothing)

    def _present(self, names: Sequence[str]) -> list[bool]:
        """Look up; what could not be read time after time is not there: it may be written anew."""
        failed = self._failed_reads
        flags = self._look_up(names)
        if not failed:
            return flags
        return [
            flag and failed.get(name, 0) < _MOST_FAILED_READS for name, flag in zip(names, flags)
        ]

    def _read_guarded(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        def read() -> list[Outcome]:
            try:
                return self._read(pool, records)
            except StoreRefused:
                self._reads_refused_until = time.monotonic() + _REFUSED_READS_S
                raise

        return self._guarded("read", read, [])

    def _write_guarded(
        self, pool: PoolName, records: Sequence[Record], namespace: bytes | None
    ) -> list[bool]:
        written = [False] * len(records)
        self._guarded("write", lambda: self._write_missing(pool, records, namespace, written), None)
        return written

    def _write_missing(
        self,
        pool: PoolName,
        records: Sequence[Record],
        namespace: bytes | None,
        written: list[bool],
    ) -> None:
        """Write what is not there; ``written`` gets the verdicts, also when the store goes away."""
        there = self._present([record.name for record in records])
        existing = [record.name for record, exists in zip(records, there) if exists]
        written[:] = there
        self._count(existing=len(existing))
        if existing:
            self._refresh(existing)
        positions = [position for position, exists in enumerate(there) if not exists]
        missing = [records[position] for position in positions]
        if not missing:
            return
        digest = namespace or missing[0].expected.owner.default_namespace
        outcomes = self._write(pool, missing, lambda run: self._headers(run, digest))
        for position, outcome in zip(positions, outcomes):
            written[position] = outcome is Outcome.DONE
            if outcome is Outcome.DONE:
                self._failed_reads.pop(records[position].name, None)
                self._bad.discard(records[position].name)
        num_done = outcomes.count(Outcome.DONE)
        self._count(
            written=num_done,
            bytes_written=num_done * missing[0].num_bytes,
            io_errors=outcomes.count(Outcome.FAILED),
        )
        if num_done < len(missing):
            self._log.warning(
                "write",
                "%d pages could not be written to %s: it is full or a node of it is away",
                len(missing) - num_done,
                self.display_name,
            )

    def _finish_reads(self, records: Sequence[Record], outcomes: Sequence[Outcome]) -> None:
        """Count; remove what is not the page it should be: a miss, which the next write heals.

        A bad record that cannot be removed counts once, however often it is read.
        """
        self._note_failures(records, outcomes)
        known = self._bad
        fresh = [o for r, o in zip(records, outcomes) if r.name not in known]
        bad = [r for r, o in zip(records, outcomes) if o in (Outcome.DAMAGED, Outcome.FOREIGN)]
        done = [record for record, outcome in zip(records, outcomes) if outcome is Outcome.DONE]
        self._count(
            hits=len(done),
            misses=outcomes.count(Outcome.MISSING),
            io_errors=outcomes.count(Outcome.FAILED),
            bytes_read=sum([record.payload_bytes for record in done]),
            corrupt=fresh.count(Outcome.DAMAGED),
            foreign=fresh.count(Outcome.FOREIGN),
        )
        if bad:
            self._discard([record.name for record in bad])
        if known and done:  # healed by another server
            known.difference_update([record.name for record in done])
        if done:
            self._guarded("refresh", lambda: self._refresh([record.name for record in done]), None)

    def _note_failures(self, records: Sequence[Record], outcomes: Sequence[Outcome]) -> None:
        failed = self._failed_reads
        num_failed = 0
        for record, outcome in zip(records, outcomes):
            if outcome is Outcome.FAILED:
                num_failed += 1
                failed[record.name] = failed.get(record.name, 0) + 1
            elif failed:
                failed.pop(record.name, None)
        if len(failed) > _MOST_REMEMBERED:
            failed.clear()
        if num_failed:
            message = "%d pages could not be read from %s: %s"
            self._log.warning("read", message, num_failed, self.display_name, self._read_failure)

    def _discard(self, names: Sequence[str], kind: str = "no page of ours") -> None:
        """Remove bad records and say what they were and what became of them."""
        is_removed = self._try_remove(names)
        if is_removed:
            self._bad.difference_update(names)
        else:
            if len(self._bad) > _MOST_REMEMBERED:
                self._bad.clear()
            self._bad.update(names)
        message = "%s is %s: %s, counts as a miss (%d in this call)"
        what = "removed" if is_removed else "could not be removed"
        self._log.warning(kind, message, names[0], kind, what, len(names))

    def _try_remove(self, names: Sequence[str]) -> bool:
        def remove() -> bool:
            self._remove(names)
            return True

        return self._guarded("remove", remove, False)

    # -- faults --

    def _guarded(self, what: str, call: Callable[[], T], otherwise: T) -> T:
        """Return what a call returns, or ``otherwise`` when the store is or goes away."""
        if not self.availability.is_up:
            return otherwise
        try:
            return call()
        except StoreUnreachable as error:
            self._count(io_errors=1)
            self.availability.report_failure(f"{what}: {error}")
            return otherwise
        except StoreRefused as error:
            self._count(io_errors=1)
            message = "%s refuses (%s): %s"
            self._log.warning(f"refused {what}", message, self.display_name, what, error)
            return otherwise

    def _count(self, **amounts: int) -> None:
        with self._stats_lock:
            self._stats.update(amounts)
