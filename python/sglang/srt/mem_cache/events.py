"""Events about cached blocks, for routers that follow what an instance holds.

Owns the event types and the recorder. Does not own transport. A block is one page; its hash is the
first 64 bits of the page's hash, as a signed integer, so equal on every tier and in every process.
Field names and their encoding, a map tagged with its type, are those that SGLang and vLLM publish.
Scheduler thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from sglang.srt.mem_cache.page_key import PageHash, RadixKey


class StorageMedium(StrEnum):
    """Where a block lies."""

    GPU = "GPU"
    CPU = "CPU_PINNED"


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """One page arrived. ``parent_block_hash``: the page before it, None for a first page.

    ``cache_salt``: the namespace of its request (its ``extra_key``, or that and its salt), absent
    for the common one. ``lora_id``, ``lora_name``: always None, consumers want them present.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: StorageMedium
    lora_id: int | None
    lora_name: str | None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One page is gone from a medium."""

    block_hashes: list[int]
    medium: StorageMedium


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing that a request could use is held any more, on no medium of this process."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one message says: when (Unix time, s), what, and of which data-parallel replica."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


def block_hash(page_hash: PageHash) -> int:
    """Return the first 64 bits of a page hash as a signed integer."""
    return int.from_bytes(bytes.fromhex(page_hash[:16]), "big", signed=True)


class EventRecorder:
    """Collects events until they are taken.

    Two pages of one name may be held at a time, where they differ in what follows them: the block
    leaves with the last of them.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVEvent] = []
        self._num_held: Counter[tuple[PageHash, StorageMedium]] = Counter()

    def take(self) -> list[KVEvent]:
        """Return and forget what was recorded."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        key: RadixKey,
        hashes: Sequence[PageHash],
        hash_before: PageHash | None,
        medium: StorageMedium,
    ) -> None:
        """Record each page of a key. ``hash_before``: of the page before it; None at the start."""
        previous = None if hash_before is None else block_hash(hash_before)
        tokens = key.token_ids.tolist()
        for index, page_hash in enumerate(hashes):
            start = index * self._page_size
            current = block_hash(page_hash)
            self._num_held[page_hash, medium] += 1
            if self._num_held[page_hash, medium] == 1:
                self._events.append(
                    BlockStored(
                        block_hashes=[current],
                        parent_block_hash=previous,
                        token_ids=tokens[start : start + self._page_size],
                        block_size=self._page_size,
                        medium=medium,
                        lora_id=None,
                        lora_name=None,
                        cache_salt=key.extra_key,
                    )
                )
            previous = current

    def removed(self, hashes: Sequence[PageHash], medium: StorageMedium) -> None:
        """Record that pages left a medium, those that begin later first."""
        for page_hash in reversed(hashes):
            self._num_held[page_hash, medium] -= 1
            if self._num_held[page_hash, medium] == 0:
                del self._num_held[page_hash, medium]
                gone = BlockRemoved(block_hashes=[block_hash(page_hash)], medium=medium)
                self._events.append(gone)

    def cleared(self) -> None:
        """Record that everything is gone, and forget what was recorded before: it is of no use."""
        self._events = [AllBlocksCleared()]
        self._num_held.clear()
