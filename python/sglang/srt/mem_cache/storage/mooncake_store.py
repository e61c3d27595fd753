"""Pages in a Mooncake Store: one record a page, straight between host memory and the store's nodes.

Owns the client, the registration of host memory with it, and buffers for pages that do not lie in
one piece. Where they do, the header goes to the room that the host pool has in front of a page, so
that a record is one block of memory: a second piece costs a tenth of the rate. What a record is and
when it counts is ``shared_store.py``'s; who may call when, ``HiCacheStorage``'s. The client lets
other threads run while it moves bytes, and it connects anew by itself when the master or a node
comes back.

Facts of the store that this relies on: a key's first value stays until it is removed; a record
appears when all of it has been written; in a batch each key has a result of its own, negative for a
failure, else for a read the length of the record; a connection that failed is closed, so that
nothing arrives after a call has returned.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, StorageError
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage.checksums import checksums
from sglang.srt.mem_cache.storage.mooncake_options import MooncakeOptions, mooncake_options
from sglang.srt.mem_cache.storage.mooncake_rehearsal import rehearse
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES, Buffers
from sglang.srt.mem_cache.storage.shared_store import (
    HeaderMaker,
    Outcome,
    Record,
    SharedPageStore,
    StoreRefused,
    StoreUnreachable,
    judge,
)

logger = logging.getLogger(__name__)

# Results of the store. Source: measured, and its documentation's list of error codes.
_TOO_LONG = -600
_NOT_FOUND = -704
_RPC_FAILURES = range(-999, -899)
_ANSWERS = (_TOO_LONG, _NOT_FOUND)  # of a store that is well
_NOT_TRIED = -1  # ours: a call before has failed

_CONNECT_TIMEOUT_S = 2.0
# Of one call of the client. While one moves, the pages of another are checked; but smaller calls
# cost reads more than that gains, and a write asks the master twice, which costs as much as a
# twentieth of 24 MiB. With many large pages at once the TCP transport may move half as much, or
# less (measured from 4 MiB on). A read must end within the master's lease (10 s by default), also
# where the network is slow.
_RUN_RECORDS = 128
_WRITE_BYTES = 96 << 20
_READ_BYTES = 24 << 20
_LARGE_RECORD_BYTES = 3 << 20
_RUN_BYTES_OF_LARGE = 25 << 20
_STAGING_BYTES = 48 << 20
_NICENESS = 3  # of the threads in which the client waits, on top of the process's own


class _Closed:
    """In a client's place once it is closed: whoever calls it is told so."""

    def __getattr__(self, name: str) -> Any:
        raise StoreUnreachable("the connection is closed")


_CLOSED = _Closed()


class _Block:
    """Memory of our own, registered with the client."""

    def __init__(self, client: Any, num_bytes: int) -> None:
        self._client = client
        self.num_bytes = num_bytes
        self.view = memoryview(mmap.mmap(-1, num_bytes))
        self.address = _address(self.view)
        _register(client, self.address, num_bytes)

    def close(self) -> None:
        """Let the client forget it; the memory goes with the last view."""
        self._client.unregister_buffer(self.address)


class _Lane:
    """What one direction needs beside the pool. One call at a time: hold ``lock``.

    The client polls while bytes move. A thread of its own with less priority does that, or on a
    busy machine it would take the time of those that move the bytes, and of the scheduler.
    """

    def __init__(self, client: Any, run_bytes: int) -> None:
        self.lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "hicache-mooncake", initializer=_lower_priority)
        self.run_bytes = run_bytes
        self._client = client
        self.has_staging = False
        self._staging: _Block | None = None

    def move(
        self, function: Callable[..., list[int]], runs: Iterable[list[_Placed]], *options: object
    ) -> Generator[tuple[list[_Placed], list[int]], None, None]:
        """Move runs, a call each, and yield them with the results of their records.

        While the caller prepares one run or looks at one that was moved, another is on its way.
        None is any more once this has ended or was closed. Behind a transfer that failed nothing
        is tried. Raises StoreUnreachable.
        """
        is_broken = threading.Event()
        moving: deque[tuple[list[_Placed], Future[list[int]]]] = deque()
        try:
            for run in runs:
                moving.append((run, self._start(is_broken, function, *_arguments(run), *options)))
                if len(moving) > 1:
                    yield _moved(*moving.popleft())
            while moving:
                yield _moved(*moving.popleft())
        finally:
            wait([call for _, call in moving if not call.cancel()])

    def _start(
        self, is_broken: threading.Event, function: Callable[..., list[int]], *arguments: Any
    ) -> Future[list[int]]:
        def call() -> list[int]:
            if is_broken.is_set():
                return [_NOT_TRIED] * len(arguments[0])
            codes = function(*arguments)
            if any(code < 0 and code not in _ANSWERS for code in codes):
                is_broken.set()
            return codes

        try:
            return self._thread.submit(call)
        except RuntimeError as error:
            raise StoreUnreachable("the connection is closed") from error

    def close(self) -> None:
        """End the thread, after the call that it may be in, and let go of staging and client."""
        self._thread.shutdown(wait=False)
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        self._client = _CLOSED

    def staging(self, least_bytes: int) -> _Block:
        """Return room for whole records, made when it is needed first."""
        if self._staging is not None and self._staging.num_bytes >= least_bytes:
            return self._staging
        if self._staging is not None:
            self._staging.close()
        self._staging = _Block(self._client, max(least_bytes, _STAGING_BYTES))
        self.has_staging = True
        return self._staging


