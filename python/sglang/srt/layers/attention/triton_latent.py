"""The `triton` attention backend for latent attention, in the absorbed form.

Like `triton_backend`, it keeps no metadata: every launch takes the batch's device tensors as they
are, so a captured forward pass needs nothing but new contents. The pool may be in an 8-bit float
type, whose rows are widened when they are read. Prompts are expanded by `layers.mla` and do not
come here.

Limits: a compressed part of up to 512 and a rotated part of up to 128 features.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.torch_native import tree_mask_of
from sglang.srt.layers.attention.triton_backend import TritonAttentionBackend, check_kv_dtype
from sglang.srt.layers.attention.triton_ops.latent_attention import (
    LatentAttentionInputs,
    latent_attention,
)
from sglang.srt.layers.attention.triton_ops.paged_attention import Workspace
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def create_triton(facts: RunnerFacts) -> AttentionBackend:
    """The backend for the model's kind of attention."""
    if facts.v_head_dim is None:
        return TritonAttentionBackend(facts)
    return TritonLatentBackend(facts)


class TritonLatentBackend(AttentionBackend):
    """See the module docstring."""

    def __init__(self, facts: RunnerFacts) -> None:
        """Raises ValueError where the device cannot convert the type of the KV cache."""
        device = torch.device(facts.device)
        check_kv_dtype(facts.kv_dtype, device)
        self._workspace = Workspace(device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to prepare: all is read on the device."""
        forward_batch.attn_metadata = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        query_lens = None
        if not forward_batch.forward_mode.is_decode():
            query_lens = forward_batch.extend_seq_lens
            if query_lens is None and q.shape[0] > 0:
                raise ValueError("an extend batch needs extend_seq_lens")
        inputs = LatentAttentionInputs(
            queries=q.view(q.shape[0], layer.num_heads, layer.head_dim),
            rows=pool.get_key_buffer(layer.layer_id),
            rank=layer.v_head_dim,
            table=forward_batch.req_to_token_pool.req_to_token,
            table_rows=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            query_lens=query_lens,
            tree_mask=tree_mask_of(forward_batch),
            scaling=layer.scaling,
        )
        out = latent_attention(inputs, self._workspace)
        return out.view(q.shape[0], layer.num_heads * layer.v_head_dim)
