"""Events about cached blocks, for routers that follow what an instance holds.

Owns the event types and the recorder. Does not own transport. A block is one page; its hash is the
first 64 bits of the page's hash, as a signed integer, so equal on every tier and in every process.
Field names and their encoding, a map tagged with its type, are those that SGLang and vLLM publish.
Scheduler thread only.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from sglang.srt.mem_cache.page_key import PageHash
from sglang.srt.mem_cache.tree_components.base import TreeNode


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
    """Collects events until they are taken. Nodes must have their page hashes."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """Return and forget what was recorded."""
        events, self._events = self._events, []
        return events

    def stored(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record each page of a node."""
        parent = node.parent
        before = parent.hash_value[-1] if parent is not None and parent.hash_value else None
        previous = None if before is None else block_hash(before)
        tokens = node.key.token_ids.tolist()
        for index, page_hash in enumerate(_hashes_of(node)):
            start = index * self._page_size
            current = block_hash(page_hash)
            self._events.append(
                BlockStored(
                    block_hashes=[current],
                    parent_block_hash=previous,
                    # Without those after the page's own that its KV may depend on.
                    token_ids=tokens[start : start + self._page_size],
                    block_size=self._page_size,
                    medium=medium,
                    lora_id=None,
                    lora_name=None,
                    cache_salt=node.key.extra_key,
                )
            )
            previous = current

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node's pages left a medium."""
        for page_hash in _hashes_of(node):
            self._events.append(BlockRemoved(block_hashes=[block_hash(page_hash)], medium=medium))

    def cleared(self) -> None:
        """Record that everything is gone, and forget what was recorded before: it is of no use."""
        self._events = [AllBlocksCleared()]


def _hashes_of(node: TreeNode) -> list[PageHash]:
    if node.hash_value is None:
        raise ValueError(f"{node!r} has no page hashes to report")
    return node.hash_value
