"""A cache controller over tiny pools and a storage backend in memory that a test can disturb."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
)
from sglang.srt.mem_cache.memory_pool_host import (
    HostPoolGroup,
    MHATokenToKVPoolHost,
    PoolEntry,
)
from sglang.srt.mem_cache.page_key import PageHash, RadixKey
from sglang.srt.mem_cache.pool_transfer import PageRule, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage_threads import PrefetchOperation, StorageOperation
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.test.fakes.fake_kv import FakeKV

DRAFT_DIGEST = b"draft-weights-01"

CallHook = Callable[[str, list[str]], None]


class MemoryStore(HiCacheStorage):
    """Pages in a dict. ``hook(method, keys)`` runs inside each call: it may delay or raise.

    ``bad_keys``: a read of them fills the host page with rubbish and says False; a write of them
    says False.
    """

    def __init__(self, pages: dict[str, bytes] | None = None) -> None:
        super().__init__(HiCacheStorageConfig())
        self.pages: dict[str, bytes] = {} if pages is None else pages
        self.hook: CallHook | None = None
        self.bad_keys: set[str] = set()
        self.calls: list[tuple[str, list[str]]] = []
        self.prefix_keys: list[tuple[PageHash, ...] | None] = []
        self.num_closed = 0

    def _enter(
        self, method: str, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> None:
        self.calls.append((method, list(keys)))
        self.prefix_keys.append(extra_info.prefix_keys if extra_info else None)
        if self.hook is not None:
            self.hook(method, list(keys))

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        self._enter("exists", keys, extra_info)
        for count, key in enumerate(keys):
            if key not in self.pages:
                return count
        return len(keys)

    def _starts(self, transfer: PoolTransfer) -> list[int]:
        assert transfer.host_indices is not None
        return transfer.host_indices[:: self.pools[transfer.name].page_size].tolist()

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        result: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            self._enter(f"get {transfer.name}", keys, extra_info)
            pool = self.pools[transfer.name]
            verdicts = []
            for key, start in zip(keys, self._starts(transfer)):
                is_good = key in self.pages and key not in self.bad_keys
                content = self.pages[key] if is_good else b"\xee" * pool.bytes_per_page
                offset = 0
                for buffer in pool.page_buffers(start):
                    buffer[:] = content[offset : offset + buffer.nbytes]
                    offset += buffer.nbytes
                verdicts.append(is_good)
            result[transfer.name] = verdicts
        return result

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        result: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            self._enter(f"set {transfer.name}", keys, extra_info)
            pool = self.pools[transfer.name]
            verdicts = []
            for key, start in zip(keys, self._starts(transfer)):
                if key not in self.bad_keys:
                    self.pages[key] = b"".join(bytes(part) for part in pool.page_buffers(start))
                verdicts.append(key not in self.bad_keys)
            result[transfer.name] = verdicts
        return result

    def clear(self) -> bool:
        self._enter("clear", [], None)
        self.pages.clear()
        return True

    def close(self) -> None:
        self.num_closed += 1


class Gate:
    """A hook that stops the calls it is given for until ``open``; tells when one has come."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, method: str, keys: object) -> None:
        if method == self.method:
            self.entered.set()
            assert self._opened.wait(20), "a test left a gate shut"

    def open(self) -> None:
        """Let everyone through, from now on."""
        self._opened.set()


def seed_for(fingerprint: str) -> Callable[[RadixKey], bytes]:
    """Return a seed function of one set of weights."""
    return lambda key: hashlib.sha256(f"{fingerprint}/{key.extra_key}".encode()).digest()


