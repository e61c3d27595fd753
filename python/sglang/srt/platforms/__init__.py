"""The device of this process: `platforms.current` (or `current_platform()`).

A scheduler process calls `init_platform` first; code that runs without one (tests, benchmarks)
gets CUDA if torch can use it, else CPU. The choice is made once: write `platforms.current.x`, not
`from sglang.srt.platforms import current`, which would choose at import time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.platforms.base import Platform

    current: Platform

_current: Platform | None = None


def _make(device: str, device_index: int) -> Platform:
    # Function-local: the front processes import this package and must not load torch.
    if device == "cpu":
        from sglang.srt.platforms.cpu import CpuPlatform

        return CpuPlatform(device_index)
    if device == "cuda":
        from sglang.srt.platforms.cuda import CudaPlatform

        return CudaPlatform(device_index)
    raise ValueError(f"there is no platform for device {device!r}")


def _detect() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def init_platform(device: str, device_index: int = 0) -> Platform:
    """Choose the platform of this process ("cpu" or "cuda"). Raises if another was in use."""
    global _current
    if _current is not None:
        if _current.name != device or (_current.device.index or 0) != device_index:
            raise RuntimeError(
                f"this process already runs on {_current.device}, not on {device}:{device_index}"
            )
        return _current
    _current = _make(device, device_index)
    return _current


def current_platform() -> Platform:
    """The platform of this process, chosen at the first call if `init_platform` was not called."""
    return _current if _current is not None else init_platform(_detect())


def __getattr__(name: str) -> Platform:
    if name == "current":
        return current_platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
