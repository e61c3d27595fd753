"""Prompts, engines and parameters that the tests of the tiers share."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.tree_components.base import TreeNode
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fault_store import FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, TreeFactory

PAGE = 4
all_trees = pytest.mark.parametrize(
    "make_tree", [HiRadixCache, UnifiedRadixCache, HiMambaRadixCache]
)
policies = pytest.mark.parametrize(
    "write_policy", ["write_through", "write_through_selective", "write_back"]
)


def prompt(num_pages: int, first: int = 0, extra: int = 1) -> list[int]:
    """Tokens of whole pages and ``extra`` more, which a match never covers."""
    return list(range(first, first + num_pages * PAGE + extra))


def engine_of(make_tree: TreeFactory = HiRadixCache, **options: Any) -> HiCacheEngine:
    options = {"size": 160, "host_size": 160} | options
    if make_tree is HiMambaRadixCache:
        options = {"num_states": 20} | options
    return HiCacheEngine(make_tree, page_size=PAGE, **options)


def fresh_hit(store: MemoryStore | FaultStore, tokens: list[int], **options: Any) -> int:
    """Return how many tokens a new instance over this store gets from it."""
    engine = engine_of(store=store, prefetch_policy="wait_complete", **options)
    return engine.serve(tokens).loaded_tokens


def only_node(engine: HiCacheEngine) -> TreeNode:
    (node,) = engine.tree.iter_nodes()
    return node
