"""The CPU platform: streams run inline, events are done as soon as they are recorded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch

from sglang.srt.platforms.base import MemoryInfo, Platform
from sglang.srt.platforms.regions import HostRegion

_CGROUP = Path("/sys/fs/cgroup")


class CpuEvent:
    """Always passed: CPU work is finished when the call that did it returns."""

    def record(self, stream: Any = None) -> None:
        return

    def wait(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class CpuStream:
    """The calling thread itself."""

    def synchronize(self) -> None:
        return

    def wait_stream(self, stream: Any) -> None:
        return

    def wait_event(self, event: Any) -> None:
        # An event of a worker thread (it has `synchronize`) can be behind us.
        event.synchronize()

    def record_event(self, event: Any = None) -> Any:
        event = event if event is not None else CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class CpuPlatform(Platform):
    """Tensors in host memory."""

    name = "cpu"
    graph_capture_supported = False
    default_attention_backend = "torch_native"
    default_dtype = torch.float32
    collective_backend = "gloo"

    def __init__(self, device_index: int = 0) -> None:
        self._device = torch.device("cpu")
        self._stream = CpuStream()

    @property
    def device(self) -> torch.device:
        return self._device

    def stream(self) -> CpuStream:
        return CpuStream()

    def current_stream(self) -> CpuStream:
        return self._stream

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext(stream)

    def event(self, enable_timing: bool = False) -> CpuEvent:
        return CpuEvent()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def synchronize(self) -> None:
        return

    def memory_info(self) -> MemoryInfo:
        """Host memory, or what the container's limit leaves of it."""
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
        limit, used = _read_int(_CGROUP / "memory.max"), _read_int(_CGROUP / "memory.current")
        if limit is not None and used is not None and limit < total:
            # Page cache counts as used but is given up on demand.
            reclaimable = _read_stat(_CGROUP / "memory.stat", "inactive_file")
            total = limit
            free = min(free, max(0, limit - used + reclaimable))
        return MemoryInfo(total_bytes=total, free_bytes=free)

    def held_bytes(self) -> int:
        memory = self.memory_info()
        return memory.total_bytes - memory.free_bytes

    def empty_cache(self) -> None:
        """Nothing is kept."""

    def reserve(self, num_bytes: int) -> HostRegion:
        return HostRegion(num_bytes)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def configure_process(self, num_threads: int | None) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        # The scheduler is one thread that calls one operator after the other.
        if torch.get_num_interop_threads() != 1:  # may be set only once
            torch.set_num_interop_threads(1)
        torch.set_grad_enabled(False)


def _read_int(path: Path) -> int | None:
    """A number from a control-group file; None when there is no file or no limit."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path, key: str) -> int:
    if not path.exists():
        return 0
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
