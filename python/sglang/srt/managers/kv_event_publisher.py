"""Publishes what the KV cache holds, for routers that send a request to where its prefix lies.

Owns the sockets and the thread that serves them. The scheduler hands over batches and never waits:
a batch that nobody takes in time is dropped, and its number missing tells the subscriber.

Live messages have three frames: topic, number (unsigned, 8 bytes, big-endian), batch (msgpack of
`KVEventBatch`). A replay request is the number to begin at, alone or behind an empty frame, on a
DEALER or REQ socket; each reply is an empty frame, number, batch; the last one has number 2**64 - 1
and an empty batch. These are the frames of SGLang's and vLLM's publishers.

Numbers go up by one from the microsecond of the start, so that those of a server that was started
anew are higher than all of before, and its subscribers see that something is missing; the first
batch says that nothing is held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from sglang.srt.configs.kv_events_config import KVEventsConfig, rank_endpoint
from sglang.srt.managers.io_struct import KVEventEndpoints
from sglang.srt.mem_cache.events import AllBlocksCleared, BlockStored, KVEvent, KVEventBatch
from sglang.srt.utils.network import NetworkAddress
from sglang.srt.utils.zmq_endpoints import bindable, check_socket_file, remove_socket_file

logger = logging.getLogger(__name__)

# Messages are at most about so long, so that high-water marks, which count them, bound memory.
_MAX_BATCH_BYTES = 100_000
# What an event takes, as sent: names and hashes, and the most that a token id takes.
_EVENT_BYTES, _TOKEN_BYTES = 180, 5
# Batches kept for replay: at most so many bytes, however few batches that are.
_MAX_REPLAY_BYTES = 256 << 20
# Peers send subscriptions and numbers; ZeroMQ hangs up on who sends more.
_MAX_PEER_BYTES = 1024
_HANDSHAKE_MS = 5000
# Replays take at most this share of the time: they hold what the scheduler's thread needs, too.
_REPLAY_SHARE = 0.1
_MAX_REPLAY_REQUESTS = 4  # of one peer that wait for their turn
_END_OF_REPLAY = b"\xff" * 8
_LINGER_MS = 1000
_STOP = b""
_COLLECTOR_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED

Socket = zmq.Socket[bytes]


class KVEventPublisher:
    """One scheduler's publisher. ``publish`` and ``close`` belong to the scheduler thread."""

    def __init__(self, config: KVEventsConfig, *, host: str, dp_rank: int) -> None:
        """Open the sockets, so that a bad address is known before a model is loaded.

        ``host``: of the HTTP server. Raises ValueError for an address that cannot be used.
        """
        self._dp_rank = dp_rank
        self._encoder = msgspec.msgpack.Encoder()
        self._next_seq = time.time_ns() // 1000
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
            "subscribe to" if self.endpoints.is_bound else "sent to the collector",
            self.endpoints.endpoint,
            self.endpoints.replay_endpoint or "off",
        )
        self.publish([AllBlocksCleared()])

    def _open(self, config: KVEventsConfig, host: str) -> _Sockets:
        publish = self._make(zmq.PUB, config.hwm)
        publish.linger = _LINGER_MS
        endpoint = rank_endpoint(config.publish_endpoint(host), self._dp_rank)
        place, watch = bindable(endpoint), None
        if place is None:
            watch = publish.get_monitor_socket(_COLLECTOR_EVENTS)
            _connect(publish, endpoint)
        else:
            endpoint = _bind(publish, endpoint, place)
        replay, replay_endpoint = None, None
        if config.replay_endpoint is not None:
            # The mark: what one peer was sent and does not read; beyond it, replies are lost.
            replay = self._make(zmq.ROUTER, config.buffer_steps + 1)
            replay.linger = 0
            replay.rcvhwm = _MAX_REPLAY_REQUESTS
            # Says who has gone, or reads nothing, instead of dropping what is sent to them.
            replay.router_mandatory = True
            address = rank_endpoint(config.replay_endpoint, self._dp_rank, "replay_endpoint")
            replay_endpoint = _bind(replay, address, bindable(address))
        self.endpoints = KVEventEndpoints(
            endpoint=endpoint, replay_endpoint=replay_endpoint, is_bound=place is not None
        )
        inbox = self._context.socket(zmq.PULL)
        inbox.rcvhwm = 1
        inbox.bind("inproc://batches")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.sndhwm = config.max_queue_size
        self._outbox.connect("inproc://batches")
        return _Sockets(inbox, publish, replay, watch, endpoint)

    def _make(self, kind: int, high_water_mark: int) -> Socket:
        made = self._context.socket(kind)
        made.sndhwm = high_water_mark
        made.maxmsgsize = _MAX_PEER_BYTES
        made.handshake_ivl = _HANDSHAKE_MS
        return made

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
            if self.endpoints.is_bound:
                remove_socket_file(self.endpoints.endpoint)
            remove_socket_file(self.endpoints.replay_endpoint)


@dataclass(frozen=True, slots=True)
class _Sockets:
    inbox: Socket
    publish: Socket
    replay: Socket | None
    watch: Socket | None  # tells of the connection to a collector
    collector: str

    def close(self) -> None:
        """All of them."""
        if self.watch is not None:
            self.publish.disable_monitor()
        for one in (self.inbox, self.publish, self.replay):
            if one is not None:
                one.close()


