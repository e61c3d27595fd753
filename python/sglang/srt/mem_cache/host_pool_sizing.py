"""How many tokens the host pools hold.

Owns the arithmetic only: a pure function and one that asks the system for free memory. Called once
when the hierarchical cache is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.platforms.base import MemoryInfo
from sglang.srt.platforms.cpu import CpuPlatform

DEFAULT_RATIO = 2.0
MIN_PAGES = 2
_GB = 10**9
# Left for the processes themselves: weights in transit, tokenizer, page cache of storage.
_RESERVE_BYTES = 10 * 1024**3
_RESERVE_SHARE = 10  # ... but not more than a tenth of a small machine


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoolLimits:
    """What the user said about the size of the host pools.

    ``size_gb`` (GB = 1e9 bytes a rank) wins over ``ratio`` (host tokens / device tokens). With
    neither the ratio is 2, made smaller so that the pools of all ``local_ranks`` together take at
    most ``memory_fraction`` of the free memory.
    """

    size_gb: float = 0
    ratio: float | None = None
    memory_fraction: float = 0.8
    local_ranks: int = 1


def host_memory_info() -> MemoryInfo:
    """Total and free memory of the host, or what the container's limit leaves of it."""
    return CpuPlatform().memory_info()


def host_pool_tokens(
    limits: HostPoolLimits,
    *,
    device_tokens: int,
    bytes_per_token: int,
    page_size: int,
    memory: MemoryInfo,
) -> int:
    """Return the slots of the host pools of one rank: whole pages, at least two.

    ``bytes_per_token`` is summed over all pools that share these slots (target and draft).
    Raises ValueError, in one sentence, when the pools do not fit into the free memory.
    """
    reserve = min(_RESERVE_BYTES, memory.total_bytes // _RESERVE_SHARE)
    usable = max(0, memory.free_bytes - reserve) // limits.local_ranks
    if limits.size_gb > 0:
        wanted = int(limits.size_gb * _GB) // bytes_per_token
        origin, remedy = f"--hicache-size {limits.size_gb:g}", "choose a smaller size"
    elif limits.ratio is not None:
        wanted = int(device_tokens * limits.ratio)
        origin, remedy = f"--hicache-ratio {limits.ratio:g}", "choose a smaller ratio"
    else:
        share = int(memory.free_bytes * limits.memory_fraction) // limits.local_ranks
        wanted = min(int(device_tokens * DEFAULT_RATIO), min(share, usable) // bytes_per_token)
        origin, remedy = "The smallest host pool", "free some memory or do without it"
    num_pages = max(MIN_PAGES, wanted // page_size)
    num_bytes = num_pages * page_size * bytes_per_token
    if num_bytes > usable:
        raise ValueError(
            f"{origin} needs {num_bytes / _GB:.3f} GB of host memory a rank, but only "
            f"{usable / _GB:.3f} GB of the free {memory.free_bytes / _GB:.3f} GB can be used for "
            f"each of {limits.local_ranks} rank(s); {remedy}."
        )
    return num_pages * page_size
