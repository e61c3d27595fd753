"""``SWARadixCache``: the prefix cache of models that mix window and full-attention layers.

Owns where nodes are divided so that each has all of its window rows or none, and which rows go when
they are short; the walk, the tiers and all other behaviour are ``UnifiedRadixCache``'s with the
components FULL and SWA. Scheduler thread only.

Nodes are divided

* where a request's rows begin that it has not given back yet;
* one window before the end of what is inserted or matched, so that a lock holds the rows that its
  user reads, and not those of a long prompt before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheableReq,
    CacheInitParams,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_records import WriteThroughEntry
from sglang.srt.mem_cache.tree_components.base import (
    ComponentType,
    InvariantError,
    TreeComponent,
    TreeNode,
)
from sglang.srt.mem_cache.tree_components.swa import SWAComponent, swa_data
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class SWARadixCache(UnifiedRadixCache):
    """Prefix cache of full-attention KV and window rows; a match ends where the window is there."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params, components=(ComponentType.FULL, ComponentType.SWA))
        self._windows.bind_split(self._split)
        # Least recently used last, as of when it was made; see `_evict_rows`.
        self._victims: list[tuple[int, TreeNode]] = []
        # Rows of requests that have gone so far that they look back on nothing of the tree.
        self._past_the_tree: set[int] = set()

    @property
    def _windows(self) -> SWAComponent:
        windows = self.components[ComponentType.SWA]
        assert isinstance(windows, SWAComponent)
        return windows

    def swa_evictable_size(self) -> int:
        """See ``BasePrefixCache``."""
        return self._windows.evictable_size

    def swa_protected_size(self) -> int:
        """See ``BasePrefixCache``."""
        return self._windows.protected_size

    def reset(self) -> None:
        """See ``BasePrefixCache``."""
        super().reset()
        self._victims.clear()
        self._past_the_tree.clear()

    # -- requests -------------------------------------------------------------------------------

    def _release_behind(self, req: CacheableReq, stride: int) -> None:
        super()._release_behind(req, stride)
        row, node = req.req_pool_idx, req.last_node
        if row is None or node is None or row in self._past_the_tree:
            return
        if req.kv_committed_len - self._windows.reach >= req.cache_protected_len:
            self._windows.unlock(node)
            self._past_the_tree.add(row)

    def cache_unfinished_req(self, req: CacheableReq, chunked: bool = False) -> None:
        """See ``BasePrefixCache``."""
        self._complete_lock(req)
        super().cache_unfinished_req(req, chunked)

    def cache_finished_req(self, req: CacheableReq, is_insert: bool = True) -> None:
        """See ``BasePrefixCache``."""
        self._complete_lock(req)
        super().cache_finished_req(req, is_insert)

    def _complete_lock(self, req: CacheableReq) -> None:
        """Take a window's lock again, so that the request's lock can be returned as a whole."""
        row = req.req_pool_idx
        if row in self._past_the_tree and req.last_node is not None:
            self._windows.lock(req.last_node)
            self._past_the_tree.discard(row)

    # -- where nodes are divided ----------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See ``BasePrefixCache``."""
        result = super().match_prefix(params)
        for end in (result.last_device_node, result.best_match_node):
            if end is not None:
                self._cut_before_tail(end)
        return result

    def _cut_before_tail(self, node: TreeNode) -> None:
        """Let a node begin one window (in whole pages) before the end of ``node``."""
        left = self._windows.tail
        while left > 0 and node.parent is not None:
            if len(node.key) > left:
                self._split(node, len(node.key) - left)
                return
            left -= len(node.key)
            node = node.parent

    def _keep(self, node: TreeNode, slots: torch.Tensor, units_behind: int) -> Sequence[TreeNode]:
        windows = self._windows
        cuts: set[int] = set()
        own_start = len(node.key) - (windows.tail - units_behind)
        if windows.tail > units_behind and own_start > 0:
            cuts.add(own_start)
        rows = windows.allocator.swa_rows(slots)
        lacks_rows = swa_data(node).value is None
        if lacks_rows:
            has_row = rows > 0
            cuts.update((has_row[1:] != has_row[:-1]).nonzero().flatten().add(1).tolist())
        parts: list[TreeNode] = []
        start = 0
        for end in [*sorted(cuts), len(slots)]:
            part = node if end == len(slots) else self._split(node, end - start)
            if lacks_rows and rows[start] > 0:
                windows.absorb(part, slots[start:end], rows[start:end])
            parts.append(part)
            start = end
        return parts

    def _settle_write(self, entry: WriteThroughEntry) -> None:
        super()._settle_write(entry)
        for node in entry.nodes:
            self._windows.end_copy(node)

    # -- eviction -------------------------------------------------------------------------------

    def evict(self, params: EvictParams | int) -> EvictResult:
        """See ``BasePrefixCache``. What is evicted whole counts for both."""
        available = self._windows.allocator.available_swa_size()
        result = super().evict(params)
        wanted = 0 if isinstance(params, int) else params.num_swa_tokens
        freed = self._windows.allocator.available_swa_size() - available
        if freed < wanted:
            freed += self._evict_rows(wanted - freed)
        return EvictResult(
            num_tokens_evicted=result.num_tokens_evicted, num_swa_tokens_evicted=freed
        )

    def _evict_rows(self, wanted: int) -> int:
        """Free window rows, least recently used first; return how many.

        Of an inner node the rows alone; of a long leaf those before the window at its end; a short
        one goes as a whole, since nothing could end there without its rows.
        """
        freed = 0
        freed_at_order = -1
        with self._evicting():
            while freed < wanted:
                if not self._victims:
                    # What is left of long leaves is in the next order.
                    if freed == freed_at_order or not self._order_victims():
                        break
                    freed_at_order = freed
                tick, node = self._victims.pop()
                if node.last_access_time == tick and self._can_lose_rows(node):
                    freed += self._lose_rows(node)
        return freed

    def _order_victims(self) -> bool:
        nodes = (node for node in self.iter_nodes() if self._can_lose_rows(node))
        # Of one time the inner ones first: a request of that time ended at the leaf.
        self._victims = sorted(
            ((node.last_access_time, node) for node in nodes),
            key=lambda entry: (-entry[0], bool(entry[1].children), entry[1].id),
        )
        return bool(self._victims)

    @staticmethod
    def _can_lose_rows(node: TreeNode) -> bool:
        data = swa_data(node)
        return data.value is not None and data.lock_ref == 0 and node.parent is not None

    def _lose_rows(self, node: TreeNode) -> int:
        num_rows = len(node.key)
        if node in self.evictable_leaves:
            if num_rows <= self._windows.tail:
                self._evict_leaf(node)
                return num_rows
            if self._windows.tail:
                node = self._split(node, num_rows - self._windows.tail)
        self._save_before_loss(node)
        return self._windows.drop_rows(node)

    def _make_device_room(self, part: TreeComponent) -> int:
        """See ``UnifiedRadixCache``."""
        if part is not self._windows:
            return super()._make_device_room(part)
        return self._evict_rows(self._windows.num_lacking)

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """See ``BasePrefixCache``; also: the sizes of windows, and of no request: all rows."""
        super().check_invariants(num_private_slots)
        windows, locked, free = self._windows, 0, 0
        for node in self.iter_nodes():
            data = swa_data(node)
            num_rows = 0 if data.value is None else len(data.value)
            locked += num_rows if data.lock_ref else 0
            free += 0 if data.lock_ref else num_rows
        if (free, locked) != (windows.evictable_size, windows.protected_size):
            raise InvariantError(
                f"window rows: evictable {windows.evictable_size} and protected "
                f"{windows.protected_size}, but the tree holds {free} and {locked}"
            )
        allocator = windows.allocator
        private = allocator.size_swa - allocator.available_swa_size() - free - locked
        if private < 0 or (num_private_slots is not None and private > num_private_slots):
            raise InvariantError(
                f"window rows: {allocator.available_swa_size()} free + {free + locked} cached of "
                f"{allocator.size_swa}, with {num_private_slots} slots of requests"
            )
