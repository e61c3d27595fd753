"""Memory whose pages can be given back while its addresses stay.

A region's address never changes, so tensors, views, captured graphs and kernels that know it stay
valid across a release. Between `release` and `resume` nobody may touch it on a device. Content is
lost. Layer of the platforms; used by the memory saver.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any

import torch


class MemoryRegion(ABC):
    """`buffer`: uint8 [num_bytes or more], zeros at first."""

    buffer: torch.Tensor

    @abstractmethod
    def release(self) -> None:
        """Give the pages back to the system. All work that touches them must be done."""

    @abstractmethod
    def resume(self) -> None:
        """Take pages again, at the same addresses, as zeros. Raises RuntimeError."""


class HostRegion(MemoryRegion):
    """Anonymous private pages of this process."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)

    def resume(self) -> None:
        """Pages come back as zeros when they are touched."""


class DeviceRegion(MemoryRegion):
    """Pages of a CUDA device, mapped by the driver's virtual memory calls.

    Source: chapter "Virtual Memory Management" of the CUDA driver API reference.
    """

    def __init__(self, num_bytes: int, device_index: int) -> None:
        self._device_index = device_index
        self._prop = _AllocationProp()
        self._prop.type = _PINNED
        self._prop.location.type = _DEVICE
        self._prop.location.id = device_index
        # The driver calls need the context that torch uses.
        torch.cuda.current_stream(device_index).synchronize()
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), self._prop_ref(), 0)
        step = granularity.value
        self._size = -(-max(num_bytes, 1) // step) * step
        address = ctypes.c_ulonglong()
        size = ctypes.c_size_t(self._size)
        _call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), _ZERO, _ZERO)
        self._address = address.value
        self._handle: ctypes.c_ulonglong | None = None
        self._map()
        self.buffer = torch.as_tensor(
            _DeviceBytes(self._address, self._size), device=f"cuda:{device_index}"
        )
        self.buffer.zero_()

    def release(self) -> None:
        if self._handle is None:
            return
        torch.cuda.synchronize(self._device_index)
        _call("cuMemUnmap", ctypes.c_ulonglong(self._address), ctypes.c_size_t(self._size))
        _call("cuMemRelease", self._handle)
        self._handle = None

    def resume(self) -> None:
        if self._handle is None:
            self._map()
            self.buffer.zero_()

    def _map(self) -> None:
        size, address = ctypes.c_size_t(self._size), ctypes.c_ulonglong(self._address)
        handle = ctypes.c_ulonglong()
        access = _AccessDesc()
        access.location.type = _DEVICE
        access.location.id = self._device_index
        access.flags = _READ_WRITE
        one = ctypes.c_size_t(1)
        with ExitStack() as undo:
            _call("cuMemCreate", ctypes.byref(handle), size, self._prop_ref(), _ZERO)
            undo.callback(_call, "cuMemRelease", handle)
            _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, _ZERO)
            undo.callback(_call, "cuMemUnmap", address, size)
            _call("cuMemSetAccess", address, size, ctypes.byref(access), one)
            undo.pop_all()
        self._handle = handle

    def _prop_ref(self) -> Any:
        return ctypes.byref(self._prop)


_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # allocation type, location type, access flags
_ZERO = ctypes.c_ulonglong(0)


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _DeviceBytes:
    """Tells torch where the bytes are (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Call the driver. Raises RuntimeError where it refuses."""
    result = getattr(_driver(), name)(*arguments)
    if result != 0:
        raise RuntimeError(f"CUDA refused {name}: error {result}")
