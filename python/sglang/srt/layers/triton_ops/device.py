"""What the kernels' launchers ask about the device. Cached: the answers never change."""

from __future__ import annotations

import functools

import torch


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
