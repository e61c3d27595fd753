"""The scheduler's self-check when idle: every slot and row accounted for.

Reads only. Raises `InvariantError` with the numbers on the first equation that does not hold: a
leak or a double use is a fault of the program, and going on would serve wrong KV.
"""

from __future__ import annotations

import time

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.tree_components.base import InvariantError

# The walk over a large tree takes part of a second, for which the next request waits.
_WALK_SHARE = 0.01  # of the time, at most
_SHORT_WALK_S = 0.001  # nobody notices


class InvariantChecker:
    """Checks the pool equations of one scheduler that has no request."""

    def __init__(
        self,
        *,
        tree_cache: BasePrefixCache,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
    ) -> None:
        self.tree_cache = tree_cache
        self.req_to_token_pool = req_to_token_pool
        self.allocator = token_to_kv_pool_allocator
        self.num_checks = 0
        self._walked_at = 0.0  # by `time.perf_counter`
        self._walk_s = 0.0  # what the last walk took

    def check_idle(self) -> None:
        """Without requests: all rows free, nothing locked, free + cached = all slots.

        And the tree is sound, which is looked at less often where that takes long. Raises
        InvariantError.
        """
        rows = self.req_to_token_pool
        if rows.available_size() != rows.size:
            raise InvariantError(f"idle, but {rows.size - rows.available_size()} rows are taken")
        protected = self.tree_cache.protected_size()
        if protected:
            raise InvariantError(f"idle, but {protected} cached tokens are locked")
        protected = self.tree_cache.swa_protected_size()
        if protected:
            raise InvariantError(f"idle, but {protected} cached window rows are locked")
        free, cached = self.allocator.available_size(), self.tree_cache.evictable_size()
        if free + cached != self.allocator.size:
            raise InvariantError(
                f"idle: {free} free + {cached} cached != {self.allocator.size} slots "
                f"({self.allocator.size - free - cached} lost)"
            )
        self._walk_tree()
        self.num_checks += 1

    def _walk_tree(self) -> None:
        started = time.perf_counter()
        pause = self._walk_s / _WALK_SHARE if self._walk_s > _SHORT_WALK_S else 0.0
        if started - self._walked_at < pause:
            return
        self.tree_cache.check_invariants(0)
        self._walked_at = time.perf_counter()
        self._walk_s = self._walked_at - started
