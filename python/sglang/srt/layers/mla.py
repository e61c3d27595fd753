"""Multi-head latent attention over the paged pool of latent rows, in either of its two forms.

A token is cached as one row for all heads: a compressed vector c and a rotated key. Each head's
key and value are products of c with that head's part of `kv_b_proj`. Two ways to attend are equal
up to rounding:

- *absorbed*: the query is multiplied by the key part first, so that it can be compared with c
  itself, and the weighted sum of c's by the value part afterwards. All heads read the same rows:
  right where few new tokens look at many cached ones. The backend attends.
- *expanded*: keys and values of all heads are made from the rows, then plain attention: each pair
  of tokens costs several times less. Right for prompts.

Owns no parameters. Used by the models on the scheduler thread.

Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1.2 and appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from sglang.srt.configs.model_config import MLAConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


def is_expanding_cheaper(
    mla: MLAConfig, query_lens: Sequence[int], prefix_lens: Sequence[int]
) -> bool:
    """Whether the expanded form takes fewer multiplications, for one head and a whole batch.

    Expanding makes keys and values of the prefix again; those of the new tokens cost as much as
    absorbing their queries and unfolding their outputs.
    """
    absorbed_pair = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim
    expanded_pair = mla.qk_head_dim + mla.v_head_dim
    row = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    saved = sum(
        query_len * (prefix_len + query_len) * (absorbed_pair - expanded_pair) - prefix_len * row
        for query_len, prefix_len in zip(query_lens, prefix_lens, strict=True)
    )
    return saved >= 0


class LatentAttention(nn.Module):
    """Rotation, writing to the pool and attention of one layer. `num_heads` is this rank's."""

    def __init__(
        self,
        mla: MLAConfig,
        num_heads: int,
        scaling: float,
        layer_id: int,
        rope_interleaved: bool,
    ) -> None:
        """`rope_interleaved`: rotated pairs are neighbours; else (i, i + half)."""
        super().__init__()
        self.mla = mla
        self.num_heads = num_heads
        self.rope_interleaved = rope_interleaved
        self.attn = RadixAttention(
            num_heads, mla.latent_dim, scaling, 1, layer_id, v_head_dim=mla.kv_lora_rank
        )

    def forward(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        compressed: torch.Tensor,
        key_to_rotate: torch.Tensor,
        kv_b_weight: torch.Tensor,
        rotary: RotaryEmbedding,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend; [n, num_heads * v_head_dim].

        q [n, num_heads * qk_head_dim] not yet rotated, compressed [n, kv_lora_rank] normed,
        key_to_rotate [n, qk_rope_head_dim], kv_b_weight [num_heads * (nope + v), kv_lora_rank].
        """
        mla = self.mla
        q_nope, q_rope = q.view(-1, self.num_heads, mla.qk_head_dim).split(
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
        )
        flat_rope, key_rope = rotary(
            positions, self._in_halves(q_rope).flatten(1), self._in_halves(key_to_rotate)
        )
        q_rope = flat_rope.view(-1, self.num_heads, mla.qk_rope_head_dim)
        pool = _latent_pool(forward_batch)
        pool.set_mla_kv_buffer(self.attn, forward_batch.out_cache_loc, compressed, key_rope)
        if self._expands(forward_batch):
            queries = torch.cat((q_nope, q_rope), dim=-1)
            return self._attend_expanded(queries, kv_b_weight, forward_batch)
        key_part, value_part = kv_b_weight.view(self.num_heads, -1, mla.kv_lora_rank).split(
            [mla.qk_nope_head_dim, mla.v_head_dim], dim=1
        )
        absorbed = torch.bmm(q_nope.transpose(0, 1), key_part).transpose(0, 1)  # [n, H, rank]
        queries = torch.cat((absorbed, q_rope), dim=-1).flatten(1)
        rows = torch.cat((compressed, key_rope), dim=-1)
        out = self.attn(queries, rows, rows[:, : mla.kv_lora_rank], forward_batch, False)
        weighted = out.view(-1, self.num_heads, mla.kv_lora_rank).transpose(0, 1)
        return torch.bmm(weighted, value_part.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _in_halves(self, x: torch.Tensor) -> torch.Tensor:
        """Features in the order that the rotation wants, (i, i + half); a new tensor.

        Queries and keys are reordered alike, which their products do not notice.
        """
        if self.rope_interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return x.contiguous()

    def _expands(self, forward_batch: ForwardBatch) -> bool:
        query_lens = forward_batch.extend_seq_lens_cpu
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        return (
            forward_batch.forward_mode is ForwardMode.EXTEND
            and query_lens is not None
            and prefix_lens is not None
            and is_expanding_cheaper(self.mla, query_lens, prefix_lens)
        )

    def _attend_expanded(
        self,
        queries: torch.Tensor,  # [n, H, qk]
        kv_b_weight: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        query_lens = forward_batch.extend_seq_lens_cpu
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        assert query_lens is not None and prefix_lens is not None
        rows = _latent_pool(forward_batch).get_key_buffer(self.attn.layer_id)
        table = forward_batch.req_to_token_pool.req_to_token
        out = []
        for index, own in enumerate(queries.split(query_lens)):
            # A slice, not an element: indexing with an element would wait for the device.
            request = forward_batch.req_pool_indices[index : index + 1]
            slots = table[request, : prefix_lens[index] + query_lens[index]].flatten().long()
            latent = rows[slots].squeeze(1).to(queries.dtype)  # [seq_len, rank + rope]
            out.append(self._attend_one(own, latent, kv_b_weight))
        return torch.cat(out).flatten(1)

    def _attend_one(
        self, queries: torch.Tensor, latent: torch.Tensor, kv_b_weight: torch.Tensor
    ) -> torch.Tensor:
        """queries [q, H, qk] of the last q of the tokens in `latent` -> [q, H, v]."""
        mla, seq_len, query_len = self.mla, latent.shape[0], queries.shape[0]
        compressed, key_rope = latent.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        expanded = linear(compressed, kv_b_weight).view(seq_len, self.num_heads, -1)
        key_nope, values = expanded.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        key_rope = key_rope.unsqueeze(1).expand(-1, self.num_heads, -1)
        keys = torch.cat((key_nope, key_rope), dim=-1)  # [seq_len, H, qk]
        mask = None
        if seq_len > query_len:
            ones = torch.ones(query_len, seq_len, dtype=torch.bool, device=queries.device)
            mask = ones.tril(seq_len - query_len)
        out = scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys.transpose(0, 1).unsqueeze(0),
            values.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.attn.scaling,
        )
        return out.squeeze(0).transpose(0, 1)


def _latent_pool(forward_batch: ForwardBatch) -> MLATokenToKVPool:
    pool = forward_batch.token_to_kv_pool
    if not isinstance(pool, MLATokenToKVPool):
        raise TypeError(f"latent attention needs a pool of latent rows, not {type(pool).__name__}")
    return pool
