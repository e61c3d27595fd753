"""``HiCacheTreeBase``: the tick, the drain, backups to storage, attach and detach, weights, reset.

Owns what the three documented trees share besides the walk (``component_tree.py``), the copies
between device and host (``hicache_tiers.py``) and prefetches (``hicache_prefetch.py``). A variant
fills in the hooks of ``hicache_tiers.py`` and overrides nothing here. Scheduler thread only.

**The tick** (``check_hicache_events``) is the only place where ranks talk, once per scheduler loop
on every rank, whatever its queues hold:

1. one MIN over [done writes, done loads, hits, backup acks, releases, extra releases ...];
2. one MIN over what differs by rank in things that all ranks have alike: of each prefetch its
   completed tokens, whether its I/O is over, and the verdict to stop it (negated, so that one
   rank's yes counts), of each backup that is about to be drained the tokens written. Left out when
   there is nothing of the kind; the length follows from replicated state alone.
3. exactly those numbers are processed, in this order: writes, loads, hits, prefetches that ended,
   backup acks, releases.

Stopping a prefetch takes two ticks where there are several ranks: one decides and freezes, the next
takes the smallest frozen progress.

**Pages of storage operations** stay theirs until the operation itself is over, also across a reset:
``controller.reset`` keeps them out of the free list and they come back through the release queue.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from queue import Queue
from typing import Any

import numpy as np
import torch

from sglang.srt.mem_cache.backend_opening import BackendOpening
from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.hicache_prefetch import HiCachePrefetch
from sglang.srt.mem_cache.hicache_records import (
    PREFETCH_POLICIES,
    WRITE_POLICIES,
    BackupEntry,
    PrefetchEntry,
)
from sglang.srt.mem_cache.hicache_storage import FAULT_COUNTERS, HiCacheStorage
from sglang.srt.mem_cache.hicache_tiers import split_in
from sglang.srt.mem_cache.memory_pool_host import PoolEntry
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage.extra_config import ExtraConfig, parse_extra_config
from sglang.srt.mem_cache.storage.rate_limited_log import RateLimitedLog
from sglang.srt.mem_cache.storage_control import StorageControlQueues, TickCounts
from sglang.srt.mem_cache.storage_threads import StorageOperation
from sglang.srt.mem_cache.tree_components.base import ComponentType, InvariantError, TreeNode
from sglang.srt.utils.attempt import AttemptState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchProgress:
    """Of one prefetch: tokens that every rank has, every rank's I/O is over, some rank stops it."""

    entry: PrefetchEntry
    completed_tokens: int
    all_done: bool
    some_rank_stops: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TickProgress:
    """What ranks agreed on in the second step of a tick, in the order of the tables.

    ``written_tokens``: of each backup ack that this tick drains.
    """

    prefetches: list[PrefetchProgress]
    written_tokens: list[int]


