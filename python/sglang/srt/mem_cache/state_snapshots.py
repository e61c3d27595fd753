"""Snapshots of recurrent states on their way from the forward pass to the prefix cache.

A snapshot at a position is taken by the forward pass that computes it, since the state is gone one
token later. So its slot is chosen when the step is planned, and the cache asks for it when it takes
over the request's KV. Owns the slots in between, by row of the request table; what the tree has
taken is the tree's. Scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.tree_components.base import TreeNode

# A request's own state, where it was begun in an earlier step; see ``StatePlan.sources``.
OWN_STATE = -1
# The state before the first token: all zeros, never written.
INITIAL_STATE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpan:
    """One request's part in a prefill step: its tokens [start, end).

    ``node``: where the cached prefix ends, None for a request that goes on with its own state.
    ``is_last``: nothing of the prompt follows. ``known_len``: leading tokens that the cache has
    seen before, whether or not it could be used.
    """

    row: int
    start: int
    end: int
    is_last: bool
    node: TreeNode | None
    known_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSnapshot:
    """Write the state of the batch's request ``index`` after ``position`` tokens to ``slot``."""

    index: int
    position: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlan:
    """What a step does with state slots besides updating each request's own.

    ``sources``: slot that each request begins with (prefill only), ``OWN_STATE`` for its own.
    ``snapshots``: by request, then position.
    """

    sources: list[int] = field(default_factory=list)
    snapshots: list[StateSnapshot] = field(default_factory=list)


class _HasRow(Protocol):
    @property
    def req_pool_idx(self) -> int | None: ...


class StateSnapshots:
    """The allocator of snapshot slots, and those that were planned and not yet taken over."""

    def __init__(self, num_slots: int, track_interval: int) -> None:
        """`track_interval`: tokens between two snapshots of a request's output."""
        if track_interval < 1:
            raise ValueError(f"the track interval must be positive, got {track_interval}")
        self.track_interval = track_interval
        self.allocator = BaseTokenToKVPoolAllocator(num_slots, 1)
        # Row -> position -> slot.
        self._pending: dict[int, dict[int, int]] = {}
        # Row -> position of the pending snapshot of its output.
        self._tracked: dict[int, int] = {}

    def clear(self) -> None:
        """Forget everything and take back every slot."""
        self._pending.clear()
        self._tracked.clear()
        self.allocator.clear()

    @property
    def num_pending(self) -> int:
        """Slots that neither the allocator nor the tree has."""
        return sum(len(slots) for slots in self._pending.values())

    def plan(self, row: int, position: int, is_output: bool = False) -> int | None:
        """Take a slot for a row's state after so many tokens; None when no slot is free.

        Of a request's output only the last one is kept.
        """
        slots = self.allocator.alloc(1)
        if slots is None:
            return None
        of_row = self._pending.setdefault(row, {})
        if position in of_row:
            self._free(of_row.pop(position))
        if is_output:
            before = of_row.pop(self._tracked.get(row, -1), None)
            if before is not None:
                self._free(before)
            self._tracked[row] = position
        of_row[position] = int(slots[0])
        return of_row[position]

    def positions(self, req: _HasRow, limit: int) -> list[int]:
        """Positions before ``limit`` of a request's pending snapshots, rising."""
        if req.req_pool_idx is None:
            return []
        return sorted(p for p in self._pending.get(req.req_pool_idx, ()) if p < limit)

    def capture(self, req: _HasRow, num_tokens: int) -> torch.Tensor | None:
        """Hand over a request's snapshot after so many tokens: its slot, int64 [1], or None.

        A ``StateCapture``.
        """
        if req.req_pool_idx is None:
            return None
        slot = self._pending.get(req.req_pool_idx, {}).pop(num_tokens, None)
        return None if slot is None else torch.tensor([slot], dtype=torch.int64)

    def release(self, row: int) -> None:
        """Free what is left of a request that gives up its row."""
        for slot in self._pending.pop(row, {}).values():
            self._free(slot)
        self._tracked.pop(row, None)

    def _free(self, slot: int) -> None:
        self.allocator.free(torch.tensor([slot], dtype=torch.int64))
