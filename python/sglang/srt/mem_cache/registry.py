"""Which cache serves which flags.

Owns the choice only. Called once per scheduler at start-up.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.swa_allocator import swa_part
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache


def create_tree_cache(params: CacheInitParams) -> BasePrefixCache:
    """Build the cache for these parameters.

    Raises ValueError on contradicting page sizes and on tiers without prefix reuse.
    """
    if params.disable:
        if params.hicache is not None:
            raise ValueError("a hierarchical cache without prefix reuse makes no sense")
        return ChunkCache(params)
    if swa_part(params.token_to_kv_pool_allocator) is not None:
        return SWARadixCache(params)
    has_state = params.state_allocator is not None
    if params.hicache is None:
        return MambaRadixCache(params) if has_state else RadixCache(params)
    return HiMambaRadixCache(params) if has_state else HiRadixCache(params)