class _Placed:
    """A record and the block of memory where it lies for the client, header and page."""

    __slots__ = ("record", "block", "address")

    def __init__(self, record: Record, block: memoryview, address: int) -> None:
        self.record = record
        self.block = block
        self.address = address

    def gather(self, header: bytes) -> None:
        """Before a write: all that is not in the block yet."""
        self.block[:HEADER_BYTES] = header

    def scatter(self) -> None:
        """After a read that is right: what belongs elsewhere."""


class _Staged(_Placed):
    """A page in more than one piece, gathered in the staging.

    A call with thousands of pieces exhausts the connections of the TCP transport, and fails after a
    minute.
    """

    __slots__ = ()

    def gather(self, header: bytes) -> None:
        """See the base class."""
        super().gather(header)
        _copy(self.record.buffers, self.block[HEADER_BYTES:], to_flat=True)

    def scatter(self) -> None:
        """See the base class."""
        _copy(self.record.buffers, self.block[HEADER_BYTES:], to_flat=False)


class MooncakeStore(SharedPageStore):
    """See the module docstring.

    Raises ValueError for bad options; StorageError when Mooncake is not installed or cannot be
    loaded, or when the master does not answer.
    """

    display_name = "Mooncake Store"

    def __init__(self, config: HiCacheStorageConfig) -> None:
        options = mooncake_options(config.extra_config)
        super().__init__(config, options.key_prefix)
        self.options = options
        module = _load(options)
        self._client = _connect(module, options)
        # Left out where it says nothing: a call with it takes longer.
        self._put_options: list[Any] = []
        if options.num_replicas > 1:
            self._put_options = [module.ReplicateConfig()]
            self._put_options[0].replica_num = options.num_replicas
        self._reading = _Lane(self._client, _READ_BYTES)
        self._writing = _Lane(self._client, _WRITE_BYTES)
        self._registered: dict[PoolName, list[tuple[int, int]]] = {}
        self._direct: set[PoolName] = set()  # pools that pages go to and from without a copy
        self._closed = False
        logger.info(
            "L3 in the Mooncake Store of %s: %s, %d bytes of this process's memory added",
            options.master,
            options.protocol,
            options.segment_bytes,
        )

    def register_mem_host_pool_v2(self, pool: HostKVCache, name: PoolName) -> None:
        """See the base class. Raises StorageError when the memory cannot be registered."""
        super().register_mem_host_pool_v2(pool, name)
        blocks = [(_address(block), block.nbytes) for block in pool.memory_blocks()]
        for address, num_bytes in blocks:
            _register(self._client, address, num_bytes)
        self._registered[name] = blocks
        if self._is_one_block(pool):
            self._direct.add(name)
        else:
            logger.warning(
                "pages of %s are not in one piece (layout %s): each is copied once more on its way",
                name,
                pool.layout,
            )

    def unregister_mem_host_pool_v2(self, name: PoolName) -> None:
        """See the base class."""
        self._forget_memory(name)
        super().unregister_mem_host_pool_v2(name)

    def _forget_memory(self, name: PoolName) -> None:
        self._direct.discard(name)
        for address, _ in self._registered.pop(name, []):
            self._client.unregister_buffer(address)

    def close(self) -> None:
        """End the connection and take this process's memory out of the store; idempotent."""
        super().close()
        if self._closed:
            return
        self._closed = True
        self._reading.close()
        self._writing.close()
        for name in list(self._registered):
            self._forget_memory(name)
        # What the client holds, 20 MB and more, goes with the last reference to it and not when it
        # is closed; we ourselves may stay for long, in a ring of references.
        client, self._client = self._client, _CLOSED
        client.close()

    # -- see SharedPageStore --

    def _probe(self) -> bool:
        # The client's own health check does not notice that the master is gone.
        return int(self._client.is_exist("a name that nothing has")) >= 0

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        codes = self._client.batch_is_exist(list(names))
        _check_reached(codes, len(names))
        failed = [code for code in codes if code < 0 and code != _NOT_FOUND]
        if failed:
            self._count(io_errors=len(failed))
            message = "%s does not say whether it has %d pages (%d): they count as absent"
            self._log.warning("look", message, self.display_name, len(failed), failed[0])
        return [code == 1 for code in codes]

    def _read(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        lane, get = self._reading, self._client.batch_get_into
        # Closed before the lock is free: then nothing is on its way.
        with lane.lock, closing(lane.move(get, self._runs(pool, records, lane))) as moved:
            for run, codes in moved:
                if codes[0] == _NOT_TRIED:
                    break
                # All checksums first: the passes over the pages displace the code of the rest.
                sums = checksums([[placed.block[HEADER_BYTES:]] for placed in run])
                found = [self._finish_read(*each) for each in zip(run, codes, sums)]
                outcomes += found
                # Of KV a prefix counts: what lies behind a gap is of no use.
                if pool == PoolName.KV and found != [Outcome.DONE] * len(found):
                    break
        return outcomes

    def _finish_read(self, placed: _Placed, code: int, payload_checksum: int) -> Outcome:
        record = placed.record
        if code == _NOT_FOUND:
            return Outcome.MISSING
        if code == _TOO_LONG or (code >= 0 and code != record.num_bytes):
            return Outcome.FOREIGN
        if code < 0:
            self._read_failure = f"the store says {code}"
            return Outcome.FAILED
        outcome = judge(record, placed.block[:HEADER_BYTES], payload_checksum)
        if outcome is Outcome.DONE:
            placed.scatter()
        return outcome

    def _write(
        self, pool: PoolName, records: Sequence[Record], make_headers: HeaderMaker
    ) -> list[Outcome]:
        def ready(run: list[_Placed]) -> list[_Placed]:
            headers = make_headers([placed.record for placed in run])
            for placed, header in zip(run, headers):
                placed.gather(header)
            return run

        outcomes: list[Outcome] = []
        lane, put = self._writing, self._client.batch_put_from
        runs = map(ready, self._runs(pool, records, lane))
        with lane.lock, closing(lane.move(put, runs, *self._put_options)) as moved:
            for _, codes in moved:
                outcomes += [Outcome.DONE if code >= 0 else Outcome.FAILED for code in codes]
                if min(codes) < 0:
                    break
        return outcomes

    def _remove(self, names: Sequence[str]) -> None:
        codes = [int(self._client.remove(name, True)) for name in names]
        _check_reached(codes, len(names))
        failed = [code for code in codes if code < 0 and code != _NOT_FOUND]
        if failed:
            raise StoreRefused(f"{len(failed)} of {len(names)} records stay, it says {failed[0]}")

    def _remove_prefix(self, prefix: str) -> int:
        # Prefixes hold letters, digits, '-', '_' and '/' only.
        num_removed = int(self._client.remove_by_regex(f"^{prefix}", True))
        _check_reached([num_removed], 1)
        if num_removed < 0:
            raise StoreRefused(f"it says {num_removed}")
        return num_removed

    # -- placement --

    def _is_one_block(self, pool: HostKVCache) -> bool:
        """Whether a page, with room for the header, is one block of registered memory."""
        block = pool.page_with_room(0)
        if block is None or block.nbytes != HEADER_BYTES + pool.bytes_per_page:
            return False
        return len(pool.memory_blocks()) > 0

    def _runs(
        self, pool: PoolName, records: Sequence[Record], lane: _Lane
    ) -> Iterator[list[_Placed]]:
        """Place records, as many at a time as one call should have."""
        if not records:
            return
        is_direct = pool in self._direct
        most = lane.run_bytes if is_direct else min(lane.run_bytes, _STAGING_BYTES // 2)
        size = _records_a_call(len(records), records[0].num_bytes, most)
        for number, start in enumerate(range(0, len(records), size)):
            run = records[start : start + size]
            yield self._in_pool(pool, run) if is_direct else _in_staging(lane, run, number)

    def _in_pool(self, pool: PoolName, records: Sequence[Record]) -> list[_Placed]:
        host_pool = self.pools[pool]
        placed = []
        for record in records:
            block = host_pool.page_with_room(record.first_slot)
            assert block is not None
            placed.append(_Placed(record, block, _address(block)))
        return placed


def _records_a_call(num_records: int, num_bytes: int, most_bytes: int) -> int:
    """Return how many of so many records, of ``num_bytes`` bytes each, one call moves: at most
    ``most_bytes``, and about as many in every call."""
    if num_bytes >= _LARGE_RECORD_BYTES:
        most_bytes = min(most_bytes, _RUN_BYTES_OF_LARGE)
    most = min(max(most_bytes // num_bytes, 1), _RUN_RECORDS)
    return math.ceil(num_records / math.ceil(num_records / most))


def _in_staging(lane: _Lane, records: Sequence[Record], number: int) -> list[_Placed]:
    """Place one run: in halves by turns, since two runs are under way at a time."""
    num_bytes = records[0].num_bytes
    half_bytes = max(len(records) * num_bytes, _STAGING_BYTES // 2)
    staging = lane.staging(2 * half_bytes)
    first = number % 2 * half_bytes
    placed: list[_Placed] = []
    for start in range(first, first + len(records) * num_bytes, num_bytes):
        block = staging.view[start : start + num_bytes]
        placed.append(_Staged(records[len(placed)], block, staging.address + start))
    return placed


def _lower_priority() -> None:
    """Of the calling thread: 0 is that thread, where Linux has a priority for each."""
    priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(priority, 19))
    except OSError as error:  # a sandbox may forbid it
        logger.warning("Mooncake's calls keep their priority: %s", error)


def _arguments(run: list[_Placed]) -> tuple[list[str], list[int], list[int]]:
    return (
        [placed.record.name for placed in run],
        [placed.address for placed in run],
        [placed.block.nbytes for placed in run],
    )


def _moved(run: list[_Placed], call: Future[list[int]]) -> tuple[list[_Placed], list[int]]:
    codes = call.result()
    _check_reached(codes, len(run))
    return run, codes


def _check_reached(codes: Sequence[int], num_asked: int) -> None:
    if len(codes) != num_asked:
        # Of a client that is not connected; whose results these are nobody knows.
        raise StoreUnreachable(f"{len(codes)} results for {num_asked} records")
    failed = next((code for code in codes if code in _RPC_FAILURES), None)
    if failed is not None:
        raise StoreUnreachable(f"a call of the master failed with {failed}")


# What the environment has from us, and not from the user, whose own variables win.
_our_settings: dict[str, str] = {}


def _load(options: MooncakeOptions) -> Any:
    """Import the client. Its times and its log are set by the environment: the log's are read while
    it loads, the times by every connection (measured), so each has the times that it asks for."""
    settings = {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(options.transfer_timeout_s)),
        "MC_RPC_TIMEOUT_MS": str(round(options.rpc_timeout_s * 1000)),
        # Of twenty tries with another port of our own each: a master that is away is no reason.
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
        "MC_LOG_LEVEL": "ERROR",
        "MC_YLT_LOG_LEVEL": "error",
    }
    for name, value in settings.items():
        if os.environ.get(name) == _our_settings.get(name):
            os.environ[name] = _our_settings[name] = value
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StorageError(
            f"Mooncake cannot be loaded ({error}): install the extra 'mooncake', and the system's "
            "package libibverbs1 where libibverbs.so.1 is missing"
        ) from error


def _connect(module: Any, options: MooncakeOptions) -> Any:
    host, _, port = options.master.rpartition(":")
    try:
        # The client itself would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StorageError(f"no Mooncake master at {options.master}: {error}") from error
    rehearse(options)
    client = module.MooncakeDistributedStore()
    code = client.setup(
        options.local_hostname,
        options.metadata_server,
        options.segment_bytes,
        options.buffer_bytes,
        options.protocol,
        options.devices,
        options.master,
    )
    if code != 0:
        raise StorageError(f"the Mooncake master at {options.master} cannot be used: {code}")
    return client


def _register(client: Any, address: int, num_bytes: int) -> None:
    code = client.register_buffer(address, num_bytes)
    if code != 0:
        raise StorageError(f"{num_bytes} bytes of host memory cannot be registered: {code}")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _copy(pieces: Buffers, flat: memoryview, *, to_flat: bool) -> None:
    start = 0
    for piece in pieces:
        part = flat[start : start + piece.nbytes]
        if to_flat:
            part[:] = piece
        else:
            piece[:] = part
        start += piece.nbytes
