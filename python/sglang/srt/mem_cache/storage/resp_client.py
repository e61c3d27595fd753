"""A connection to a server that speaks RESP 2, made for large values: no copies of their bytes.

Owns the address, the wire format and time limits. Values are sent from, and received into, the
caller's buffers; everything else is small. Not a general client: no cluster, no subscriptions. One
thread at a time. Source of the format: the RESP specification of Redis and Valkey.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

_MAX_BUFFERS = 1000  # of one sendmsg call; Linux takes 1024
_MAX_LINE_BYTES = 64 << 10
_READ_AHEAD_BYTES = 16 << 10
_DEFAULT_PORT = 6379
# Of a value that comes outside of a caller's buffers: all of them are numbers, names, short texts.
_MAX_VALUE_BYTES = 16 << 20

_ESCAPES = "in a password '%', '/', '?', '#', '[' and ']' are written %25, %2F, %3F, %23, %5B, %5D"

Buffer = bytes | memoryview
Argument = Buffer | Sequence[Buffer]
"""One argument of a command; a sequence is sent as one value, piece after piece."""
Command = Sequence[Argument]


class RespError(Exception):
    """The server refused a command; the connection goes on."""


class RespProtocolError(OSError):
    """What came is no RESP: the connection is of no use any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RespAddress:
    """Where the server is and as whom to ask. ``path``: of a local socket, if it is not remote."""

    host: str = "127.0.0.1"
    port: int = _DEFAULT_PORT
    path: str | None = None
    is_tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def parse_url(url: str) -> RespAddress:
    """Read ``redis://[user:password@]host[:port][/database]``, ``rediss://`` for TLS (``valkey``
    likewise) or ``unix://path[?db=n]``. Raises ValueError, which quotes nothing that an '@'
    follows: any part of a URL that is wrong may be a piece of the password."""
    try:
        url.encode()
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"url cannot be read: {_ESCAPES}") from None
    scheme = parts.scheme.replace("valkey", "redis")
    if scheme not in ("redis", "rediss", "unix"):
        raise ValueError("url must begin with redis://, rediss:// or unix://")
    query = parse_qs(parts.query, keep_blank_values=True)
    unknown = sorted(set(query) - {"db"})
    if parts.fragment or (unknown and "@" in parts.query):
        raise ValueError(f"url takes nothing but db behind '?', and no '#'; {_ESCAPES}")
    if unknown:  # behind the '@', which ends a password
        raise ValueError(
            f"url takes no {', '.join(unknown)} behind '?'; time limits are options of the backend"
        )
    try:
        port = _DEFAULT_PORT if parts.port is None else parts.port
        database = _database(parts)
    except ValueError:
        raise ValueError(f"url has a port or a database that is no number; {_ESCAPES}") from None
    if port == 0 or database < 0:
        raise ValueError("url needs a port from 1 to 65535, and a database from 0")
    if scheme == "unix" and not parts.path:
        raise ValueError("url must name the path of the local socket")
    return RespAddress(
        host=parts.hostname or "127.0.0.1",
        port=port,
        path=parts.path if scheme == "unix" else None,
        is_tls=scheme == "rediss",
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        database=database,
    )


def _database(parts: SplitResult) -> int:
    asked = parse_qs(parts.query).get("db")
    if asked:
        return int(asked[0])
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    return int(path) if path else 0


