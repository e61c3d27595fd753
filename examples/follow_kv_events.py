"""Follow what a server's KV cache holds, as a router does that sends requests to their prefix.

    scripts/serve.sh --kv-events-config '{"replay_endpoint": "tcp://127.0.0.1:5657"}'
    .venv/bin/python examples/follow_kv_events.py --url http://127.0.0.1:30000

Prints the blocks held after each batch. `CacheView` is all that a router needs of it: fed with the
events, it says how many tokens of a prompt the server could take from its cache.

Batches are numbered. A gap means that this end was too slow, or that the server was started anew:
what is missing is asked for at the replay endpoint; where that has not all of it (or there is
none), the view begins anew and learns of blocks as they come.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import requests
import zmq

_END_OF_REPLAY = 2**64 - 1
_REPLAY_TIMEOUT_MS = 5000
_QUIET_S = 5.0

Event = dict[str, Any]
Page = tuple[str | None, int | None, tuple[int, ...]]  # namespace, block before it, its tokens


class CacheView:
    """The blocks of one replica. `held`: by medium, hashes of blocks; `pages`: how to find them."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[str, set[int]] = {}
        self.pages: dict[Page, int] = {}
        self._page_of: dict[int, Page] = {}

    def apply(self, event: Event) -> None:
        """Take in one event; those of unknown types are left alone."""
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.clear()
        elif kind == "BlockStored":
            block = event["block_hashes"][0]
            self.held.setdefault(event["medium"], set()).add(block)
            namespace, parent = event.get("cache_salt"), event["parent_block_hash"]
            page = (namespace, parent, tuple(event["token_ids"]))
            self.pages[page] = block
            self._page_of[block] = page
        elif kind == "BlockRemoved":
            for block in event["block_hashes"]:
                self._remove(block, event["medium"])

    def clear(self) -> None:
        """Nothing is held."""
        self.held.clear()
        self.pages.clear()
        self._page_of.clear()

    def _remove(self, block: int, medium: str) -> None:
        self.held.get(medium, set()).discard(block)
        if not any(block in blocks for blocks in self.held.values()):
            page = self._page_of.pop(block, None)
            if page is not None:
                del self.pages[page]

    def _is_held(self, block: int, medium: str | None) -> bool:
        return medium is None or block in self.held.get(medium, set())

    def matched_tokens(
        self, token_ids: Sequence[int], namespace: str | None = None, medium: str | None = None
    ) -> int:
        """How many of a prompt's first tokens are held, on whichever medium; whole blocks."""
        size = self.block_size
        parent: int | None = None
        for start in range(0, len(token_ids) - size + 1, size):
            page = (namespace, parent, tuple(token_ids[start : start + size]))
            parent = self.pages.get(page)
            if parent is None or not self._is_held(parent, medium):
                return start
        return len(token_ids) - len(token_ids) % size


class Follower:
    """A subscription to one replica. `view` is up to date with the last batch that was read."""

    def __init__(self, info: dict[str, Any], dp_rank: int = 0, server_host: str = "127.0.0.1"):
        """`info`: `kv_events` of /server_info. `server_host`: in place of a wildcard address."""
        publisher = info["publishers"][dp_rank]
        if not publisher["is_bound"]:
            raise ValueError(f"the server sends its events to {publisher['endpoint']}")
        self.view = CacheView(info["block_size"])
        self.num_gaps = 0  # that no replay could close
        self._next_seq = 0  # 0: nothing came yet
        self._server_host = server_host
        self._context = zmq.Context()
        self._live = self._connect(zmq.SUB, publisher["endpoint"])
        self._live.setsockopt_string(zmq.SUBSCRIBE, info["topic"])
        replay = publisher["replay_endpoint"]
        self._replay = self._connect(zmq.DEALER, replay) if replay is not None else None

    def _connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        connected = self._context.socket(kind)
        for wildcard in ("*", "0.0.0.0", "[::]"):
            endpoint = endpoint.replace(f"//{wildcard}:", f"//{self._server_host}:")
        connected.ipv6 = "[" in endpoint
        connected.connect(endpoint)
        return connected

    def catch_up(self) -> None:
        """Take in what was published before now, as far as the server still has it."""
        for seq, payload in self._missed():
            self._apply(seq, payload)

    def poll(self, timeout_s: float) -> list[Event] | None:
        """Take in the next batch and return its events; None when none came in time."""
        if not self._live.poll(int(timeout_s * 1000)):
            return None
        _, number, payload = self._live.recv_multipart()
        seq = int.from_bytes(number, "big")
        if seq > self._next_seq:
            self.catch_up()
        return self._apply(seq, payload)

    def _missed(self) -> Iterator[tuple[int, bytes]]:
        if self._replay is None:
            return
        self._replay.send_multipart([b"", self._next_seq.to_bytes(8, "big")])
        while self._replay.poll(_REPLAY_TIMEOUT_MS):
            *_, number, payload = self._replay.recv_multipart()
            seq = int.from_bytes(number, "big")
            if seq == _END_OF_REPLAY:
                return
            yield seq, payload

    def _apply(self, seq: int, payload: bytes) -> list[Event]:
        if seq < self._next_seq:
            return []  # it came with a replay already
        if seq > self._next_seq > 0:
            # What was removed meanwhile is not known: better no block than one that is gone.
            self.num_gaps += 1
            self.view.clear()
        self._next_seq = seq + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        for event in events:
            self.view.apply(event)
        return list(events)

    def close(self) -> None:
        """End the subscription."""
        self._context.destroy(linger=0)


def fetch_info(url: str, api_key: str | None) -> dict[str, Any]:
    """`kv_events` of /server_info. Raises SystemExit with a sentence."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = requests.get(f"{url.rstrip('/')}/server_info", headers=headers, timeout=10)
        reply.raise_for_status()
        info = reply.json()["kv_events"]
    except (requests.RequestException, KeyError) as error:
        raise SystemExit(f"{url} does not tell of its KV events: {error}") from None
    if info is None:
        raise SystemExit("This server publishes no KV events: start it with --kv-events-config.")
    return dict(info)


def main() -> None:
    """Follow the server of the command line until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="Base URL of the server.")
    parser.add_argument("--api-key", help="Its key, where it has one.")
    parser.add_argument("--dp-rank", type=int, default=0, help="Which of its replicas.")
    args = parser.parse_args()
    info = fetch_info(args.url, args.api_key)
    if not 0 <= args.dp_rank < info["dp_size"]:
        raise SystemExit(f"--dp-rank must be below {info['dp_size']}.")
    try:
        follower = Follower(info, args.dp_rank, urlsplit(args.url).hostname or "127.0.0.1")
    except ValueError as error:
        raise SystemExit(f"Nothing to follow here: {error}.") from None
    follower.catch_up()
    try:
        while True:
            events = follower.poll(timeout_s=_QUIET_S)
            if events is None:
                follower.catch_up()  # a server that was started anew may have nothing to say yet
                continue
            held = {medium: len(blocks) for medium, blocks in follower.view.held.items()}
            gaps = f", {follower.num_gaps} gaps" if follower.num_gaps else ""
            now = time.strftime("%H:%M:%S")
            print(f"{now} {len(events)} events; blocks held: {held}{gaps}", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        follower.close()


if __name__ == "__main__":
    main()
