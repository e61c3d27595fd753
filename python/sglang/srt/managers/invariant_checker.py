"""The scheduler's self-check when idle: every slot and row accounted for.

Reads only. Raises `InvariantError` with the numbers on the first equation that does not hold: a
leak or a double use is a fault of the program, and going on would serve wrong KV.
"""

from __future__ import annotations

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class InvariantError(RuntimeError):
    """A pool equation does not hold."""


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

    def check_idle(self) -> None:
        """Without requests: all rows free, nothing locked, free + cached = all slots.

        Raises InvariantError.
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
        self.tree_cache.check_invariants(0)
        self.num_checks += 1
