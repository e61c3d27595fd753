"""The `triton` attention backend: own kernels over the paged pool, for CUDA.

Keeps no metadata: every launch takes the batch's device tensors as they are, so a captured forward
pass needs nothing but new contents of `seq_lens`, `req_pool_indices`, `out_cache_loc` and (in a
verification) `extend_seq_lens` and the mask. Rows that pad a captured batch may have length 0 or
point at the dummy slot.

Limits: head sizes up to 256; a tree mask is read over the new tokens only, the prefix counts as
visible.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.torch_native import tree_mask_of
from sglang.srt.layers.attention.triton_ops.paged_attention import (
    PagedAttentionInputs,
    Workspace,
    paged_attention,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.triton_ops.store_kv import store_kv
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class TritonAttentionBackend(AttentionBackend):
    """See the module docstring."""

    def __init__(self, facts: RunnerFacts) -> None:
        self._workspace = Workspace(torch.device(facts.device))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing to compute: lengths are read on the device, by the kernels."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        keys, values = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            store_kv(k, v, forward_batch.out_cache_loc, keys, values)
        num_tokens = q.shape[0]
        is_decode = forward_batch.forward_mode.is_decode()
        query_lens = None if is_decode else forward_batch.extend_seq_lens
        if not is_decode and query_lens is None and num_tokens > 0:
            raise ValueError("an extend batch needs extend_seq_lens")
        inputs = PagedAttentionInputs(
            queries=q.view(num_tokens, layer.num_heads, layer.head_dim),
            keys=keys,
            values=values,
            table=forward_batch.req_to_token_pool.req_to_token,
            table_rows=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            query_lens=query_lens,
            tree_mask=tree_mask_of(forward_batch),
            scaling=layer.scaling,
            window=layer.sliding_window,
        )
        out = paged_attention(inputs, self._workspace)
        return out.view(num_tokens, layer.num_heads * layer.head_dim)
