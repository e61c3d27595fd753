"""A faulty storage backend that a running server loads as `dynamic`, and its remote control.

`ServedFaultStore` is a `FaultStore` that looks at a small file before each call and behaves as it
says; a test in another process writes that file through `FaultSwitch`. `ServedFaultProxy` does the
same over the backend of a real shared store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    StorageError,
)
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import create_storage_backend
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.store_servers import StoreServers, put_raw_record, raw_record

_POLL_S = 0.01
_ALL_WELL: dict[str, Any] = {"fault": None, "calls": [], "delay_s": 0.0}


@dataclass(frozen=True, slots=True)
class FaultSwitch:
    """Chooses what a server's `ServedFaultStore` does from its next call on."""

    path: Path

    def extra_config(self, inner: StoreServers | None = None, **options: Any) -> str:
        """Text for `--hicache-storage-backend-extra-config`; `options`: more of its keys.

        `inner`: the store that has the pages; None: the server's memory.
        """
        config = {
            "backend_name": "faulty",
            "module_path": __name__,
            "class_name": self.class_name(inner),
            "switch": str(self.path),
            **options,
        }
        if inner is not None:
            config |= {"inner_backend": inner.backend, "inner_config": inner.extra_config()}
        return json.dumps(config)

    @staticmethod
    def class_name(inner: StoreServers | None) -> str:
        """The class that a server then uses."""
        return "ServedFaultStore" if inner is None else "ServedFaultProxy"

    def set(
        self, fault: Fault | None, *calls: str, delay_s: float = 0.0, rank: int | None = None
    ) -> None:
        """Every one of the calls (`exists`, `get`, `set`) meets the fault; None: all is well.

        `rank`: only that tensor-parallel rank is slow and meets faults.
        """
        plan = {
            "fault": fault.value if fault else None,
            "calls": calls,
            "delay_s": delay_s,
            "rank": rank,
        }
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(plan))
        os.replace(partial, self.path)

    def num_calls(self, call: str) -> int:
        """How often the server has begun such a call."""
        log = self.path.with_suffix(".log")
        return log.read_text().split().count(call) if log.exists() else 0


class SwitchReader:
    """The server's side of a `FaultSwitch`."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self._switch = Path(config.extra_config["switch"])
        self._rank = config.tp_rank

    def begin(self, call: str) -> Fault | None:
        """Note that a call begins, wait as long as the switch says; return the fault it meets."""
        with open(self._switch.with_suffix(".log"), "a") as log:
            log.write(f"{call}\n")
        plan = self._read()
        time.sleep(plan["delay_s"])
        while plan["fault"] == Fault.HANG.value and call in plan["calls"]:
            time.sleep(_POLL_S)
            plan = self._read()
        return Fault(plan["fault"]) if plan["fault"] and call in plan["calls"] else None

    def _read(self) -> dict[str, Any]:
        try:
            plan: dict[str, Any] = json.loads(self._switch.read_text())
        except FileNotFoundError:
            return _ALL_WELL
        return plan if plan["rank"] in (None, self._rank) else _ALL_WELL


class ServedFaultStore(FaultStore):
    """See the module docstring. Pages live in the server's memory."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self._switch = SwitchReader(config)

    def _begin(self, call: str) -> None:
        fault = self._switch.begin(call)
        self.plans = [FaultPlan(fault=fault, call=call, nth=None)] if fault else []
        super()._begin(call)


class ServedFaultProxy(HiCacheStorage):
    """A real shared store behind the same switch: pages are damaged and removed in the store."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self._switch = SwitchReader(config)
        inner = replace(config, extra_config=config.extra_config["inner_config"])
        made = create_storage_backend(config.extra_config["inner_backend"], inner)
        assert isinstance(made, SharedPageStore)
        self._inner = made

    def register_mem_host_pool_v2(self, pool: HostKVCache, name: PoolName) -> None:
        super().register_mem_host_pool_v2(pool, name)
        self._inner.register_mem_host_pool_v2(pool, name)

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        fault = self._begin("exists")
        if fault is Fault.FALSE:
            return 0
        found = self._inner.batch_exists(keys, extra_info)
        if fault is Fault.VANISH:
            self._inner._remove(self._inner._names(keys[:found]))
        return found

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        fault = self._begin("get")
        if fault is Fault.FALSE:
            return self._all_false(transfers)
        if fault is Fault.TRUNCATE:
            self._damage(transfers, lambda data: data[: len(data) // 2])
        return self._inner.batch_get_v2(transfers, extra_info)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        fault = self._begin("set")
        if fault is Fault.FALSE:
            return self._all_false(transfers)
        verdicts = self._inner.batch_set_v2(transfers, extra_info)
        if fault is Fault.TRUNCATE:
            self._damage(transfers, lambda data: data[: len(data) // 2])
        elif fault is Fault.FLIP:
            self._damage(transfers, lambda data: data[:-1] + bytes([data[-1] ^ 8]))
        return verdicts

    def clear(self) -> bool:
        return self._inner.clear()

    def close(self) -> None:
        self._inner.close()

    def _begin(self, call: str) -> Fault | None:
        fault = self._switch.begin(call)
        if fault is Fault.RAISE:
            raise StorageError(f"planned failure of {call}")
        return fault

    @staticmethod
    def _all_false(transfers: Sequence[PoolTransfer]) -> dict[PoolName, list[bool]]:
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def _damage(self, transfers: Sequence[PoolTransfer], change: Callable[[bytes], bytes]) -> None:
        for transfer in transfers:
            for name in self._inner._names(transfer.keys or ()):
                data = raw_record(self._inner, name)
                if data is not None:
                    put_raw_record(self._inner, name, change(data))
