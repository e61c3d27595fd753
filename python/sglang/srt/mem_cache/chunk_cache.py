"""The cache without reuse (``--disable-radix-cache``): slots live and die with their request.

Scheduler thread only.
"""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheableReq,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.tree_components.base import InvariantError, TreeNode


class ChunkCache(BasePrefixCache):
    """Remembers nothing but a request's own earlier chunks, which its row holds."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See the base class: never a hit."""
        return MatchResult(
            device_indices=torch.empty(0, dtype=torch.int64),
            last_device_node=None,
            last_host_node=None,
            best_match_node=None,
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Refuse: slots given away here would be lost."""
        raise RuntimeError("a cache without a tree takes no slots")

    def cache_unfinished_req(self, req: CacheableReq, chunked: bool = False) -> None:
        """See the base class: the request keeps all its slots."""
        if req.req_pool_idx is None:
            raise RuntimeError(f"request {req.rid} has no row")
        self._release_behind(req, stride=1)
        req.prefix_indices = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_committed_len)

    def cache_finished_req(self, req: CacheableReq, is_insert: bool = True) -> None:
        """See the base class: all slots are freed."""
        # [0, kv_allocated_len): the request's own, freed; nothing is the tree's.
        if req.req_pool_idx is not None and req.kv_allocated_len:
            slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
            self.token_to_kv_pool_allocator.free(slots)
        self._forget_window(req)
        req.kv_committed_len = 0
        req.kv_allocated_len = 0
        req.prefix_indices = torch.empty(0, dtype=torch.int64)

    def evict(self, params: EvictParams | int) -> EvictResult:
        """See the base class: there is nothing to evict."""
        return EvictResult(num_tokens_evicted=0)

    def inc_lock_ref(self, node: TreeNode | None) -> int:
        """See the base class."""
        return 0

    def dec_lock_ref(self, node: TreeNode | None) -> int:
        """See the base class."""
        return 0

    def evictable_size(self) -> int:
        """See the base class."""
        return 0

    def protected_size(self) -> int:
        """See the base class."""
        return 0

    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """See the base class: only the pool equation can break."""
        available = self.token_to_kv_pool_allocator.available_size()
        size = self.token_to_kv_pool_allocator.size
        if num_private_slots is not None and available + num_private_slots != size:
            raise InvariantError(
                f"available {available} + private {num_private_slots} != size {size}"
            )
