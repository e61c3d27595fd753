"""Launch attention over latent rows: block sizes, how finely to share the keys, scratch memory.

Nothing here reads a device tensor, so every call can be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from sglang.srt.layers.attention.triton_ops.latent_attention_kernel import (
    latent_attention_kernel,
    merge_latent_shares_kernel,
)
from sglang.srt.layers.attention.triton_ops.paged_attention import (
    MAX_BATCH_SIZE,
    Workspace,
    batch_block,
    check_new_tokens,
)
from sglang.srt.layers.triton_ops.device import num_multiprocessors

MAX_RANK = 512
MAX_ROPE = 128
# The matrix unit's smallest tile has this many rows and columns.
_MIN_TILE = 16
_MAX_SHARES = 32
# Scratch memory of one launch, float32 elements: beyond it tokens are many enough by themselves.
_MAX_PARTIAL = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionInputs:
    """Arguments of `latent_attention`.

    n = new tokens of all requests, b = requests. Slots of a request's keys, those of its new
    tokens included, are in `table[table_rows[i], :seq_lens[i]]`.
    """

    queries: torch.Tensor  # [n, num_heads, rank + rope], contiguous
    rows: torch.Tensor  # [slots, 1, rank + rope], any float type
    rank: int  # the first so many columns of a row are its value
    table: torch.Tensor  # int32 [rows, columns]
    table_rows: torch.Tensor  # int64 [b]
    seq_lens: torch.Tensor  # int64 [b], new tokens included
    query_lens: torch.Tensor | None  # int64 [b]; None = one new token each (then n == b)
    # bool [b, q, m], contiguous, as in `attention.base.TreeMaskInput`; n is b * q then.
    tree_mask: torch.Tensor | None
    scaling: float


def latent_attention(
    inputs: LatentAttentionInputs, workspace: Workspace, num_shares: int | None = None
) -> torch.Tensor:
    """Attention of new tokens over their requests' rows: [n, num_heads, rank], like queries.

    Causal among the new tokens unless there is a tree mask. A token without keys gets zeros.
    `num_shares`: programs that divide a token's keys; None: as many as fill the device. Raises
    ValueError for shapes that the kernel does not do.
    """
    _check(inputs)
    num_tokens, num_heads, width = inputs.queries.shape
    out = inputs.queries.new_empty(num_tokens, num_heads, inputs.rank)
    if out.numel() == 0:
        return out
    block_h = min(max(triton.next_power_of_2(num_heads), _MIN_TILE), 2 * _MIN_TILE)
    num_head_blocks = triton.cdiv(num_heads, block_h)
    shares = num_shares or _choose_shares(inputs, num_tokens * num_head_blocks)
    is_shared = shares > 1
    block_r = max(triton.next_power_of_2(inputs.rank), _MIN_TILE)
    lines = num_tokens * num_heads
    partial_out, partial_lse = workspace.reserve(lines * shares if is_shared else 0, inputs.rank)
    mask = inputs.tree_mask
    query_lens = inputs.seq_lens if inputs.query_lens is None else inputs.query_lens
    is_wide = inputs.queries.dtype == torch.float32
    latent_attention_kernel[(num_tokens, num_head_blocks, shares)](
        inputs.queries,
        out,
        inputs.rows,
        inputs.table,
        inputs.table_rows,
        inputs.seq_lens,
        query_lens,
        inputs.queries if mask is None else mask.view(torch.uint8),
        partial_out,
        partial_lse,
        inputs.seq_lens.shape[0],
        shares,
        inputs.table.stride(0),
        0 if mask is None else mask.shape[2],
        inputs.queries.stride(0),
        inputs.rows.stride(0),
        inputs.scaling * math.log2(math.e),
        NUM_HEADS=num_heads,
        RANK=inputs.rank,
        ROPE=width - inputs.rank,
        BLOCK_R=block_r,
        BLOCK_P=max(triton.next_power_of_2(width - inputs.rank), _MIN_TILE),
        BLOCK_H=block_h,
        BLOCK_N=16 if is_wide else 32,
        BATCH_BLOCK=batch_block(inputs.seq_lens.shape[0]),
        ONE_QUERY=inputs.query_lens is None,
        TREE=mask is not None,
        SHARED=is_shared,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=8 if block_h > _MIN_TILE else 4,
        num_stages=2,
    )
    if is_shared:
        merge_latent_shares_kernel[(lines,)](
            out,
            partial_out,
            partial_lse,
            shares,
            RANK=inputs.rank,
            BLOCK_R=block_r,
            BLOCK_S=triton.next_power_of_2(shares),
            num_warps=4,
        )
    return out


def _choose_shares(inputs: LatentAttentionInputs, num_programs: int) -> int:
    """From shapes alone: two programs a multiprocessor, as far as memory allows."""
    wanted = 2 * num_multiprocessors(inputs.queries.device) // num_programs
    lines = inputs.queries.shape[0] * inputs.queries.shape[1]
    affordable = _MAX_PARTIAL // (lines * (inputs.rank + 1))
    return max(1, min(wanted, affordable, _MAX_SHARES))


def _check(inputs: LatentAttentionInputs) -> None:
    queries, rows, rank = inputs.queries, inputs.rows, inputs.rank
    num_tokens, _, width = queries.shape
    batch_size = inputs.seq_lens.shape[0]
    if rows.shape[1:] != (1, width) or not 0 < rank < width:
        raise ValueError(
            f"queries {tuple(queries.shape)} and rows {tuple(rows.shape)} of rank {rank} do not fit"
        )
    if rank > MAX_RANK or width - rank > MAX_ROPE or batch_size > MAX_BATCH_SIZE:
        raise ValueError(
            f"rank {rank}, {width - rank} rotated features or batch size {batch_size} exceeds "
            f"{MAX_RANK}, {MAX_ROPE} and {MAX_BATCH_SIZE}"
        )
    check_new_tokens(inputs.tree_mask, inputs.query_lens, num_tokens, batch_size)
    if not queries.is_contiguous() or rows.stride(2) != 1:
        raise ValueError("queries must be contiguous, and the features of a row side by side")
    if inputs.scaling <= 0:
        raise ValueError(f"the scale must be positive, not {inputs.scaling}")
