"""``UnifiedRadixCache``: the component tree with whatever tiers it is given.

Owns what a copy of a node consists of, for any set of components: the hooks of the
hierarchical layer. Without ``CacheInitParams.hicache`` it is the device-only tree. Scheduler thread
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.events import StorageMedium
from sglang.srt.mem_cache.hicache_base import HiCacheTreeBase
from sglang.srt.mem_cache.hicache_records import FetchedSpan, HostLock, PrefetchEntry
from sglang.srt.mem_cache.hicache_tiers import Phase
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer, SpanPages
from sglang.srt.mem_cache.tree_components.base import (
    ComponentType,
    InvariantError,
    TreeComponent,
    TreeNode,
)
from sglang.srt.mem_cache.tree_components.full import FullComponent

# Nodes to evict for a slot in a pool other than KV: those that go first may hold none there, and
# the whole tier must not go for one.
MAX_EVICTIONS_FOR_SLOTS = 4


class UnifiedRadixCache(HiCacheTreeBase):
    """A radix cache over any set of components, with or without a host tier and storage."""

    def __init__(
        self,
        params: CacheInitParams,
        components: Sequence[ComponentType] = (ComponentType.FULL,),
    ) -> None:
        super().__init__(params, components)

    @property
    def _full(self) -> FullComponent:
        full = self.components[ComponentType.FULL]
        assert isinstance(full, FullComponent)
        return full

    def _take_host_lock(self, node: TreeNode) -> HostLock:
        taken = tuple(kind for kind, part in self.components.items() if part.lock_host(node))
        self._refresh_host_leaf(node)
        return HostLock(node=node, taken=taken)

    def _return_host_lock(self, lock: HostLock) -> None:
        for kind in lock.taken:
            self.components[kind].unlock_host(lock.node)
        self._refresh_host_leaf(lock.node)

    def _pool_transfers(self, nodes: Sequence[TreeNode], phase: Phase) -> list[PoolTransfer] | None:
        reserved: list[PoolTransfer] = []
        for part in self.components.values():
            of_part = self._reserve(part, nodes, phase)
            if of_part is None:
                self._cancel(phase, reserved)
                return None
            reserved += of_part
        return reserved

    def _reserve(
        self, part: TreeComponent, nodes: Sequence[TreeNode], phase: Phase
    ) -> list[PoolTransfer] | None:
        """Let a component take slots; those of its own pool come free with the nodes that go."""
        to_host = phase is Phase.BACKUP
        for _ in range(MAX_EVICTIONS_FOR_SLOTS):
            reserved = part.reserve(nodes, to_host)
            if reserved is not None:
                return reserved
            if (part.make_host_room(1) if to_host else self._make_device_room(part)) == 0:
                return None
        return part.reserve(nodes, to_host)

    def _make_device_room(self, part: TreeComponent) -> int:
        """Free device slots of a component's own pool; returns how many, or tokens that went."""
        return self.evict(1).num_tokens_evicted

    def _cancel(self, phase: Phase, transfers: Sequence[PoolTransfer]) -> None:
        for part in self.components.values():
            part.cancel(phase is Phase.BACKUP, transfers)

    def _commit_transfer(
        self,
        nodes: Sequence[TreeNode],
        phase: Phase,
        indices: torch.Tensor | None,
        transfers: Sequence[PoolTransfer],
    ) -> None:
        if indices is None:
            self._cancel(phase, transfers)
            return
        offset = 0
        for node in nodes:
            if node.backuped if phase is Phase.BACKUP else not node.evicted:
                continue  # its KV is there: the copy is of other components
            of_node = indices[offset : offset + len(node.key)]
            offset += len(node.key)
            if phase is Phase.BACKUP:
                self._full.store_host(node, of_node)
            else:
                self._store(node, of_node)
        for part in self.components.values():
            part.commit(nodes, phase is Phase.BACKUP, transfers)

    def _insert_fetched(self, anchor: TreeNode, span: FetchedSpan) -> int:
        key, page = span.key, self.page_size
        pool = self.cache_controller.mem_pool_host
        nodes: list[TreeNode] = []
        node, offset = anchor, 0
        while offset < len(key):
            child = node.children.get(key.child_key(page, offset))
            if child is None:
                break
            matched = key.match(child.key, page, offset)
            if matched < len(child.key):
                child = self._split(child, matched)
            slots = span.host_indices[offset : offset + matched]
            if child.backuped:
                pool.free(slots)
            else:
                # Computed here meanwhile: the fetched pages become its host copy, or what follows
                # would be on the host below a node that is not.
                self._adopt(child, slots)
            node = child
            nodes.append(node)
            offset += matched
        num_new = len(key) - offset
        if num_new:
            nodes.append(self._add_host_leaf(node, span, offset))
        parts = {part.pool_name: part for part in self.components.values()}
        for pages in span.extra:
            parts[pages.name].attach_fetched(nodes, pages)
        return num_new

    def _adopt(self, node: TreeNode, host_indices: torch.Tensor) -> None:
        self._full.store_host(node, host_indices)
        self._report(node, StorageMedium.CPU, is_stored=True)

    def _add_host_leaf(self, parent: TreeNode, span: FetchedSpan, offset: int) -> TreeNode:
        """Link the rest of a fetched span as one node that only the host has."""
        if not parent.backuped:
            raise InvariantError(f"nothing can be on the host below {parent!r}")
        key = span.key[offset:]
        leaf = self._new_node(key, parent)
        leaf.priority = parent.priority
        leaf.last_access_time = leaf.creation_time = self._tick
        leaf.hash_value = span.hashes[offset // self.page_size :]
        parent.children[key.child_key(self.page_size)] = leaf
        self._full.store_host(leaf, span.host_indices[offset:])
        self._report(leaf, StorageMedium.CPU, is_stored=True)
        self._refresh_host_leaf(leaf)
        self._refresh_host_leaf(parent)
        return leaf

    def _release_reservations(self, entry: PrefetchEntry) -> None:
        taken = entry.operation.taken()
        self._queue_release({name: taken[name] for name in taken if name is not PoolName.KV})

    def _make_host_room(self, pool_sizes: Mapping[PoolName, int]) -> None:
        group = self.cache_controller.host_pools
        for part in self.components.values():
            entry = group.get(part.pool_name)
            if part.pool_name in pool_sizes and entry is not None:
                shortfall = pool_sizes[part.pool_name] - entry.host_pool.available_size()
                part.make_host_room(shortfall)

    def _host_pages(self, node: TreeNode) -> list[SpanPages]:
        found = [part.host_pages(node, self.page_size) for part in self.components.values()]
        return [pages for pages in found if pages is not None]

    def _pick_host_victim(self) -> TreeNode | None:
        return self._host_leaves.pop()

    def _nodes_to_hash(self) -> Iterator[TreeNode]:
        return self.iter_nodes()
