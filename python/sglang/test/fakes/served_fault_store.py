"""A faulty storage backend that a running server loads as `dynamic`, and its remote control.

`ServedFaultStore` is a `FaultStore` that looks at a small file before each call and behaves as it
says; a test in another process writes that file through `FaultSwitch`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore

_POLL_S = 0.01
_ALL_WELL: dict[str, Any] = {"fault": None, "calls": [], "delay_s": 0.0}


@dataclass(frozen=True, slots=True)
class FaultSwitch:
    """Chooses what a server's `ServedFaultStore` does from its next call on."""

    path: Path

    def extra_config(self, **options: Any) -> str:
        """Text for `--hicache-storage-backend-extra-config`; `options`: more of its keys."""
        return json.dumps(
            {
                "backend_name": "faulty",
                "module_path": __name__,
                "class_name": "ServedFaultStore",
                "switch": str(self.path),
                **options,
            }
        )

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


class ServedFaultStore(FaultStore):
    """See the module docstring. Pages live in the server's memory."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        super().__init__(config)
        self._switch = Path(config.extra_config["switch"])

    def _begin(self, call: str) -> None:
        with open(self._switch.with_suffix(".log"), "a") as log:
            log.write(f"{call}\n")
        plan = self._read()
        time.sleep(plan["delay_s"])
        while plan["fault"] == Fault.HANG.value and call in plan["calls"]:
            time.sleep(_POLL_S)
            plan = self._read()
        faults = [Fault(plan["fault"])] if plan["fault"] else []
        self.plans = [FaultPlan(fault=f, call=c, nth=None) for f in faults for c in plan["calls"]]
        super()._begin(call)

    def _read(self) -> dict[str, Any]:
        try:
            plan: dict[str, Any] = json.loads(self._switch.read_text())
        except FileNotFoundError:
            return _ALL_WELL
        return plan if plan["rank"] in (None, self.config.tp_rank) else _ALL_WELL
