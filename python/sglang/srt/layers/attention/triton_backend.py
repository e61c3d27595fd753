"""The `triton` attention backend: own kernels over the paged pool, for CUDA.

Decode and verification keep no metadata: every launch takes the batch's device tensors as they
are, so a captured forward pass needs nothing but new contents of `seq_lens`, `req_pool_indices`,
`out_cache_loc` and (in a verification) the mask; so does an extend step whose lengths the host does
not give, with new contents of `extend_seq_lens`. How many new tokens the requests of a speculative
step have, the same for all, is compiled in. Rows that pad a captured batch may have length 0 or
point at the dummy slot. Captured launches share this backend's scratch memory: replay them on one
stream.

Long prompts without prefix go to cuDNN (`triton_ops.dense_prefill`), where it can do them.

The pool may be in another float type of 16 or 8 bits: keys and values are rounded to it when they
are stored, without scales, and converted back when they are read.

Limits: head sizes up to 256. `seq_lens` and the request table must not be written by a kernel that
lets others start early (`triton_ops.device.launch_early`).
"""

from __future__ import annotations

import torch

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.torch_native import tree_mask_of
from sglang.srt.layers.attention.triton_ops import dense_prefill
from sglang.srt.layers.attention.triton_ops.paged_attention import (
    MAX_ROTATED_TOKENS,
    NewTokens,
    PagedAttentionInputs,
    Workspace,
    paged_attention,
)
from sglang.srt.layers.radix_attention import RadixAttention, Rotation
from sglang.srt.layers.triton_ops.device import converts_fp8
from sglang.srt.layers.triton_ops.store_kv import store_kv
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

# Query elements of a request and KV head, at most, that are rotated where they are read.
_ROTATED_ELEMENTS = 8192


