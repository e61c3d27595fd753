"""The attention layer as models see it: sizes and scale; the work is the current backend's."""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import current_attention_backend


class RadixAttention(nn.Module):
    """Attention over the paged KV pool for one layer. Head counts are this rank's."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        sliding_window: int | None = None,
    ) -> None:
        """`sliding_window`: tokens a query may look back on, itself included; None = all."""
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.sliding_window = sliding_window

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """q [n, num_heads * head_dim], k and v [n, num_kv_heads * head_dim]; result like q.

        Writes the new keys and values to the pool at `out_cache_loc` unless told not to.
        """
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.head_dim)
        backend = current_attention_backend()
        return backend.forward(q, k, v, self, forward_batch, save_kv_cache)
