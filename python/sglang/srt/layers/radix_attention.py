"""The attention layer as models see it: sizes and scale; the work is the current backend's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.layers.dispatch import KVDestination
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import current_attention_backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """By how much each new token's heads are rotated; see `dispatch.Ops.apply_rope`."""

    positions: torch.Tensor  # int64 [n]
    cos_sin: torch.Tensor  # float32 [positions, rotary_dim]


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
        v_head_dim: int | None = None,
    ) -> None:
        """`sliding_window`: tokens a query may look back on, itself included; None = all.

        `v_head_dim`: width of a value; None = that of a key.
        """
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        self.scaling = scaling
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.sliding_window = sliding_window

    def rotate_and_attend(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: RotaryEmbedding,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Rotate q and k, write k and v to the pool, attend. Shapes as in `forward`.

        Consumes q and k. In one launch where the backend can; otherwise the operations of the
        device rotate and write.
        """
        backend = current_attention_backend()
        if backend.can_rotate(forward_batch):
            return backend.forward_rotating(
                q,
                k.view(-1, self.num_kv_heads, self.head_dim),
                v.view(-1, self.num_kv_heads, self.head_dim),
                Rotation(positions=positions, cos_sin=rotary.cos_sin),
                self,
                forward_batch,
            )
        pool = forward_batch.token_to_kv_pool
        buffers = pool.get_kv_buffer(self.layer_id)
        destination = KVDestination(
            slots=pool.rows_of(self.layer_id, forward_batch.out_cache_loc),
            key_buffer=buffers.key,
            value_buffer=buffers.value,
        )
        q, k = rotary.rotate_and_store(positions, q, k, v, destination)
        return self.forward(q, k, v, forward_batch, save_kv_cache=False)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """q [n, num_heads * head_dim], k and v [n, num_kv_heads * head_dim]; result like q.

        Where values have another width, v and the result have it. Writes the new keys and values
        to the pool at `out_cache_loc` unless told not to.
        """
        k = k.view(-1, self.num_kv_heads, self.head_dim)
        v = v.view(-1, self.num_kv_heads, self.v_head_dim)
        backend = current_attention_backend()
        return backend.forward(q, k, v, self, forward_batch, save_kv_cache)
