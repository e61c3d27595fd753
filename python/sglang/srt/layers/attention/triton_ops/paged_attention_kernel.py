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
def _rotated(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Features times cosine plus their partners times (signed) sine, rounded like the features."""
    return (first.to(tl.float32) * cos + second.to(tl.float32) * sin).to(first.dtype)


@triton.jit
def _partners(feature: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """(feature that each is rotated with, number of the pair), pairs being (i, i + HALF).

    Features behind 2 * HALF are their own partners.
    """
    is_second = (feature >= HALF) & (feature < 2 * HALF)
    partner = tl.where(feature < HALF, feature + HALF, feature)
    partner = tl.where(is_second, feature - HALF, partner)
    pair = tl.where(is_second, feature - HALF, feature)
    return partner, pair


@triton.jit
def _rotated_heads(
    heads: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    cos_sin: tl.tensor,
    cos_sin_stride: tl.tensor,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """What lies at `heads` [rows], each rotated by its own position; zeros where not `live`."""
    feature = tl.arange(0, BLOCK_D)
    partner, pair = _partners(feature, HALF)
    angles = cos_sin + position[:, None] * cos_sin_stride + pair[None, :]
    has_angle = live & (feature < 2 * HALF)[None, :]
    cos = tl.load(angles, mask=has_angle, other=1.0)
    sin = tl.load(angles + HALF, mask=has_angle, other=0.0)
    sin = tl.where((feature < HALF)[None, :], -sin, sin)
    first = tl.load(heads[:, None] + feature[None, :], mask=live, other=0.0)
    second = tl.load(heads[:, None] + partner[None, :], mask=live, other=0.0)
    return _rotated(first, second, cos, sin)


@triton.jit
def _write_new(
    key_base: tl.tensor,
    value_base: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    slot_map: tl.tensor,
    cos_sin: tl.tensor,
    query_start: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    new_key_stride: tl.tensor,
    new_value_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    QUERIES: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    """One head's keys, rotated, and values of new tokens [first, last) of a request to the pool."""
    feature = tl.arange(0, BLOCK_D)
    new = tl.arange(0, NEW_BLOCK)
    is_meant = (new < QUERIES) & (new >= first) & (new < last)
    live = is_meant[:, None] & (feature < HEAD_DIM)[None, :]
    line = query_start + new
    slot = tl.load(slots + line, mask=is_meant, other=0)
    if MAPPED:
        slot = tl.load(slot_map + slot, mask=is_meant, other=0).to(tl.int64)
    position = tl.load(positions + line, mask=is_meant, other=0)
    values = new_values + line * new_value_stride
    value = tl.load(values[:, None] + feature[None, :], mask=live, other=0.0)
    key = _rotated_heads(
        new_keys + line * new_key_stride, position, live, cos_sin, cos_sin_stride, BLOCK_D, HALF
    )  # fmt: skip
    key_rows = key_base + slot * key_stride
    value_rows = value_base + slot * value_stride
    buffer_type = key_base.dtype.element_ty
    tl.store(key_rows[:, None] + feature[None, :], key.to(buffer_type), mask=live)
    tl.store(value_rows[:, None] + feature[None, :], value.to(buffer_type), mask=live)


@triton.jit
def _shares(
    all_seqs: tl.tensor,
    all_queries: tl.tensor,
    all_blocks: tl.tensor,
    share_target: tl.tensor,
    min_share: tl.tensor,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    """Into how many shares the keys of every request's row blocks are divided."""
    attended = all_seqs.to(tl.int64)
    if WINDOW > 0:
        attended = tl.minimum(attended, WINDOW + all_queries - 1)
    total_work = tl.maximum(tl.sum(all_blocks * attended, 0), 1)
    # In proportion to the work, rounded down: the sum stays below share_target, plus one item for
    # each row block that would have got none.
    shares = attended * share_target // total_work
    shares = tl.minimum(shares, (attended + min_share - 1) // min_share)
    return tl.maximum(shares, 1).to(tl.int32)


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


@triton.jit(
    do_not_specialize=["batch_size", "share_target", "min_share", "table_stride", "mask_width"],
)
def paged_attention_kernel(  # noqa: PLR0915 - a kernel is one program
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
    # Row blocks of every request, where QUERIES tells.
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    if PDL and MERGE_HERE:
        # What follows is no merging kernel, which needs the room that these programs take.
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    item = tl.program_id(1)

    # Which request, row block and share of its keys this program has.
    lanes = tl.arange(0, BATCH_BLOCK)
    in_batch = lanes < batch_size
    all_seqs = tl.load(seq_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    if QUERIES > 0:
        all_queries = tl.where(in_batch, QUERIES, 0)
    else:
        all_queries = tl.load(query_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    all_blocks = (all_queries * GROUP + BLOCK_M - 1) // BLOCK_M
    if QUERIES == 0:
        even = False
    elif not SHARED:
        even = True
    else:
        # Whether nobody has enough of the work for a second share; cheaper than everybody's number.
        attended = all_seqs.to(tl.int64)
        if WINDOW > 0:
            attended = tl.minimum(attended, WINDOW + QUERIES - 1)
        total_work = tl.sum(attended, 0) * BLOCKS
        even = tl.max(attended, 0) * share_target < 2 * total_work
    if even:
        # Many requests of about the same length: no need to add up what the others have.
        total_items = batch_size * BLOCKS
        request = item // BLOCKS
        local = item % BLOCKS
        num_shares = 1
        shared_before = 0
        query_start = request * QUERIES
    else:
        if SHARED:
            all_shares = _shares(all_seqs, all_queries, all_blocks, share_target, min_share, WINDOW)
        else:
            all_shares = tl.full((BATCH_BLOCK,), 1, tl.int32)
        all_items = all_blocks * all_shares
        total_items = tl.sum(all_items, 0)
        # Last rows first: under a causal mask they have most to do.
        item = total_items - 1 - item
        request = tl.sum((tl.cumsum(all_items, 0) <= item).to(tl.int32), 0)
        before = lanes < request
        local = item - tl.sum(tl.where(before, all_items, 0), 0)
        num_shares = tl.sum(tl.where(lanes == request, all_shares, 0), 0)
        shared_before = tl.sum(tl.where(before & (all_shares > 1), all_blocks, 0), 0)
        query_start = tl.sum(tl.where(before, all_queries, 0), 0)
    # Beyond the last item there is nothing to do.
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
        query = _rotated_heads(
            query_ptrs, position, in_row, cos_sin, cos_sin_stride, BLOCK_D, HALF
        )  # fmt: skip
    else:
        query = tl.load(query_ptrs[:, None] + feature[None, :], mask=in_row, other=0.0)
        if HALF > 0:
            # One position: angles for one head are enough.
            partner, pair = _partners(feature, HALF)
            angles = cos_sin + tl.load(positions + query_start) * cos_sin_stride + pair
            cos = tl.load(angles, mask=feature < 2 * HALF, other=1.0)
            sin = tl.load(angles + HALF, mask=feature < 2 * HALF, other=0.0)
            sin = tl.where(feature < HALF, -sin, sin)
            second = tl.load(query_ptrs[:, None] + partner[None, :], mask=in_row, other=0.0)
            query = _rotated(query, second, cos[None, :], sin[None, :])
    prefix_len = seq_len - num_queries
    query_pos = prefix_len + token
    first_token = row_block * BLOCK_M // GROUP
    last_token = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)

    # Keys: [low, high) for the row block, [start, end) for this share; below `plain_end` every row
    # sees every key.
    low = 0
    high = tl.maximum(prefix_len + last_token + 1, 0)
    plain_end = prefix_len + first_token + 1
    mask_lines = token
    mask_start = prefix_len
    if TREE:
        high = seq_len
        mask_start = seq_len - mask_width
        plain_end = mask_start
        tree_mask += query_start * mask_width - mask_start
        mask_lines = tl.where(row_live, token * mask_width, 0)
    if WINDOW > 0:
        low = tl.maximum(prefix_len + first_token - WINDOW + 1, 0)
        plain_end = 0
        if TREE:
            # A tree's tokens lie behind each other in memory, not in the sequence.
            query_pos = tl.load(positions + query_start + token, mask=row_live, other=0).to(
                tl.int32
            )
            low = tl.maximum(prefix_len - WINDOW + 1, 0)
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
                _write_new(
                    key_base, value_base, new_keys + head * HEAD_DIM, new_values + head * HEAD_DIM,
                    positions, slots, slot_map, cos_sin, query_start, start - prefix_len,
                    end - prefix_len, key_stride, value_stride, new_key_stride, new_value_stride,
                    cos_sin_stride, QUERIES, NEW_BLOCK, HEAD_DIM, BLOCK_D, HALF, MAPPED,
                )  # fmt: skip
        elif (end == high) & (start < end):
            in_head = feature < HEAD_DIM
            new_key = new_keys + query_start * new_key_stride + head * HEAD_DIM
            key = tl.load(new_key + feature, mask=in_head, other=0.0)
            second_half = tl.load(new_key + partner, mask=in_head, other=0.0)
            key = _rotated(key, second_half, cos, sin)
            new_value = new_values + query_start * new_value_stride + head * HEAD_DIM
            value = tl.load(new_value + feature, mask=in_head, other=0.0)
            slot = tl.load(slots + query_start)
            if MAPPED:
                slot = tl.load(slot_map + slot).to(tl.int64)
            buffer_type = key_buffer.dtype.element_ty
            tl.store(key_base + slot * key_stride + feature, key.to(buffer_type), mask=in_head)
            tl.store(
                value_base + slot * value_stride + feature, value.to(buffer_type), mask=in_head
            )
        tl.debug_barrier()
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
                line_in_block = tl.arange(0, MERGE_ROWS)
                row = row_block * BLOCK_M + line_in_block
                live = row < num_queries * GROUP
                first_item = tl.full((MERGE_ROWS,), item - share, tl.int32)
                merged = _merged_rows(
                    partial_out, partial_lse, first_item, line_in_block, live, num_shares, head,
                    NUM_KV_HEADS, BLOCK_D, BLOCK_M, MERGE_ROWS, MERGE_SHARES,
                )  # fmt: skip
                if ONE_QUERY:
                    out_row = out + query_start * out_stride + (head * GROUP + row) * HEAD_DIM
                else:
                    out_row = out + (query_start + row // GROUP) * out_stride
                    out_row += (head * GROUP + row % GROUP) * HEAD_DIM
                tl.store(
                    out_row[:, None] + feature[None, :],
                    merged.to(out.dtype.element_ty),
                    mask=live[:, None] & (feature < HEAD_DIM)[None, :],
                )


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
    in_batch = lanes < batch_size
    all_seqs = tl.load(seq_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    if QUERIES > 0:
        all_queries = tl.where(in_batch, QUERIES, 0)
    else:
        all_queries = tl.load(query_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    all_blocks = (all_queries * GROUP + BLOCK_M - 1) // BLOCK_M
    all_shares = _shares(all_seqs, all_queries, all_blocks, share_target, min_share, WINDOW)
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
