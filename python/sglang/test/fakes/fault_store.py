"""A storage backend in memory that fails on command."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StorageError,
    page_indices,
)
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer


class Fault(Enum):
    """What goes wrong. ``RAISE`` and ``HANG`` meet a whole call, the others a page or a look."""

    RAISE = "raise"  # the call raises StorageError
    HANG = "hang"  # the call waits until `release()`
    FALSE = "false"  # the page is neither read nor written, the verdict is False
    TRUNCATE = "truncate"  # set: half of the page is stored; get: half of it arrives, verdict False
    FLIP = "flip"  # set: one bit is stored wrong, found at the next get (verdict False)
    VANISH = "vanish"  # exists says yes and the page is deleted right after


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """One fault. ``call``: ``exists``, ``get`` or ``set``; ``nth``: which event of that call meets
    it, from 0 (events: pages, or calls for ``RAISE`` and ``HANG``), None: every one; ``pool``: only
    pages of this pool."""

    fault: Fault
    call: str
    nth: int | None = 0
    pool: PoolName | None = None


class FaultStore(HiCacheStorage):
    """Pages in a dict, verified like those of a real backend, with planned and random faults.

    ``delay_s``: each call waits that long. ``failure_rate``: share of pages whose get or set is
    False, drawn from ``seed``. ``calls`` lists (call, key) in order, for assertions.
    """

    def __init__(
        self,
        config: HiCacheStorageConfig | None = None,
        *,
        plans: Sequence[FaultPlan] = (),
        delay_s: float = 0.0,
        failure_rate: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(config or HiCacheStorageConfig())
        self.pages: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.plans = list(plans)
        self.delay_s = delay_s
        self.failure_rate = failure_rate
        self.is_closed = False
        self.clear_result = True
        self._whole: dict[str, int] = {}  # key -> hash of what should be there
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._hanging = threading.Semaphore(0)
        self._events: dict[tuple[FaultPlan, str], int] = {}

    # -- controls of a test --

    def release(self) -> None:
        """Let every hanging call go on; later ones do not hang."""
        self._released.set()

    def wait_until_hanging(self, timeout_s: float = 5.0) -> None:
        """Return when a call hangs. Raises TimeoutError."""
        if not self._hanging.acquire(timeout=timeout_s):
            raise TimeoutError("no call hangs")

    # -- the interface --

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys are there, or seem to be."""
        self._begin("exists")
        num_found = 0
        for key in keys:
            with self._lock:
                self.calls.append(("exists", key))
                fault = self._draw("exists", None)
                if key not in self.pages or fault is Fault.FALSE:
                    break
                if fault is Fault.VANISH:
                    del self.pages[key]
            num_found += 1
        return num_found

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Copy pages out; a page that is not what was written is a miss and is deleted."""
        self._begin("get")
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            indices = page_indices(transfer, self.pools[transfer.name].page_size)
            for index, key in zip(indices, transfer.keys or []):
                verdict = self._get(transfer.name, index, key)
                verdicts.setdefault(transfer.name, []).append(verdict)
        return verdicts

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Copy pages in."""
        self._begin("set")
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            indices = page_indices(transfer, self.pools[transfer.name].page_size)
            for index, key in zip(indices, transfer.keys or []):
                verdict = self._set(transfer.name, index, key)
                verdicts.setdefault(transfer.name, []).append(verdict)
        return verdicts

    def clear(self) -> bool:
        """Delete everything; returns ``clear_result`` and deletes nothing when that is False."""
        if self.clear_result:
            with self._lock:
                self.pages.clear()
        return self.clear_result

    def get_stats(self) -> dict[str, float]:
        """Return the number of pages."""
        return {"pages": float(len(self.pages))}

    def close(self) -> None:
        """Let hanging calls end."""
        self.is_closed = True
        self.release()

    # -- one page --

    def _get(self, name: PoolName, index: int, key: str) -> bool:
        with self._lock:
            self.calls.append(("get", key))
            fault = self._draw("get", name)
            data = self.pages.get(key)
            if fault is Fault.FALSE or data is None:
                return False
            is_whole = hash(data) == self._whole[key] and fault is not Fault.TRUNCATE
            if fault is Fault.TRUNCATE:
                data = data[: len(data) // 2]
            if not is_whole:
                self.pages.pop(key)
        start = 0
        for buffer in self.pools[name].page_buffers(index):
            part = data[start : start + buffer.nbytes]
            buffer[: len(part)] = part
            start += buffer.nbytes
        return is_whole

    def _set(self, name: PoolName, index: int, key: str) -> bool:
        data = b"".join(bytes(view) for view in self.pools[name].page_buffers(index))
        with self._lock:
            self.calls.append(("set", key))
            fault = self._draw("set", name)
            if fault is Fault.FALSE:
                return False
            self._whole[key] = hash(data)
            if fault is Fault.TRUNCATE:
                data = data[: len(data) // 2]
            elif fault is Fault.FLIP:
                flipped = bytearray(data)
                flipped[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
                data = bytes(flipped)
            self.pages[key] = data
            return True

    # -- faults --

    def _begin(self, call: str) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._lock:
            faults = [
                plan.fault
                for plan in self.plans
                if plan.fault in (Fault.RAISE, Fault.HANG) and self._meets(plan, call, None)
            ]
        if Fault.HANG in faults and not self._released.is_set():
            self._hanging.release()
            self._released.wait()
        if Fault.RAISE in faults:
            raise StorageError(f"planned failure of {call}")

    def _draw(self, call: str, name: PoolName | None) -> Fault | None:
        found = None
        for plan in self.plans:
            is_page_fault = plan.fault not in (Fault.RAISE, Fault.HANG)
            if is_page_fault and self._meets(plan, call, name):
                found = plan.fault
        if found is None and call != "exists" and self._random.random() < self.failure_rate:
            return Fault.FALSE
        return found

    def _meets(self, plan: FaultPlan, call: str, name: PoolName | None) -> bool:
        if plan.call != call or (plan.pool is not None and name != plan.pool):
            return False
        seen = self._events.get((plan, call), 0)
        self._events[(plan, call)] = seen + 1
        return plan.nth is None or plan.nth == seen
