"""Publishes what the KV cache holds, for routers that send a request to where its prefix lies.

Owns the sockets and the thread that serves them. The scheduler hands over batches and never waits:
a batch that nobody takes in time is dropped, and its number missing tells the subscriber.

Live messages have three frames: topic, number (unsigned, 8 bytes, big-endian, from 0), batch
(msgpack of `KVEventBatch`). A replay request is the number to begin at, alone or behind an empty
frame, on a DEALER or REQ socket; each reply is an empty frame, number, batch; the last one has
number 2**64 - 1 and an empty batch. These are the frames of SGLang's and vLLM's publishers.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import zmq

from sglang.srt.configs.kv_events_config import KVEventsConfig, must_bind, rank_endpoint
from sglang.srt.managers.io_struct import KVEventEndpoints
from sglang.srt.mem_cache.events import BlockStored, KVEvent, KVEventBatch
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# A message holds blocks of at most so many tokens (about 100 KB), so that high-water marks, which
# count messages, bound memory.
_MAX_BATCH_TOKENS = 16_384
# Batches kept for replay: at most so many bytes, however few batches that are.
_MAX_REPLAY_BYTES = 256 << 20
_END_OF_REPLAY = b"\xff" * 8
_LINGER_MS = 1000
_STOP = b""

Socket = zmq.Socket[bytes]


class KVEventPublisher:
    """One scheduler's publisher. ``publish`` and ``close`` belong to the scheduler thread."""

    def __init__(self, config: KVEventsConfig, *, host: str, dp_rank: int) -> None:
        """Open the sockets, so that a bad address is known before a model is loaded.

        ``host``: of the HTTP server. Raises ValueError for an address that cannot be used.
        """
        self._dp_rank = dp_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = 0
        self._num_dropped = 0
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            sockets = self._open(config, host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=_EventServer(sockets, config).run, name="kv-events", daemon=True
        )
        self._thread.start()
        logger.info(
            "KV events: %s %s, replay %s",
            "subscribe to" if self.endpoints.is_bound else "sent to",
            self.endpoints.endpoint,
            self.endpoints.replay_endpoint or "off",
        )

    def _open(self, config: KVEventsConfig, host: str) -> _Sockets:
        publish = self._context.socket(zmq.PUB)
        publish.sndhwm = config.hwm
        publish.linger = _LINGER_MS
        base = config.publish_endpoint(host)
        endpoint = _attach(publish, rank_endpoint(base, self._dp_rank))
        replay, replay_endpoint = None, None
        if config.replay_endpoint is not None:
            replay = self._context.socket(zmq.ROUTER)
            # What one peer was sent and does not read; beyond it, replies to it are lost.
            replay.sndhwm = config.buffer_steps + 1
            replay.linger = 0
            address = rank_endpoint(config.replay_endpoint, self._dp_rank, "replay_endpoint")
            replay_endpoint = _bind(replay, address)
        self.endpoints = KVEventEndpoints(
            endpoint=endpoint, replay_endpoint=replay_endpoint, is_bound=must_bind(endpoint)
        )
        inbox = self._context.socket(zmq.PULL)
        inbox.rcvhwm = 1
        inbox.bind("inproc://batches")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = config.max_queue_size
        self._outbox.connect("inproc://batches")
        return _Sockets(inbox, publish, replay)

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Send events to all subscribers, in order. Never blocks, never raises for a peer."""
        for part in _split(events):
            batch = KVEventBatch(time.time(), part, self._dp_rank)
            seq, self._next_seq = self._next_seq, self._next_seq + 1
            try:
                self._outbox.send_multipart(
                    [seq.to_bytes(8, "big"), self._encoder.encode(batch)], zmq.NOBLOCK
                )
            except zmq.Again:
                self._num_dropped += 1
                if self._num_dropped.bit_count() == 1:  # the 1st, 2nd, 4th, ...
                    logger.warning("KV events: %d batches dropped in all", self._num_dropped)

    def close(self) -> None:
        """Send what was published, for a second at most, and end the thread. Idempotent."""
        if self._outbox.closed:
            return
        with suppress(zmq.Again):
            self._outbox.send(_STOP, zmq.NOBLOCK)
        self._outbox.close(linger=_LINGER_MS)
        self._thread.join(2 * _LINGER_MS / 1000)
        if not self._thread.is_alive():
            self._context.term()


@dataclass(frozen=True, slots=True)
class _Sockets:
    inbox: Socket
    publish: Socket
    replay: Socket | None


class _EventServer:
    """The thread's part: batches to subscribers, and again to those that ask."""

    def __init__(self, sockets: _Sockets, config: KVEventsConfig) -> None:
        self._sockets = sockets
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._max_kept = config.buffer_steps if sockets.replay is not None else 0
        self._has_warned = False

    def run(self) -> None:
        """Serve until the stop message."""
        sockets = self._sockets
        poller = zmq.Poller()
        poller.register(sockets.inbox, zmq.POLLIN)
        if sockets.replay is not None:
            poller.register(sockets.replay, zmq.POLLIN)
        try:
            while self._step(dict(poller.poll())):
                pass
        except Exception:
            logger.exception("KV events are not published any more")
        finally:
            for one in (sockets.inbox, sockets.publish, sockets.replay):
                if one is not None:
                    one.close()

    def _step(self, ready: dict[Socket, int]) -> bool:
        # Before a request too: it is answered with all that was published before it was sent.
        while self._sockets.inbox.poll(0):
            if not self._forward():
                return False
        if self._sockets.replay is not None and self._sockets.replay in ready:
            self._answer(self._sockets.replay)
        return True

    def _forward(self) -> bool:
        frames = self._sockets.inbox.recv_multipart()
        if frames == [_STOP]:
            return False
        seq, payload = frames
        self._sockets.publish.send_multipart([self._topic, seq, payload])
        self._keep(int.from_bytes(seq, "big"), payload)
        return True

    def _keep(self, seq: int, payload: bytes) -> None:
        if not self._max_kept:
            return
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or self._kept_bytes > _MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: Socket) -> None:
        peer, *request = replay.recv_multipart()
        if not request or len(request[-1]) != 8 or any(request[:-1]):
            if not self._has_warned:
                self._has_warned = True
                logger.warning("KV events: a replay request is not 8 bytes; such are ignored")
            return
        first = int.from_bytes(request[-1], "big")
        for seq, payload in self._kept:
            if seq >= first:
                replay.send_multipart([peer, b"", seq.to_bytes(8, "big"), payload])
        replay.send_multipart([peer, b"", _END_OF_REPLAY, b""])


