"""Full-attention KV as a tree component.

Owns the sizes, locks and release of full-attention slots in the tree. A lock covers the whole path
to the root, since a token attends to all before it. Scheduler thread only.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.tree_components.base import (
    ComponentType,
    InvariantError,
    MatchCursor,
    TreeComponent,
    TreeNode,
)


class FullComponent(TreeComponent):
    """One slot per token of every node."""

    component_type: ClassVar[ComponentType] = ComponentType.FULL
    pool_name: ClassVar[PoolName] = PoolName.KV

    def __init__(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        super().__init__()
        self._allocator = allocator

    def reset(self, root: TreeNode) -> None:
        """See ``TreeComponent``; the root counts as resident and backed up, with no tokens."""
        self.evictable_size = 0
        self.protected_size = 0
        data = root.data[ComponentType.FULL]
        data.value = torch.empty(0, dtype=torch.int64)
        data.host_value = torch.empty(0, dtype=torch.int64)
        data.lock_ref = 1

    def match_cursor(self) -> MatchCursor:
        """See ``TreeComponent``: usable wherever some tier holds the KV."""
        return lambda node: not node.evicted or node.backuped

    def is_on_device(self, node: TreeNode) -> bool:
        """See ``TreeComponent``; what is above is there too."""
        return not node.evicted

    def store(self, node: TreeNode, value: torch.Tensor) -> None:
        """See ``TreeComponent``."""
        data = node.data[ComponentType.FULL]
        if data.value is not None or len(value) != len(node.key):
            raise InvariantError(f"{node!r} cannot take {len(value)} device slots")
        # A copy: the caller's tensor may be a view of something that changes.
        data.value = value.clone()
        if data.lock_ref:
            self.protected_size += len(value)
        else:
            self.evictable_size += len(value)

    def split(self, upper: TreeNode, lower: TreeNode, num_units: int) -> None:
        """See ``TreeComponent``. Whoever locks the lower part locks the upper one too."""
        mine = lower.data[ComponentType.FULL]
        theirs = upper.data[ComponentType.FULL]
        if mine.value is not None:
            theirs.value = mine.value[:num_units].clone()
            mine.value = mine.value[num_units:].clone()
        if mine.host_value is not None:
            theirs.host_value = mine.host_value[:num_units].clone()
            mine.host_value = mine.host_value[num_units:].clone()
        theirs.lock_ref = mine.lock_ref
        # host_lock_ref stays below: a backed-up child protects the host copy of its parent.

    def lock(self, node: TreeNode) -> int:
        """See ``TreeComponent``: every node from ``node`` to the root."""
        delta = 0
        current = node
        while current.parent is not None:
            data = current.data[ComponentType.FULL]
            if data.value is None:
                raise InvariantError(f"{current!r} has nothing on the device to lock")
            if data.lock_ref == 0:
                delta -= len(current.key)
            data.lock_ref += 1
            current = current.parent
        self.evictable_size += delta
        self.protected_size -= delta
        return delta

    def unlock(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        delta = 0
        current = node
        while current.parent is not None:
            data = current.data[ComponentType.FULL]
            if data.lock_ref <= 0:
                raise InvariantError(f"{current!r} is unlocked once too often")
            data.lock_ref -= 1
            if data.lock_ref == 0:
                delta += len(current.key)
            current = current.parent
        self.evictable_size += delta
        self.protected_size -= delta
        return delta

    def release_device(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        data = node.data[ComponentType.FULL]
        if data.lock_ref or data.value is None:
            raise InvariantError(f"{node!r} cannot be taken off the device")
        num_tokens = len(data.value)
        self._allocator.free(data.value)
        data.value = None
        self.evictable_size -= num_tokens
        return num_tokens

    def store_host(self, node: TreeNode, host_indices: torch.Tensor) -> None:
        """Give a node without host copy its host slots; the tree owns them now."""
        data = node.data[ComponentType.FULL]
        if data.host_value is not None or len(host_indices) != len(node.key):
            raise InvariantError(f"{node!r} cannot take {len(host_indices)} host slots")
        data.host_value = host_indices.clone()

    def lock_host(self, node: TreeNode) -> bool:
        """See ``TreeComponent``: the one node, its ancestors have a child with a host copy."""
        if not super().lock_host(node):
            raise InvariantError(f"{node!r} has nothing on the host to lock")
        return True

    def release_host(self, node: TreeNode) -> int:
        """See ``TreeComponent``; only what is off the device may go."""
        data = node.data[ComponentType.FULL]
        if self._host_pool is None or data.host_lock_ref or data.host_value is None:
            raise InvariantError(f"{node!r} cannot be taken off the host")
        if data.value is not None:
            raise InvariantError(f"{node!r} is on the device: its host copy stays")
        num_tokens = self._host_pool.free(data.host_value)
        data.host_value = None
        return num_tokens

    def check_node(self, node: TreeNode, page_size: int) -> None:
        """See ``TreeComponent``."""
        data = node.data[ComponentType.FULL]
        for name, slots in (("value", data.value), ("host_value", data.host_value)):
            if slots is None:
                continue
            if len(slots) != len(node.key):
                raise InvariantError(f"{name} of {node!r} has {len(slots)} slots")
            if page_size > 1 and not _are_whole_pages(slots.numpy(), page_size):
                raise InvariantError(f"{name} of {node!r} is not whole pages: {slots.tolist()}")
        if data.value is None and data.host_value is None:
            raise InvariantError(f"{node!r} is on no tier")
        parent = node.parent
        if data.value is not None and parent is not None and parent.evicted:
            raise InvariantError(f"{node!r} is on the device below {parent!r} which is not")
        of_children = sum(child.lock_ref for child in node.children.values())
        if data.lock_ref < of_children or (data.lock_ref and data.value is None):
            raise InvariantError(f"{node!r} has lock_ref {data.lock_ref}, children {of_children}")


def _are_whole_pages(slots: np.ndarray, page_size: int) -> bool:
    if len(slots) % page_size or (slots[::page_size] % page_size).any():
        return False
    pages = slots.reshape(-1, page_size)
    return bool((pages == pages[:, :1] + np.arange(page_size)).all())