class RespConnection:
    """See the module docstring. Whatever it raises as OSError ends it: close it.

    ``timeout_s``: the longest that no byte moves.
    """

    def __init__(self, address: RespAddress, *, connect_timeout_s: float, timeout_s: float) -> None:
        self._socket = _connect(address, connect_timeout_s)
        self._socket.settimeout(timeout_s)
        self._reader = self._socket.makefile("rb", buffering=_READ_AHEAD_BYTES)
        try:
            self._introduce(address)
        except BaseException:
            self.close()
            raise

    def _introduce(self, address: RespAddress) -> None:
        commands: list[Command] = []
        if address.password is not None:
            names = [address.username.encode()] if address.username else []
            commands.append([b"AUTH", *names, address.password.encode()])
        if address.database:
            commands.append([b"SELECT", b"%d" % address.database])
        for answer in self.ask(commands):
            if isinstance(answer, RespError):
                raise answer

    def close(self) -> None:
        """End it; idempotent."""
        self._reader.close()
        self._socket.close()

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands at once and return their answers: bytes, int, None, a list of these, or a
        RespError where the server refused one. Raises OSError."""
        if not commands:
            return []
        self.send(commands)
        return [self.receive() for _ in commands]

    def send(self, commands: Sequence[Command]) -> None:
        """Send commands; ``receive`` takes one answer for each. Raises OSError.

        The server must be able to answer all of them with little: it stops reading while nobody
        takes what it has to say.
        """
        views = [memoryview(part) for command in commands for part in _encode(command)]
        if isinstance(self._socket, ssl.SSLSocket):
            for view in views:
                self._socket.sendall(view)
            return
        first = 0
        while first < len(views):
            num_sent = self._socket.sendmsg(views[first : first + _MAX_BUFFERS])
            while first < len(views) and num_sent >= views[first].nbytes:
                num_sent -= views[first].nbytes
                first += 1
            if num_sent:
                views[first] = views[first][num_sent:]

    def receive(self) -> Any:
        """Return the next answer; see ``ask``."""
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            return RespError(text.decode(errors="replace"))
        if kind == b":":
            return _number(text)
        if kind == b"$":
            length = _number(text)
            if length < 0:
                return None
            if length > _MAX_VALUE_BYTES:
                raise RespProtocolError(f"an answer of {length} bytes")
            value = bytearray(length)
            self._fill(memoryview(value))
            self._end_of_value()
            return bytes(value)
        if kind == b"*":
            length = _number(text)
            return None if length < 0 else [self.receive() for _ in range(length)]
        raise RespProtocolError(f"an answer begins with {kind!r}")

    def begin_array(self) -> int | RespError:
        """Begin an answer that is an array; return its length, or why there is none."""
        kind, text = self._line()
        if kind == b"-":
            return RespError(text.decode(errors="replace"))
        if kind != b"*":
            raise RespProtocolError(f"an array was expected, not {kind!r}")
        return _number(text)

    def receive_into(
        self, buffers: Sequence[memoryview], seen: Callable[[memoryview], None]
    ) -> int | None:
        """Receive a value into buffers; return its length, None when there is none.

        A value of another length than that of all buffers is skipped. ``seen`` is called with each
        piece in order, while it is likely still in the core's cache.
        """
        kind, text = self._line()
        if kind != b"$":
            raise RespProtocolError(f"a value was expected, not {kind!r}")
        length = _number(text)
        if length < 0:
            return None
        if length == sum([buffer.nbytes for buffer in buffers]):
            for piece in pieces(buffers):
                self._fill(piece)
                seen(piece)
        else:
            self._skip(length)
        self._end_of_value()
        return length

    def _line(self) -> tuple[bytes, bytes]:
        line = self._reader.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\r\n"):
            if len(line) < _MAX_LINE_BYTES:
                raise ConnectionResetError("the server ended the connection")
            raise RespProtocolError("a line is too long")
        return line[:1], line[1:-2]

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            count = self._reader.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionResetError("the server ended the connection within a value")
            done += count

    def _skip(self, length: int) -> None:
        waste = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            part = waste[: min(length, waste.nbytes)]
            self._fill(part)
            length -= part.nbytes

    def _end_of_value(self) -> None:
        if self._reader.read(2) != b"\r\n":
            raise RespProtocolError("a value is longer than it says")


_PIECE_BYTES = 256 << 10


def pieces(buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    """Cut buffers into parts of at most 256 KiB."""
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _PIECE_BYTES):
            yield buffer[start : start + _PIECE_BYTES]


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise RespProtocolError(f"{text[:20]!r} is no number") from None


def _encode(command: Command) -> Iterator[Buffer]:
    """Yield the parts of a command; large arguments as they are, small ones joined."""
    head = bytearray(b"*%d\r\n" % len(command))
    for argument in command:
        if isinstance(argument, bytes):
            head += b"$%d\r\n%b\r\n" % (len(argument), argument)
            continue
        parts = [argument] if isinstance(argument, memoryview) else argument
        head += b"$%d\r\n" % sum([len(memoryview(part).cast("B")) for part in parts])
        yield bytes(head)
        yield from parts
        head = bytearray(b"\r\n")
    yield bytes(head)


def _connect(address: RespAddress, timeout_s: float) -> socket.socket:
    if address.path is not None:
        local = socket.socket(socket.AF_UNIX)
        local.settimeout(timeout_s)
        try:
            local.connect(address.path)
        except BaseException:
            local.close()
            raise
        return local
    remote = socket.create_connection((address.host, address.port), timeout_s)
    try:
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if address.is_tls:
            context = ssl.create_default_context()
            return context.wrap_socket(remote, server_hostname=address.host)
    except BaseException:
        remote.close()
        raise
    return remote
