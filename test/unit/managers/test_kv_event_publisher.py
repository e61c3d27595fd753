"""The publisher of KV events with real sockets: frames, order, gaps, replay, bad peers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from sglang.srt.configs.kv_events_config import KVEventsConfig
from sglang.srt.managers import kv_event_publisher
from sglang.srt.managers.kv_event_publisher import KVEventPublisher
from sglang.srt.mem_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from sglang.srt.utils.network import get_free_port

END = 2**64 - 1
_WAIT_MS = 5000
_KNOWN = -1  # a block that no test publishes


def stored(block: int, num_tokens: int = 2) -> BlockStored:
    return BlockStored(
        block_hashes=[block],
        parent_block_hash=None,
        token_ids=list(range(num_tokens)),
        block_size=num_tokens,
        medium=StorageMedium.GPU,
        lora_id=None,
        lora_name=None,
    )


@contextmanager
def publisher_of(
    dp_rank: int = 0, host: str = "127.0.0.1", **keys: Any
) -> Iterator[KVEventPublisher]:
    keys = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", **keys}
    config = KVEventsConfig.from_cli(json.dumps(keys))
    publisher = KVEventPublisher(config, host=host, dp_rank=dp_rank)
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Sockets that a test has dropped are closed already, and wait for ever for a peer that is gone.
    context.linger = 0
    yield context
    context.destroy(linger=0)


def subscribe(
    context: zmq.Context[Any], publisher: KVEventPublisher, topic: str = "", rcvhwm: int = 0
) -> Any:
    """A subscriber that the publisher knows of: it has got all messages up to this moment."""
    live = context.socket(zmq.SUB)
    live.rcvhwm = rcvhwm
    live.setsockopt_string(zmq.SUBSCRIBE, topic)
    live.connect(publisher.endpoints.endpoint)
    deadline = time.monotonic() + 5
    while not live.poll(10):
        assert time.monotonic() < deadline
        publisher.publish([AllBlocksCleared()])
    publisher.publish([stored(_KNOWN)])
    while receive(live)[2][1][0].get("block_hashes") != [_KNOWN]:
        continue
    return live


def receive(live: Any) -> tuple[bytes, int, list[Any]]:
    assert live.poll(_WAIT_MS), "nothing came"
    topic, seq, payload = live.recv_multipart()
    return topic, int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload)


def ask(context: zmq.Context[Any], publisher: KVEventPublisher, *frames: bytes) -> Any:
    replay = context.socket(zmq.DEALER)
    replay.connect(publisher.endpoints.replay_endpoint)
    replay.send_multipart(list(frames))
    return replay


def replies(replay: Any) -> list[tuple[int, bytes]]:
    """All replies up to the last, which is checked and left out."""
    found: list[tuple[int, bytes]] = []
    while True:
        assert replay.poll(_WAIT_MS), "the replay does not end"
        empty, number, payload = replay.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big") == END:
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), payload))


def events_of(payload: bytes) -> list[Any]:
    return list(msgspec.msgpack.decode(payload, type=KVEventBatch).events)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_message_is_what_routers_read(context: Any) -> None:
    with publisher_of(dp_rank=3, endpoint="tcp://127.0.0.1:0", topic="kv@pod") as publisher:
        live = subscribe(context, publisher, "kv@")
        before = time.time()
        publisher.publish([stored(-7), BlockRemoved(block_hashes=[-7], medium=StorageMedium.CPU)])
        topic, _, (ts, events, rank) = receive(live)
        assert topic == b"kv@pod"
        assert before <= ts <= time.time()
        assert rank == 3
        assert events == [
            {
                "type": "BlockStored",
                "block_hashes": [-7],
                "parent_block_hash": None,
                "token_ids": [0, 1],
                "block_size": 2,
                "medium": "GPU",
                "lora_id": None,
                "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [-7], "medium": "CPU_PINNED"},
        ]


def test_numbers_count_up_and_nothing_is_sent_for_nothing(context: Any) -> None:
    with publisher_of() as publisher:
        live = subscribe(context, publisher)
        publisher.publish([])
        for block in range(50):
            publisher.publish([stored(block)])
        received = [receive(live) for _ in range(50)]
        numbers = [seq for _, seq, _ in received]
        assert numbers == list(range(numbers[0], numbers[0] + 50))
        assert [batch[1][0]["block_hashes"] for _, _, batch in received] == [
            [block] for block in range(50)
        ]
        assert not live.poll(50)


def test_large_batches_are_split_in_order(context: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kv_event_publisher, "_MAX_BATCH_BYTES", 2 * (180 + 4 * 5))
    with publisher_of() as publisher:
        live = subscribe(context, publisher)
        publisher.publish([stored(block, 4) for block in range(5)] + [stored(5, 100)])
        parts = [[event["block_hashes"][0] for event in receive(live)[2][1]] for _ in range(4)]
        assert parts == [[0, 1], [2, 3], [4], [5]]


def test_replay_from_any_number(context: Any) -> None:
    with publisher_of() as publisher:
        for block in range(20):
            publisher.publish([stored(block)])
        for frames in ([b"", bytes(8)], [bytes(8)]):
            found = replies(ask(context, publisher, *frames))
            first = found[0][0]
            assert [seq for seq, _ in found] == list(range(first, first + 21))
            assert events_of(found[0][1]) == [AllBlocksCleared()], "a new server holds nothing"
            assert events_of(found[5][1]) == [stored(4)]
        for skipped, left in ((18, 3), (21, 0)):
            number = (first + skipped).to_bytes(8, "big")
            found = replies(ask(context, publisher, b"", number))
            assert [seq - first for seq, _ in found] == list(range(21 - left, 21))


def test_replay_keeps_the_latest(context: Any, monkeypatch: Any) -> None:
    with publisher_of(buffer_steps=5) as publisher:
        for block in range(12):
            publisher.publish([stored(block)])
        found = replies(ask(context, publisher, b"", bytes(8)))
        assert [events_of(payload) for _, payload in found] == [[stored(b)] for b in range(7, 12)]
        size = len(found[0][1])
    monkeypatch.setattr(kv_event_publisher, "_MAX_REPLAY_BYTES", 3 * size)
    with publisher_of() as publisher:
        for block in range(12):
            publisher.publish([stored(block)])
        found = replies(ask(context, publisher, b"", bytes(8)))
        assert [events_of(payload) for _, payload in found] == [[stored(b)] for b in range(9, 12)]


def test_numbers_go_on_from_those_of_the_server_before(context: Any) -> None:
    """One that missed the restart sees a gap, however few batches the old server sent."""
    last = 0
    for _ in range(2):
        with publisher_of() as publisher:
            publisher.publish([stored(1)])
            numbers = [seq for seq, _ in replies(ask(context, publisher, b"", bytes(8)))]
            assert last + 1 < numbers[0] < 2**62
            last = numbers[-1]


def test_replays_leave_most_of_the_time_to_others(context: Any) -> None:
    with publisher_of() as publisher:
        live = subscribe(context, publisher)
        for block in range(5000):
            publisher.publish([stored(block)])
        replay = ask(context, publisher, b"", bytes(8))
        for _ in range(20):
            replay.send_multipart([b"", bytes(8)])
        begin = time.monotonic()
        num_ends, sent = 0, 0
        while time.monotonic() < begin + 1.0:
            if replay.poll(0):
                num_ends += replay.recv_multipart()[1] == b"\xff" * 8
            elif sent < 50:
                publisher.publish([stored(10_000 + sent)])
                sent += 1
                while receive(live)[2][1][0]["block_hashes"][0] < 10_000:
                    pass  # of those before
        assert sent == 50, "live events are not held up"
        assert num_ends < 20


def test_a_req_socket_may_ask(context: Any) -> None:
    """It gets the first reply, as with other publishers of this protocol."""
    with publisher_of() as publisher:
        publisher.publish([stored(1)])
        replay = context.socket(zmq.REQ)
        replay.connect(publisher.endpoints.replay_endpoint)
        replay.send(bytes(8))
        assert replay.poll(_WAIT_MS)
        number, _ = replay.recv_multipart()
        assert int.from_bytes(number, "big") > 0


def test_bad_requests_change_nothing(context: Any) -> None:
    with publisher_of() as publisher:
        live = subscribe(context, publisher)
        for frames in ([b""], [b"", b"1234567"], [b"x", bytes(8)], [b"", bytes(9)], [bytes(1000)]):
            assert not ask(context, publisher, *frames).poll(20)
        for endpoint in (publisher.endpoints.endpoint, publisher.endpoints.replay_endpoint):
            assert endpoint is not None
            port = int(endpoint.rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        publisher.publish([stored(9)])
        assert receive(live)[2][1][0]["block_hashes"] == [9]
        assert replies(ask(context, publisher, b"", bytes(8)))


def test_a_peer_that_does_not_read_stops_nobody(context: Any) -> None:
    with publisher_of(hwm=10) as publisher:
        lazy = subscribe(context, publisher, rcvhwm=1)
        live = subscribe(context, publisher)
        asking = ask(context, publisher, b"", bytes(8))
        received = []
        start = time.monotonic()
        for block in range(2000):
            publisher.publish([stored(block, 1000)])
            if live.poll(0):
                received.append(receive(live)[1])
        assert time.monotonic() - start < 10
        while live.poll(200):
            received.append(receive(live)[1])
        assert received == sorted(set(received))
        publisher.publish([stored(7)])
        _, latest, (_, events, _) = receive(live)
        assert events[0]["block_hashes"] == [7], "the one that reads has the latest"
        assert replies(asking)
        # What the lazy one lost shows as a gap, and can be had again.
        numbers = []
        while lazy.poll(200):
            numbers.append(receive(lazy)[1])
        assert len(numbers) < 2000
        missing = replies(ask(context, publisher, b"", numbers[-1].to_bytes(8, "big")))
        assert [seq for seq, _ in missing] == list(range(numbers[-1], latest + 1))


def test_a_full_queue_drops_and_the_gap_tells(context: Any, monkeypatch: Any) -> None:
    """The thread stands still while the scheduler publishes."""
    gate = threading.Event()
    forward = kv_event_publisher._EventServer._forward

    def slow(server: Any) -> bool:
        gate.wait(10)
        return forward(server)

    monkeypatch.setattr(kv_event_publisher._EventServer, "_forward", slow)
    with publisher_of(max_queue_size=4) as publisher:
        start = time.monotonic()
        for block in range(100):
            publisher.publish([stored(block)])
        assert time.monotonic() - start < 1
        gate.set()
        time.sleep(0.2)
        publisher.publish([stored(100)])
        numbers: list[int] = []

        def has_come() -> bool:
            numbers[:] = [seq for seq, _ in replies(ask(context, publisher, b"", bytes(8)))]
            return numbers[-1] - numbers[0] == 101

        wait_for(has_come)
        assert 4 <= len(numbers) < 20


def test_the_last_events_leave_before_the_end(context: Any) -> None:
    with publisher_of() as publisher:
        live = subscribe(context, publisher)
        for block in range(100):
            publisher.publish([stored(block)])
    assert [receive(live)[2][1][0]["block_hashes"][0] for _ in range(100)] == list(range(100))
    publisher.close()


def test_addresses_in_use_are_refused(tmp_path: Path) -> None:
    port = get_free_port()
    for endpoint in (f"tcp://127.0.0.1:{port}", f"ipc://{tmp_path}/events"):
        with publisher_of(endpoint=endpoint) as first:
            assert first.endpoints.endpoint == endpoint
            with pytest.raises(ValueError, match="--kv-events-config: cannot listen on"):
                with publisher_of(endpoint=endpoint):
                    pass
        with publisher_of(endpoint=endpoint):  # free again
            pass
    assert not list(tmp_path.iterdir()), "socket files are removed"
    precious = tmp_path / "precious"
    precious.write_text("data")
    with pytest.raises(ValueError, match="there is a file that is no socket"):
        with publisher_of(endpoint=f"ipc://{precious}"):
            pass
    with pytest.raises(ValueError, match="is not of this host"):
        with publisher_of(replay_endpoint="tcp://192.0.2.77:5000"):
            pass
    with pytest.raises(ValueError, match="needs a port"):
        with publisher_of(endpoint="tcp://192.0.2.77:0"):
            pass
    assert precious.read_text() == "data"
    with pytest.raises(ValueError, match="cannot listen on ipc:///nowhere/to/be/found"):
        with publisher_of(endpoint="ipc:///nowhere/to/be/found"):
            pass
    with pytest.raises(ValueError, match="cannot listen on ipc"):
        with publisher_of(endpoint=f"ipc://{tmp_path}/{'long' * 50}"):
            pass


@pytest.mark.parametrize("endpoint", ["tcp://localhost:0", "tcp://*:0", "tcp://[::1]:0"])
def test_hosts_that_can_be_bound(context: Any, endpoint: str) -> None:
    with publisher_of(endpoint=endpoint) as publisher:
        bound = publisher.endpoints.endpoint
        assert bound.rpartition(":")[0] == endpoint.rpartition(":")[0]
        port = int(bound.rpartition(":")[2])
        live = context.socket(zmq.SUB)
        live.ipv6 = True
        live.subscribe(b"")
        live.connect(f"tcp://{'[::1]' if '::1' in endpoint else '127.0.0.1'}:{port}")
        deadline = time.monotonic() + 5
        while not live.poll(20):
            assert time.monotonic() < deadline
            publisher.publish([stored(1)])


def test_a_collector_is_connected_to(
    context: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector on another machine binds; here it plays one on this machine."""
    monkeypatch.setattr(kv_event_publisher, "bindable", lambda endpoint: None)
    caplog.set_level("INFO")
    port = get_free_port()
    collector = context.socket(zmq.SUB)
    collector.subscribe(b"")
    with publisher_of(endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint=None) as publisher:
        assert not publisher.endpoints.is_bound
        publisher.publish([stored(1)])  # nobody there yet: lost, and no harm
        wait_for(lambda: "cannot be reached" in caplog.text)
        collector.bind(f"tcp://127.0.0.1:{port}")
        deadline = time.monotonic() + 5
        while not collector.poll(20):
            assert time.monotonic() < deadline
            publisher.publish([stored(2)])
        assert receive(collector)[1] > 0
        wait_for(lambda: "KV events: connected to" in caplog.text)
        collector.close()
        wait_for(lambda: caplog.text.count("cannot be reached") == 2)
