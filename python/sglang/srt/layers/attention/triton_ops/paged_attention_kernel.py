"""The attention kernel over the paged pool: decode, verification and extend are one program text.

A program computes the output of one *row block* of one KV head over one range of the keys. Rows
are the new tokens of a request times the query heads that share the KV head, packed, so that a
decode step fills the matrix unit with the heads of a group and a draft tree with its tokens too.

Work items are (request, row block, share of the keys). Which item a program has follows from the
lengths on the device alone: nothing about a batch is computed on the host, and a captured launch
stays right when the lengths change. Shares of a small row block are merged by that of its programs
which ends last, those of larger ones by a second kernel.

Where all requests have the same few new tokens, as in decode and verification, a program may also
rotate what it reads of them, and write those new keys and values that it is going to read to the
pool before it does: one launch less a layer.

Called by `paged_attention.py`, which documents the arguments and checks them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang.srt.layers.attention.triton_ops.new_tokens import (
    angles_of,
    rotated,
    rotated_heads,
    write_new,
    write_one,
)
from sglang.srt.layers.attention.triton_ops.work_division import (
    all_requests,
    keys_of_rows,
    shares_of_all,
    work_item,
)

NO_VALUE = tl.constexpr(float("-inf"))


@triton.jit
def _attend(
    query: tl.tensor,
    acc: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    key_pos: tl.tensor,
    end: tl.tensor,
    query_pos: tl.tensor,
    mask_start: tl.tensor,
    tree_mask: tl.tensor,
    mask_lines: tl.tensor,
    table_row: tl.tensor,
    slot_map: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    scale_log2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    MAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """One block of keys. Key p has cell `tree_mask + mask_lines + p`, from `mask_start` on."""
    feature = tl.arange(0, BLOCK_D)
    # Behind the end the last key is loaded again: cheaper than masked loads, and never a NaN, which
    # would get through a weight of zero.
    read_pos = tl.minimum(key_pos, end - 1) if MASKED else key_pos
    slots = tl.load(table_row + read_pos).to(tl.int64)
    if MAPPED:
        slots = tl.load(slot_map + slots).to(tl.int64)
    key_ptrs = key_base + slots[:, None] * key_stride + feature[None, :]
    value_ptrs = value_base + slots[:, None] * value_stride + feature[None, :]
    if HEAD_DIM == BLOCK_D:
        keys = tl.load(key_ptrs).to(query.dtype)
        values = tl.load(value_ptrs).to(query.dtype)
    else:
        keys = tl.load(key_ptrs, mask=(feature < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
        values = tl.load(value_ptrs, mask=(feature < HEAD_DIM)[None, :], other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    if MASKED:
        visible = (key_pos < end)[None, :]
        if TREE:
            is_limited = (key_pos >= mask_start) & (key_pos < end)
            bits = tree_mask + (mask_lines[:, None] + key_pos[None, :])
            seen = tl.load(bits, mask=is_limited[None, :], other=1)
            visible = visible & (seen != 0)
        elif not ONE_QUERY:
            visible = visible & (key_pos[None, :] <= query_pos[:, None])
        # The only query of a decode step sees all keys of its range, which the window bounds.
        if WINDOW > 0 and not ONE_QUERY:
            visible = visible & (query_pos[:, None] - key_pos[None, :] < WINDOW)
        scores = tl.where(visible, scores, NO_VALUE)
    # Scores stay unscaled; the scale (with log2 e, for exp2) goes into one multiply-add.
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    if MASKED and not ONE_QUERY:
        safe_max = tl.where(new_max == NO_VALUE, 0.0, new_max)
    else:
        safe_max = new_max
    weights = tl.exp2(scores * scale_log2 - safe_max[:, None])
    fade = tl.exp2(row_max - safe_max)
    row_sum = row_sum * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    acc = tl.dot(weights.to(query.dtype), values, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def _attend_range(
    query: tl.tensor,
    start: tl.tensor,
    plain_end: tl.tensor,
    end: tl.tensor,
    query_pos: tl.tensor,
    token: tl.tensor,
    row_live: tl.tensor,
    query_start: tl.tensor,
    seq_len: tl.tensor,
    prefix_len: tl.tensor,
    tree_mask: tl.tensor,
    mask_width: tl.tensor,
    table_row: tl.tensor,
    slot_map: tl.tensor,
    key_base: tl.tensor,
    value_base: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    scale_log2: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    MAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
) -> tl.tensor:
    """(sum of weighted values of keys [start, end), largest score, sum of weights) of each row."""
    mask_lines = token
    mask_start = prefix_len
    if TREE:
        mask_start = seq_len - mask_width
        tree_mask += query_start * mask_width - mask_start
        mask_lines = tl.where(row_live, token * mask_width, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_M,), NO_VALUE, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    block = tl.arange(0, BLOCK_N)
    # In one loop the last block is pipelined as well; in two most blocks need no mask.
    masked_start = start
    if not ONE_LOOP:
        for position in tl.range(start, plain_end, BLOCK_N):
            acc, row_max, row_sum = _attend(
                query, acc, row_max, row_sum, position + block, end, query_pos, mask_start,
                tree_mask, mask_lines, table_row, slot_map, key_base, value_base, key_stride,
                value_stride, scale_log2,
                HEAD_DIM, BLOCK_D, WINDOW, TREE, ONE_QUERY, MAPPED, False, PRECISION,
            )  # fmt: skip
        masked_start = plain_end
    for position in tl.range(masked_start, end, BLOCK_N, num_stages=MASKED_STAGES):
        acc, row_max, row_sum = _attend(
            query, acc, row_max, row_sum, position + block, end, query_pos, mask_start,
            tree_mask, mask_lines, table_row, slot_map, key_base, value_base, key_stride,
            value_stride, scale_log2,
            HEAD_DIM, BLOCK_D, WINDOW, TREE, ONE_QUERY, MAPPED, True, PRECISION,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _merged_rows(
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    row_item: tl.tensor,
    row_in_block: tl.tensor,
    row_live: tl.tensor,
    num_shares: tl.tensor,
    head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    MERGE_SHARES: tl.constexpr,
) -> tl.tensor:
    """Weighted mean [ROWS, BLOCK_D] of the shares' outputs; `row_item`: a row's first item."""
    feature = tl.arange(0, BLOCK_D)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total_max = tl.full((ROWS,), NO_VALUE, tl.float32)
    total_sum = tl.zeros((ROWS,), tl.float32)
    for first in tl.range(0, num_shares, MERGE_SHARES):
        share = first + tl.arange(0, MERGE_SHARES)
        item = (row_item[None, :] + share[:, None]).to(tl.int64)
        line = (item * NUM_KV_HEADS + head) * BLOCK_M + row_in_block[None, :]
        live = (share < num_shares)[:, None] & row_live[None, :]
        # Not from the multiprocessor's own cache: others may have written since this kernel began.
        lse = tl.load(partial_lse + line, mask=live, other=NO_VALUE, cache_modifier=".cg")
        part = tl.load(
            partial_out + line[:, :, None] * BLOCK_D + feature[None, None, :],
            mask=live[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(total_max, tl.max(lse, 0))
        safe_max = tl.where(new_max == NO_VALUE, 0.0, new_max)
        weights = tl.exp2(lse - safe_max[None, :])
        fade = tl.exp2(total_max - safe_max)
        total_sum = total_sum * fade + tl.sum(weights, 0)
        acc = acc * fade[:, None] + tl.sum(part * weights[:, :, None], 0)
        total_max = new_max
    return acc / tl.where(total_sum > 0.0, total_sum, 1.0)[:, None]


@triton.jit
def _merge_row_block(
    out: tl.tensor,
    out_stride: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    first_item: tl.tensor,
    row_block: tl.tensor,
    num_shares: tl.tensor,
    num_queries: tl.tensor,
    head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SHARES: tl.constexpr,
) -> None:
    """Merge the shares of a row block, `first_item` and behind; `out`: of its request."""
    feature = tl.arange(0, BLOCK_D)
    line = tl.arange(0, MERGE_ROWS)
    row = row_block * BLOCK_M + line
    live = row < num_queries * GROUP
    merged = _merged_rows(
        partial_out, partial_lse, tl.full((MERGE_ROWS,), first_item, tl.int32), line, live,
        num_shares, head, NUM_KV_HEADS, BLOCK_D, BLOCK_M, MERGE_ROWS, MERGE_SHARES,
    )  # fmt: skip
    if ONE_QUERY:
        out_row = out + (head * GROUP + row) * HEAD_DIM
    else:
        out_row = out + (row // GROUP) * out_stride + (head * GROUP + row % GROUP) * HEAD_DIM
    tl.store(
        out_row[:, None] + feature[None, :],
        merged.to(out.dtype.element_ty),
        mask=live[:, None] & (feature < HEAD_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=["batch_size", "share_target", "min_share", "table_stride", "mask_width"],
)
def paged_attention_kernel(
    queries: tl.tensor,
    out: tl.tensor,
    key_buffer: tl.tensor,
    value_buffer: tl.tensor,
    table: tl.tensor,
    table_rows: tl.tensor,
    slot_map: tl.tensor,
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    tree_mask: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    arrivals: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    slots: tl.tensor,
    batch_size: tl.tensor,
    share_target: tl.tensor,
    min_share: tl.tensor,
    table_stride: tl.tensor,
    mask_width: tl.tensor,
    query_stride: tl.tensor,
    out_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    new_key_stride: tl.tensor,
    new_value_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    scale_log2: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    MAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
    MERGE_HERE: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    MERGE_SHARES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid: (NUM_KV_HEADS, upper bound of the number of work items).

    QUERIES: new tokens of every request; 0 where `query_lens` says how many each has.
    """
    # What the only query of a request sees needs no mask, except a tree's.
    ONE_QUERY: tl.constexpr = QUERIES == 1 and not TREE
    if PDL and MERGE_HERE:
        # What follows is no merging kernel, which needs the room that these programs take.
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    item, request, local, num_shares, shared_before, query_start = work_item(
        tl.program_id(1), seq_lens, query_lens, batch_size, share_target, min_share,
        GROUP, BLOCK_M, BATCH_BLOCK, WINDOW, QUERIES, SHARED,
    )  # fmt: skip
    if (item < 0) | (request >= batch_size):
        return
    query_start = query_start.to(tl.int64)
    seq_len = tl.load(seq_lens + request).to(tl.int32)
    num_queries = QUERIES
    if QUERIES == 0:
        num_queries = tl.load(query_lens + request).to(tl.int32)
    row_block = local // num_shares
    share = local % num_shares

    # Rows: (new token, query head of the group), packed.
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    row_live = token < num_queries
    # The kernel before this one wrote queries and keys: wait for it. Lengths and table are older.
    if PDL:
        tl.extra.cuda.gdc_wait()
    feature = tl.arange(0, BLOCK_D)
    row_offset = (head * GROUP + rows % GROUP) * HEAD_DIM
    in_row = row_live[:, None] & (feature < HEAD_DIM)[None, :]
    query_ptrs = queries + (query_start + token) * query_stride + row_offset
    if HALF > 0 and QUERIES > 1:
        position = tl.load(positions + query_start + token, mask=row_live, other=0)
        query = rotated_heads(
            query_ptrs, position, in_row, cos_sin, cos_sin_stride, BLOCK_D, HALF
        )  # fmt: skip
    else:
        query = tl.load(query_ptrs[:, None] + feature[None, :], mask=in_row, other=0.0)
        if HALF > 0:
            # One position: angles for one head are enough.
            partner, cos, sin = angles_of(
                positions + query_start, cos_sin, cos_sin_stride, BLOCK_D, HALF
            )
            second = tl.load(query_ptrs[:, None] + partner[None, :], mask=in_row, other=0.0)
            query = rotated(query, second, cos[None, :], sin[None, :])

    # Keys: [low, high) for the row block, [start, end) for this share; below `plain_end` every row
    # sees every key.
    prefix_len = seq_len - num_queries
    query_pos = prefix_len + token
    if TREE and WINDOW > 0:
        # A tree's tokens lie behind each other in memory, not in the sequence.
        query_pos = tl.load(positions + query_start + token, mask=row_live, other=0).to(tl.int32)
    low, high, plain_end = keys_of_rows(
        row_block, seq_len, prefix_len, num_queries, mask_width, GROUP, BLOCK_M, WINDOW, TREE
    )
    start = low
    end = high
    if SHARED:
        keys_per_share = (high - low + num_shares - 1) // num_shares
        keys_per_share = (keys_per_share + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        start = low + share * keys_per_share
        end = tl.minimum(start + keys_per_share, high)
    plain_end = start + tl.maximum(tl.minimum(plain_end, end) - start, 0) // BLOCK_N * BLOCK_N

    table_row = table + tl.load(table_rows + request).to(tl.int64) * table_stride
    key_base = key_buffer + head * HEAD_DIM
    value_base = value_buffer + head * HEAD_DIM
    if HALF > 0:
        # Whoever reads a new key writes it first. Row blocks of one head write the same.
        if QUERIES > 1:
            if (prefix_len < end) & (start < end):
                write_new(
                    key_base, value_base, new_keys + head * HEAD_DIM, new_values + head * HEAD_DIM,
                    positions, slots, slot_map, cos_sin, query_start, start - prefix_len,
                    end - prefix_len, key_stride, value_stride, new_key_stride, new_value_stride,
                    cos_sin_stride, QUERIES, NEW_BLOCK, HEAD_DIM, BLOCK_D, HALF, MAPPED,
                )  # fmt: skip
        elif (end == high) & (start < end):
            write_one(
                key_base, value_base, new_keys + query_start * new_key_stride + head * HEAD_DIM,
                new_values + query_start * new_value_stride + head * HEAD_DIM, slots + query_start,
                slot_map, partner, cos, sin, key_stride, value_stride, HEAD_DIM, BLOCK_D, MAPPED,
            )  # fmt: skip
        tl.debug_barrier()
    acc, row_max, row_sum = _attend_range(
        query, start, plain_end, end, query_pos, token, row_live, query_start, seq_len, prefix_len,
        tree_mask, mask_width, table_row, slot_map, key_base, value_base, key_stride, value_stride,
        scale_log2, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, WINDOW, TREE, ONE_QUERY, MAPPED, PRECISION,
        ONE_LOOP, MASKED_STAGES,
    )  # fmt: skip
    if PDL and not MERGE_HERE:
        tl.extra.cuda.gdc_launch_dependents()
    acc = acc / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]

    out_ptrs = out + (query_start + token) * out_stride + row_offset
    if not SHARED:
        tl.store(out_ptrs[:, None] + feature[None, :], acc.to(out.dtype.element_ty), mask=in_row)
    elif num_shares == 1:
        tl.store(out_ptrs[:, None] + feature[None, :], acc.to(out.dtype.element_ty), mask=in_row)
    else:
        line = (item.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(
            partial_out + line[:, None] * BLOCK_D + feature[None, :], acc, mask=row_live[:, None]
        )
        tl.store(partial_lse + line, row_max + tl.log2(row_sum))
        if MERGE_HERE:
            # Row blocks in several shares are at most share_target / 2: so many counters a head.
            counter = arrivals + (shared_before + row_block) * NUM_KV_HEADS + head
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_shares - 1:
                tl.store(counter, 0)
                _merge_row_block(
                    out + query_start * out_stride, out_stride, partial_out, partial_lse,
                    item - share, row_block, num_shares, num_queries, head, NUM_KV_HEADS, GROUP,
                    HEAD_DIM, BLOCK_D, BLOCK_M, ONE_QUERY, MERGE_ROWS, MERGE_SHARES,
                )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size", "share_target", "min_share"])
def merge_shares_kernel(
    out: tl.tensor,
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    partial_out: tl.tensor,
    partial_lse: tl.tensor,
    batch_size: tl.tensor,
    share_target: tl.tensor,
    min_share: tl.tensor,
    out_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MERGE_SHARES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Weighted mean of the shares' outputs. Grid: (NUM_KV_HEADS, new tokens)."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    lanes = tl.arange(0, BATCH_BLOCK)
    all_seqs, all_queries, all_blocks = all_requests(
        seq_lens, query_lens, batch_size, GROUP, BLOCK_M, BATCH_BLOCK, QUERIES
    )
    all_shares = shares_of_all(all_seqs, all_queries, all_blocks, share_target, min_share, WINDOW)
    request = tl.sum((tl.cumsum(all_queries, 0) <= token).to(tl.int32), 0)
    before = lanes < request
    num_shares = tl.sum(tl.where(lanes == request, all_shares, 0), 0)
    # Also where there is nothing to merge: whoever comes next relies on the other kernel's end.
    if PDL:
        tl.extra.cuda.gdc_wait()
    # Of padding tokens behind the last request nobody has computed anything.
    if num_shares <= 1:
        return
    query_start = tl.sum(tl.where(before, all_queries, 0), 0)
    first_item = tl.sum(tl.where(before, all_blocks * all_shares, 0), 0)
    member = tl.arange(0, GROUP_BLOCK)
    rows = (token - query_start) * GROUP + member
    row_item = first_item + rows // BLOCK_M * num_shares
    acc = _merged_rows(
        partial_out, partial_lse, row_item, rows % BLOCK_M, member < GROUP, num_shares, head,
        NUM_KV_HEADS, BLOCK_D, BLOCK_M, GROUP_BLOCK, MERGE_SHARES,
    )  # fmt: skip
    feature = tl.arange(0, BLOCK_D)
    out_row = out + token.to(tl.int64) * out_stride + (head * GROUP + member) * HEAD_DIM
    tl.store(
        out_row[:, None] + feature[None, :],
        acc.to(out.dtype.element_ty),
        mask=(member < GROUP)[:, None] & (feature < HEAD_DIM)[None, :],
    )
