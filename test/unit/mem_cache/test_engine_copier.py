"""What the copy engine is told, by a driver that does on the CPU what CUDA's is asked for.

The structures are declared here anew, as cuda.h has them.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.host_copy import EngineCopier, PageMap
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LAYOUTS, MHATokenToKVPoolHost
from sglang.srt.platforms import cuda_host

PAGE_SIZE, LAYERS = 2, 3
UNIFIED, STREAM_ORDER = 4, 1


class Memcpy2D(ctypes.Structure):
    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t),
        ("srcY", ctypes.c_size_t),
        ("srcMemoryType", ctypes.c_int),
        ("srcHost", ctypes.c_void_p),
        ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p),
        ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t),
        ("dstY", ctypes.c_size_t),
        ("dstMemoryType", ctypes.c_int),
        ("dstHost", ctypes.c_void_p),
        ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p),
        ("dstPitch", ctypes.c_size_t),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    ]


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Attributes(ctypes.Structure):
    _fields_ = [
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    ]


class Driver:
    """Copies at once; `result` is what every call returns."""

    def __init__(self) -> None:
        self.calls = {"rectangle": 0, "batch": 0, "single": 0}
        self.result = 0

    def cuMemcpy2DAsync_v2(self, address: int, stream: int) -> int:
        self.calls["rectangle"] += 1
        copy = Memcpy2D.from_address(address)
        assert copy.srcMemoryType == copy.dstMemoryType == UNIFIED
        assert not any((copy.srcXInBytes, copy.srcY, copy.dstXInBytes, copy.dstY))
        assert not any((copy.srcHost, copy.dstHost, copy.srcArray, copy.dstArray))
        assert copy.WidthInBytes <= min(copy.srcPitch, copy.dstPitch)
        for row in range(copy.Height):
            to, origin = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
            ctypes.memmove(to, origin, copy.WidthInBytes)
        return self.result

    def cuMemcpyAsync(self, to: int, origin: int, size: int, stream: int) -> int:
        self.calls["single"] += 1
        ctypes.memmove(to, origin, size)
        return self.result


class BatchDriver(Driver):
    """The driver of CUDA 13."""

    def cuMemcpyBatchAsync_v2(
        self, *args: int
    ) -> int:  # dst, src, sizes, count, attributes, their first copies, attributes, stream
        self.calls["batch"] += 1
        count, stream = args[3], args[7]
        dst, src, sizes = ((ctypes.c_uint64 * count).from_address(each) for each in args[:3])
        attributes = Attributes.from_address(args[4])
        assert attributes.srcAccessOrder == STREAM_ORDER and attributes.flags == 0
        assert ctypes.c_size_t.from_address(args[5]).value == 0 and args[6] == 1
        assert stream != 0, "CUDA refuses batches on the default stream"
        for to, origin, size in zip(dst, src, sizes):
            ctypes.memmove(to, origin, size)
        return self.result


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver, stream: int) -> None:
    monkeypatch.setattr(cuda_host, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream))


def make_pools(layout: str) -> tuple[MHATokenToKVPool, MHATokenToKVPoolHost]:
    device = MHATokenToKVPool(40, PAGE_SIZE, torch.int16, 2, 4, LAYERS, "cpu", v_head_dim=2)
    host = MHATokenToKVPoolHost(device, 48, layout)
    for data in (device.k_data, device.v_data, host.memory.tensor):
        data.random_()
    return device, host


def slots_of(pages: list[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).reshape(-1)


# A long run, a short one, and pages alone: more than are submitted at first.
HOST_PAGES = [4, 5, 6, 7, 8, 9, 12, 13, 20, 1, 17, 15, 3, 0, 22]
DEVICE_PAGES = [1, 2, 3, 4, 5, 6, 10, 11, 20, 19, 17, 8, 15, 14, 12]


@pytest.mark.parametrize("driver_type", [Driver, BatchDriver])
@pytest.mark.parametrize("stream", [0, 7], ids=["default stream", "own stream"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backup_and_load(
    layout: str, stream: int, driver_type: type[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_type()
    install(monkeypatch, driver, stream)
    device, host = make_pools(layout)
    page_map = PageMap(slots_of(HOST_PAGES), slots_of(DEVICE_PAGES), PAGE_SIZE)
    sides = host.sides(device)
    expected = [side.host.clone() for side in sides]
    for side, wanted in zip(sides, expected):
        wanted[:, HOST_PAGES] = side.device[:, DEVICE_PAGES]
    EngineCopier(sides, page_map, True).copy(range(LAYERS))
    assert driver.calls["rectangle"] > 8 and driver.calls["single"] == driver.calls["batch"] == 0
    for side, wanted in zip(sides, expected):
        assert torch.equal(side.host, wanted)
        side.host.add_(1)
    expected = [side.device.clone() for side in sides]
    load = EngineCopier(sides, page_map, False)
    for layer in range(LAYERS):
        for side, wanted in zip(sides, expected):
            wanted[layer, DEVICE_PAGES] = side.host[layer, HOST_PAGES]
        load.copy(range(layer, layer + 1))
        for side, wanted in zip(sides, expected):
            assert torch.equal(side.device, wanted)
    by_batch = driver_type is BatchDriver and stream != 0
    assert driver.calls["batch"] == (LAYERS if by_batch else 0)
    assert (driver.calls["single"] > 0) != by_batch


def test_refusals_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = BatchDriver()
    install(monkeypatch, driver, 7)
    device, host = make_pools("page_first")
    page_map = PageMap(slots_of(HOST_PAGES), slots_of(DEVICE_PAGES), PAGE_SIZE)
    backup = EngineCopier(host.sides(device), page_map, True)
    with pytest.raises(ValueError, match="all 3 layers"):
        backup.copy(range(1))
    driver.result = 700
    with pytest.raises(RuntimeError, match="rectangle: error 700"):
        backup.copy(range(LAYERS))
    alone = PageMap(slots_of([3]), slots_of([5]), PAGE_SIZE)
    with pytest.raises(RuntimeError, match="batch of 2 pieces: error 700"):
        EngineCopier(host.sides(device), alone, False).copy(range(1))