class HiCacheTreeBase(HiCachePrefetch):
    """See the module docstring."""

    def __init__(
        self,
        params: CacheInitParams,
        components: Sequence[ComponentType] = (ComponentType.FULL,),
    ) -> None:
        super().__init__(params, components)
        self.ongoing_backup: dict[int, BackupEntry] = {}
        self._orphaned_backups: set[int] = set()  # of nodes that a reset has forgotten
        self._backend_log = RateLimitedLog(logger)
        if params.hicache is None:
            return
        _check_policies(params.hicache.write_policy, params.hicache.prefetch_policy)
        self._control_queues = self._make_control_queues()
        if params.hicache.storage_backend is not None:
            # A rank that cannot ends the start of all: nothing to agree on.
            success, message = self._try_attach(
                {
                    "storage_backend": params.hicache.storage_backend,
                    "storage_backend_extra_config_json": params.hicache.storage_extra_config,
                }
            )
            if not success:
                raise ValueError(message)

    def _make_control_queues(self) -> StorageControlQueues:
        controller = self.cache_controller
        return StorageControlQueues(
            hit=controller.prefetch_hit_queue,
            backup=controller.ack_backup_queue,
            release=controller.host_mem_release_queue,
            extra_release=tuple(controller.extra_host_mem_release_queues.values()),
            min_reduce=self.hicache.min_reduce,
        )

    @property
    def enable_storage(self) -> bool:
        """See ``HiCachePrefetch``."""
        return self._controller is not None and self._controller.enable_storage

    def storage_backend_name(self) -> str | None:
        """See ``BasePrefixCache``."""
        if not self.enable_storage:
            return None
        return type(self.cache_controller.storage_backend).__name__

    def has_pending_transfers(self) -> bool:
        """See ``BasePrefixCache``."""
        return bool(
            self.has_pending_copies()
            or self.ongoing_prefetch
            or self.ongoing_backup
            or self._orphaned_backups
        )

    # -- the tick ----------------------------------------------------------------------------------

    def check_hicache_events(self) -> None:
        """See ``BasePrefixCache`` and the module docstring. Collective."""
        if self._controller is None or self._is_quiet():
            return
        self._controller.start_writing()
        counts = self._sync_hicache_ready_counts()
        progress = self._sync_progress(counts)
        self.writing_check(counts.write_acks)
        self.loading_check(counts.load_acks)
        self._drain_storage_control_queues_impl(counts, progress)

    def _is_quiet(self) -> bool:
        """Whether there is nobody to agree with and nothing that could have happened."""
        return (
            self.hicache.min_reduce is None
            and not self.has_pending_transfers()
            and self._control_queues.is_empty()
        )

    def _sync_hicache_ready_counts(self) -> TickCounts:
        """Agree on how much every rank can process now. Collective."""
        controller = self.cache_controller
        return self._control_queues.sync(controller.num_done_writes(), controller.num_done_loads())

    def _sync_progress(self, counts: TickCounts) -> TickProgress:
        """Agree on prefetches under way and on what backups wrote. Collective if there are any."""
        entries = self._progress_table()
        operations = [entry.operation for entry in entries]
        backups = _peek(self.cache_controller.ack_backup_queue, counts.backups)
        # Looked at before the tokens: what is over by now has all that it ever will have.
        over = [int(operation.is_done) for operation in operations]
        vector = [
            *(operation.completed_tokens for operation in operations),
            *over,
            *(-int(self._is_overdue(entry)) for entry in entries),
            *(operation.completed_tokens for operation in backups),
        ]
        min_reduce = self.hicache.min_reduce
        if vector and min_reduce is not None:
            vector = min_reduce(vector)
        num = len(entries)
        rows = zip(entries, vector[:num], vector[num : 2 * num], vector[2 * num : 3 * num])
        return TickProgress(
            prefetches=[
                PrefetchProgress(
                    entry=entry,
                    completed_tokens=completed,
                    all_done=done > 0,
                    some_rank_stops=stop < 0,
                )
                for entry, completed, done, stop in rows
            ],
            written_tokens=vector[3 * num :],
        )

    def _progress_table(self) -> list[PrefetchEntry]:
        """Return the prefetches to agree on: those that read, and under a clock also the others."""
        watches_clock = self.prefetch_stop_policy != "best_effort"
        return [
            entry for entry in self.ongoing_prefetch.values() if entry.is_allocated or watches_clock
        ]

    def drain_storage_control_queues(self) -> None:
        """Agree on the storage queues alone and process them. Collective."""
        if self._controller is None:
            return
        counts = self._control_queues.sync(0, 0)
        self._drain_storage_control_queues_impl(counts, self._sync_progress(counts))

    def drain_storage_control_queues_local(self) -> None:
        """Process what is here without asking other ranks; allocates nothing (detach, exit)."""
        self._drain_storage_control_queues_impl(None, None)

    def _drain_storage_control_queues_impl(
        self, counts: TickCounts | None, progress: TickProgress | None
    ) -> None:
        """Process hits, prefetches that ended, backup acks, releases: exactly ``counts``.

        None: all that is here, no hits; backups count as not written, on every rank alike.
        """
        written = iter([] if progress is None else progress.written_tokens)

        def on_backup(operation: StorageOperation) -> None:
            self._settle_backup(operation, next(written, 0))

        if counts is not None and progress is not None:
            hits = TickCounts(hits=counts.hits, extra_releases=(0,) * len(counts.extra_releases))
            self._drain(hits, on_backup)
            self._settle_prefetches(progress)
            self._report_storage(bool(counts.hits or counts.backups or progress.prefetches))
            counts = replace(counts, hits=0)
        self._drain(counts, on_backup)

    def _report_storage(self, storage_was_used: bool = True) -> None:
        """Report what storage has read, written and found wrong since the last time."""
        backend = self.cache_controller.storage_backend
        if backend is None or not storage_was_used:
            return
        stats = self.cache_controller.storage_stats
        totals: dict[str, float] = {
            "storage_read_bytes": stats.read_bytes,
            "storage_read_seconds": stats.read_seconds,
            "storage_write_bytes": stats.write_bytes,
            "storage_write_seconds": stats.write_seconds,
        }
        totals |= self._faults_of(backend)
        for name, total in totals.items():
            if total > self._reported_totals[name]:
                self._count_storage(name, total - self._reported_totals[name])
            self._reported_totals[name] = total

    def _faults_of(self, backend: HiCacheStorage) -> dict[str, float]:
        """Ask a backend, which may be anybody's class, what it found wrong; by metric."""
        try:
            faults = backend.fault_counts()
            counts = {f"storage_{name}": faults[name] for name in FAULT_COUNTERS if name in faults}
            counts["hicache_damaged_pages"] = backend.num_damaged_pages()
            return {name: float(count) for name, count in counts.items()}
        except Exception as error:  # noqa: BLE001 - a count that fails costs the count alone
            kind = type(backend).__name__
            self._backend_log.warning(kind, "%s cannot say what it found wrong: %r", kind, error)
            return {}

    def _drain(
        self, counts: TickCounts | None, on_backup: Callable[[StorageOperation], None]
    ) -> None:
        self._control_queues.drain(
            counts,
            on_hit=self._drain_and_alloc_storage_hit,
            on_backup=on_backup,
            on_release=self._on_release,
            on_extra_release=self._on_extra_release,
        )

    def _on_release(self, host_indices: torch.Tensor) -> None:
        self.cache_controller.mem_pool_host.free(host_indices)
        self._returning_pages[PoolName.KV] -= len(host_indices) // self.page_size

    def _on_extra_release(self, index: int, host_indices: torch.Tensor) -> None:
        name = list(self.cache_controller.extra_host_mem_release_queues)[index]
        self.cache_controller.host_pools.free({name: host_indices})
        self._returning_pages[name] -= 1

    def _settle_prefetches(self, progress: TickProgress) -> None:
        for seen in progress.prefetches:
            rid = seen.entry.operation.request_id
            entry = self.ongoing_prefetch.get(rid)
            if entry is None or entry.attempt != seen.entry.attempt:
                continue  # ended by a hit of this tick
            if entry.is_stopping or seen.all_done:
                self._finish_prefetch(entry, seen.completed_tokens)
            elif seen.some_rank_stops:
                self.terminate_prefetch(rid)

    # -- host -> storage ---------------------------------------------------------------------------

    def write_backup_storage(self, node: TreeNode) -> int | None:
        """Queue the write of a node's host copy to storage; return the operation's id.

        None where nothing is to be written: storage is off or paused, the node is not on the host,
        is being written, or is of other weights than the present ones. The write begins at the
        first page that storage is not known to hold.
        """
        host_value = node.host_value
        if not self.enable_storage or host_value is None or node.storage_op_id is not None:
            return None
        if node.write_through_pending_id is not None:
            return None  # follows when the bytes are there
        if self._storage_is_paused or not self._is_current(node):
            return None
        hashes = self.page_hashes(node)
        first_page = node.unstored_from or 0
        prefix_keys = None
        if self.storage_options.hicache_storage_pass_prefix_keys:
            before = self.path_hashes(node)
            prefix_keys = tuple(before[: len(before) - len(hashes) + first_page])
        extra = tuple(pages.within(first_page) for pages in self._host_pages(node))
        op_id = self.cache_controller.write_storage(
            host_value[first_page * self.page_size :],
            hashes[first_page:],
            prefix_keys,
            extra,
            self._num_whole_drafts(node, len(host_value) // self.page_size - first_page),
        )
        self.ongoing_backup[op_id] = BackupEntry(
            nodes=(node,),
            num_pages=len(hashes) - first_page,
            host_lock=self._take_host_lock(node),
            extra=extra,
        )
        node.storage_op_id = op_id
        node.unstored_from = None  # set meanwhile: storage has lost what it had
        return op_id

    def _num_whole_drafts(self, node: TreeNode, num_pages: int) -> int | None:
        """Of the last ``num_pages`` of a node on the host: see the controller's method."""

        def path_indices() -> torch.Tensor:
            path: list[torch.Tensor] = []
            current: TreeNode | None = node
            while current is not None and current.parent is not None:
                if current.host_value is None:
                    raise InvariantError(f"{current!r} is not on the host, a child is")
                path.append(current.host_value)
                current = current.parent
            return torch.cat(path[::-1])

        return self.cache_controller.num_whole_drafts(path_indices, num_pages)

    def _settle_backup(self, operation: StorageOperation, written_tokens: int) -> None:
        """Note what one write has achieved; what is missing is written at the node's next hit."""
        entry = self.ongoing_backup.pop(operation.id, None)
        if entry is None:
            self._orphaned_backups.discard(operation.id)
            return
        self._end_backup(entry, written_tokens)
        self._count_storage("backuped_tokens", written_tokens)
        self._count_transfer("backup", written_tokens, operation.io_seconds)

    def _end_backup(self, entry: BackupEntry, written_tokens: int) -> None:
        self._return_host_lock(entry.host_lock)
        pages_of = [len(node.key) // self.page_size for node in entry.nodes]
        # Pages of all nodes: [0, before) were there, [before, stored) have been written.
        before = sum(pages_of) - entry.num_pages
        stored = before + written_tokens // self.page_size
        start = 0
        for node, num_pages in zip(entry.nodes, pages_of):
            node.storage_op_id = None
            first_missing = min(max(stored - start, 0), node.unstored_from or num_pages)
            if node.unstored_from != 0:
                node.unstored_from = first_missing if first_missing < num_pages else None
            start += num_pages

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        super()._on_split(upper, lower)
        upper.storage_op_id = lower.storage_op_id
        if lower.storage_op_id is not None:
            entry = self.ongoing_backup[lower.storage_op_id]
            self.ongoing_backup[lower.storage_op_id] = replace(
                entry, nodes=split_in(entry.nodes, upper, lower)
            )
        if lower.unstored_from is not None:
            num_upper = len(upper.key) // self.page_size
            first = lower.unstored_from
            upper.unstored_from = first if first < num_upper else None
            lower.unstored_from = max(first - num_upper, 0)

    def _mark_unstored(self) -> None:
        """Storage holds nothing that the tree knows of: what is hit again is written again."""
        for node in self.iter_nodes():
            if node.backuped:
                node.unstored_from = 0

    # -- attach, detach, clear ---------------------------------------------------------------------

    def open_storage_backend(self, **config: Any) -> BackendOpening:
        """See ``BasePrefixCache``."""
        if self._controller is None:
            return super().open_storage_backend(**config)
        controller, name = self._controller, str(config["storage_backend"])

        def make() -> HiCacheStorage:
            text = config.get("storage_backend_extra_config_json")
            extra = self._parse_storage_backend_extra_config(text)
            return controller.make_storage_backend(name, extra.backend)

        return BackendOpening(name, make)

    def opening_state(self, opening: BackendOpening) -> AttemptState:
        """See ``BasePrefixCache``. Collective."""
        min_reduce = self.hicache.min_reduce
        state = opening.state
        if min_reduce is None:
            return state
        # Until all have ended: rank 0, which answers, can say why.
        is_over, least = min_reduce([int(state is not AttemptState.PENDING), int(state)])
        return AttemptState(least) if is_over else AttemptState.PENDING

    def attach_storage_backend(
        self, opened: BackendOpening | None = None, **config: Any
    ) -> tuple[bool, str]:
        """Attach storage, or change the policies where the same backend is attached already.

        ``storage_backend``, ``storage_backend_extra_config_json`` (text or ``@file``; of what is
        attached already None or the same, another one is refused),
        ``hicache_storage_prefetch_policy``, ``hicache_write_policy``; ``served_model_name`` is
        taken from the cache identity instead. ``opened``: takes the backend from there (and
        closes it where it is not attached). The caller makes sure that nothing runs. Returns
        (success, message); nothing has changed where it fails, on any rank. Collective.
        """
        if self._controller is None:
            return super().attach_storage_backend(opened, **config)
        self.flush_write_through_acks()
        was_attached = self.enable_storage
        success, message = self._try_attach(config, opened)
        if not self._all_ranks(success):
            if success and not was_attached:
                self._stop_storage()
            return False, message if not success else "Another rank could not attach storage."
        if not was_attached:
            # Chains begin at the root, whatever was made while there was no storage.
            for node in self._nodes_to_hash():
                self.page_hashes(node)
            self._mark_unstored()
        self._apply_storage_runtime_config(*self._policies(config))
        return True, message

    def _policies(self, config: dict[str, Any]) -> tuple[str, str]:
        """Return (write policy, prefetch policy) as a configuration wants them."""
        write_policy = config.get("hicache_write_policy") or self.write_policy
        prefetch_policy = config.get("hicache_storage_prefetch_policy")
        return write_policy, prefetch_policy or self.prefetch_stop_policy

    def _all_ranks(self, success: bool) -> bool:
        """Whether it has gone well on every rank. Collective."""
        min_reduce = self.hicache.min_reduce
        return success if min_reduce is None else min_reduce([int(success)])[0] > 0

    def _try_attach(
        self, config: dict[str, Any], opened: BackendOpening | None = None
    ) -> tuple[bool, str]:
        """Attach on this rank; nothing has changed where it fails.

        Leaves policies and nodes alone, which ranks have alike.
        """
        backend = config["storage_backend"]
        attached = self.cache_controller.storage_backend_type
        try:
            self._check_runtime_config(*self._policies(config))
            if self.enable_storage and attached != backend:
                raise ValueError(
                    f"Storage backend {attached} is attached; detach it before {backend} is."
                )
            text = config.get("storage_backend_extra_config_json")
            if not self.enable_storage:
                self._attach(backend, self._parse_storage_backend_extra_config(text), opened)
            elif text and self._parse_storage_backend_extra_config(text) != self._attached_config:
                raise ValueError(
                    f"Storage backend {attached} is attached with another extra config; detach it "
                    "before it is attached with this one."
                )
        except Exception as error:  # noqa: BLE001 - a backend may raise anything; the server goes on
            logger.warning("Storage backend %s not attached: %r", backend, error)
            if opened is not None:
                opened.give_up()
            return False, str(error) or repr(error)
        return True, f"storage backend {backend} attached"

    def _attach(self, backend: str, config: ExtraConfig, opened: BackendOpening | None) -> None:
        self.cache_controller.attach_storage_backend(
            backend=backend,
            extra_config=config.backend,
            seed_fn=self._hash_seed,
            make=opened.take if opened else None,
        )
        self.storage_options = config.options
        self._attached_config = config
        for name in ("hicache_damaged_pages", *(f"storage_{fault}" for fault in FAULT_COUNTERS)):
            self._reported_totals[name] = 0  # a new backend counts from 0
        self._control_queues = self._make_control_queues()

    def _apply_storage_runtime_config(self, write_policy: str, prefetch_policy: str) -> None:
        """Change the policies. Raises like ``_check_runtime_config``."""
        self._check_runtime_config(write_policy, prefetch_policy)
        self.write_policy = write_policy
        self.prefetch_stop_policy = prefetch_policy

    def _check_runtime_config(self, write_policy: str, prefetch_policy: str) -> None:
        """Raise ValueError for an unknown policy, InvariantError where one may not be left."""
        _check_policies(write_policy, prefetch_policy)
        if self.write_policy == "write_back" and write_policy != "write_back":
            # The other policies rely on it, and a flush establishes it.
            self._check_host_prefixes()

    def _parse_storage_backend_extra_config(self, text: str | None) -> ExtraConfig:
        """Split a configuration into the tree's part and the backend's. Raises ValueError."""
        return parse_extra_config(text, self.default_storage_options)

    def detach_storage_backend(self, wait_s: float | None = None) -> tuple[bool, str]:
        """See ``BasePrefixCache``; idempotent, collective. What is queued is settled or dropped.

        Where it fails on a rank, storage is off on all, and ticks settle what its threads post.
        """
        if self._controller is None:
            return super().detach_storage_backend(wait_s)
        success, message = self._stop_storage(wait_s)
        if not self._all_ranks(success):
            return False, message if not success else "Storage hangs on another rank."
        # Only now: while a thread of some rank hangs, queues of ranks hold different things.
        self.drain_storage_control_queues_local()
        self._force_release_pending_storage_ops()
        return True, message

    def _stop_storage(self, wait_s: float | None = None) -> tuple[bool, str]:
        """End the threads of this rank; the tree changes as on ranks where that fails.

        Also undoes an attachment that has just been made: it has queued nothing, and what threads
        of an earlier one have posted is for ticks to settle.
        """
        self.flush_write_through_acks()
        self._abort_all_prefetches()
        self._report_storage()
        try:
            self.cache_controller.detach_storage_backend(wait_s)
        except Exception as error:  # noqa: BLE001 - the message goes to the operator
            logger.debug("Storage not detached: %r", error)
            return False, str(error) or repr(error)
        return True, "storage backend detached"

    def _force_release_pending_storage_ops(self) -> None:
        """Give up what no thread will answer any more; the threads are dead.

        Of a prefetch only [0, completed) is taken: the rest is in the release queue already.
        """
        self._abort_all_prefetches()
        for entry in self.ongoing_backup.values():
            self._end_backup(entry, 0)
        self.ongoing_backup.clear()
        self._orphaned_backups.clear()
        self.drain_storage_control_queues_local()

    def clear_storage_backend(self) -> bool:
        """See ``BasePrefixCache``; queued writes are dropped first, so no page comes back.

        Prefetches end: what they bring after the clearing would count as stored.
        """
        if self._controller is None or not self.enable_storage:
            return False
        self._abort_all_prefetches()
        cleared = self._controller.clear_storage_backend()
        # Writes that were under way or dropped settle at a tick and mark their nodes themselves.
        self._mark_unstored()
        return cleared

    def shutdown(self) -> None:
        """See ``BasePrefixCache``; what is on its way to the host still goes to storage."""
        if self._controller is not None:
            self.flush_write_through_acks()
            self._controller.shutdown()

    # -- weights -----------------------------------------------------------------------------------

    def prepare_weights_update(self) -> None:
        """Let nothing of the present weights go to or come from storage any more.

        Ends prefetches, drops queued backups and waits for the one being written (at most for the
        controller's join timeout). Copies between device and host go on. Every rank calls it at the
        same point of its loop; no collective.
        """
        if self._controller is None:
            return
        self._storage_is_paused = True
        self._abort_all_prefetches()
        self._controller.discard_queued_backups()

    def finish_weights_update(self, fingerprint: str | None) -> None:
        """Go on under the new weights, or the old ones where the update failed."""
        self._storage_is_paused = False
        self.set_weights_fingerprint(fingerprint)

    def set_weights_fingerprint(self, fingerprint: str | None) -> None:
        """See ``BasePrefixCache``. Nodes of other weights are never written to storage."""
        if fingerprint != self.weights_fingerprint:
            self._abort_all_prefetches()
        super().set_weights_fingerprint(fingerprint)

    # -- reset -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty device and host; what is being written to storage goes on and loses nothing.

        Waits for copies between device and host, never for storage. The caller clears allocator
        and request table.
        """
        if self._controller is not None:
            self.flush_write_through_acks()
            self._abort_all_prefetches()
            for entry in self.ongoing_backup.values():
                self._returning_pages[PoolName.KV] += entry.num_pages
                self._count_returning(entry.extra)
            self._orphaned_backups |= self.ongoing_backup.keys()
            self.ongoing_backup.clear()
            self._controller.reset()
            self.ongoing_write_through.clear()
            self.ongoing_load_back.clear()
            self.prefetch_loaded_tokens_by_reqid.clear()
            self._host_leaves.clear()
        super().reset()

    # -- self-check --------------------------------------------------------------------------------

    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """See ``BasePrefixCache``; with the tiers' invariants and the equation of the host pool."""
        super().check_invariants(num_private_slots)
        if self._controller is None:
            return
        nodes = list(self.iter_nodes())
        self._check_host_prefixes()
        self._check_pending(nodes)
        self._check_host_locks(nodes)
        leaves = {node for node in nodes if self._is_host_leaf(node)}
        if leaves != self.evictable_host_leaves:
            raise InvariantError(
                f"host leaf set differs in {sorted(leaves ^ self.evictable_host_leaves)}"
            )
        self._check_host_slots(nodes)
        occupied = sum(entry.num_tokens for entry in self.ongoing_prefetch.values())
        if occupied != self.prefetch_tokens_occupied:
            raise InvariantError(f"occupied {self.prefetch_tokens_occupied}, under way {occupied}")

    def _check_host_prefixes(self) -> None:
        """What is on the host begins at the root."""
        for node in self.iter_nodes():
            if node.backuped and node.parent is not None and not node.parent.backuped:
                raise InvariantError(f"{node!r} is on the host below {node.parent!r}, which is not")

    def _check_pending(self, nodes: list[TreeNode]) -> None:
        """Marks of nodes and tables agree; what is being copied is locked on the device."""
        for node in nodes:
            write_id, op_id = node.write_through_pending_id, node.storage_op_id
            if write_id is not None and node not in self.ongoing_write_through[write_id].nodes:
                raise InvariantError(f"{node!r} is not part of the copy {write_id}")
            if write_id is not None and node.lock_ref == 0:
                raise InvariantError(f"{node!r} is being copied and not locked")
            if op_id is not None and node not in self.ongoing_backup[op_id].nodes:
                raise InvariantError(f"{node!r} is not part of the write {op_id}")
            if node.unstored_from is not None and not (
                0 <= node.unstored_from < len(node.key) // self.page_size
            ):
                raise InvariantError(f"{node!r} is to be written from page {node.unstored_from}")
        for load in self.ongoing_load_back.values():
            if load.node.lock_ref == 0:
                raise InvariantError(f"{load.node!r} is being loaded and not locked")
        marked = sum(node.write_through_pending_id is not None for node in nodes)
        covered = sum(len(entry.nodes) for entry in self.ongoing_write_through.values())
        if marked != covered:
            raise InvariantError(f"{marked} nodes are marked as being copied, {covered} are")

    def _check_host_locks(self, nodes: list[TreeNode]) -> None:
        locks = [entry.host_lock for entry in self.ongoing_backup.values()]
        locks += [entry.host_lock for entry in self.ongoing_load_back.values()]
        locks += [entry.anchor for entry in self.ongoing_prefetch.values()]
        held = Counter((lock.node.id, kind) for lock in locks for kind in lock.taken)
        for node in nodes:
            for kind in self.components:
                if node.data[kind].host_lock_ref != held[node.id, kind]:
                    raise InvariantError(
                        f"{node!r} has host_lock_ref {node.data[kind].host_lock_ref} in {kind!r}, "
                        f"held by {held[node.id, kind]}"
                    )

    def _check_host_slots(self, nodes: list[TreeNode]) -> None:
        """No host slot is in two places, and every one is in one; in each pool."""
        for kind, part in self.components.items():
            entry = self.cache_controller.host_pools.get(part.pool_name)
            if entry is None:
                raise InvariantError(f"{kind!r} has no host pool")
            values = [node.data[kind].host_value for node in nodes]
            self._check_slots_of_pool(entry, [value for value in values if value is not None])

    def _check_slots_of_pool(self, entry: PoolEntry, in_tree: list[torch.Tensor]) -> None:
        operations = [prefetch.operation for prefetch in self.ongoing_prefetch.values()]
        in_prefetches = [op.slots[entry.name] for op in operations if entry.name in op.slots]
        parts = [slots.numpy() for slots in (*in_tree, *in_prefetches)]
        slots = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        in_order = np.sort(slots)
        if (in_order[1:] == in_order[:-1]).any():
            raise InvariantError(f"a host slot of {entry.name} is in two places")
        pool = entry.host_pool
        num_in_tree = sum(map(len, parts[: len(in_tree)]))
        if pool.is_free(torch.from_numpy(slots[:num_in_tree])).any():
            raise InvariantError(f"host slots of {entry.name} in the tree are free")
        returning = self._returning_pages[entry.name] * pool.page_size
        available = pool.available_size()
        if available + len(slots) + returning != pool.size:
            raise InvariantError(
                f"host {entry.name}: free {available} + tree and prefetches {len(slots)} + "
                f"returning {returning} != size {pool.size}"
            )


def _check_policies(write_policy: str, prefetch_policy: str) -> None:
    if write_policy not in WRITE_POLICIES:
        raise ValueError(f"write policy {write_policy!r} is none of {', '.join(WRITE_POLICIES)}")
    if prefetch_policy not in PREFETCH_POLICIES:
        raise ValueError(
            f"prefetch policy {prefetch_policy!r} is none of {', '.join(PREFETCH_POLICIES)}"
        )


def _peek(items: Queue[StorageOperation], count: int) -> list[StorageOperation]:
    with items.mutex:
        return list(islice(items.queue, count))
