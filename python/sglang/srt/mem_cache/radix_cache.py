"""The device-only radix cache under its documented names.

``RadixCache`` is the component tree with full attention alone and no further tiers; ``RadixKey``
and ``TreeNode`` are importable from here. Scheduler thread only.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.page_key import RadixKey
from sglang.srt.mem_cache.tree_components.base import ComponentType, TreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

__all__ = ["RadixCache", "RadixKey", "TreeNode"]


class RadixCache(UnifiedRadixCache):
    """Prefix cache of full-attention KV on the device."""

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params, components=(ComponentType.FULL,))
