"""Pages in a Mooncake Store: one record a page, straight between host memory and the store's nodes.

Owns the client, the registration of host memory with it, and the few buffers beside the pool: room
for headers, and for pages that do not lie in one piece. What a record is and when it counts is
``shared_store.py``'s; who may call when, ``HiCacheStorage``'s. The client lets other threads run
while it moves bytes, and it connects anew by itself when the master or a node comes back.

Facts of the store that this relies on: a key's first value stays until it is removed; a record
appears when all of it has been written; in a batch each key has a result of its own, negative for a
failure; a connection that failed is closed, so that nothing arrives after a call has returned.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, StorageError
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage.mooncake_options import MooncakeOptions, mooncake_options
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES, Buffers, checksum
from sglang.srt.mem_cache.storage.shared_store import (
    Outcome,
    Record,
    SharedPageStore,
    StoreUnreachable,
    judge,
)

logger = logging.getLogger(__name__)

# Results of the store. Source: measured, and its documentation's list of error codes.
_WRONG_LENGTH = -600
_NOT_FOUND = -704
_RPC_FAILURES = range(-999, -899)

_CONNECT_TIMEOUT_S = 2.0
# Of one call of the client: enough to keep it busy, and little enough that pages are in the cores'
# cache when their checksum is computed.
_RUN_RECORDS = 128
_RUN_BYTES = 24 << 20


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
    """What one direction needs beside the pool. One call at a time: hold ``lock``."""

    def __init__(self, client: Any) -> None:
        self.lock = threading.Lock()
        self._client = client
        self.headers = _Block(client, _RUN_RECORDS * HEADER_BYTES)
        self.has_staging = False
        self._staging: _Block | None = None

    def staging(self, least_bytes: int) -> _Block:
        """Return room for whole records, made when it is needed first."""
        if self._staging is not None and self._staging.num_bytes >= least_bytes:
            return self._staging
        if self._staging is not None:
            self._staging.close()
        self._staging = _Block(self._client, max(least_bytes, _RUN_BYTES))
        self.has_staging = True
        return self._staging


class _Placed:
    """A record and where its bytes lie for the client: in the pool, or gathered in the staging.

    A page in more than one piece is gathered: a call with thousands of pieces exhausts the
    connections of the TCP transport, and fails after a minute.
    """

    __slots__ = ("record", "header", "payload", "addresses", "sizes", "is_staged")

    def __init__(self, record: Record, lane: _Lane, position: int, is_staged: bool) -> None:
        self.record = record
        self.is_staged = is_staged
        if is_staged:
            block = lane.staging(record.num_bytes)
            start = position * record.num_bytes
            view = block.view[start : start + record.num_bytes]
            self.header, self.payload = view[:HEADER_BYTES], [view[HEADER_BYTES:]]
            self.addresses, self.sizes = [block.address + start], [record.num_bytes]
        else:
            start = position * HEADER_BYTES
            self.header = lane.headers.view[start : start + HEADER_BYTES]
            self.payload = list(record.buffers)
            self.addresses = [lane.headers.address + start, _address(record.buffers[0])]
            self.sizes = [HEADER_BYTES, record.payload_bytes]

    def gather(self, header: bytes) -> None:
        """Before a write: the header, and the page where it is staged."""
        self.header[:] = header
        if self.is_staged:
            _copy(self.record.buffers, self.payload[0], to_flat=True)

    def scatter(self) -> None:
        """After a read that is right: the page into the pool where it was staged."""
        if self.is_staged:
            _copy(self.record.buffers, self.payload[0], to_flat=False)


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
        self._reading, self._writing = _Lane(self._client), _Lane(self._client)
        self._registered: dict[PoolName, list[tuple[int, int]]] = {}
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
        if not self._is_direct(name, pool.page_buffers(0)):
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
        for address, _ in self._registered.pop(name, []):
            self._client.unregister_buffer(address)

    def close(self) -> None:
        """End the connection and take this process's memory out of the store; idempotent."""
        super().close()
        if self._closed:
            return
        self._closed = True
        for name in list(self._registered):
            self._forget_memory(name)
        self._client.close()

    # -- see SharedPageStore --

    def _probe(self) -> bool:
        # The client's own health check does not notice that the master is gone.
        return int(self._client.is_exist("a name that nothing has")) >= 0

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        codes = self._client.batch_is_exist(list(names))
        _check_reached(codes)
        return [code == 1 for code in codes]

    def _read(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._reading.lock:
            for run in self._runs(pool, records, self._reading):
                codes = self._client.batch_get_into_multi_buffers(*_arguments(run))
                _check_reached(codes)
                found = [self._finish_read(placed, code) for placed, code in zip(run, codes)]
                outcomes += found
                # Of KV a prefix counts: what lies behind a gap is of no use.
                if pool == PoolName.KV and found != [Outcome.DONE] * len(found):
                    break
        return outcomes

    def _finish_read(self, placed: _Placed, code: int) -> Outcome:
        record = placed.record
        if code == _NOT_FOUND:
            return Outcome.MISSING
        if code < 0:
            # A record of another length fails in different ways, which the transfer hides.
            stored = int(self._client.get_size(record.name))
            if code == _WRONG_LENGTH or (stored >= 0 and stored != record.num_bytes):
                return Outcome.FOREIGN
            return Outcome.FAILED
        outcome = judge(record, placed.header, checksum(placed.payload))
        if outcome is Outcome.DONE:
            placed.scatter()
        return outcome

    def _write(
        self, pool: PoolName, records: Sequence[Record], make_header: Callable[[Record], bytes]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        with self._writing.lock:
            for run in self._runs(pool, records, self._writing):
                for placed in run:
                    placed.gather(make_header(placed.record))
                codes = self._client.batch_put_from_multi_buffers(
                    *_arguments(run), *self._put_options
                )
                _check_reached(codes)
                outcomes += [Outcome.DONE if code >= 0 else Outcome.FAILED for code in codes]
                if min(codes) < 0:
                    break
        return outcomes

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            code = self._client.remove(name, True)
            if code < 0 and code != _NOT_FOUND:
                self._log.warning("remove", "%s could not be removed: %d", name, code)

    def _remove_prefix(self, prefix: str) -> int:
        # Prefixes hold letters, digits, '-', '_' and '/' only.
        num_removed = int(self._client.remove_by_regex(f"^{prefix}", True))
        if num_removed < 0:
            raise StoreUnreachable(f"removing records failed with {num_removed}")
        return num_removed

    # -- placement --

    def _is_direct(self, pool: PoolName, buffers: Buffers) -> bool:
        if len(buffers) != 1:
            return False
        start, num_bytes = _address(buffers[0]), buffers[0].nbytes
        return any(
            address <= start and start + num_bytes <= address + size
            for address, size in self._registered.get(pool, ())
        )

    def _runs(
        self, pool: PoolName, records: Sequence[Record], lane: _Lane
    ) -> Iterator[list[_Placed]]:
        """Place records, as many at a time as there is room beside the pool."""
        if not records:
            return
        is_staged = not self._is_direct(pool, records[0].buffers)
        size = min(max(_RUN_BYTES // records[0].num_bytes, 1), _RUN_RECORDS)
        for start in range(0, len(records), size):
            part = records[start : start + size]
            yield [_Placed(record, lane, i, is_staged) for i, record in enumerate(part)]


def _arguments(run: list[_Placed]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    return (
        [placed.record.name for placed in run],
        [placed.addresses for placed in run],
        [placed.sizes for placed in run],
    )


def _check_reached(codes: Sequence[int]) -> None:
    failed = next((code for code in codes if code in _RPC_FAILURES), None)
    if failed is not None:
        raise StoreUnreachable(f"a call of the master failed with {failed}")


def _load(options: MooncakeOptions) -> Any:
    """Import the client. Its times and its log are set by the environment, read while it loads."""
    settings = {
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(math.ceil(options.transfer_timeout_s)),
        "MC_RPC_TIMEOUT_MS": str(round(options.rpc_timeout_s * 1000)),
        # Of twenty tries with another port of our own each: a master that is away is no reason.
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",
        "MC_LOG_LEVEL": "ERROR",
        "MC_YLT_LOG_LEVEL": "error",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
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
