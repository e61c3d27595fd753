"""The radix node and what a kind of cached data must supply to the component tree.

Owns ``TreeNode`` and the ``TreeComponent`` interface. The tree (``component_tree.py``) walks,
splits and links nodes; a component owns one kind of data per node (full-attention KV here; sliding
window and recurrent state in their own files), its sizes and its locks. Scheduler thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import ClassVar

import torch

from sglang.srt.mem_cache.memory_pool_host import HostKVCache, HostPoolGroup
from sglang.srt.mem_cache.page_key import PageHash, RadixKey
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer, SpanPages


class ComponentType(IntEnum):
    """Index of a component's data in ``TreeNode.data``."""

    FULL = 0
    SWA = 1
    MAMBA = 2


_FULL = int(ComponentType.FULL)  # a plain int: the properties below run for each node of a walk


class ComponentData:
    """One component's data of one node.

    ``value``: device slots int64 [len(key)] on the CPU, None = not on the device.
    ``host_value``: host slots, None = not on the host (filled by the hierarchical tree).
    ``lock_ref``: users of the device copy. ``host_lock_ref``: transfers using the host copy.
    """

    __slots__ = ("value", "host_value", "lock_ref", "host_lock_ref")

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.host_value: torch.Tensor | None = None
        self.lock_ref = 0
        self.host_lock_ref = 0


class TreeNode:
    """A run of whole pages below its parent.

    Times are ticks of the tree's own counter, never a clock: all ranks must evict alike.
    """

    __slots__ = (
        "id",
        "key",
        "parent",
        "children",
        "data",
        "hash_value",
        "event_hashes",
        "told_media",
        "hit_count",
        "priority",
        "last_access_time",
        "creation_time",
        "write_through_pending_id",
        "storage_op_id",
        "unstored_from",
        "is_in_heap",
    )

    def __init__(
        self, node_id: int, key: RadixKey, parent: TreeNode | None, num_components: int
    ) -> None:
        self.id = node_id
        self.key = key
        self.parent = parent
        self.children: dict[Hashable, TreeNode] = {}
        self.data = [ComponentData() for _ in range(num_components)]
        self.hash_value: list[PageHash] | None = None  # one per page; set when first needed
        # Of KV events: one hash per page, set when first needed; media that have been told of.
        self.event_hashes: list[PageHash] | None = None
        self.told_media: frozenset[str] = frozenset()
        self.hit_count = 0
        self.priority = 0
        self.last_access_time = 0
        self.creation_time = 0
        self.write_through_pending_id: int | None = None  # set while a backup copy is in flight
        self.storage_op_id: int | None = None  # set while a write to storage covers this node
        # First page that storage is not known to hold although it was to be written; None: nothing
        # to write again.
        self.unstored_from: int | None = None
        self.is_in_heap = False  # has exactly one entry in the tree's eviction heap

    def __lt__(self, other: TreeNode) -> bool:
        return self.id < other.id

    def __repr__(self) -> str:
        return (
            f"TreeNode(id={self.id}, len={len(self.key)}, lock_ref={self.lock_ref}, "
            f"evicted={self.evicted}, backuped={self.backuped})"
        )

    @property
    def value(self) -> torch.Tensor | None:
        """Device slots of full attention."""
        return self.data[_FULL].value

    @property
    def host_value(self) -> torch.Tensor | None:
        """Host slots of full attention."""
        return self.data[_FULL].host_value

    @property
    def lock_ref(self) -> int:
        """Users of the full-attention device copy."""
        return self.data[_FULL].lock_ref

    @property
    def evicted(self) -> bool:
        """Whether the node has no device copy."""
        return self.data[_FULL].value is None

    @property
    def backuped(self) -> bool:
        """Whether the node has a host copy."""
        return self.data[_FULL].host_value is not None


MatchCursor = Callable[[TreeNode], bool]


