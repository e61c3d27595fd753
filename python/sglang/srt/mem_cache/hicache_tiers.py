"""Life of the copies between device and host: backup, load back, eviction on both tiers.

Owns which nodes are being written or loaded and the locks that this takes. Does not own the walk
(``component_tree.py``), the copies (``managers/cache_controller.py``), storage
(``hicache_prefetch.py``, ``hicache_base.py``) nor the data of a component: hooks, filled in by a
concrete tree, say what a copy of a node consists of. Scheduler thread only. Nothing here is a
collective: all decisions follow from state that every rank has alike.

Invariants of the tiers:

- a node is on the host only below nodes that are on the host (ancestors are backed up first), so
  a node that is only on the device never has a child that is only on the host;
- a node whose copy is under way is locked on the device until the acknowledgement, so neither side
  of the copy is handed to anybody else (a copy that is waited for needs no lock);
- a node counts as backed up as soon as its copy is queued: whoever reads the host copy earlier is
  kept off by that lock, or comes after the acknowledgement.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheInitParams,
    LoadBackParams,
    LoadBackResult,
)
from sglang.srt.mem_cache.component_tree import ComponentTree
from sglang.srt.mem_cache.events import StorageMedium
from sglang.srt.mem_cache.hicache_records import (
    FetchedSpan,
    HiCacheParams,
    HostLock,
    LoadBackEntry,
    PrefetchEntry,
    WriteThroughEntry,
)
from sglang.srt.mem_cache.host_leaves import HostLeaves
from sglang.srt.mem_cache.page_key import CacheIdentity
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer, SpanPages
from sglang.srt.mem_cache.tree_components.base import ComponentType, InvariantError, TreeNode

logger = logging.getLogger(__name__)


class Phase(Enum):
    """Which way a copy goes."""

    BACKUP = auto()  # device -> host
    LOAD = auto()  # host -> device


class HiCacheTiers(ComponentTree):
    """The component tree with a host tier. Without a controller it is the device-only tree."""

    def __init__(
        self,
        params: CacheInitParams,
        components: Sequence[ComponentType] = (ComponentType.FULL,),
    ) -> None:
        super().__init__(params, components)
        self.hicache_params = params.hicache
        self._controller = None if params.hicache is None else params.hicache.controller
        self.write_policy = (
            "write_through" if params.hicache is None else params.hicache.write_policy
        )
        self._host_leaves = HostLeaves(self._evict_key)
        self.ongoing_write_through: dict[int, WriteThroughEntry] = {}
        self.ongoing_load_back: dict[int, LoadBackEntry] = {}
        if self._controller is not None:
            for component in self.components.values():
                component.bind_host_pools(self._controller.host_pools)
        # Copies that an eviction waits for: their nodes are off the device already.
        self._staged: list[HostLock] = []

    # -- what a concrete tree supplies -------------------------------------------------------------

    @abstractmethod
    def _take_host_lock(self, node: TreeNode) -> HostLock:
        """Keep the host copies of ``node`` in place; the token says which."""

    @abstractmethod
    def _return_host_lock(self, lock: HostLock) -> None:
        """Undo exactly what the token says."""

    @abstractmethod
    def _pool_transfers(self, nodes: Sequence[TreeNode], phase: Phase) -> list[PoolTransfer] | None:
        """Reserve slots in pools other than KV for a copy of ``nodes``; None: no room."""

    @abstractmethod
    def _commit_transfer(
        self,
        nodes: Sequence[TreeNode],
        phase: Phase,
        indices: torch.Tensor | None,
        transfers: Sequence[PoolTransfer],
    ) -> None:
        """Give the nodes the slots of a queued copy; ``indices`` None: give reservations back."""

    @abstractmethod
    def _insert_fetched(self, anchor: TreeNode, span: FetchedSpan) -> int:
        """Put pages from storage below ``anchor``; returns the tokens that only the host has now.

        All of the span's host slots are the tree's or free afterwards.
        """

    @abstractmethod
    def _release_reservations(self, entry: PrefetchEntry) -> None:
        """Give back what other pools reserved for a prefetch that will not be inserted."""

    @abstractmethod
    def _make_host_room(self, pool_sizes: Mapping[PoolName, int]) -> None:
        """Try to have so many free host slots in pools with slots of their own."""

    @abstractmethod
    def _host_pages(self, node: TreeNode) -> list[SpanPages]:
        """Return what of a node is on the host in pools with slots of their own."""

    @abstractmethod
    def _pick_host_victim(self) -> TreeNode | None:
        """Take the next node to evict from the host out of the candidates."""

    @abstractmethod
    def _nodes_to_hash(self) -> Iterator[TreeNode]:
        """Yield the nodes whose page hashes storage needs, parents before children."""

    # -- parts -------------------------------------------------------------------------------------

    @property
    def hicache(self) -> HiCacheParams:
        """The parameters; raises RuntimeError for a device-only tree."""
        if self.hicache_params is None:
            raise RuntimeError("this cache has no host tier")
        return self.hicache_params

    def hicache_controller(self) -> HiCacheController | None:
        """See ``BasePrefixCache``."""
        return self._controller

    @property
    def cache_controller(self) -> HiCacheController:
        """The copies and storage threads; raises RuntimeError for a device-only tree."""
        if self._controller is None:
            raise RuntimeError("this cache has no host tier")
        return self._controller

    @property
    def evictable_host_leaves(self) -> set[TreeNode]:
        """Nodes that host eviction may take now."""
        return self._host_leaves.members

    @property
    def load_back_threshold(self) -> int:
        """Tokens below which a load behind a resident prefix is refused."""
        return self.hicache.load_back_threshold

    # -- device -> host ----------------------------------------------------------------------------

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Queue the copy of ``node``, and of what is not on the host above it, to the host.

        Returns the tokens queued, 0 when the host has no room for the node itself; ancestors come
        first, so what is on the host always begins at the root. ``write_back``: the caller waits
        for the copy, so the node is not locked on the device.
        """
        missing: list[TreeNode] = []
        current: TreeNode | None = node
        while current is not None and not current.backuped:
            missing.append(current)
            current = current.parent
        queued = 0
        # All of the path is on the device, so none of it is taken to make room on the host.
        for current in reversed(missing):
            if not self._backup_one(current, write_back):
                return 0
            queued += len(current.key)
        return queued

    def _backup_one(self, node: TreeNode, write_back: bool) -> bool:
        """Queue the copy of one node whose parent is on the host.

        Of a node that is on the host itself: of what components have kept of it since.
        """
        value = node.value
        if value is None:
            raise InvariantError(f"{node!r} is on no tier that could be copied from")
        if node.backuped:
            value = value[:0]  # only what other components have and the host has not
        transfers = self._pool_transfers([node], Phase.BACKUP)
        if transfers is None or (node.backuped and not transfers):
            return False
        host_indices = self.cache_controller.write(value, node.id, pool_transfers=transfers)
        if host_indices is None:
            shortfall = len(value) - self.cache_controller.mem_pool_host.available_size()
            self.evict_host(shortfall)
            host_indices = self.cache_controller.write(value, node.id, pool_transfers=transfers)
        self._commit_transfer([node], Phase.BACKUP, host_indices, transfers)
        if host_indices is None:
            return False
        if not len(value):
            # Storage gets it with the pages that it belongs to.
            names = {transfer.name for transfer in transfers}
            firsts = [p.positions[0] for p in self._host_pages(node) if p.name in names]
            if node.unstored_from is not None:
                firsts.append(node.unstored_from)
            node.unstored_from = min(firsts)
        node.write_through_pending_id = node.id
        if write_back:
            self._staged.append(self._take_host_lock(node))
        else:
            self.inc_lock_ref(node)
        self.ongoing_write_through[node.id] = WriteThroughEntry(
            locked=None if write_back else node,
            nodes=(node,),
            backup_len=len(value),
            start_time=self.hicache.clock(),
        )
        self._count_copied("hicache_backup", len(value))
        return True

    def writing_check(self, num_ready: int | None = None, write_back: bool = False) -> None:
        """Settle the first ``num_ready`` copies to the host; None: those that are done here.

        ``write_back``: wait for all that are queued and settle them.
        """
        controller = self.cache_controller
        if write_back:
            controller.start_writing()
            num_ready = len(controller.ack_write_queue)
        elif num_ready is None:
            num_ready = controller.num_done_writes()
        for ack in controller.take_write_acks(num_ready):
            for node_id in ack.node_ids:
                self._settle_write(self.ongoing_write_through.pop(node_id))

    def _settle_write(self, entry: WriteThroughEntry) -> None:
        self._count_duration("hicache_backup", entry.start_time)
        for node in entry.nodes:
            node.write_through_pending_id = None
            self._report(node, StorageMedium.CPU, is_stored=True)
        # From the root down: what storage holds is a prefix at any moment.
        for node in entry.nodes:
            self.write_backup_storage(node)
        if entry.locked is not None:
            self.dec_lock_ref(entry.locked)

    def flush_write_through_acks(self) -> None:
        """See ``BasePrefixCache``."""
        if self._controller is not None:
            self.writing_check(write_back=True)

    def write_backup_storage(self, node: TreeNode) -> int | None:
        """Queue the write of a node's host copy to storage; the storage layer overrides this."""
        return None

    # -- host -> device ----------------------------------------------------------------------------

    def init_load_back(self, params: LoadBackParams) -> LoadBackResult:
        """See ``BasePrefixCache``; the caller holds the lock of ``last_device_node``.

        The result's slots are those behind ``last_device_node``. Their KV is there when the layer
        events of the batch that ``ready_to_load_host_cache`` names have passed.
        """
        end = params.best_match_node
        if self._controller is None or end is None or params.host_hit_length == 0:
            return super().init_load_back(params)
        if not self._is_on_device(end) and self.load_back(end, params.mem_quota) is None:
            return super().init_load_back(params)
        values: list[torch.Tensor] = []
        current = end
        while current is not params.last_device_node and current.parent is not None:
            if current.value is None:
                raise InvariantError(f"{current!r} was to be loaded and is not on the device")
            values.append(current.value)
            current = current.parent
        indices = torch.cat(values[::-1]) if values else torch.empty(0, dtype=torch.int64)
        return LoadBackResult(device_indices=indices, last_node=end)

    def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None:
        """Take device slots for ``node`` and what is missing above it, and queue the copy.

        Returns the KV slots in order (none where only other components lack something), None when
        it is refused: too few tokens, more than ``mem_quota`` (device tokens that the caller may
        still use), or no room. The threshold spares copies that cost more than computing; it does
        not apply where nothing of the prefix is on the device, or with small pages a short prefix
        could never come back.
        """
        # [..., start] can be used without a copy; (start, node] is gained by it.
        gained: list[TreeNode] = []
        start = node
        while start.parent is not None and not self._is_on_device(start):
            gained.append(start)
            start = start.parent
        gained.reverse()
        num_gained = sum(len(part.key) for part in gained)
        is_whole_prefix = start is self.root_node
        if num_gained == 0 or (num_gained < self.load_back_threshold and not is_whole_prefix):
            return None
        # What is on the device of KV is a prefix of the path.
        resident = next((part for part in reversed(gained) if not part.evicted), start)
        num_tokens = sum(len(part.key) for part in gained if part.evicted)
        delta = self.inc_lock_ref(resident)
        # What is loaded may lie above an end that the host does not have.
        source = node
        while not source.backuped and source.parent is not None:
            source = source.parent
        host_lock = self._take_host_lock(source)
        device_indices = None
        if mem_quota is None or num_tokens <= mem_quota + delta:
            device_indices = self._queue_load(gained, num_tokens)
        if device_indices is None:
            self._return_host_lock(host_lock)
            self.dec_lock_ref(resident)
            return None
        self.inc_lock_ref(node)
        self.dec_lock_ref(resident)
        self.ongoing_load_back[node.id] = LoadBackEntry(
            node=node,
            host_lock=host_lock,
            num_tokens=num_tokens,
            start_time=self.hicache.clock(),
        )
        self._count_copied("load_back", num_tokens)
        return device_indices

    def _count_copied(self, what: str, num_tokens: int) -> None:
        num_bytes = num_tokens * self.cache_controller.host_pools.bytes_per_token
        self._count(f"{what}_tokens", num_tokens, pool=PoolName.KV)
        self._count(f"{what}_bytes", num_bytes, pool=PoolName.KV)

    def _count_duration(self, what: str, start_time: float) -> None:
        self._count(f"{what}_duration_seconds", self.hicache.clock() - start_time)

    def _queue_load(self, nodes: list[TreeNode], num_tokens: int) -> torch.Tensor | None:
        """Queue the copy of what ``nodes`` lack; ``num_tokens``: of those without KV."""
        host_values = [node.host_value for node in nodes if node.evicted]
        if any(value is None for value in host_values):
            raise InvariantError(f"a node of {nodes} is on no tier")
        host_indices = torch.cat(
            [torch.empty(0, dtype=torch.int64), *(v for v in host_values if v is not None)]
        )
        transfers = self._pool_transfers(nodes, Phase.LOAD)
        if transfers is None:
            return None
        end = nodes[-1]
        controller = self.cache_controller
        device_indices = controller.load(host_indices, end.id, pool_transfers=transfers)
        if device_indices is None:
            self.evict(num_tokens - self.token_to_kv_pool_allocator.available_size())
            device_indices = controller.load(host_indices, end.id, pool_transfers=transfers)
        self._commit_transfer(nodes, Phase.LOAD, device_indices, transfers)
        return device_indices

    def ready_to_load_host_cache(self) -> int:
        """See ``BasePrefixCache``."""
        return -1 if self._controller is None else self._controller.start_loading()

    def loading_check(self, num_ready: int | None = None) -> None:
        """Settle the first ``num_ready`` copies to the device; None: those that are done here."""
        controller = self.cache_controller
        if num_ready is None:
            num_ready = controller.num_done_loads()
        for ack in controller.take_load_acks(num_ready):
            for node_id in ack.node_ids:
                entry = self.ongoing_load_back.pop(node_id)
                self._count_duration("load_back", entry.start_time)
                self._return_host_lock(entry.host_lock)
                self.dec_lock_ref(entry.node)

    def has_pending_copies(self) -> bool:
        """See ``BasePrefixCache``."""
        return bool(self.ongoing_write_through or self.ongoing_load_back)

    # -- eviction ----------------------------------------------------------------------------------

    @contextmanager
    def _evicting(self) -> Iterator[None]:
        """See ``ComponentTree``. Under write_back it waits for the copies that are made meanwhile.

        The slots of all victims come free together, when the copies have ended.
        """
        if self._controller is None or self.write_policy != "write_back":
            yield
            return
        self.token_to_kv_pool_allocator.free_group_begin()
        yield
        self._finish_staged()
        self.token_to_kv_pool_allocator.free_group_end()

    def _evict_leaf(self, node: TreeNode) -> int:
        if self._controller is None:
            return super()._evict_leaf(node)
        self._save_before_loss(node)
        if not node.backuped:
            num_dropped = len(node.key)
            self._count("hicache_dropped_tokens", num_dropped, pool=PoolName.KV, reason="evicted")
            return super()._evict_leaf(node)
        freed = self._release_device(node)
        self._refresh_host_leaf(node)
        return freed

    def _save_before_loss(self, node: TreeNode) -> None:
        """See ``ComponentTree``: under write_back this is when a node goes to the host."""
        is_last_chance = self._controller is not None and self.write_policy == "write_back"
        if not is_last_chance or not self._is_current(node):
            return
        if node.backuped:
            if self._is_unsaved(node):
                self._backup_one(node, write_back=True)
        elif self.write_backup(node, write_back=True) == 0 and self._staged:
            # What was copied a moment ago may be all that could make room.
            self._finish_staged()
            self.write_backup(node, write_back=True)

    def _finish_staged(self) -> None:
        """Wait for the copies of this eviction and let their host pages be as any others."""
        if not self._staged:
            return
        self.writing_check(write_back=True)
        staged, self._staged = self._staged, []
        for lock in staged:
            self._return_host_lock(lock)

    def evict_host(self, num_tokens: int) -> int:
        """Free host slots of nodes that only the host has, leaves first; returns how many.

        May free less than asked for, and more by less than a node.
        """
        freed = 0
        while freed < num_tokens:
            node = self._pick_host_victim()
            if node is None:
                break
            freed += self._evict_host_leaf(node)
        return freed

    def _evict_host_leaf(self, node: TreeNode) -> int:
        parent = node.parent
        self._report(node, StorageMedium.CPU, is_stored=False)
        freed = self._release_host(node)
        self._remove(node)
        if parent is not None:
            self._refresh_leaf(parent)
        return freed

    def _release_host(self, node: TreeNode) -> int:
        """Free the host copies of all components; returns the KV tokens freed."""
        freed = {kind: part.release_host(node) for kind, part in self.components.items()}
        return freed[ComponentType.FULL]

    # -- hooks of the walk -------------------------------------------------------------------------

    def _on_insert_visit(self, node: TreeNode, is_chunked: bool) -> None:
        """Back the node up where the policy says so.

        Chunks do not count as uses but their nodes are backed up: they may be evicted before the
        last chunk comes.
        """
        if self.write_policy == "write_back":
            return
        is_due = self.write_policy == "write_through" or (not is_chunked and node.hit_count >= 2)
        if not node.backuped:
            if is_due:
                self.write_backup(node)
            return
        if is_due and self._is_unsaved(node):
            self._backup_one(node, write_back=False)
        if node.unstored_from is not None and not is_chunked:
            self.write_backup_storage(node)

    def _is_unsaved(self, node: TreeNode) -> bool:
        """Whether the host lacks something of ``node`` although it has its KV, all of it."""
        is_settled = node.write_through_pending_id is None and not node.evicted
        return is_settled and any(part.is_unsaved(node) for part in self.components.values())

    def _on_share(self) -> None:
        """Wait for loads under way: a running request waits for none of them by itself.

        Only its first batch knows of a load, and one that is queued may belong to a request that
        was not admitted after all.
        """
        if self.ongoing_load_back:
            self.cache_controller.start_loading()
            for ack in self.cache_controller.ack_load_queue:
                ack.finish_event.synchronize()

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """What is under way for a node is under way for both of its parts."""
        upper.write_through_pending_id = lower.write_through_pending_id
        if lower.write_through_pending_id is not None:
            entry = self.ongoing_write_through[lower.write_through_pending_id]
            self.ongoing_write_through[lower.write_through_pending_id] = replace(
                entry, nodes=split_in(entry.nodes, upper, lower)
            )

    def _refresh_host_leaf(self, node: TreeNode) -> None:
        """Put a node in or out of the host's leaf set as its state says."""
        self._host_leaves.set_membership(node, self._is_host_leaf(node))

    def _is_host_leaf(self, node: TreeNode) -> bool:
        return (
            node.parent is not None
            and node.evicted
            and node.backuped
            and not node.children
            and all(data.host_lock_ref == 0 for data in node.data)
        )

    def _hash_identity(self) -> CacheIdentity:
        return super()._hash_identity() if self._controller is None else self.hicache.identity


def split_in(nodes: tuple[TreeNode, ...], upper: TreeNode, lower: TreeNode) -> tuple[TreeNode, ...]:
    """Return ``nodes`` with ``lower`` replaced by both of its parts."""
    at = nodes.index(lower)
    return (*nodes[:at], upper, lower, *nodes[at + 1 :])
