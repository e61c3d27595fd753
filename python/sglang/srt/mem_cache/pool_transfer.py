"""Names of the kinds of cached bytes and the description of a copy between tiers.

Owns nothing but the words that host pools, storage backends, the controller and the trees share.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

import torch


class PoolName(StrEnum):
    """Kinds of cached bytes that travel together."""

    KV = "kv"
    DRAFT = "draft"
    MAMBA = "mamba"
    SWA = "swa"


class PoolHitPolicy(Enum):
    """Which pages of a pool must exist for a prefix to be usable.

    ``ALL_PAGES``: every page of the prefix; ``TRAILING_PAGES``: only the last ``len(keys)``.
    """

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass(slots=True, kw_only=True)
class PoolTransfer:
    """What one pool contributes to a copy between tiers.

    ``host_indices``/``device_indices``: slots int64 on the CPU, whole pages of the pool.
    ``keys``: one storage key a page, as the backend sees it (with the pool's prefix).
    """

    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
