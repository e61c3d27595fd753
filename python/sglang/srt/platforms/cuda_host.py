"""Host memory as a CUDA device sees it: page-locking of existing memory, and the copy engine.

Owns nothing; a caller that registers memory unregisters it before it is unmapped. Importable
without CUDA; the functions need it. The copies go to the driver directly, because PyTorch copies
neither many pieces nor rectangles in one call.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

_PORTABLE = 1  # cudaHostRegisterPortable: for every context of the process
_TOUCH_BYTES = 256 << 20
_MAX_THREADS = 16
_SYSTEM_PAGE = os.sysconf("SC_PAGE_SIZE")

_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address tells where the memory is
# Fields of CUDA_MEMCPY2D, eight bytes each: x, y, memory type, host, device, array, pitch of the
# source, the same of the destination, width, height.
_RECTANGLE_WORDS = 16
_SRC_TYPE, _SRC, _SRC_PITCH, _DST_TYPE, _DST, _DST_PITCH, _WIDTH, _HEIGHT = (
    *(2, 4, 6),
    *(9, 11, 13),
    *(14, 15),
)


def register(array: np.ndarray) -> None:
    """Page-lock the bytes of a one-dimensional uint8 array and map them for the device.

    The device reads and writes them at the same addresses. Raises RuntimeError when the system or
    the driver refuses.
    """
    _touch(array)
    result = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, _PORTABLE)
    _check(int(result), f"lock {array.nbytes} bytes of host memory")


def unregister(array: np.ndarray) -> None:
    """Undo ``register``; no copy of these bytes is in flight."""
    result = torch.cuda.cudart().cudaHostUnregister(array.ctypes.data)
    _check(int(result), "unlock host memory")


def _touch(array: np.ndarray) -> None:
    """Have the system provide all pages: many threads clear them faster than the driver does."""
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    starts = range(0, array.nbytes, _TOUCH_BYTES)

    def touch(start: int) -> None:
        array[start : start + _TOUCH_BYTES : _SYSTEM_PAGE] = 0

    with ThreadPoolExecutor(num_threads, thread_name_prefix="pin") as pool:
        list(pool.map(touch, starts))


def _check(result: int, action: str) -> None:
    if result != 0:
        raise RuntimeError(f"CUDA could not {action}: error {result}")


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    ]


_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer: Any = ctypes.c_void_p
    size: Any = ctypes.c_size_t
    driver.cuMemcpyAsync.argtypes = [pointer, pointer, size, pointer]
    driver.cuMemcpy2DAsync_v2.argtypes = [pointer, pointer]
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):  # driver of CUDA 13
        batch = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
        driver.cuMemcpyBatchAsync_v2.argtypes = batch
    return driver


def copy_async(lines: np.ndarray, rectangles: np.ndarray, *, to_host: bool) -> None:
    """Queue copies between page-locked host memory and the device on the current stream.

    ``lines`` int64 [n, 3]: host address, device address, bytes. ``rectangles`` int64 [m, 6]: host
    address, device address, bytes a row, rows, host pitch, device pitch. Raises RuntimeError when
    the driver refuses one.
    """
    stream = torch.cuda.current_stream().cuda_stream
    if len(rectangles):
        _copy_rectangles(rectangles, to_host, stream)
    if len(lines):
        _copy_lines(lines, to_host, stream)


def _copy_rectangles(rectangles: np.ndarray, to_host: bool, stream: int) -> None:
    words = np.zeros((len(rectangles), _RECTANGLE_WORDS), dtype=np.int64)
    words[:, [_SRC_TYPE, _DST_TYPE]] = _UNIFIED
    addresses = [_DST, _SRC] if to_host else [_SRC, _DST]
    pitches = [_DST_PITCH, _SRC_PITCH] if to_host else [_SRC_PITCH, _DST_PITCH]
    words[:, [*addresses, _WIDTH, _HEIGHT, *pitches]] = rectangles
    copy = _driver().cuMemcpy2DAsync_v2
    start, stride = words.ctypes.data, words.strides[0]
    for address in range(start, start + words.nbytes, stride):
        _check(copy(address, stream), "copy a rectangle")


def _copy_lines(lines: np.ndarray, to_host: bool, stream: int) -> None:
    host, device, sizes = np.ascontiguousarray(lines.T)
    dst, src = (host, device) if to_host else (device, host)
    driver = _driver()
    # The driver takes no batch on the default stream.
    if stream and hasattr(driver, "cuMemcpyBatchAsync_v2"):
        attributes = _Attributes(src_access_order=_STREAM_ORDER)
        first = ctypes.c_size_t(0)
        result = driver.cuMemcpyBatchAsync_v2(
            dst.ctypes.data,
            src.ctypes.data,
            sizes.ctypes.data,
            len(sizes),
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            stream,
        )
        _check(result, f"copy a batch of {len(sizes)} pieces")
        return
    for to, origin, size in zip(dst.tolist(), src.tolist(), sizes.tolist()):
        _check(driver.cuMemcpyAsync(to, origin, size, stream), "copy a piece")