class TreeComponent(ABC):
    """One kind of cached data. Mutated by the scheduler thread only, through the tree.

    ``evictable_size`` and ``protected_size`` count this component's device slots in the tree that
    no lock, or some lock, holds.
    """

    component_type: ClassVar[ComponentType]
    pool_name: ClassVar[PoolName]  # whose slots these are, on the host and in storage

    def __init__(self) -> None:
        self.evictable_size = 0
        self.protected_size = 0
        self._host_pool: HostKVCache | None = None

    @abstractmethod
    def reset(self, root: TreeNode) -> None:
        """Start over below a new root; the pools are cleared by the caller."""

    @abstractmethod
    def match_cursor(self) -> MatchCursor:
        """Return a function that one walk calls with each node from the root down.

        True: this component can continue from that node's end. The deepest node where all
        components say so is the match, whichever tier its data is on. A cursor may keep state (a
        window counts tokens).
        """

    @abstractmethod
    def is_on_device(self, node: TreeNode) -> bool:
        """Whether a user of ``node`` finds on the device all that it needs of this component.

        Asked of nodes where the match may end. False where the cursor says True: there is
        something to load (``reserve`` says what), even if the node's KV is on the device.
        """

    @abstractmethod
    def store(self, node: TreeNode, value: torch.Tensor) -> None:
        """Give ``node`` (new, or without device copy) its device slots; the tree owns them now."""

    @abstractmethod
    def split(self, upper: TreeNode, lower: TreeNode, num_units: int) -> None:
        """Divide ``lower``'s data: the first ``num_units`` go to the new ``upper``."""

    @abstractmethod
    def lock(self, node: TreeNode) -> int:
        """Protect what a user of ``node`` needs; return the change of ``evictable_size`` (<= 0)."""

    @abstractmethod
    def unlock(self, node: TreeNode) -> int:
        """Mirror ``lock`` exactly; return the change of ``evictable_size`` (>= 0)."""

    @abstractmethod
    def release_device(self, node: TreeNode) -> int:
        """Free the node's device slots and forget them; return how many. Raises when locked."""

    # -- host tier ------------------------------------------------------------------------------

    def bind_host_pools(self, pools: HostPoolGroup) -> None:
        """Learn where host copies live; before any of the methods below, once.

        Raises ValueError when the component's pool is not registered.
        """
        entry = pools.get(self.pool_name)
        if entry is None:
            raise ValueError(f"no host pool {self.pool_name} is registered")
        self._host_pool = entry.host_pool

    @property
    def host_pool(self) -> HostKVCache:
        """Where host copies live. Raises RuntimeError without a host tier."""
        if self._host_pool is None:
            raise RuntimeError(f"{self.pool_name} has no host tier here")
        return self._host_pool

    def lock_host(self, node: TreeNode) -> bool:
        """Keep the node's host copy in place; False when there is none and nothing was taken."""
        data = node.data[self.component_type]
        if data.host_value is None:
            return False
        data.host_lock_ref += 1
        return True

    def unlock_host(self, node: TreeNode) -> None:
        """Undo one ``lock_host`` that took something. InvariantError when nobody holds one."""
        data = node.data[self.component_type]
        if data.host_lock_ref <= 0:
            raise InvariantError(
                f"the host's {self.pool_name} of {node!r} is unlocked once too often"
            )
        data.host_lock_ref -= 1

    @abstractmethod
    def release_host(self, node: TreeNode) -> int:
        """Free the node's host copy; return how many slots. Raises when locked."""

    def is_unsaved(self, node: TreeNode) -> bool:
        """Whether ``node``, whose KV is on the host, has data of this component on the device only.

        So of data that came later than the KV.
        """
        return False

    def make_host_room(self, num_slots: int) -> int:
        """Give up this component's own host copies, least recently used first; nothing else.

        Returns how many slots came free: what is in use or under way stays.
        """
        return 0

    def reserve(self, nodes: Sequence[TreeNode], to_host: bool) -> list[PoolTransfer] | None:
        """Take slots for a copy of ``nodes`` in a pool of its own; None when it has no room.

        The tree itself takes those of full attention. ``nodes``: from the root down. To the host:
        one node, whatever of it is on the device only. To the device: what a user of the last one
        needs and lacks there; the node before the first one has all it needs there.
        """
        return []

    def commit(  # noqa: B027 - nothing to do without a pool of its own
        self, nodes: Sequence[TreeNode], to_host: bool, transfers: Sequence[PoolTransfer]
    ) -> None:
        """Give the reserved slots to the nodes: their copy is queued."""

    def cancel(  # noqa: B027 - as above
        self, to_host: bool, transfers: Sequence[PoolTransfer]
    ) -> None:
        """Give reserved slots back: there will be no copy."""

    # -- storage, for pools with slots of their own -------------------------------------------

    def host_pages(self, node: TreeNode, page_size: int) -> SpanPages | None:
        """Return what of ``node`` is on the host, to be written with its KV pages.

        Positions number the node's pages. None: nothing.
        """
        return None

    def attach_fetched(  # noqa: B027 - nothing to do without a pool of its own
        self, nodes: Sequence[TreeNode], pages: SpanPages
    ) -> None:
        """Take over pages of this component's pool that were read from storage.

        ``nodes`` cover the span, from the root down, and end where it ends; all are on the host.
        Slots of what a node has on the host already are freed.
        """

    @abstractmethod
    def check_node(self, node: TreeNode, page_size: int) -> None:
        """Raise InvariantError when the node's data of this component is not consistent."""


class InvariantError(RuntimeError):
    """The cache's state contradicts itself; the message holds the numbers."""
