"""Which host pools a model's device pools get, and what they share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.managers.hicache_setup import (
    full_attention_pool,
    make_side_pools,
    side_bytes_per_token,
)
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.mamba_pool import MambaPool, StateShape
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost
from sglang.srt.mem_cache.pool_transfer import PageRule, PoolName

_SHAPE = StateShape(
    conv_dim=6, conv_len=3, num_heads=2, key_dim=4, value_dim=5, conv_dtype=torch.bfloat16
)


def hybrid_pool(num_snapshots: int) -> HybridLinearKVPool:
    kv = MHATokenToKVPool(
        size=64, page_size=4, dtype=torch.float32, head_num=1, head_dim=8, layer_num=2, device="cpu"
    )
    return HybridLinearKVPool(
        kv, MambaPool(num_snapshots, 3, _SHAPE, 4, "cpu"), [1, 3], [0, 2, 4, 5]
    )


def test_states_get_a_host_pool_as_much_larger_as_that_of_kv() -> None:
    pool = hybrid_pool(10)
    (entry,) = make_side_pools(pool, 160, "page_first")
    assert entry.name is PoolName.MAMBA and not entry.share_indices_with_anchor
    assert entry.rule == PageRule(trailing=1)
    assert isinstance(entry.host_pool, MambaPoolHost)
    assert entry.host_pool.size == 25
    assert entry.device_pool is pool.mamba_pool
    assert full_attention_pool(pool) is pool.full_kv_pool


def test_bytes_of_states_are_shared_out_to_the_tokens() -> None:
    """So that a size in GB is that of all pools together."""
    pool = hybrid_pool(10)
    (entry,) = make_side_pools(pool, 64, "page_first")
    num_bytes = entry.host_pool.size * entry.host_pool.bytes_per_page
    assert num_bytes <= 64 * side_bytes_per_token(pool) < num_bytes + 64


def test_a_model_without_states_has_one_pool() -> None:
    pool = hybrid_pool(1).full_kv_pool
    assert make_side_pools(pool, 64, "page_first") == [] and side_bytes_per_token(pool) == 0
    assert full_attention_pool(pool) is pool


def test_tiers_without_snapshots_are_refused() -> None:
    with pytest.raises(ValueError, match="snapshots"):
        make_side_pools(hybrid_pool(0), 64, "page_first")


def test_states_of_another_dtype_have_other_pages() -> None:
    other = replace(_SHAPE, conv_dtype=torch.float16)
    tags = [
        MambaPoolHost(MambaPool(2, 0, shape, 4, "cpu"), 2).byte_layout_tag()
        for shape in (_SHAPE, other)
    ]
    assert tags[0] != tags[1]
