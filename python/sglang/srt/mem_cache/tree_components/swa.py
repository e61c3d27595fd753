"""KV of sliding-window layers as a tree component.

A node has window rows for all of its tokens or for none: those of tokens that nobody looked back
on any more, or that eviction took, are gone, and the node stays for its full-attention KV. A prefix
can be continued where the tokens that the window reaches back to have rows, on whatever tier.

Owns the rows of nodes, their sizes and locks. Does not own where nodes are divided so that this
holds (``swa_radix_cache.py``) nor which rows are free (``swa_allocator.py``). Scheduler thread
only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer, SpanPages
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.tree_components.base import (
    ComponentData,
    ComponentType,
    InvariantError,
    MatchCursor,
    TreeComponent,
    TreeNode,
)

# Place in a node's locks of a copy that reads all of its rows; others are how far they reach.
_COPY = 0

Split = Callable[[TreeNode, int], TreeNode]
"""Divides a node after so many units; returns the new upper part, the node keeps its end."""


def swa_data(node: TreeNode) -> ComponentData:
    """A node's window rows; ``value`` int64 [len(key)] or None."""
    return node.data[ComponentType.SWA]


class SWAComponent(TreeComponent):
    """Window rows of a node's tokens, all or none.

    ``reach``: tokens before a position that a query there looks back on. A lock of a node covers
    the rows of so many tokens up to its end. It is remembered at each node it touches by how far it
    still reaches there, so that dividing a node divides its locks exactly.
    """

    component_type: ClassVar[ComponentType] = ComponentType.SWA
    pool_name: ClassVar[PoolName] = PoolName.SWA

    def __init__(self, allocator: SWATokenToKVPoolAllocator) -> None:
        super().__init__()
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.reach = allocator.window - 1
        self._locks: dict[int, Counter[int]] = {}  # node id -> tokens covered from its end -> count
        self._split: Split | None = None
        self._with_host_rows: dict[int, TreeNode] = {}  # by node id
        # Parts of a node that was divided while its host copy was in use -> the part that says so.
        self._pinned_by: dict[int, TreeNode] = {}
        # Nodes whose host rows a reserved load reads: nothing else protects them yet.
        self._loading: tuple[TreeNode, ...] = ()
        self.num_lacking = 0  # device rows that the last `reserve` found missing

    @property
    def tail(self) -> int:
        """The reach in whole pages."""
        return -(-self.reach // self.page_size) * self.page_size

    def bind_split(self, split: Split) -> None:
        """Learn how nodes are divided; once."""
        self._split = split

    def reset(self, root: TreeNode) -> None:
        """See ``TreeComponent``."""
        self.evictable_size = 0
        self.protected_size = 0
        self._locks.clear()
        self._with_host_rows.clear()
        self._pinned_by.clear()
        self._loading = ()
        data = swa_data(root)
        data.value = torch.empty(0, dtype=torch.int64)
        data.host_value = torch.empty(0, dtype=torch.int64)

    def match_cursor(self) -> MatchCursor:
        """See ``TreeComponent``: where the reach, or all there is, has rows."""
        covered = 0  # tokens with rows, in a row, up to here
        total = 0

        def cursor(node: TreeNode) -> bool:
            nonlocal covered, total
            data, num_tokens = swa_data(node), len(node.key)
            total += num_tokens
            has_rows = data.value is not None or data.host_value is not None
            covered = covered + num_tokens if has_rows else 0
            return covered >= min(self.reach, total)

        return cursor

    def is_on_device(self, node: TreeNode) -> bool:
        """See ``TreeComponent``."""
        return all(swa_data(part).value is not None for part in self._within_reach(node))

    def _within_reach(self, node: TreeNode) -> list[TreeNode]:
        """Nodes with tokens that a query behind ``node`` looks back on, the last first."""
        found: list[TreeNode] = []
        left, current = self.reach, node
        while left > 0 and current.parent is not None:
            found.append(current)
            left -= len(current.key)
            current = current.parent
        return found

    def store(self, node: TreeNode, value: torch.Tensor) -> None:
        """See ``TreeComponent``; ``value``: rows, which the allocator has for the node's slots."""
        data = swa_data(node)
        if data.value is not None or len(value) != len(node.key):
            raise InvariantError(f"{node!r} cannot take {len(value)} window rows")
        data.value = value.clone()
        self._count_rows(node, len(value))

    def _count_rows(self, node: TreeNode, num_rows: int) -> None:
        if swa_data(node).lock_ref:
            self.protected_size += num_rows
        else:
            self.evictable_size += num_rows

    def split(self, upper: TreeNode, lower: TreeNode, num_units: int) -> None:
        """See ``TreeComponent``."""
        mine, theirs = swa_data(lower), swa_data(upper)
        if mine.value is not None:
            self._count_rows(lower, -len(mine.value))
            theirs.value = mine.value[:num_units].clone()
            mine.value = mine.value[num_units:].clone()
        if mine.host_value is not None:
            theirs.host_value = mine.host_value[:num_units].clone()
            mine.host_value = mine.host_value[num_units:].clone()
            self._with_host_rows[upper.id] = upper
            pin = lower if mine.host_lock_ref else self._pinned_by.get(lower.id)
            if pin is not None:
                self._pinned_by[upper.id] = pin
        rest = len(lower.key)
        further = Counter(
            {
                left - rest: n
                for left, n in self._locks.get(lower.id, Counter()).items()
                if left > rest
            }
        )
        if lower.write_through_pending_id is not None and self.reach:
            # The copy's own lock is of the lower end and may not reach so far. Where windows look
            # back on nothing it holds no row at all, and a match must not lock what was promised.
            further[_COPY] = 1
        if further:
            self._locks[upper.id] = further
            theirs.lock_ref = further.total()
        for node in (upper, lower):
            value = swa_data(node).value
            if value is not None:
                self._count_rows(node, len(value))

    def lock(self, node: TreeNode) -> int:
        """See ``TreeComponent``: the rows within reach of the node's end, present or not."""
        return self._change_locks(node, 1)

    def unlock(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        return self._change_locks(node, -1)

    def _change_locks(self, node: TreeNode, change: int) -> int:
        before = self.evictable_size
        left = self.reach
        for part in self._within_reach(node):
            self._change_lock(part, left, change)
            left -= len(part.key)
        return self.evictable_size - before

    def _change_lock(self, node: TreeNode, left: int, change: int) -> None:
        data = swa_data(node)
        num_rows = 0 if data.value is None else len(data.value)
        self._count_rows(node, -num_rows)
        data.lock_ref += change
        self._count_rows(node, num_rows)
        locks = self._locks.setdefault(node.id, Counter())
        locks[left] += change
        if locks[left] < 0:
            raise InvariantError(f"the window of {node!r} is unlocked once too often")
        if locks[left] == 0:
            del locks[left]
        if not locks:
            del self._locks[node.id]

    def end_copy(self, node: TreeNode) -> None:
        """A copy to the host has read the node's rows."""
        if node.id in self._locks and self._locks[node.id][_COPY]:
            self._change_lock(node, _COPY, -1)

    def release_device(self, node: TreeNode) -> int:
        """See ``TreeComponent``; the rows go with the slots, which full attention has freed."""
        data = swa_data(node)
        if data.lock_ref:
            raise InvariantError(f"the window of {node!r} is in use")
        if data.value is None:
            return 0
        num_rows = len(data.value)
        self.evictable_size -= num_rows
        data.value = None
        return num_rows

    def drop_rows(self, node: TreeNode) -> int:
        """Free the rows of a node that keeps its slots; return how many. Raises when locked."""
        slots = node.value
        if swa_data(node).value is None or slots is None:
            return 0
        num_rows = self.release_device(node)
        self.allocator.free_swa(slots)
        return num_rows

    def absorb(self, node: TreeNode, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Let a node without rows have those of ``slots``, which hold the same tokens.

        ``slots`` are the node's own, or copies that are about to be freed.
        """
        own = node.value
        if own is None:
            raise InvariantError(f"{node!r} has no slots for window rows")
        if not torch.equal(own, slots):
            self.allocator.move_swa(slots, own)
        self.store(node, rows)

    # -- host tier ------------------------------------------------------------------------------

    def release_host(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        data = swa_data(node)
        if data.host_value is None:
            return 0
        if data.host_lock_ref:
            raise InvariantError(f"the host window of {node!r} is in use")
        num_rows = self.host_pool.free(data.host_value)
        data.host_value = None
        del self._with_host_rows[node.id]
        self._pinned_by.pop(node.id, None)
        return num_rows

    def is_unsaved(self, node: TreeNode) -> bool:
        """See ``TreeComponent``: rows that were computed again, or found no room before."""
        return swa_data(node).value is not None and swa_data(node).host_value is None

    def make_host_room(self, num_slots: int) -> int:
        """See ``TreeComponent``."""
        freed = 0
        nodes = [n for n in self._with_host_rows.values() if self._can_lose_host_rows(n)]
        for node in sorted(nodes, key=lambda n: (n.last_access_time, n.id)):
            if freed >= num_slots:
                break
            freed += self.release_host(node)
        return freed

    def _can_lose_host_rows(self, node: TreeNode) -> bool:
        # A copy that is under way, in either direction, locks the node's rows on the device.
        data, pin = swa_data(node), self._pinned_by.get(node.id)
        is_pinned = pin is not None and swa_data(pin).host_lock_ref > 0
        is_in_use = data.host_lock_ref or data.lock_ref or is_pinned
        return not is_in_use and node not in self._loading

    def _to_copy(self, nodes: Sequence[TreeNode], to_host: bool) -> list[TreeNode]:
        """Nodes whose rows are on the one tier only; to the device what the last one reaches."""
        if to_host:
            return [node for node in nodes if self.is_unsaved(node)]
        lacking = [n for n in self._within_reach(nodes[-1]) if swa_data(n).value is None]
        return lacking[::-1]

    def reserve(self, nodes: Sequence[TreeNode], to_host: bool) -> list[PoolTransfer] | None:
        """See ``TreeComponent``. To the host KV goes without rows where they find no room."""
        to_copy = self._to_copy(nodes, to_host)
        num_rows = sum(len(node.key) for node in to_copy)
        if num_rows == 0:
            return []
        if to_host:
            shortfall = num_rows - self.host_pool.available_size()
            if shortfall > 0 and self.make_host_room(shortfall) < shortfall:
                return []
            source = torch.cat([v for n in to_copy if (v := swa_data(n).value) is not None])
            taken = self.host_pool.alloc(num_rows)
            if taken is None:
                return []
            return [PoolTransfer(name=self.pool_name, host_indices=taken, device_indices=source)]
        sources = [swa_data(node).host_value for node in to_copy]
        if any(rows is None for rows in sources):
            # Given up on the host since the match.
            self.num_lacking = 0
            return None
        rows = self.allocator.swa_allocator.alloc(num_rows)
        if rows is None:
            self.num_lacking = num_rows - self.allocator.available_swa_size()
            return None
        source = torch.cat([v for v in sources if v is not None])
        self._loading = tuple(to_copy)
        return [PoolTransfer(name=self.pool_name, host_indices=source, device_indices=rows)]

    def commit(
        self, nodes: Sequence[TreeNode], to_host: bool, transfers: Sequence[PoolTransfer]
    ) -> None:
        """See ``TreeComponent``."""
        rows = self._reserved(to_host, transfers)
        if rows is None:
            return
        if not to_host:  # rows may go to the host while others are about to come from there
            self._loading = ()
        offset = 0
        for node in self._to_copy(nodes, to_host):
            of_node = rows[offset : offset + len(node.key)]
            offset += len(node.key)
            if to_host:
                self._store_host(node, of_node)
                continue
            if node.value is None:
                raise InvariantError(f"{node!r} has no slots for the rows that were loaded")
            self.allocator.bind_swa(node.value, of_node)
            self.store(node, of_node)

    def cancel(self, to_host: bool, transfers: Sequence[PoolTransfer]) -> None:
        """See ``TreeComponent``."""
        rows = self._reserved(to_host, transfers)
        if rows is None:
            return
        if to_host:
            self.host_pool.free(rows)
        else:
            self._loading = ()
            self.allocator.swa_allocator.free(rows)

    def _reserved(self, to_host: bool, transfers: Sequence[PoolTransfer]) -> torch.Tensor | None:
        for transfer in transfers:
            if transfer.name is self.pool_name:
                return transfer.host_indices if to_host else transfer.device_indices
        return None

    def _store_host(self, node: TreeNode, rows: torch.Tensor) -> None:
        swa_data(node).host_value = rows.clone()
        self._with_host_rows[node.id] = node

    # -- storage --------------------------------------------------------------------------------

    def host_pages(self, node: TreeNode, page_size: int) -> SpanPages | None:
        """See ``TreeComponent``."""
        rows = swa_data(node).host_value
        if rows is None:
            return None
        positions = tuple(range(len(node.key) // page_size))
        return SpanPages(name=self.pool_name, positions=positions, host_indices=rows)

    def attach_fetched(self, nodes: Sequence[TreeNode], pages: SpanPages) -> None:
        """See ``TreeComponent``: the last pages; a node that begins before them is divided."""
        rows, current = pages.host_indices, nodes[-1]
        left = len(rows)
        while left > 0:
            if left < len(current.key):
                if self._split is None:
                    raise RuntimeError("nodes cannot be divided here")
                self._split(current, len(current.key) - left)
            of_node = rows[left - len(current.key) : left]
            left -= len(current.key)
            if swa_data(current).host_value is None:
                self._store_host(current, of_node)
            else:
                self.host_pool.free(of_node)
            if left > 0:
                if current.parent is None or current.parent.parent is None:
                    raise InvariantError(f"{left} window rows lie before the first token")
                current = current.parent

    # -- self-check -----------------------------------------------------------------------------

    def check_node(self, node: TreeNode, page_size: int) -> None:
        """See ``TreeComponent``."""
        data, slots = swa_data(node), node.value
        if data.value is not None and slots is None:
            raise InvariantError(f"{node!r} has window rows without slots")
        if slots is not None:
            rows = self.allocator.swa_rows(slots)
            expected = torch.zeros_like(rows) if data.value is None else data.value
            if not torch.equal(rows, expected):
                raise InvariantError(f"{node!r} has rows {expected[:8]}, its slots {rows[:8]}")
            if data.value is not None and self.allocator.swa_allocator.is_free(rows).any():
                raise InvariantError(f"window rows of {node!r} are free")
        if data.host_value is not None and (
            len(data.host_value) != len(node.key) or not node.backuped
        ):
            raise InvariantError(f"{node!r} has {len(data.host_value)} host rows")
        if (data.host_value is not None) != (self._with_host_rows.get(node.id) is node):
            raise InvariantError(f"{node!r} is not where host windows are looked for")
        locks = self._locks.get(node.id, Counter())
        if data.lock_ref != locks.total():
            raise InvariantError(f"{node!r} has {data.lock_ref} window locks, not {locks}")
