"""A served tiny model over storage, and over storage that fails on command: set-up and calls."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.test.fakes.served_fault_store import FaultSwitch
from sglang.test.fakes.store_servers import StoreServers
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, serve

PAGE = 16
PROMPT_LEN = 200
FULL = PROMPT_LEN // PAGE * PAGE  # tokens of a prompt that storage can have
WAIT_S = 0.4  # that the prefetch policy allows
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def prompt(number: int) -> list[int]:
    """Token ids; no two numbers share a page."""
    return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(PROMPT_LEN)]


@dataclass(frozen=True)
class StoredServer:
    """A running server with storage."""

    server: SmallServer
    class_name: str  # of the storage backend

    def ask(self, number: int) -> dict[str, Any]:
        """Greedy answer to a prompt."""
        answer: dict[str, Any] = self.server.generate(
            input_ids=prompt(number), sampling_params=GREEDY
        )
        return answer

    def tokens(self, number: int) -> list[int]:
        """Output ids of a greedy answer."""
        ids: list[int] = self.ask(number)["output_ids"]
        return ids

    def timed(self, number: int) -> tuple[float, dict[str, Any]]:
        """Seconds that an answer took, and the answer."""
        start = time.monotonic()
        answer = self.ask(number)
        return time.monotonic() - start, answer

    def flush(self) -> None:
        """Empty device and host when storage has everything."""
        reply = self.server.post("/flush_cache?timeout=30")
        assert reply.status_code == 200, reply.text


@dataclass(frozen=True)
class FaultServer(StoredServer):
    """With the switch of its storage."""

    switch: FaultSwitch


def from_storage(answer: dict[str, Any]) -> int:
    """Tokens of an answer's prompt that came from storage."""
    return int((answer["meta_info"]["cached_tokens_details"] or {}).get("storage", 0))


@contextmanager
def serve_with_faults(
    folder: Path, *flags: str | int | float, store: StoreServers | None = None
) -> Iterator[FaultServer]:
    """Serve a tiny model. ``store``: where its pages go; None: the server's own memory."""
    switch = FaultSwitch(folder / "faults.json")
    config = switch.extra_config(store, **_POLICY)
    with _serve_tiny(folder, "dynamic", config, *flags) as running:
        yield FaultServer(running, switch.class_name(store), switch)


@contextmanager
def serve_over_store(
    folder: Path, store: StoreServers, *flags: str | int | float
) -> Iterator[StoredServer]:
    """Serve a tiny model over a shared store."""
    config = json.dumps({**store.extra_config(), **_POLICY})
    with _serve_tiny(folder, store.backend, config, *flags) as running:
        yield StoredServer(running, store.class_name)


_POLICY = {
    "prefetch_threshold": PAGE,
    "prefetch_timeout_base": WAIT_S,
    "prefetch_timeout_per_ki_token": 0.0,
}


@contextmanager
def _serve_tiny(
    folder: Path, backend: str, config: str, *flags: str | int | float
) -> Iterator[SmallServer]:
    model = make_tiny_checkpoint(folder / "tiny", max_position_embeddings=1024)
    with serve(
        str(model),
        *("--max-total-tokens", 1024, "--page-size", PAGE),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", backend, "--hicache-storage-prefetch-policy", "timeout"),
        *("--hicache-storage-backend-extra-config", config),
        *flags,
    ) as running:
        yield running
