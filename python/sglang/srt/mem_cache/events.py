"""Events about cached blocks, for routers that follow what an instance holds.

Owns the event types and the recorder. Does not own transport. A block is one page; its hash is the
first 64 bits of the page's hash, as a signed integer, so equal on every tier and in every process.
Scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sglang.srt.mem_cache.page_key import PageHash
from sglang.srt.mem_cache.tree_components.base import TreeNode


class StorageMedium(StrEnum):
    """Where a block lies."""

    GPU = "GPU"
    CPU = "CPU_PINNED"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """One page arrived. ``parent_block_hash``: the page before it, None for a first page."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: str | None
    medium: StorageMedium


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """One page is gone from a medium."""

    block_hashes: list[int]
    medium: StorageMedium


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is held any more, on no medium of this process."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


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
        for index, page_hash in enumerate(_hashes_of(node)):
            start = index * self._page_size
            current = block_hash(page_hash)
            self._events.append(
                BlockStored(
                    block_hashes=[current],
                    parent_block_hash=previous,
                    token_ids=list(node.key[start : start + self._page_size].token_ids),
                    block_size=self._page_size,
                    lora_id=node.key.extra_key,
                    medium=medium,
                )
            )
            previous = current

    def removed(self, node: TreeNode, medium: StorageMedium) -> None:
        """Record that a node's pages left a medium."""
        for page_hash in _hashes_of(node):
            self._events.append(BlockRemoved(block_hashes=[block_hash(page_hash)], medium=medium))

    def cleared(self) -> None:
        """Record that everything is gone."""
        self._events.append(AllBlocksCleared())


def _hashes_of(node: TreeNode) -> list[PageHash]:
    if node.hash_value is None:
        raise ValueError(f"{node!r} has no page hashes to report")
    return node.hash_value
