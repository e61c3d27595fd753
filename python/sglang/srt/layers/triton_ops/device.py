"""What the kernels' launchers ask about the device. Cached: the answers never change."""

from __future__ import annotations

import functools

import torch

# Above, what an early launch could gain is little, and allowing it costs thousands of programs.
MAX_EARLY_ROWS = 256


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; a small number where the interpreter stands in for it."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def supports_early_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it ends (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether kernels can convert to and from float8_e4m3fn (Ada and later)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def launch_early(device: torch.device, num_rows: int) -> bool:
    """Whether an operation on `num_rows` tokens is to overlap with its neighbours.

    Such a kernel lets the next one start at once and itself waits for the end of the one before:
    it may read only what is older than all of a chain of them (weights, tables, lengths) earlier,
    and every one of its programs that writes must wait, since memory is reused along the chain.
    """
    return num_rows <= MAX_EARLY_ROWS and supports_early_launch(device)
