"""``HiMambaRadixCache``: the hierarchical cache of models with full attention and recurrent state.

Owns its defaults; all other behaviour is ``MambaRadixCache``'s. Scheduler thread only.
"""

from __future__ import annotations

from typing import ClassVar

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.storage.extra_config import PrefetchOptions


class HiMambaRadixCache(MambaRadixCache):
    """``MambaRadixCache`` with a host tier and storage."""

    default_storage_options: ClassVar[PrefetchOptions] = PrefetchOptions(
        prefetch_timeout_base=2.0, prefetch_timeout_per_ki_token=0.1
    )

    def __init__(self, params: CacheInitParams) -> None:
        if params.hicache is None or params.capture_state is None:
            raise ValueError("HiMambaRadixCache needs HiCacheParams and a way to capture states")
        super().__init__(params)
