"""``HiRadixCache``: the hierarchical cache of full-attention models (MHA, MLA) by its own name.

Owns its defaults only; all behaviour is ``UnifiedRadixCache``'s. Scheduler thread only.
"""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.storage.extra_config import PrefetchOptions
from sglang.srt.mem_cache.tree_components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class HiRadixCache(UnifiedRadixCache):
    """Prefix cache of full-attention KV on device, host and storage."""

    default_storage_options: ClassVar[PrefetchOptions] = PrefetchOptions(
        prefetch_timeout_base=2.0, prefetch_timeout_per_ki_token=0.1
    )

    def __init__(self, params: CacheInitParams) -> None:
        if params.hicache is None:
            raise ValueError("HiRadixCache needs HiCacheParams; RadixCache has no host tier")
        super().__init__(params, components=(ComponentType.FULL,))