class _EventServer:
    """The thread's part: batches to subscribers, and again to those that ask."""

    def __init__(self, sockets: _Sockets, config: KVEventsConfig) -> None:
        self._sockets = sockets
        self._topic = config.topic.encode()
        self._kept: deque[tuple[bytes, bytes]] = deque()  # number, batch
        self._kept_bytes = 0
        self._max_kept = config.buffer_steps if sockets.replay is not None else 0
        self._no_replay_before = 0.0  # by time.monotonic
        self._has_warned = False
        self._is_collected: bool | None = None  # None: not known yet

    def run(self) -> None:
        """Serve until the stop message."""
        try:
            while self._step():
                pass
        except Exception:
            logger.exception("KV events are not published any more")
        finally:
            self._sockets.close()

    def _step(self) -> bool:
        """Wait for something and do it; False: it was the stop message."""
        sockets, rest_s = self._sockets, self._no_replay_before - time.monotonic()
        poller = zmq.Poller()
        for one in (sockets.inbox, sockets.watch, sockets.replay if rest_s <= 0 else None):
            if one is not None:
                poller.register(one, zmq.POLLIN)
        is_resting = sockets.replay is not None and rest_s > 0
        ready = dict(poller.poll(int(rest_s * 1000) + 1 if is_resting else None))
        # Before a request too: it is answered with all that was published before it was sent.
        while sockets.inbox.poll(0):
            if not self._forward():
                return False
        if sockets.replay is not None and sockets.replay in ready:
            self._answer(sockets.replay)
        if sockets.watch is not None and sockets.watch in ready:
            self._tell_of_collector(sockets.watch)
        return True

    def _forward(self) -> bool:
        frames = self._sockets.inbox.recv_multipart()
        if frames == [_STOP]:
            return False
        seq, payload = frames
        self._sockets.publish.send_multipart([self._topic, seq, payload])
        self._keep(seq, payload)
        return True

    def _keep(self, seq: bytes, payload: bytes) -> None:
        if not self._max_kept:
            return
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._max_kept or self._kept_bytes > _MAX_REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self, replay: Socket) -> None:
        begin = time.monotonic()
        peer, *request = replay.recv_multipart()
        if not request or len(request[-1]) != 8 or any(request[:-1]):
            if not self._has_warned:
                self._has_warned = True
                logger.warning("KV events: a replay request is not 8 bytes; such are ignored")
            return
        with suppress(zmq.ZMQError):  # it has gone, or does not read
            self._replay_from(replay, peer, request[-1])
        now = time.monotonic()
        self._no_replay_before = now + (now - begin) * (1 / _REPLAY_SHARE - 1)

    def _replay_from(self, replay: Socket, peer: bytes, first: bytes) -> None:
        for seq, payload in self._kept:
            if seq >= first:  # big-endian numbers compare as they are
                # Not copied: all peers that do not read share the batches that wait for them.
                replay.send_multipart([peer, b"", seq, payload], zmq.NOBLOCK, copy=False)
        replay.send_multipart([peer, b"", _END_OF_REPLAY, b""], zmq.NOBLOCK)

    def _tell_of_collector(self, watch: Socket) -> None:
        event: dict[str, Any] = dict(parse_monitor_message(watch.recv_multipart()))
        is_collected = event["event"] == zmq.EVENT_CONNECTED
        if is_collected == self._is_collected:
            return
        self._is_collected = is_collected
        if is_collected:
            logger.info("KV events: connected to %s", self._sockets.collector)
        else:
            logger.warning("KV events: %s cannot be reached", self._sockets.collector)


def _split(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    """Yield the events in order, in lists of bounded size."""
    part: list[KVEvent] = []
    num_bytes = 0
    for event in events:
        size = _EVENT_BYTES
        if isinstance(event, BlockStored):
            size += _TOKEN_BYTES * len(event.token_ids)
        if part and num_bytes + size > _MAX_BATCH_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(event)
        num_bytes += size
    if part:
        yield part


def _connect(one: Socket, endpoint: str) -> None:
    """To a collector on another host."""
    if NetworkAddress.parse(endpoint).port == 0:
        raise ValueError(f"--kv-events-config: {endpoint} is not of this host and needs a port.")
    try:
        one.ipv6 = True
        one.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"--kv-events-config: cannot connect to {endpoint}: {error}") from None


def _bind(one: Socket, endpoint: str, place: str | None) -> str:
    """Listen; return the address, with the port that the system chose where it was to choose."""
    refusal = f"--kv-events-config: cannot listen on {endpoint}"
    if place is None:
        raise ValueError(f"{refusal}: it is not of this host.")
    try:
        check_socket_file(endpoint)
        one.ipv6 = "[" in place
        one.bind(place)
    except (zmq.ZMQError, OSError) as error:
        raise ValueError(f"{refusal}: {error}") from None
    if endpoint.startswith("ipc://"):
        return endpoint
    bound = NetworkAddress.parse(one.getsockopt_string(zmq.LAST_ENDPOINT))
    return NetworkAddress(NetworkAddress.parse(endpoint).host, bound.port).to_tcp()
