"""Which KV pool a model needs, and how many bytes a token takes in it.

Pure functions of a configuration. Called by the model runner and by whoever sizes pools before
they exist, at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.memory_pool import (
    Allocate,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPoolShape:
    """What a pool's size follows from, besides the model. `tp_size`: ranks that share the heads."""

    num_tokens: int
    page_size: int
    dtype: torch.dtype
    tp_size: int


def kv_bytes_per_token(model: ModelConfig, tp_size: int, kv_dtype: torch.dtype) -> int:
    """Bytes of K and V that one token takes on one rank."""
    if model.mla is not None:
        return model.num_hidden_layers * model.mla.latent_dim * kv_dtype.itemsize
    heads = model.get_num_kv_heads(tp_size)
    return 2 * model.num_hidden_layers * heads * model.head_dim * kv_dtype.itemsize


def make_kv_pool(
    model: ModelConfig,
    shape: KVPoolShape,
    device: torch.device | str,
    allocate: Allocate | None = None,
) -> KVCache:
    """An empty pool of the kind that the model's attention reads.

    `allocate` makes the buffers, zeroed; None: as tensors are made.
    """
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
    return MHATokenToKVPool(
        shape.num_tokens,
        shape.page_size,
        shape.dtype,
        model.get_num_kv_heads(shape.tp_size),
        model.head_dim,
        model.num_hidden_layers,
        device,
        allocate=allocate,
    )
