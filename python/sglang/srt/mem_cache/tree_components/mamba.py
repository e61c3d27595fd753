"""Recurrent state as a tree component: one snapshot at the end of a node, or none.

Owns the snapshots' slots on device and host. A snapshot is the state after exactly the tokens up to
the node's end, so a prefix can be continued only where there is one: the inner nodes that splits
make have none. It is never written in place; a request copies it. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer, SpanPages
from sglang.srt.mem_cache.tree_components.base import (
    ComponentData,
    ComponentType,
    InvariantError,
    MatchCursor,
    TreeComponent,
    TreeNode,
)


def _data(node: TreeNode) -> ComponentData:
    return node.data[ComponentType.MAMBA]


class MambaComponent(TreeComponent):
    """At most one state slot a node and tier. A lock counts users of one node, not of a path."""

    component_type: ClassVar[ComponentType] = ComponentType.MAMBA
    pool_name: ClassVar[PoolName] = PoolName.MAMBA

    def __init__(self, allocator: BaseTokenToKVPoolAllocator | None) -> None:
        super().__init__()
        if allocator is None or allocator.page_size != 1:
            raise ValueError("recurrent state needs an allocator of single slots")
        self.allocator = allocator
        self._with_host_state: dict[int, TreeNode] = {}  # by node id
        # Least recently used last, as of when it was made; see `make_host_room`.
        self._host_victims: list[tuple[int, TreeNode]] = []

    def reset(self, root: TreeNode) -> None:
        """See ``TreeComponent``; the root's state is the initial one, which needs no slot."""
        self.evictable_size = 0
        self.protected_size = 0
        self._with_host_state.clear()
        self._host_victims.clear()
        data = _data(root)
        data.value = torch.empty(0, dtype=torch.int64)
        data.host_value = torch.empty(0, dtype=torch.int64)

    def match_cursor(self) -> MatchCursor:
        """See ``TreeComponent``: where a snapshot is."""
        return lambda node: _data(node).value is not None or _data(node).host_value is not None

    def is_on_device(self, node: TreeNode) -> bool:
        """See ``TreeComponent``."""
        return _data(node).value is not None

    def store(self, node: TreeNode, value: torch.Tensor) -> None:
        """See ``TreeComponent``."""
        data = _data(node)
        if data.value is not None or len(value) != 1:
            raise InvariantError(f"{node!r} cannot take {len(value)} states")
        data.value = value.clone()
        if data.lock_ref:
            self.protected_size += 1
        else:
            self.evictable_size += 1

    def split(self, upper: TreeNode, lower: TreeNode, num_units: int) -> None:
        """See ``TreeComponent``: the snapshot is of the lower end and stays there."""

    def lock(self, node: TreeNode) -> int:
        """See ``TreeComponent``; users are counted whether or not there is a snapshot yet."""
        data = _data(node)
        data.lock_ref += 1
        if node.parent is None or data.value is None or data.lock_ref > 1:
            return 0
        self.evictable_size -= 1
        self.protected_size += 1
        return -1

    def unlock(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        data = _data(node)
        if data.lock_ref <= 0:
            raise InvariantError(f"the state of {node!r} is unlocked once too often")
        data.lock_ref -= 1
        if node.parent is None or data.value is None or data.lock_ref:
            return 0
        self.evictable_size += 1
        self.protected_size -= 1
        return 1

    def release_device(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        data = _data(node)
        if data.value is None:
            return 0
        if data.lock_ref:
            raise InvariantError(f"the state of {node!r} is in use")
        self.allocator.free(data.value)
        data.value = None
        self.evictable_size -= 1
        return 1

    # -- host tier ------------------------------------------------------------------------------

    def release_host(self, node: TreeNode) -> int:
        """See ``TreeComponent``."""
        data = _data(node)
        if data.host_value is None:
            return 0
        if data.host_lock_ref:
            raise InvariantError(f"the host state of {node!r} is in use")
        self.host_pool.free(data.host_value)
        data.host_value = None
        del self._with_host_state[node.id]
        return 1

    def _store_host(self, node: TreeNode, slot: torch.Tensor) -> None:
        _data(node).host_value = slot.clone()
        self._with_host_state[node.id] = node

    def is_unsaved(self, node: TreeNode) -> bool:
        """See ``TreeComponent``: a later request ended where the node does."""
        return _data(node).value is not None and _data(node).host_value is None

    def make_host_room(self, num_slots: int) -> int:
        """See ``TreeComponent``. What was used since the order was made comes after all others."""
        freed = 0
        is_fresh = False
        while freed < num_slots:
            if not self._host_victims:
                if is_fresh or not self._order_host_victims():
                    break
                is_fresh = True
            tick, node = self._host_victims.pop()
            if node.last_access_time == tick and self._can_lose_host_state(node):
                freed += self.release_host(node)
        return freed

    def _can_lose_host_state(self, node: TreeNode) -> bool:
        # A copy to the host that is under way locks the node on the device.
        data = _data(node)
        is_in_use = data.host_lock_ref or data.lock_ref
        return not is_in_use and self._with_host_state.get(node.id) is node

    def _order_host_victims(self) -> bool:
        nodes = (node for node in self._with_host_state.values() if self._can_lose_host_state(node))
        self._host_victims = sorted(
            ((node.last_access_time, node) for node in nodes),
            key=lambda entry: (-entry[0], entry[1].id),
        )
        return bool(self._host_victims)

    @staticmethod
    def _to_copy(nodes: Sequence[TreeNode], to_host: bool) -> list[TreeNode]:
        """Nodes with a snapshot on the one tier and none on the other; to the device the last."""
        if to_host:
            return [n for n in nodes if _data(n).value is not None and _data(n).host_value is None]
        end = nodes[-1:]
        return [n for n in end if _data(n).host_value is not None and _data(n).value is None]

    def reserve(self, nodes: Sequence[TreeNode], to_host: bool) -> list[PoolTransfer] | None:
        """See ``TreeComponent``: one slot a snapshot that is to be copied."""
        to_copy = self._to_copy(nodes, to_host)
        if not to_copy:
            return []
        pool = self.host_pool if to_host else self.allocator
        slots = pool.alloc(len(to_copy))
        if slots is None:
            return None
        sources = [_data(node).value if to_host else _data(node).host_value for node in to_copy]
        source = torch.cat([slot for slot in sources if slot is not None])
        return [
            PoolTransfer(
                name=PoolName.MAMBA,
                host_indices=slots if to_host else source,
                device_indices=source if to_host else slots,
            )
        ]

    def commit(
        self, nodes: Sequence[TreeNode], to_host: bool, transfers: Sequence[PoolTransfer]
    ) -> None:
        """See ``TreeComponent``."""
        slots = self._reserved(to_host, transfers)
        for node, slot in zip(self._to_copy(nodes, to_host), slots.reshape(-1, 1), strict=True):
            if to_host:
                self._store_host(node, slot)
            else:
                self.store(node, slot)

    def cancel(self, to_host: bool, transfers: Sequence[PoolTransfer]) -> None:
        """See ``TreeComponent``."""
        slots = self._reserved(to_host, transfers)
        if len(slots):
            (self.host_pool if to_host else self.allocator).free(slots)

    @staticmethod
    def _reserved(to_host: bool, transfers: Sequence[PoolTransfer]) -> torch.Tensor:
        for transfer in transfers:
            if transfer.name is PoolName.MAMBA:
                slots = transfer.host_indices if to_host else transfer.device_indices
                assert slots is not None
                return slots
        return torch.empty(0, dtype=torch.int64)

    # -- storage --------------------------------------------------------------------------------

    def host_pages(self, node: TreeNode, page_size: int) -> SpanPages | None:
        """See ``TreeComponent``: the snapshot goes with the node's last page."""
        slot = _data(node).host_value
        if slot is None:
            return None
        last = len(node.key) // page_size - 1
        return SpanPages(name=self.pool_name, positions=(last,), host_indices=slot)

    def attach_fetched(self, nodes: Sequence[TreeNode], pages: SpanPages) -> None:
        """See ``TreeComponent``: one snapshot, at the end of the span."""
        end = nodes[-1]
        if len(pages.host_indices) != 1:
            raise InvariantError(f"{len(pages.host_indices)} states were read for {end!r}")
        if _data(end).host_value is None:
            self._store_host(end, pages.host_indices)
        else:
            self.host_pool.free(pages.host_indices)

    def check_node(self, node: TreeNode, page_size: int) -> None:
        """See ``TreeComponent``."""
        data = _data(node)
        if data.value is not None and (len(data.value) != 1 or node.evicted):
            raise InvariantError(f"{node!r} has a state without KV, or several: {data.value}")
        if data.host_value is not None and (len(data.host_value) != 1 or not node.backuped):
            raise InvariantError(f"{node!r} has a host state without KV: {data.host_value}")
        if (data.host_value is not None) != (self._with_host_state.get(node.id) is node):
            raise InvariantError(f"{node!r} is not where host states are looked for")
        if data.value is not None and self.allocator.is_free(data.value).any():
            raise InvariantError(f"the state slot of {node!r} is free")
