"""Pages in a server that speaks RESP (Redis, Valkey): one record a page, moved in batches.

Owns the connections. What a record is and when it counts is ``shared_store.py``'s; who may call
when, ``HiCacheStorage``'s; the wire is ``resp_client.py``'s. A value is the record as it is, header
and page; a batch is one MGET, or one pipeline of SETs, of bounded size, between the socket and host
pages. Eviction and persistence are the server's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, StorageError
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.backend_options import BackendOptions
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES
from sglang.srt.mem_cache.storage.resp_client import (
    Command,
    RespAddress,
    RespConnection,
    RespError,
    RespProtocolError,
    parse_url,
)
from sglang.srt.mem_cache.storage.shared_store import (
    DEFAULT_PREFIX,
    HeaderMaker,
    Outcome,
    Record,
    SharedPageStore,
    StoreRefused,
    StoreUnreachable,
    check_prefix,
    chunks,
    judge,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

OPTION_NAMES = frozenset({"url", "ttl", "timeout", "connect_timeout", "batch_bytes", "key_prefix"})
_SCAN_COUNT = b"1000"
# A thousand years: the server counts milliseconds since 1970 in 64 bits.
_MOST_TTL_S = 1000 * 365 * 86400
_MOST_BATCH_BYTES = 4 << 30
_MAX_IDLE = 4  # connections: one thread each looks, reads, writes and probes
# The server is up and does not serve: like a server that is away.
_AWAY = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "NOAUTH", "TRYAGAIN")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """What the user chose. ``ttl_s``: how long an unused record is kept, 0: the server decides;
    ``timeout_s``: without any byte moving; ``batch_bytes``: of one MGET or pipeline."""

    address: RespAddress
    ttl_s: float
    timeout_s: float
    connect_timeout_s: float
    batch_bytes: int
    key_prefix: str


def redis_options(extra: Mapping[str, Any]) -> RedisOptions:
    """Resolve the options; the environment has the URL where the extra config does not.

    Raises ValueError naming the key.
    """
    url = envs.SGLANG_HICACHE_REDIS_URL.get()
    variables = {"url": envs.SGLANG_HICACHE_REDIS_URL.name}
    options = BackendOptions("redis", [extra, {"url": url} if url else {}], variables)
    options.check_known(OPTION_NAMES)
    url = options.text("url", "redis://127.0.0.1:6379/0", is_secret=True)
    try:
        address = parse_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace("url", options.name("url"), 1)) from error
    return RedisOptions(
        address=address,
        ttl_s=options.number("ttl", 0.0, most=_MOST_TTL_S),
        timeout_s=options.number("timeout", 2.0, least=0.01),
        connect_timeout_s=options.number("connect_timeout", 1.0, least=0.01),
        batch_bytes=options.size("batch_bytes", 32 << 20, least=1, most=_MOST_BATCH_BYTES),
        key_prefix=check_prefix(options.text("key_prefix", DEFAULT_PREFIX)),
    )


def _refusal(command: str, error: RespError) -> StoreRefused | StoreUnreachable:
    text = f"{command}: {error}"
    return StoreUnreachable(text) if str(error).startswith(_AWAY) else StoreRefused(text)


@dataclass(slots=True)
class _Checksum:
    """CRC-32 of what came behind the header."""

    value: int = 0
    num_seen: int = 0

    def see(self, piece: memoryview) -> None:
        if self.num_seen:
            self.value = page_file.checksum([piece], self.value)
        self.num_seen += 1


class RedisStore(SharedPageStore):
    """See the module docstring.

    Raises ValueError for bad options, StorageError when the server does not answer or refuses us.
    """

    display_name = "the RESP server"

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self.options = redis_options(config.extra_config)
        super().__init__(config, self.options.key_prefix)
        self._idle: list[RespConnection] = []
        self._idle_lock = threading.Lock()
        self._check_server()
        ttl_s = self.options.ttl_s
        logger.info(
            "L3 in the RESP server at %s; unused records live %s",
            self.options.address,
            f"{ttl_s:g} s" if ttl_s else "as long as the server keeps them",
        )

    def _check_server(self) -> None:
        """Raise StorageError where the server is away or wants nothing of us."""
        address = self.options.address
        try:
            answer = self._ask([[b"PING"]])[0]
        except StoreUnreachable as error:
            if isinstance(error.__cause__, RespError):
                raise StorageError(f"the RESP server at {address} refuses us: {error}") from error
            raise StorageError(f"no RESP server at {address}: {error}") from error
        if isinstance(answer, RespError):
            raise StorageError(f"the RESP server at {address} refuses us: {answer}")

    def close(self) -> None:
        """End the connections; idempotent."""
        super().close()
        self._drop_idle()

    # -- see SharedPageStore --

    def _probe(self) -> bool:
        answer = self._ask([[b"PING"]])[0]
        return not (isinstance(answer, RespError) and str(answer).startswith(_AWAY))

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        # Not EXISTS: that another type of value is in the way would never be noticed.
        answers = self._ask([[b"STRLEN", name.encode()] for name in names])
        bad = []
        for name, answer in zip(names, answers):
            if isinstance(answer, RespError):
                if str(answer).startswith("WRONGTYPE"):
                    bad.append(name)
                else:
                    self._refused("STRLEN", answer)
        if bad:
            # Whoever may not remove it sees it again and again: it counts once.
            self._count(foreign=len(set(bad) - self._bad))
            self._discard(bad, "another type of value in the place of a page")
        return [isinstance(answer, int) and answer > 0 for answer in answers]

    def _read(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for run in chunks(records, self.options.batch_bytes):
            outcomes += self._with_connection(partial(self._fetch, run))
            # Of KV a prefix counts: what lies behind a gap is of no use.
            if pool == PoolName.KV and outcomes[-len(run) :] != [Outcome.DONE] * len(run):
                break
        return outcomes

    def _fetch(self, run: Sequence[Record], connection: RespConnection) -> list[Outcome]:
        connection.send([[b"MGET", *[record.name.encode() for record in run]]])
        length = connection.begin_array()
        if isinstance(length, RespError):
            raise _refusal("MGET", length)
        if length != len(run):
            # What is too much would be taken for the next command's answer.
            raise RespProtocolError(f"{length} values for {len(run)} names")
        outcomes = []
        header = memoryview(bytearray(HEADER_BYTES))
        for record in run:
            crc = _Checksum()
            num_bytes = connection.receive_into([header, *record.buffers], crc.see)
            if num_bytes is None:
                outcomes.append(Outcome.MISSING)
            elif num_bytes != record.num_bytes:
                outcomes.append(Outcome.DAMAGED)
            else:
                outcomes.append(judge(record, header, crc.value))
        return outcomes

    def _write(
        self, pool: PoolName, records: Sequence[Record], make_headers: HeaderMaker
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        expiry = [b"PX", self._ttl_ms] if self.options.ttl_s else []
        for run in chunks(records, self.options.batch_bytes):
            commands: list[Command] = [
                [b"SET", record.name.encode(), [header, *record.buffers], *expiry]
                for record, header in zip(run, make_headers(run))
            ]
            for answer in self._ask(commands):
                if isinstance(answer, RespError):
                    self._refused("SET", answer)
                refused = isinstance(answer, RespError)
                outcomes.append(Outcome.FAILED if refused else Outcome.DONE)
            if Outcome.FAILED in outcomes:
                break
        return outcomes

    def _remove(self, names: Sequence[str]) -> None:
        self._unlink([name.encode() for name in names])

    def _unlink(self, names: Sequence[bytes]) -> int:
        answer = self._ask([[b"UNLINK", *names]])[0]
        if isinstance(answer, RespError):
            raise _refusal("UNLINK", answer)
        return int(answer)

    def _remove_prefix(self, prefix: str) -> int:
        # Prefixes hold nothing that a pattern gives a meaning to.
        pattern = f"{prefix}*".encode()
        num_removed = 0
        cursor = b"0"
        while True:
            answer = self._ask([[b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT]])[0]
            if isinstance(answer, RespError):
                raise _refusal("SCAN", answer)
            cursor, names = answer
            if names:
                num_removed += self._unlink(names)
            if cursor == b"0":
                return num_removed

    def _refresh(self, names: Sequence[str]) -> None:
        if self.options.ttl_s:
            answers = self._ask([[b"PEXPIRE", name.encode(), self._ttl_ms] for name in names])
            refused = next((each for each in answers if isinstance(each, RespError)), None)
            if refused is not None:
                self._refused("PEXPIRE", refused)

    @property
    def _ttl_ms(self) -> bytes:
        return b"%d" % max(round(self.options.ttl_s * 1000), 1)

    def _refused(self, command: str, error: RespError) -> None:
        """Say that the server answers and does not do it. Raises StoreUnreachable if it is away."""
        refusal = _refusal(command, error)
        if isinstance(refusal, StoreUnreachable):
            raise refusal
        self._log.warning(f"refused {command}", "%s refuses %s", self.display_name, refusal)

    # -- connections --

    def _ask(self, commands: Sequence[Command]) -> list[Any]:
        return self._with_connection(lambda connection: connection.ask(commands))

    def _with_connection(self, call: Callable[[RespConnection], T]) -> T:
        """Run a call on a connection of its own. Raises StoreUnreachable."""
        try:
            with self._idle_lock:
                connection = self._idle.pop() if self._idle else None
            if connection is not None:
                try:
                    return self._run(call, connection)
                except ConnectionError:
                    # The server was restarted, or has closed what was idle for long.
                    self._drop_idle()
            return self._run(call, self._connect())
        except RespError as error:
            raise StoreUnreachable(str(error)) from error
        except OSError as error:
            raise StoreUnreachable(f"{type(error).__name__}: {error}") from error

    def _run(self, call: Callable[[RespConnection], T], connection: RespConnection) -> T:
        try:
            result = call(connection)
        except BaseException:
            # Nothing may arrive later: what is under way was meant for pages that others get.
            connection.close()
            raise
        with self._idle_lock:
            is_kept = len(self._idle) < _MAX_IDLE and self.availability.is_up
            if is_kept:
                self._idle.append(connection)
        if not is_kept:
            connection.close()
        return result

    def _connect(self) -> RespConnection:
        options = self.options
        return RespConnection(
            options.address,
            connect_timeout_s=options.connect_timeout_s,
            timeout_s=options.timeout_s,
        )

    def _drop_idle(self) -> None:
        with self._idle_lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
