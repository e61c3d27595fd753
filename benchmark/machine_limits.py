"""What the machine itself reaches: the figures that the benchmarks' limits come from.

No script: the benchmarks import it. Each measures in its own process, beside its other figures,
since a shared machine is not equally fast at all times.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sglang.srt.layers.cpu import native, ops
from sglang.srt.platforms import current_platform

CPU_BUFFER_BYTES = 1 << 30  # no cache holds as much
CPU_MATRIX = 2048


def timed(function: Callable[[], object], repeats: int) -> float:
    """Seconds of one call: best of `repeats`, device work included."""
    platform = current_platform()
    best = float("inf")
    for _ in range(repeats):
        platform.synchronize()
        start = time.perf_counter()
        function()
        platform.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def cpu_read_bandwidth(num_bytes: int = CPU_BUFFER_BYTES, repeats: int = 10) -> float:
    """Bytes per second at which all threads together read an array once."""
    data = torch.ones(num_bytes // 4)
    read = native.read_all if ops.available() else torch.sum
    return num_bytes / timed(lambda: read(data), repeats)


def _cuda_read_bandwidth(buffer: torch.Tensor) -> float:
    return buffer.nbytes / timed(buffer.view(torch.int32).max, 10)


def measure_limits(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Read and copy bandwidth (bytes/s) and matmul rate (operations/s)."""
    is_cpu = device.type == "cpu"
    num = CPU_BUFFER_BYTES if is_cpu else (1 << 31)
    read = cpu_read_bandwidth(num) if is_cpu else None
    source = torch.empty(num, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    size = CPU_MATRIX if is_cpu else 8192
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, b, out=out)
    return {
        "read_bytes_s": read or _cuda_read_bandwidth(source),
        "copy_bytes_s": 2 * num / timed(lambda: target.copy_(source), 10),
        "matmul_ops_s": 2 * size**3 / timed(lambda: torch.mm(a, b, out=out), 10),
    }
