"""Messages between processes: a codec for the dataclasses of `io_struct`, and zmq channels.

A message is a msgpack array of two: the class name, and the fields as a map. `array('i')` values
(token ids) travel as packed 32-bit integers in a msgpack extension. Decoding is typed: a message
that does not fit its class raises `IpcError`. A channel has one reader, which binds; any number
of writers connect and never block, because queues are unbounded. Channels are used by one thread
each (zmq sockets are not thread-safe).
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from typing import Any

import msgspec
import zmq

from sglang.srt.managers import io_struct
from sglang.srt.utils.wakeup import Wakeup

_EXT_INT32 = 1
_ARRAY_OF_TWO = 0x92
_FIXSTR, _STR8 = 0xA0, 0xD9
# A writer whose reader has not bound yet tries again: soon at first, for the processes of a server
# start within moments of each other, then more and more seldom.
_RECONNECT_MS, _MAX_RECONNECT_MS = 5, 160
_READABLE = int(zmq.POLLIN)  # `&` of the enumeration's member would be a Python function


class IpcError(ValueError):
    """Bytes that are no message of ours, or an object that cannot be one."""


def _encode_special(value: Any) -> Any:
    if isinstance(value, array) and value.typecode == "i":
        return msgspec.msgpack.Ext(_EXT_INT32, value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} cannot be part of a message")


def _decode_ext(code: int, data: memoryview) -> Any:
    if code != _EXT_INT32:
        raise IpcError(f"unknown extension {code} in a message")
    packed = array("i")
    packed.frombytes(data)
    return packed


def _decode_special(hint: Any, value: Any) -> Any:
    # Arrays were made by `_decode_ext`; msgspec calls this for the annotated type `array[int]`.
    if isinstance(value, array):
        return value
    raise NotImplementedError(f"a message field of type {hint} cannot be decoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_special)


def _message_classes() -> dict[str, type]:
    """Every dataclass defined in `io_struct`, by name."""
    return {
        name: value
        for name, value in vars(io_struct).items()
        if isinstance(value, type)
        and dataclasses.is_dataclass(value)
        and value.__module__ == io_struct.__name__
    }


class _Registry:
    """Headers and decoders, made at the first use of a class."""

    def __init__(self) -> None:
        self._classes = _message_classes()
        self._headers: dict[type, bytes] = {}
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}

    def header(self, cls: type) -> bytes:
        header = self._headers.get(cls)
        if header is None:
            if self._classes.get(cls.__name__) is not cls:
                raise IpcError(f"{cls.__name__} is not a message class")
            header = bytes([_ARRAY_OF_TWO]) + msgspec.msgpack.encode(cls.__name__)
            self._headers[cls] = header
        return header

    def decoder(self, name: str) -> msgspec.msgpack.Decoder[Any]:
        decoder = self._decoders.get(name)
        if decoder is None:
            cls = self._classes.get(name)
            if cls is None:
                raise IpcError(f"{name!r} is not a message class")
            try:
                decoder = msgspec.msgpack.Decoder(
                    cls, ext_hook=_decode_ext, dec_hook=_decode_special
                )
            except TypeError as error:
                raise IpcError(f"{name} cannot be decoded: {error}") from error
            self._decoders[name] = decoder
        return decoder


_registry = _Registry()


def encode(message: Any) -> bytes:
    """The bytes of a message object. Raises IpcError for objects that are no messages."""
    header = _registry.header(type(message))
    buffer = bytearray(header)
    try:
        _encoder.encode_into(message, buffer, len(header))
    except RecursionError as error:
        raise IpcError(f"{type(message).__name__} is nested too deep") from error
    except (NotImplementedError, TypeError, OverflowError, ValueError) as error:
        raise IpcError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return bytes(buffer)


def decode(data: bytes | memoryview) -> Any:
    """The message object of these bytes. Raises IpcError."""
    name, start = _read_header(data)
    try:
        return _registry.decoder(name).decode(memoryview(data)[start:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise IpcError(f"{name} does not fit its class: {error}") from error


def _read_header(data: bytes | memoryview) -> tuple[str, int]:
    """(class name, offset of the fields)."""
    if len(data) < 3 or data[0] != _ARRAY_OF_TWO:
        raise IpcError("not a message: it does not begin with a class name")
    if data[1] & 0xE0 == _FIXSTR:
        start, length = 2, data[1] & 0x1F
    elif data[1] == _STR8:
        start, length = 3, data[2]
    else:
        raise IpcError("not a message: it does not begin with a class name")
    try:
        return str(data[start : start + length], "ascii"), start + length
    except UnicodeDecodeError as error:
        raise IpcError("not a message: the class name is not ASCII") from error


# ------------------------------------------------------------------------------------------------
# Channels
# ------------------------------------------------------------------------------------------------


def _socket(kind: int, address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.PULL:
        socket.bind(address)
    else:
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        socket.connect(address)
    return socket


class PushChannel:
    """The writing end. The reader may bind later: messages wait in this process until then."""

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PUSH, address)

    def send(self, message: Any) -> None:
        """Queue one message object; never blocks. Raises IpcError."""
        self._socket.send(encode(message), zmq.NOBLOCK, copy=False)

    def close(self, linger_s: float = 0.0) -> None:
        """Close; wait at most `linger_s` seconds for queued messages to leave."""
        self._socket.close(linger=int(linger_s * 1000))


class PullChannel:
    """The reading end, for a process with a loop of its own (scheduler, detokenizer)."""

    def __init__(self, address: str) -> None:
        self._socket = _socket(zmq.PULL, address)

    def recv_bytes_nowait(self) -> bytes | None:
        """The next message undecoded (rank 0 broadcasts it as it is), or None."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def recv_all_bytes_nowait(self) -> list[bytes]:
        """Every message that has arrived, undecoded, oldest first."""
        messages: list[bytes] = []
        # Asking first is cheaper than the exception of an empty socket.
        while int(self._socket.get(zmq.EVENTS)) & _READABLE:
            messages.append(self._socket.recv(zmq.NOBLOCK))
        return messages

    def recv_all_nowait(self) -> list[Any]:
        """Every message that has arrived, oldest first; empty when there is none."""
        return [decode(data) for data in self.recv_all_bytes_nowait()]

    def wait(self, timeout_s: float | None, wakeup: Wakeup | None = None) -> bool:
        """Sleep until a message is there; False after `timeout_s` (None: no limit).

        `wakeup` ends the sleep too, and is cleared.
        """
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000))
        if wakeup is None:
            return bool(self._socket.poll(timeout_ms, zmq.POLLIN))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wakeup.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        wakeup.clear()
        return self._socket in ready

    def recv(self, timeout_s: float | None = None) -> Any | None:
        """The next message, or None when none came within `timeout_s` (None: no limit)."""
        if not self.wait(timeout_s):
            return None
        data = self.recv_bytes_nowait()
        return None if data is None else decode(data)

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncPullChannel:
    """The reading end inside an asyncio program. Any loop may await it, one at a time."""

    def __init__(self, address: str) -> None:
        self._channel = PullChannel(address)
        self._fd = int(self._channel._socket.getsockopt(zmq.FD))

    async def recv_all(self) -> list[Any]:
        """Wait for at least one message; return all that have arrived, oldest first."""
        while not (messages := self._channel.recv_all_nowait()):
            await self._wait_readable()
        return messages

    async def _wait_readable(self) -> None:
        # zmq's descriptor tells only *changes*: the caller has just drained the socket, which
        # clears it, so anything that comes from here on makes the descriptor readable.
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._fd, _resolve, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._fd)

    def close(self) -> None:
        self._channel.close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