def _split(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield the events in order, in lists of bounded size."""
    part: list[KVEvent] = []
    num_tokens = 0
    for event in events:
        size = len(event.token_ids) if isinstance(event, BlockStored) else 1
        if part and num_tokens + size > _MAX_BATCH_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(event)
        num_tokens += size
    if part:
        yield part


def _attach(one: Socket, endpoint: str) -> str:
    """Bind or connect; return the address, see `_bind`."""
    if must_bind(endpoint):
        return _bind(one, endpoint)
    try:
        one.ipv6 = "[" in endpoint
        one.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"--kv-events-config: cannot connect to {endpoint}: {error}") from None
    return endpoint


def _bind(one: Socket, endpoint: str) -> str:
    """Listen; return the address, with the port that the system chose where it was to choose."""
    try:
        _check_not_served(endpoint)
        one.ipv6 = "[" in endpoint
        one.bind(_bindable(endpoint))
    except (zmq.ZMQError, OSError) as error:
        raise ValueError(f"--kv-events-config: cannot listen on {endpoint}: {error}") from None
    if endpoint.startswith("ipc://"):
        return endpoint
    bound = NetworkAddress.parse(one.getsockopt_string(zmq.LAST_ENDPOINT))
    return NetworkAddress(NetworkAddress.parse(endpoint).host, bound.port).to_tcp()


def _bindable(endpoint: str) -> str:
    """The address as ZeroMQ binds it, which knows no host names."""
    if endpoint.startswith("ipc://"):
        return endpoint
    address = NetworkAddress.parse(endpoint)
    is_name = address.host == "localhost"
    return NetworkAddress("127.0.0.1", address.port).to_tcp() if is_name else endpoint


def _check_not_served(endpoint: str) -> None:
    """Raise OSError where another process listens on a socket file: ZeroMQ would replace it."""
    if not endpoint.startswith("ipc://"):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                return
            raise
    raise OSError(errno.EADDRINUSE, "another process listens there")
