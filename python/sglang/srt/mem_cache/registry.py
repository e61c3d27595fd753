"""Which cache serves which flags.

Owns the choice only. Called once per scheduler at start-up.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache


def create_tree_cache(params: CacheInitParams) -> BasePrefixCache:
    """Build the cache for these parameters. Raises ValueError on contradicting page sizes."""
    return ChunkCache(params) if params.disable else RadixCache(params)
