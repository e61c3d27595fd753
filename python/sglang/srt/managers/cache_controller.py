"""``HiCacheController``: the copies between device and host, and reset of both halves.

Owns the copy engines, the acknowledgements and the ring of per-layer load events; the storage half
(queues, threads) is its base, ``mem_cache/storage_io.py``. Does not own tree nodes
(``hicache_base.py``), slots' meaning nor decisions: threads move bytes and post results, the
scheduler thread decides and is the only one to allocate, free and mutate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, StorageError
from sglang.srt.mem_cache.hicache_transfer import (
    CacheOperation,
    CopyEngine,
    CopyHook,
    HiCacheAck,
    LayerDoneCounter,
    StreamCopyEngine,
    ThreadCopyEngine,
    merge_ops,
    num_done,
)
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.memory_pool_host import HostKVCache, HostPoolGroup
from sglang.srt.mem_cache.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import create_storage_backend
from sglang.srt.mem_cache.storage_control import MinReduce
from sglang.srt.mem_cache.storage_io import BackendFactory, HostStorageIO
from sglang.srt.mem_cache.storage_threads import (
    JOIN_TIMEOUT_S,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.platforms.base import Event, Platform

__all__ = [
    "CacheOperation",
    "HiCacheAck",
    "HiCacheController",
    "PrefetchOperation",
    "StorageOperation",
]

logger = logging.getLogger(__name__)

# At the end of the process; together well below the time that a launcher gives its children.
_LAST_WRITES_S = 2.0
_LAST_JOIN_S = 0.5


class HiCacheController(HostStorageIO):
    """See the module docstring. Scheduler thread.

    ``forward_fence()`` returns an event behind everything that forward passes have been given so
    far (default: the current stream's end). ``copy_hook``: called before each piece of a copy
    (tests delay copies with it). ``backend_factory(name, config)`` makes a storage backend. The
    others: ``HostStorageIO``.
    """

    def __init__(
        self,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        host_pools: HostPoolGroup,
        *,
        page_size: int,
        platform: Platform,
        backend_factory: BackendFactory = create_storage_backend,
        forward_fence: Callable[[], Event] | None = None,
        prefetch_min_reduce: MinReduce | None = None,
        storage_config: HiCacheStorageConfig | None = None,
        draft_storage_policy: str = "clamp",
        on_progress: Callable[[], None] | None = None,
        copy_hook: CopyHook | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
    ) -> None:
        super().__init__(
            host_pools,
            page_size=page_size,
            backend_factory=backend_factory,
            storage_config=storage_config,
            draft_storage_policy=draft_storage_policy,
            prefetch_min_reduce=prefetch_min_reduce,
            on_progress=on_progress,
            join_timeout_s=join_timeout_s,
        )
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.mem_pool_device = host_pools.anchor.device_pool
        self._platform = platform
        self._forward_fence = forward_fence or self._end_of_current_stream
        self._copy_hook = copy_hook
        self._init_transfers()

    # -- device <-> host --------------------------------------------------------------------

    def _init_transfers(self) -> None:
        self.write_queue: list[CacheOperation] = []
        self.load_queue: list[CacheOperation] = []
        self.ack_write_queue: list[HiCacheAck] = []
        self.ack_load_queue: list[HiCacheAck] = []
        self._write_engine = self._make_engine("hicache-write")
        self._load_engine = self._make_engine("hicache-load")
        self.layer_done_counter = LayerDoneCounter(
            self.host_pools.num_layers, self._load_engine.event, self._platform
        )
        for entry in self.host_pools.entries:
            entry.device_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _make_engine(self, name: str) -> CopyEngine:
        if self._platform.name == "cpu":
            return ThreadCopyEngine(name)
        return StreamCopyEngine(self._platform)

    def _end_of_current_stream(self) -> Event:
        event: Event = self._platform.current_stream().record_event()
        return event

    def _hook(self, kind: str, layer: int) -> None:
        if self._copy_hook is not None:
            self._copy_hook(kind, layer)

    def write(
        self,
        device_indices: torch.Tensor,
        node_id: int,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a backup device -> host of whole pages; int64 CPU slots.

        Returns the host slots (the caller's own), or None, with nothing queued, when the host is
        full. ``pool_transfers``: pools with slots of their own, host slots given by the caller.
        The device slots must stay taken until the acknowledgement.
        """
        taken = self.host_pools.alloc(device_indices.numel())
        if taken is None:
            return None
        host_indices = taken[self.host_pools.anchor.name]
        operation = CacheOperation(
            host_indices=host_indices,
            device_indices=device_indices.clone(),
            node_ids=[node_id],
            pool_transfers=list(pool_transfers),
        )
        self.write_queue.append(operation)
        return host_indices.clone()

    def load(
        self,
        host_indices: torch.Tensor,
        node_id: int,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> torch.Tensor | None:
        """Queue a load host -> device of whole pages; int64 CPU slots.

        Returns the device slots, or None, with nothing queued, when too few are free. The host
        slots must stay taken until the acknowledgement.
        """
        device_indices = self.token_to_kv_pool_allocator.alloc(host_indices.numel())
        if device_indices is None:
            return None
        operation = CacheOperation(
            host_indices=host_indices.clone(),
            device_indices=device_indices,
            node_ids=[node_id],
            pool_transfers=list(pool_transfers),
        )
        self.load_queue.append(operation)
        return device_indices.clone()

    def start_writing(self) -> None:
        """Start all queued backups as one copy, behind the forward that computes their pages."""
        if not self.write_queue:
            return
        operation = merge_ops(self.write_queue)
        self.write_queue.clear()
        start_event, finish_event = self._write_engine.event(), self._write_engine.event()

        def copy() -> None:
            start_event.record()
            self._hook("write", -1)
            self.host_pools.backup(
                operation.host_indices, operation.device_indices, operation.pool_transfers
            )
            finish_event.record()

        self._write_engine.submit(copy, self._forward_fence(), (start_event, finish_event))
        self.ack_write_queue.append(
            HiCacheAck(
                start_event=start_event,
                finish_event=finish_event,
                node_ids=operation.node_ids,
                num_tokens=operation.host_indices.numel(),
                operation=operation,
            )
        )

    def start_loading(self) -> int:
        """Start all queued loads as one copy, layer by layer; return its index for the consumer.

        -1 when nothing is queued. The copy waits for the forwards under way: they may still write
        the slots that were freed behind them. Call before the consuming forward is queued.
        """
        if not self.load_queue:
            return -1
        operation = merge_ops(self.load_queue)
        self.load_queue.clear()
        index = self.layer_done_counter.update_producer()
        loading = self.layer_done_counter.loading_event(index)

        def copy() -> None:
            loading.start_event.record()
            for layer, layer_event in enumerate(loading.layer_events):
                self._hook("load", layer)
                self.host_pools.load_layer(
                    layer,
                    operation.host_indices,
                    operation.device_indices,
                    operation.pool_transfers,
                )
                layer_event.record()

        self._load_engine.submit(copy, self._forward_fence(), loading.all_events())
        self.ack_load_queue.append(
            HiCacheAck(
                start_event=loading.start_event,
                finish_event=loading.finish_event,
                node_ids=operation.node_ids,
                num_tokens=operation.host_indices.numel(),
                operation=operation,
            )
        )
        return index

    def set_consumer(self, index: int) -> None:
        """Say which load (``start_loading``'s index, -1: none) the next forwards depend on."""
        self.layer_done_counter.set_consumer(index)

    def num_done_writes(self) -> int:
        """Return how many leading write acknowledgements are finished on this rank."""
        return num_done(self.ack_write_queue)

    def num_done_loads(self) -> int:
        """Return how many leading load acknowledgements are finished on this rank."""
        return num_done(self.ack_load_queue)

    def take_write_acks(self, count: int) -> list[HiCacheAck]:
        """Remove and return the first ``count`` write acknowledgements, once they are finished.

        Blocks for those that are not.
        """
        return self._take_acks(self.ack_write_queue, count)

    def take_load_acks(self, count: int) -> list[HiCacheAck]:
        """Remove and return the first ``count`` load acknowledgements; see the writes."""
        return self._take_acks(self.ack_load_queue, count)

    def _take_acks(self, acks: list[HiCacheAck], count: int) -> list[HiCacheAck]:
        taken = acks[:count]
        for ack in taken:
            ack.finish_event.synchronize()
        del acks[:count]
        return taken

    def has_pending_copies(self) -> bool:
        """Return whether copies are queued, under way or not yet taken from the acks."""
        queues = (self.write_queue, self.load_queue, self.ack_write_queue, self.ack_load_queue)
        return any(queues)

    def set_draft_kv_pool(
        self,
        device_pool: KVCache,
        host_pool: HostKVCache,
        digest_fn: Callable[[], bytes] | None = None,
    ) -> None:
        """See ``HostStorageIO``; loads then complete the draft's layers with the target's."""
        super().set_draft_kv_pool(device_pool, host_pool, digest_fn)
        device_pool.register_layer_transfer_counter(self.layer_done_counter)

    def reset(self) -> None:
        """Forget everything that depends on the tree and empty the host pools.

        Queued copies are dropped, running ones awaited, prefetches ended. **Clears the host pools
        itself**, except the pages that storage operations hold: backups go on, reads under way end
        when they do, and all their pages come back one by one through ``host_mem_release_queue``
        (never clear the pools elsewhere). Acknowledgements of backups from before still come; their
        nodes are gone: ignore unknown ids. Blocks for device copies only, never for storage.
        """
        self.write_queue.clear()
        self.load_queue.clear()
        self.take_write_acks(len(self.ack_write_queue))
        self.take_load_acks(len(self.ack_load_queue))
        self.layer_done_counter.reset()
        held_by_pool = self._held_by_storage()
        self.host_pools.clear()
        for name, held in held_by_pool.items():
            if held.any():
                # Everything but what is held, in the order of an empty pool.
                slots = self.host_pools.alloc_all(name)
                self.host_pools.free({name: slots[~held[slots]]})
        self.prefetch_tokens_occupied = 0

    def shutdown(self) -> None:
        """End everything; idempotent. Never raises for, nor waits long for, a hanging backend.

        Backups that are queued get a moment to be written.
        """
        if self.enable_storage and not self.wait_for_backups(_LAST_WRITES_S):
            logger.warning("Leaving with backups unwritten: storage is too slow or hangs")
        self._join_timeout_s = min(self._join_timeout_s, _LAST_JOIN_S)
        try:
            self.detach_storage_backend()
        except StorageError as error:
            logger.warning("Shutting down all the same: %s", error)
        self._write_engine.close()
        self._load_engine.close()
