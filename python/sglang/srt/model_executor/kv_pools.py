"""Which KV pool a model needs, and how many bytes a token takes in it.

Pure functions of a configuration. Called by the model runner and by whoever sizes pools before
they exist, at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    create_token_to_kv_pool_allocator,
)
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.mamba_pool import MambaPool, StateShape
from sglang.srt.mem_cache.memory_pool import (
    Allocate,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_pool import SWAKVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolShape:
    """What a pool's size follows from, besides the model. `tp_size`: ranks that share the heads."""

    num_tokens: int
    page_size: int
    dtype: torch.dtype
    tp_size: int
    # For layers with a recurrent state: snapshots to keep, rows of the request table.
    num_snapshots: int = 0
    num_rows: int = 0
    # For layers with a window among others: rows of a pool of their own; None: none of their own.
    num_window_tokens: int | None = None


def kv_bytes_per_token(
    model: ModelConfig, tp_size: int, kv_dtype: torch.dtype, window_ratio: float | None = None
) -> int:
    """Bytes of K and V that one token takes on one rank.

    `window_ratio`: rows of layers with a window for each slot of the others, where they have a pool
    of their own.
    """
    if model.mla is not None:
        return model.num_hidden_layers * model.mla.latent_dim * kv_dtype.itemsize
    heads = model.get_num_kv_heads(tp_size)
    in_layer = 2 * heads * model.head_dim * kv_dtype.itemsize
    if window_ratio is None or model.mixed_window is None:
        return len(model.kv_layer_ids) * in_layer
    full_ids, window_ids = layers_by_window(model)
    return int((len(full_ids) + window_ratio * len(window_ids)) * in_layer)


def state_shape(model: ModelConfig, tp_size: int) -> StateShape | None:
    """One layer's recurrent state on one rank; None for a model without."""
    linear = model.linear_attention
    if linear is None:
        return None
    return StateShape(
        conv_dim=linear.get_conv_dim(tp_size),
        conv_len=linear.conv_kernel - 1,
        num_heads=linear.get_num_value_heads(tp_size),
        key_dim=linear.key_dim,
        value_dim=linear.value_dim,
        conv_dtype=getattr(torch, model.dtype),
    )


def bytes_per_state(model: ModelConfig, tp_size: int) -> int:
    """Bytes that the recurrent state of one sequence takes on one rank; 0 for a model without."""
    shape = state_shape(model, tp_size)
    if shape is None or model.linear_attention is None:
        return 0
    return shape.bytes_per_layer * len(model.linear_attention.layer_ids)


def make_kv_pool(
    model: ModelConfig,
    shape: KVPoolShape,
    device: torch.device | str,
    allocate: Allocate | None = None,
) -> KVCache:
    """An empty pool of the kind that the model's layers read.

    `allocate` makes the buffers, zeroed; None: as tensors are made.
    """
    attention_pool = _make_attention_pool(model, shape, device, allocate)
    state, linear = state_shape(model, shape.tp_size), model.linear_attention
    if state is None or linear is None:
        return attention_pool
    states = MambaPool(
        shape.num_snapshots, shape.num_rows, state, len(linear.layer_ids), device, allocate
    )
    return HybridLinearKVPool(attention_pool, states, model.kv_layer_ids, linear.layer_ids)


def _make_attention_pool(
    model: ModelConfig,
    shape: KVPoolShape,
    device: torch.device | str,
    allocate: Allocate | None,
) -> KVCache:
    """KV of the layers that attend to tokens."""
    if model.mla is not None:
        return MLATokenToKVPool(
            shape.num_tokens,
            shape.page_size,
            shape.dtype,
            model.mla.kv_lora_rank,
            model.mla.qk_rope_head_dim,
            model.num_hidden_layers,
            device,
            allocate=allocate,
        )

    def heads_pool(num_tokens: int, num_layers: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(
            num_tokens,
            shape.page_size,
            shape.dtype,
            model.get_num_kv_heads(shape.tp_size),
            model.head_dim,
            num_layers,
            device,
            allocate=allocate,
        )

    window = model.mixed_window
    if window is None or shape.num_window_tokens is None:
        return heads_pool(shape.num_tokens, len(model.kv_layer_ids))
    full_ids, window_ids = layers_by_window(model)
    return SWAKVPool(
        heads_pool(shape.num_tokens, len(full_ids)),
        heads_pool(shape.num_window_tokens, len(window_ids)),
        full_ids,
        window_ids,
        window,
    )


def make_slot_allocator(pool: KVCache) -> BaseTokenToKVPoolAllocator:
    """The owner of a pool's slots, and of its window rows where it has some."""
    if not isinstance(pool, SWAKVPool):
        return create_token_to_kv_pool_allocator(pool.size, pool.page_size)
    return SWATokenToKVPoolAllocator(
        pool.size,
        pool.swa_kv_pool.size,
        pool.page_size,
        pool,
        pool.window,
    )


def layers_by_window(model: ModelConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers with KV that see everything, and those that see a window."""
    with_window = [i for i in model.kv_layer_ids if model.sliding_windows[i] is not None]
    full = [i for i in model.kv_layer_ids if model.sliding_windows[i] is None]
    return tuple(full), tuple(with_window)
