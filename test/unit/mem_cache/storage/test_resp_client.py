"""The RESP connection against a server made of prepared bytes."""

from __future__ import annotations

import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage.redis_store import RedisStore
from sglang.srt.mem_cache.storage.resp_client import (
    RespAddress,
    RespConnection,
    RespError,
    RespProtocolError,
    parse_url,
)
from sglang.test.fakes.host_pages import get, make_host_pool

Connect = Callable[..., tuple[RespConnection, list[bytes]]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to a server that answers whatever it is asked with `answer` and ends or hangs."""
    opened: list[socket.socket | RespConnection] = []

    def make(
        answer: bytes, *, piece: int = 1 << 20, hangs: bool = False, **address: object
    ) -> tuple[RespConnection, list[bytes]]:
        listener = socket.create_server(("127.0.0.1", 0))
        opened.append(listener)
        asked: list[bytes] = []

        def serve() -> None:
            client, _ = listener.accept()
            opened.append(client)
            client.settimeout(5)
            asked.append(client.recv(1 << 16))
            for start in range(0, len(answer), piece):
                client.sendall(answer[start : start + piece])
            if not hangs:
                client.shutdown(socket.SHUT_WR)

        def serve_until_closed() -> None:
            with suppress(OSError):  # the test is over
                serve()

        threading.Thread(target=serve_until_closed, daemon=True).start()
        where = RespAddress(port=listener.getsockname()[1], **address)  # type: ignore[arg-type]
        connection = RespConnection(where, connect_timeout_s=5, timeout_s=0.3)
        opened.append(connection)
        return connection, asked

    yield make
    for thing in opened:
        thing.close()


def test_commands_and_answers(connect: Connect) -> None:
    connection, asked = connect(
        b"+OK\r\n:-7\r\n-ERR no\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n$1\r\nx\r\n:1\r\n"
    )
    answers = connection.ask([[b"PING"], [b"A", b"bc"], [b"X"], [b"Y"], [b"Z"], [b"Q"]])
    assert answers[:2] == [b"OK", -7]
    assert isinstance(answers[2], RespError) and str(answers[2]) == "ERR no"
    assert answers[3:] == [b"a\r\n", None, [b"x", 1]]
    assert asked[0].startswith(b"*1\r\n$4\r\nPING\r\n*2\r\n$1\r\nA\r\n$2\r\nbc\r\n")


def test_a_value_is_sent_in_pieces_as_one(connect: Connect) -> None:
    connection, asked = connect(b"+OK\r\n")
    connection.ask([[b"SET", b"k", [b"head", memoryview(b"body")], b"PX", b"9"]])
    assert asked == [b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$8\r\nheadbody\r\n$2\r\nPX\r\n$1\r\n9\r\n"]


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_values_are_received_into_buffers(connect: Connect, piece: int) -> None:
    long = bytes(range(256)) * 100
    answer = b"*4\r\n$%d\r\n%b\r\n$-1\r\n$4\r\nlong\r\n$%d\r\n%b\r\n"
    connection, _ = connect(answer % (len(long), long, len(long), long), piece=max(piece, 1))
    connection.send([[b"MGET"]])
    assert connection.begin_array() == 4
    buffers = [memoryview(bytearray(100)), memoryview(bytearray(len(long) - 100))]
    seen: list[bytes] = []

    def see(part: memoryview) -> None:
        seen.append(bytes(part))

    assert connection.receive_into(buffers, see) == len(long)
    assert b"".join(seen) == b"".join(buffers) == long
    assert connection.receive_into(buffers, see) is None
    assert connection.receive_into(buffers, see) == 4, "of another length: skipped"
    buffers[0][:] = bytes(100)
    assert connection.receive_into(buffers, see) == len(long)
    assert b"".join(buffers) == long


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ConnectionResetError),
        (b"$10\r\nshort", ConnectionResetError),
        (b"?what\r\n", RespProtocolError),
        (b"$x\r\n", RespProtocolError),
        (b"$2\r\nabcd", RespProtocolError),
        (b"$9999999999999\r\n", RespProtocolError),
        (b"$%d\r\n" % 10**30, RespProtocolError),
        (b"+" + b"x" * 100_000, RespProtocolError),
    ],
)
def test_a_broken_answer_is_an_error_of_the_connection(
    connect: Connect, answer: bytes, error: type[Exception]
) -> None:
    connection, _ = connect(answer)
    with pytest.raises(error):
        connection.ask([[b"GET", b"k"]])


def test_silence_ends_at_the_time_limit(connect: Connect) -> None:
    connection, _ = connect(b"$10\r\nshort", hangs=True)
    with pytest.raises(TimeoutError):
        connection.ask([[b"GET", b"k"]])


def test_a_refused_password_is_told_apart(connect: Connect) -> None:
    with pytest.raises(RespError, match="WRONGPASS"):
        connect(b"-WRONGPASS no\r\n", password="secret")


def test_addresses() -> None:
    assert parse_url("redis://h") == RespAddress(host="h")
    assert parse_url("valkeys://u:p%40@h:1/2") == RespAddress(
        host="h", port=1, is_tls=True, username="u", password="p@", database=2
    )
    assert parse_url("unix:///tmp/s?db=3") == RespAddress(path="/tmp/s", database=3)
    assert "secret" not in repr(parse_url("redis://:secret@h"))
    for bad in ("http://h", "redis://:secret@h:port", "redis://h/name", "unix://", ""):
        with pytest.raises(ValueError) as raised:
            parse_url(bad)
        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret?secret@h",
        "redis://:secret#secret@h",
        "redis://:secret/secret@h",
        "redis://:secret\u2100secret@h",
        "redis://:secret[secret@h",
        "redis://:secret\udc80@h",
        "redis://:a@b?secret@h",
        "redis://:a@b?secret=1&db=2@h",
        "redis://:secret@h?db=secret",
        "redis://:secret@h:0",
        "redis://:secret@h:" + "1" * 30,
        "redis://:secret@h/-1",
    ],
)
def test_what_is_wrong_with_an_address_never_quotes_it(url: str) -> None:
    with pytest.raises(ValueError, match="^url ") as raised:
        parse_url(url)
    shown = traceback.format_exception(raised.value)
    assert "secret" not in str(raised.value)
    assert not any("secret" in line for line in shown if "parse_url(url)" not in line)


def test_escaped_characters_of_a_password() -> None:
    assert parse_url("redis://:a%2Fb%3F%23%5B@h").password == "a/b?#["


def test_an_array_that_is_none(connect: Connect) -> None:
    connection, _ = connect(b"*-1\r\n*0\r\n")
    assert connection.ask([[b"A"], [b"B"]]) == [None, []]


def _store(server: socket.socket, answers: dict[bytes, bytes]) -> RedisStore:
    """A store whose server answers each command by its name."""

    def serve() -> None:
        while True:
            client, _ = server.accept()
            threading.Thread(target=talk, args=(client,), daemon=True).start()

    def talk(client: socket.socket) -> None:
        while asked := client.recv(1 << 16):
            client.sendall(answers[asked.split(b"\r\n")[2]])

    def serve_until_closed() -> None:
        with suppress(OSError):
            serve()

    threading.Thread(target=serve_until_closed, daemon=True).start()
    url = f"redis://127.0.0.1:{server.getsockname()[1]}"
    return RedisStore(HiCacheStorageConfig(model_name="m", extra_config={"url": url}))


def test_clearing_where_deleting_is_refused_is_no_exception() -> None:
    answers = {
        b"PING": b"+PONG\r\n",
        b"SCAN": b"*2\r\n$1\r\n0\r\n*1\r\n$1\r\na\r\n",
        b"UNLINK": b"-NOPERM no\r\n",
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = _store(server, answers)
        assert store.clear() is False
        store.close()


@pytest.mark.parametrize("length", [-1, 0, 2])
def test_another_number_of_values_than_asked_for_ends_the_connection(length: int) -> None:
    values = b"$1\r\nx\r\n" * max(length, 0)
    answers = {b"PING": b"+PONG\r\n", b"MGET": b"*%d\r\n%b" % (length, values)}
    pool = make_host_pool()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store = _store(server, answers)
        store.register_mem_host_pool_v2(pool, PoolName.KV)
        assert get(store, pool, [0]) == [False]
        assert store.get_stats()["io_errors"] == 1
        assert store._idle == []
        store.close()
