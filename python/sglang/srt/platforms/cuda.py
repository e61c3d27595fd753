"""The CUDA platform: one device a process. The only general module that calls `torch.cuda`."""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from sglang.srt.platforms.base import MemoryInfo, Platform
from sglang.srt.platforms.regions import DeviceRegion


class CudaPlatform(Platform):
    """Tensors on one CUDA device."""

    name = "cuda"
    graph_capture_supported = True
    default_attention_backend = "triton"
    default_dtype = torch.bfloat16
    collective_backend = "nccl"

    def __init__(self, device_index: int = 0) -> None:
        self._device = torch.device("cuda", device_index)

    @property
    def device(self) -> torch.device:
        return self._device

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(device=self._device)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def use_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def event(self, enable_timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=enable_timing)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def to_device_async(self, tensor: torch.Tensor) -> torch.Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._host_reader.read(tensor, target)
        return target

    def write_to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._host_reader.read(source, target)

    @functools.cached_property
    def _host_reader(self) -> Any:
        # By name: Triton is not needed before there is a device.
        transfers = importlib.import_module("sglang.srt.platforms.cuda_transfers")
        return transfers.HostReader(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def memory_info(self) -> MemoryInfo:
        """What the driver says, plus what our allocator holds without using it."""
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return MemoryInfo(total_bytes=total, free_bytes=free + idle)

    def held_bytes(self) -> int:
        self.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def reserve(self, num_bytes: int) -> DeviceRegion:
        return DeviceRegion(num_bytes, self._device.index)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)

    def configure_process(self, num_threads: int | None) -> None:
        """See `Platform`. Raises ValueError, one sentence, where there is no such device."""
        _check_device(self._device.index)
        torch.cuda.set_device(self._device)
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)


def _check_device(index: int) -> None:
    if torch.version.cuda is None:
        raise ValueError("--device cuda: this torch is a CPU build.")
    if not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device that torch can use.")
    count = torch.cuda.device_count()
    if index >= count:
        raise ValueError(f"--device cuda: there is no GPU {index}, torch sees {count} of them.")


def uuid_of_device(index: int) -> str:
    """The UUID of a visible device, without the prefix that some tools write."""
    return str(torch.cuda.get_device_properties(index).uuid)


def device_of_uuid(uuid: str) -> int:
    """Ordinal in this process of the GPU with this UUID, with or without the prefix "GPU-".

    Raises ValueError where the process does not see it.
    """
    visible = [uuid_of_device(index) for index in range(torch.cuda.device_count())]
    wanted = uuid.removeprefix("GPU-")
    if wanted not in visible:
        raise ValueError(f"no visible GPU has the UUID {uuid}; visible ones: {visible}")
    return visible.index(wanted)
