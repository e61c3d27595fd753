"""Attention over latent rows: all heads of a token against one row a key, which is its value too.

A program has up to BLOCK_H heads of one new token and one share of the keys that the token sees;
decode, verification and extend differ only in how many keys that is. A row is read once for score
and value. Scores are sums over the compressed part and the rotated part, which are held apart since
neither needs to be as wide as the next power of two of their sum.

Which request a token belongs to follows from the lengths on the device, so that a captured launch
stays right when they change.

Called by `latent_attention.py`, which documents the arguments and checks them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_VALUE = tl.constexpr(float("-inf"))


@triton.jit
def _request_of(
    token: tl.tensor,
    query_lens: tl.tensor,
    batch_size: tl.tensor,
    ONE_QUERY: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
) -> tl.tensor:
    """(request, new tokens of the request behind this one); request >= batch_size: nobody's."""
    if ONE_QUERY:
        request = token
        behind = token * 0
    else:
        lanes = tl.arange(0, BATCH_BLOCK)
        lens = tl.load(query_lens + lanes, mask=lanes < batch_size, other=0).to(tl.int32)
        ends = tl.cumsum(lens, 0)
        is_before = (ends <= token) & (lanes < batch_size)
        request = tl.sum(is_before.to(tl.int32), 0)
        own_end = tl.sum(tl.where(lanes == request, ends, 0), 0)
        behind = own_end - token - 1
    return request, behind


@triton.jit(
    do_not_specialize=["batch_size", "num_shares", "table_stride", "mask_width"],
)
def latent_attention_kernel(  # noqa: PLR0915 - a kernel is one program
    queries: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    table_rows: tl.tensor,
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    tree_mask: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    batch_size: tl.tensor,
    num_shares: tl.tensor,
    table_stride: tl.tensor,
    mask_width: tl.tensor,
    query_stride: tl.tensor,
    row_stride: tl.tensor,
    scale_log2: tl.tensor,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    TREE: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    token = tl.program_id(0)
    share = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_live = head < NUM_HEADS
    latent = tl.arange(0, BLOCK_R)
    rotated = tl.arange(0, BLOCK_P)
    request, behind = _request_of(token, query_lens, batch_size, ONE_QUERY, BATCH_BLOCK)
    is_live = request < batch_size
    safe_request = tl.where(is_live, request, 0)
    seq_len = tl.where(is_live, tl.load(seq_lens + safe_request), 0).to(tl.int32)
    if TREE:
        limit = seq_len
        mask_start = seq_len - mask_width
        mask_line = tree_mask + token.to(tl.int64) * mask_width - mask_start
    else:
        limit = tl.where(is_live, tl.maximum(seq_len - behind, 0), 0)
    # [start, end) of this share, in whole blocks.
    num_blocks = (limit + BLOCK_N - 1) // BLOCK_N
    per_share = (num_blocks + num_shares - 1) // num_shares
    start = share * per_share * BLOCK_N
    end = tl.minimum(start + per_share * BLOCK_N, limit)

    query_row = queries + token.to(tl.int64) * query_stride + head[:, None] * (RANK + ROPE)
    latent_mask = (latent < RANK)[None, :]
    rotated_mask = (rotated < ROPE)[None, :]
    q_latent = tl.load(
        query_row + latent[None, :], mask=head_live[:, None] & latent_mask, other=0.0
    )
    q_rotated = tl.load(
        query_row + RANK + rotated[None, :], mask=head_live[:, None] & rotated_mask, other=0.0
    )
    acc = tl.zeros((BLOCK_H, BLOCK_R), tl.float32)
    row_max = tl.full((BLOCK_H,), NO_VALUE, tl.float32)
    row_sum = tl.zeros((BLOCK_H,), tl.float32)
    table_row = table + tl.load(table_rows + safe_request).to(tl.int64) * table_stride
    block = tl.arange(0, BLOCK_N)
    for first in tl.range(start, end, BLOCK_N):
        key_pos = first + block
        # Behind the end the last key is loaded again: never a NaN, which would get through a
        # weight of zero.
        slots = tl.load(table_row + tl.minimum(key_pos, end - 1)).to(tl.int64)
        row = rows + slots[:, None] * row_stride
        compressed = tl.load(row + latent[None, :], mask=latent_mask, other=0.0).to(q_latent.dtype)
        key = tl.load(row + RANK + rotated[None, :], mask=rotated_mask, other=0.0).to(
            q_latent.dtype
        )
        scores = tl.dot(q_latent, tl.trans(compressed), input_precision=PRECISION)
        scores = tl.dot(q_rotated, tl.trans(key), scores, input_precision=PRECISION)
        visible = key_pos < end
        if TREE:
            bits = tl.load(mask_line + key_pos, mask=visible & (key_pos >= mask_start), other=1)
            visible = visible & (bits != 0)
        scores = tl.where(visible[None, :], scores, NO_VALUE)
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        safe_max = tl.where(new_max == NO_VALUE, 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - safe_max[:, None])
        fade = tl.exp2(row_max - safe_max)
        row_sum = row_sum * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(q_latent.dtype), compressed, acc, input_precision=PRECISION)
        row_max = new_max
    result = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    line = token.to(tl.int64) * NUM_HEADS + head
    if SHARED:
        # A share without keys counts for nothing: its sum of weights is minus infinity in logs.
        has_keys = row_sum > 0.0
        lse = tl.where(has_keys, row_max + tl.log2(tl.where(has_keys, row_sum, 1.0)), NO_VALUE)
        line = line * num_shares + share
        tl.store(partial_lse + line, lse, mask=head_live)
        tl.store(
            partial_out + line[:, None] * RANK + latent[None, :],
            result,
            mask=head_live[:, None] & latent_mask,
        )
    else:
        tl.store(
            out + line[:, None] * RANK + latent[None, :],
            result.to(out.dtype.element_ty),
            mask=head_live[:, None] & latent_mask,
        )


@triton.jit(do_not_specialize=["num_shares"])
def merge_latent_shares_kernel(
    out: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    num_shares: tl.tensor,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Weighted mean of the shares' outputs of one token and head."""
    line = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, BLOCK_S)
    latent = tl.arange(0, BLOCK_R)
    item = line * num_shares + share
    is_live = share < num_shares
    lse = tl.load(partial_lse + item, mask=is_live, other=NO_VALUE)
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - tl.where(highest == NO_VALUE, 0.0, highest))
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial_out + item[:, None] * RANK + latent[None, :],
        mask=is_live[:, None] & (latent < RANK)[None, :],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + line * RANK + latent, merged.to(out.dtype.element_ty), mask=latent < RANK)
