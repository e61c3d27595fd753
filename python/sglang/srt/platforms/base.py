"""What the code may ask of the device it runs on.

One `Platform` per process, chosen at start (`platforms.init_platform`). Everything that differs
between CPU and CUDA outside kernels goes through it, so that the same scheduler, cache and model
code runs on both. On CPU streams run inline and an event is done when it is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang.srt.platforms.regions import MemoryRegion


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any = None) -> None:
        """Mark the current end of the stream (the current stream by default)."""

    def wait(self, stream: Any = None) -> None:
        """Make the stream wait for the mark; the calling thread goes on."""

    def query(self) -> bool:
        """Whether the mark has been passed. True for an event that was never recorded."""

    def synchronize(self) -> None:
        """Block the calling thread until the mark has been passed."""


class Stream(Protocol):
    """A queue of device work."""

    def synchronize(self) -> None:
        """Block the calling thread until all work queued so far is done."""

    def wait_stream(self, stream: Any) -> None:
        """Queue behind everything the other stream holds now."""

    def wait_event(self, event: Any) -> None:
        """Queue behind the event."""

    def record_event(self, event: Any = None) -> Any:
        """Record `event` (a new one by default) here and return it."""

    def query(self) -> bool:
        """Whether all work is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """Memory of the device, for sizing the pools."""

    total_bytes: int
    free_bytes: int  # usable by new allocations now, other processes considered


class Platform(ABC):
    """The device of this process."""

    name: str
    graph_capture_supported: bool
    default_attention_backend: str
    default_dtype: torch.dtype
    # `torch.distributed` backend for tensors on this device.
    collective_backend: str

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where tensors of this process live, index included."""

    @abstractmethod
    def stream(self) -> Any:
        """A new stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream on which work is queued now."""

    @abstractmethod
    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the work of a `with` block on `stream`."""

    def use_device(self) -> AbstractContextManager[Any]:
        """Let a thread other than the main one work on this device in a `with` block."""
        return nullcontext()

    @abstractmethod
    def event(self, enable_timing: bool = False) -> Any:
        """A new event."""

    @abstractmethod
    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in page-locked host memory, so that copies can be asynchronous."""

    def to_device_async(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, in stream order; the host goes on at once.

        The caller must not change `tensor` afterwards: on CPU it is the tensor itself. Small ones
        do not queue behind large copies.
        """
        return tensor

    def write_to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """`to_device_async` into a contiguous tensor of the same shape and type."""
        target.copy_(source)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work on the device."""

    @abstractmethod
    def memory_info(self) -> MemoryInfo:
        """Total and free memory of the device."""

    @abstractmethod
    def held_bytes(self) -> int:
        """What nobody else can have of the device, once our allocator gave back what is idle.

        Unlike `memory_info` it counts what captured graphs alone may use again. Waits for the
        device; for reports at start.
        """

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused memory of the allocator back to the system."""

    @abstractmethod
    def reserve(self, num_bytes: int) -> MemoryRegion:
        """Zeroed memory of its own that can be given back and taken again in place."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of host and device."""

    @abstractmethod
    def configure_process(self, num_threads: int | None) -> None:
        """Settings of this process, once, before tensors are made: device, threads, precision."""