class ControllerRig:
    """Device and host pools of ``FakeKV``, a controller, and the scheduler's part of a drain.

    ``drain`` keeps what it took: ``hits`` and ``acks``; released pages go back to the host pool.
    """

    def __init__(
        self,
        *,
        page_size: int = 2,
        device_pages: int = 16,
        host_pages: int = 16,
        layer_num: int = 3,
        draft_layers: int | None = None,
        window_pages: int | None = None,
        store: MemoryStore | None = None,
        **options: Any,
    ) -> None:
        self.page_size = page_size
        self.kv = FakeKV(device_pages * page_size, page_size, layer_num)
        self.allocator = create_token_to_kv_pool_allocator(self.kv.size, page_size)
        self.host = MHATokenToKVPoolHost(self.kv, host_pages * page_size, "page_first")
        self.group = HostPoolGroup(
            PoolEntry(name=PoolName.KV, host_pool=self.host, device_pool=self.kv), "direct"
        )
        # A pool with slots of its own of which a prefix needs only its last pages.
        self.window_kv: FakeKV | None = None
        self.window_host: MHATokenToKVPoolHost | None = None
        if window_pages is not None:
            self.window_kv = FakeKV(2 * window_pages * page_size, page_size, 1)
            self.window_host = MHATokenToKVPoolHost(
                self.window_kv, self.window_kv.size, "page_first"
            )
            self.group.add(
                PoolEntry(
                    name=PoolName.SWA,
                    host_pool=self.window_host,
                    device_pool=self.window_kv,
                    share_indices_with_anchor=False,
                    rule=PageRule(trailing=window_pages),
                )
            )
        self.store = store or MemoryStore()
        self.controller = HiCacheController(
            self.allocator,
            self.group,
            page_size=page_size,
            platform=CpuPlatform(),
            backend_factory=lambda name, config: self.store,
            **options,
        )
        self.draft_kv: FakeKV | None = None
        self.draft_host: MHATokenToKVPoolHost | None = None
        if draft_layers is not None:
            self.draft_kv = FakeKV(self.kv.size, page_size, draft_layers, is_draft=True)
            self.draft_host = MHATokenToKVPoolHost(self.draft_kv, self.host.size, "page_first")
            self.controller.set_draft_kv_pool(self.draft_kv, self.draft_host, lambda: DRAFT_DIGEST)
        self.hits: list[PrefetchOperation] = []
        self.acks: list[StorageOperation] = []

    def attach(self, fingerprint: str = "w1") -> None:
        """Attach the store."""
        self.controller.attach_storage_backend(
            backend="memory",
            extra_config={},
            seed_fn=seed_for(fingerprint),
        )

    def key(self, num_pages: int, first: int = 100) -> RadixKey:
        """Return a key of consecutive token ids."""
        return RadixKey(list(range(first, first + num_pages * self.page_size)))

    def fill_device(self, slots: torch.Tensor, key: RadixKey) -> None:
        """Compute the key's KV into device slots, the draft's too."""
        tokens = list(key.token_ids)
        self.kv.write_prefix(slots, tokens)
        if self.draft_kv is not None:
            self.draft_kv.write_prefix(slots, [*tokens, 7])

    def verify_device(self, slots: torch.Tensor, key: RadixKey) -> None:
        """Raise unless device slots hold the key's KV, the draft's too; fewer slots: its start."""
        tokens = list(key.token_ids)
        self.kv.verify_prefix(slots, tokens)
        if self.draft_kv is not None:
            self.draft_kv.verify_prefix(slots, [*tokens, 7])

    def to_host(self, key: RadixKey) -> torch.Tensor:
        """Compute a key and back it up; return the host slots. The device slots are free again."""
        slots = self.allocator.alloc(len(key))
        assert slots is not None
        self.fill_device(slots, key)
        host = self.controller.write(slots, node_id=0)
        assert host is not None
        self.controller.start_writing()
        self.controller.take_write_acks(1)
        self.allocator.free(slots)
        return host

    def to_device(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Load host slots and wait; return the device slots."""
        slots = self.controller.load(host_indices, node_id=0)
        assert slots is not None
        self.controller.start_loading()
        self.controller.take_load_acks(1)
        return slots

    def verify_host(self, host_indices: torch.Tensor, key: RadixKey) -> None:
        """Raise unless host slots hold the key's KV: looked at through the device."""
        slots = self.to_device(host_indices)
        self.verify_device(slots, key)
        self.allocator.free(slots)

    def to_storage(self, key: RadixKey) -> list[PageHash]:
        """Compute a key and write it to storage; it is in neither pool afterwards."""
        host = self.to_host(key)
        hashes = self.controller.page_hashes(key, None)
        op_id = self.controller.write_storage(host, hashes, None)
        self.wait(lambda: any(op.id == op_id for op in self.acks))
        self.host.free(host)
        return hashes

    def prefetch(self, key: RadixKey, attempt: int = 0) -> PrefetchOperation:
        """Start a prefetch from the root."""
        return self.controller.prefetch("rid", attempt, key, None, None)

    def wait_hit(self, operation: PrefetchOperation) -> None:
        """Wait until the query has answered."""
        self.wait(lambda: operation in self.hits)

    def allocate(self, operation: PrefetchOperation) -> torch.Tensor:
        """Give a hit its host pages and let it be read."""
        host = self.host.alloc(operation.storage_hit_count)
        assert host is not None
        operation.host_indices = host
        self.controller.prefetch_buffer.put(operation)
        return host

    def fetch(self, key: RadixKey) -> tuple[PrefetchOperation, int]:
        """Prefetch to the end; return the operation and its completed tokens."""
        operation = self.prefetch(key)
        self.wait_hit(operation)
        if operation.storage_hit_count == 0:
            return operation, 0
        self.allocate(operation)
        self.wait(lambda: operation.is_done)
        return operation, self.controller.terminate_prefetch(operation)

    def drain(self) -> None:
        """Take what the threads have posted."""
        controller = self.controller
        while controller.prefetch_hit_queue.qsize():
            self.hits.append(controller.prefetch_hit_queue.get_nowait())
        while controller.ack_backup_queue.qsize():
            self.acks.append(controller.ack_backup_queue.get_nowait())
        while controller.host_mem_release_queue.qsize():
            page = controller.host_mem_release_queue.get_nowait()
            assert page.numel() == self.page_size
            self.host.free(page)  # raises on a double free

    def wait(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Drain until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.drain()
            if condition():
                return
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.001)

    def wait_all_free(self) -> None:
        """Drain until every host slot is free."""
        self.wait(lambda: self.host.available_size() == self.host.size)