def check_kv_dtype(kv_dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise ValueError where the kernels cannot convert the type of the KV cache."""
    if kv_dtype == torch.float8_e4m3fn and not converts_fp8(device):
        raise ValueError(
            "--kv-cache-dtype fp8_e4m3 needs a GPU of compute capability 8.9 or later; fp8_e5m2 "
            "works on older ones."
        )


class TritonAttentionBackend(AttentionBackend):
    """See the module docstring."""

    captures_prefill = True

    def __init__(self, facts: RunnerFacts) -> None:
        """Raises ValueError where the device cannot convert the type of the KV cache."""
        self._device = torch.device(facts.device)
        check_kv_dtype(facts.kv_dtype, self._device)
        self._workspace = Workspace(self._device)
        # The fresh keys must be what later steps will read.
        self._dense_prefill = facts.kv_dtype in (None, facts.dtype) and dense_prefill.is_supported(
            self._device, facts.dtype, facts.head_dim
        )
        # Angles are loaded for every row of a block, so for small blocks only.
        token_size = max(facts.num_heads // facts.num_kv_heads, 1) * facts.head_dim
        self._most_rotated = min(MAX_ROTATED_TOKENS, _ROTATED_ELEMENTS // token_size)

    def planned_prefill_lengths(self, max_tokens: int) -> list[int]:
        if not self._dense_prefill:
            return []
        return list(range(dense_prefill.DENSE_UNIT, max_tokens + 1, dense_prefill.DENSE_UNIT))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Find the long prompts of an extend batch; all else is read on the device."""
        forward_batch.attn_metadata = None
        prefix_lens = forward_batch.extend_prefix_lens_cpu
        query_lens = forward_batch.extend_seq_lens_cpu
        if (
            self._dense_prefill
            and forward_batch.forward_mode is ForwardMode.EXTEND
            and prefix_lens is not None
            and query_lens is not None
        ):
            plan = dense_prefill.make_plan(prefix_lens, query_lens)
            forward_batch.attn_metadata = plan

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
            rows = forward_batch.token_to_kv_pool.rows_of(
                layer.layer_id, forward_batch.out_cache_loc
            )
            store_kv(k, v, rows, keys, values)
        queries = q.view(q.shape[0], layer.num_heads, layer.head_dim)
        plan = forward_batch.attn_metadata
        if (
            isinstance(plan, dense_prefill.DensePlan)
            and k is not None
            and v is not None
            and layer.sliding_window is None
        ):
            out = self._extend_with_dense_spans(queries, k, v, layer, forward_batch, plan)
        else:
            inputs = _paged_inputs(queries, layer, forward_batch)
            out = paged_attention(inputs, self._workspace)
        return out.view(q.shape[0], layer.num_heads * layer.head_dim)

    def can_rotate(self, forward_batch: ForwardBatch) -> bool:
        """Decode steps, and those in which all requests have the same few new tokens.

        A program of the kernel then has all queries that read a new key, or most of them.
        """
        if forward_batch.forward_mode.is_decode():
            return True
        return 0 < _equal_lens(forward_batch) <= self._most_rotated

    def forward_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        queries = q.view(q.shape[0], layer.num_heads, layer.head_dim)
        new = NewTokens(
            keys=k,
            values=v,
            positions=rotation.positions,
            cos_sin=rotation.cos_sin,
            slots=forward_batch.out_cache_loc,
        )
        inputs = _paged_inputs(queries, layer, forward_batch, new=new)
        out = paged_attention(inputs, self._workspace)
        return out.view(q.shape[0], layer.num_heads * layer.head_dim)

    def _extend_with_dense_spans(
        self,
        queries: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        plan: dense_prefill.DensePlan,
    ) -> torch.Tensor:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for span in plan.spans:
            rows = slice(span.start, span.start + span.length)
            part = dense_prefill.dense_causal_attention(
                queries[rows], k[rows], v[rows], layer.scaling
            )
            if span.length == queries.shape[0]:
                return part.contiguous()
            out[rows] = part
        if plan.rest_tokens is not None:
            inputs = _paged_inputs(
                queries[plan.rest_tokens], layer, forward_batch, query_lens=plan.rest_lens
            )
            out[plan.rest_tokens] = paged_attention(inputs, self._workspace)
        return out


def _equal_lens(forward_batch: ForwardBatch) -> int:
    """New tokens of every request of a speculative step; 0 where they differ, and of prompts.

    From what the host knows, which is the same in a captured step. The kernel is compiled for each
    such number: a server's steps have few, its prompts might have any.
    """
    if forward_batch.forward_mode not in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND):
        return 0
    lens = forward_batch.extend_seq_lens_cpu
    if not lens or lens[0] * len(lens) != forward_batch.num_tokens:
        return 0
    return lens[0] if lens.count(lens[0]) == len(lens) else 0


def _paged_inputs(
    queries: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    query_lens: torch.Tensor | None = None,
    new: NewTokens | None = None,
) -> PagedAttentionInputs:
    """`query_lens`: where not all new tokens of the requests are meant, how many of the last."""
    pool = forward_batch.token_to_kv_pool
    keys, values = pool.get_kv_buffer(layer.layer_id)
    tree_mask = tree_mask_of(forward_batch)
    likely_requests = None
    has_equal_lens = forward_batch.forward_mode.is_decode() or _equal_lens(forward_batch) > 0
    if query_lens is None and not has_equal_lens:
        query_lens = forward_batch.extend_seq_lens
        if query_lens is None and queries.shape[0] > 0:
            raise ValueError("an extend batch needs extend_seq_lens")
        if forward_batch.extend_seq_lens_cpu is None:
            # A captured step, in which most requests will be none: one that has all tokens must
            # not read its keys once for each of many small blocks.
            likely_requests = 1
    return PagedAttentionInputs(
        queries=queries,
        keys=keys,
        values=values,
        table=forward_batch.req_to_token_pool.req_to_token,
        table_rows=forward_batch.req_pool_indices,
        seq_lens=forward_batch.seq_lens,
        query_lens=query_lens,
        tree_mask=tree_mask,
        scaling=layer.scaling,
        window=layer.sliding_window,
        slot_map=pool.slot_map(layer.layer_id),
        positions=forward_batch.positions if tree_mask is not None else None,
        new=new,
        likely_requests=likely_requests,
    )
