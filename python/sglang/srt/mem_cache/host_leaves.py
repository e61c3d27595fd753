"""The set of nodes that host eviction may take next, in the policy's order.

Owns membership and one lazily renewed heap entry a node. Knows neither slots nor tiers: its user
says whether a node is a leaf. Scheduler thread only.
"""

from __future__ import annotations

import heapq

from sglang.srt.mem_cache.evict_policy import EvictKey, EvictKeyFn
from sglang.srt.mem_cache.tree_components.base import TreeNode


class HostLeaves:
    """``members``: the leaves now. Order keys may rise while a node is here, never fall."""

    def __init__(self, evict_key: EvictKeyFn) -> None:
        self._evict_key = evict_key
        self.members: set[TreeNode] = set()
        self._heap: list[tuple[EvictKey, int, TreeNode]] = []
        self._in_heap: set[int] = set()  # ids of nodes with an entry

    def clear(self) -> None:
        """Forget all."""
        self.members.clear()
        self._heap.clear()
        self._in_heap.clear()

    def set_membership(self, node: TreeNode, is_leaf: bool) -> None:
        """Put a node in or out."""
        if not is_leaf:
            self.members.discard(node)
            return
        self.members.add(node)
        if node.id not in self._in_heap:
            self._push(node)

    def pop(self) -> TreeNode | None:
        """Take out the leaf to evict first; None when there is none."""
        while self._heap:
            old_key, _, node = heapq.heappop(self._heap)
            self._in_heap.discard(node.id)
            if node not in self.members:
                continue
            if self._evict_key(node) != old_key:
                self._push(node)
                continue
            self.members.discard(node)
            return node
        return None

    def _push(self, node: TreeNode) -> None:
        heapq.heappush(self._heap, (self._evict_key(node), node.id, node))
        self._in_heap.add(node.id)
