"""What the RESP backend makes of commands that are refused, and of its options.

Over a server of a few commands; a real one has its tests in ``test/registered/hicache``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.storage.redis_store import RedisStore, redis_options
from sglang.srt.mem_cache.storage.resp_client import RespError
from sglang.test.fakes.host_pages import get, make_host_pool, page_hash, put


class Connection:
    """A connection and the server behind it. ``refused``: commands that it has no right to."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.refused: set[bytes] = set()
        self._names: list[bytes] = []

    def ask(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        return [self._answer(*command) for command in commands]

    def _answer(self, command: bytes, *words: Any) -> Any:
        if command in self.refused:
            return RespError(f"NOPERM no permission to run {command.decode()!r}")
        if command == b"SET":
            self.values[words[0]] = b"".join(words[1])
        if command == b"STRLEN":
            return len(self.values.get(words[0], b""))
        if command == b"UNLINK":
            return sum(self.values.pop(name, None) is not None for name in words)
        if command == b"SCAN":
            return [b"0", list(self.values)]
        return b"OK"

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        self._names = list(commands[0][1:])

    def begin_array(self) -> int | RespError:
        refused = b"MGET" in self.refused
        return RespError("NOPERM no MGET") if refused else len(self._names)

    def receive_into(self, buffers: Sequence[memoryview], seen: Any) -> int | None:
        data = self.values.get(self._names.pop(0))
        if data is not None and len(data) == sum(buffer.nbytes for buffer in buffers):
            start = 0
            for buffer in buffers:
                buffer[:] = data[start : start + buffer.nbytes]
                start += buffer.nbytes
                seen(buffer)
        return None if data is None else len(data)

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Connection:
    connection = Connection()
    monkeypatch.setattr(RedisStore, "_connect", lambda store: connection)
    return connection


@pytest.fixture
def store(server: Connection) -> Iterator[RedisStore]:
    store = RedisStore(HiCacheStorageConfig(model_name="m", extra_config={"ttl": 60}))
    store.register_mem_host_pool_v2(make_host_pool(), PoolName.KV)
    yield store
    store.close()


def test_refused_removals_are_no_removals(
    server: Connection, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pool = store.pools[PoolName.KV]
    put(store, pool, [1, 2])
    server.refused = {b"UNLINK"}
    assert not store.clear()
    name = next(iter(server.values))
    server.values[name] = b"junk"
    for _ in range(3):
        assert get(store, pool, [1]) == [False]
    assert len(server.values) == 2
    assert "could not be removed" in caplog.text and "removed 2" not in caplog.text
    assert "refuses (clear): UNLINK: NOPERM" in caplog.text
    assert (store.get_stats()["outages"], store.num_damaged_pages()) == (0, 1)
    server.refused = {b"SCAN"}
    assert not store.clear()
    assert get(store, pool, [2]) == [True], "not taken for an outage"
    server.refused = set()
    assert store.clear() and not server.values


def test_a_refused_refresh_is_said(
    server: Connection, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1])
    server.refused = {b"PEXPIRE"}
    for _ in range(3):
        assert get(store, pool, [1]) == [True]
    assert caplog.text.count("refuses PEXPIRE: NOPERM") == 1
    assert store.availability.is_up


def test_refused_reads_are_said_and_not_tried_on_and_on(
    server: Connection, store: RedisStore, caplog: pytest.LogCaptureFixture
) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1])
    assert store.batch_exists([page_hash(1)]) == 1
    server.refused = {b"MGET"}
    assert get(store, pool, [1]) == [False]
    assert "refuses (read): MGET: NOPERM" in caplog.text
    assert store.batch_exists([page_hash(1)]) == 0 and store.availability.is_up


def test_a_server_that_answers_no_is_not_away(server: Connection, store: RedisStore) -> None:
    server.refused = {b"PING"}
    assert store._probe()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("timeout", 10**400, id="timeout: an integer of 400 digits"),
        ("timeout", 1e10),
        ("connect_timeout", 1e10),
        pytest.param("batch_bytes", 10**400, id="batch_bytes: an integer of 400 digits"),
        pytest.param("batch_bytes", "9" * 400, id="batch_bytes: 400 digits"),
        ("batch_bytes", 0),
        ("ttl", 1e12),
        ("url", ["redis://:secret@h"]),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key) as raised:
        redis_options({key: value})
    assert len(str(raised.value)) < 200 and "secret" not in str(raised.value)
