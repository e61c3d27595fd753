"""How the work of an attention launch is divided: row blocks, shares of the keys, work items.

Parts of `paged_attention_kernel` and of the kernel that merges the shares, compiled into them. All
of it follows from the lengths on the device, so a captured launch stays right when they change.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def all_requests(
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    batch_size: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
) -> tl.tensor:
    """[BATCH_BLOCK] (lengths, new tokens, row blocks of a KV head); 0 behind the last request."""
    lanes = tl.arange(0, BATCH_BLOCK)
    in_batch = lanes < batch_size
    all_seqs = tl.load(seq_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    if QUERIES > 0:
        all_queries = tl.where(in_batch, QUERIES, 0)
    else:
        all_queries = tl.load(query_lens + lanes, mask=in_batch, other=0).to(tl.int32)
    return all_seqs, all_queries, (all_queries * GROUP + BLOCK_M - 1) // BLOCK_M


@triton.jit
def shares_of_all(
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
def work_item(
    number: tl.tensor,
    seq_lens: tl.tensor,
    query_lens: tl.tensor,
    batch_size: tl.tensor,
    share_target: tl.tensor,
    min_share: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """What the program of this number has of a head's work.

    Returns (number of the item, negative or of no request where there is none; request; number
    within the request; shares of each of its row blocks; row blocks in several shares of the
    requests before; first new token of the request).
    """
    # Row blocks of every request, where QUERIES tells.
    BLOCKS: tl.constexpr = (QUERIES * GROUP + BLOCK_M - 1) // BLOCK_M
    lanes = tl.arange(0, BATCH_BLOCK)
    all_seqs, all_queries, all_blocks = all_requests(
        seq_lens, query_lens, batch_size, GROUP, BLOCK_M, BATCH_BLOCK, QUERIES
    )
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
    item = number
    if even:
        # Many requests of about the same length: no need to add up what the others have.
        request = item // BLOCKS
        local = item % BLOCKS
        num_shares = 1
        shared_before = 0
        query_start = request * QUERIES
    else:
        if SHARED:
            all_shares = shares_of_all(
                all_seqs, all_queries, all_blocks, share_target, min_share, WINDOW
            )
        else:
            all_shares = tl.full((BATCH_BLOCK,), 1, tl.int32)
        all_items = all_blocks * all_shares
        # Last rows first: under a causal mask they have most to do.
        item = tl.sum(all_items, 0) - 1 - item
        request = tl.sum((tl.cumsum(all_items, 0) <= item).to(tl.int32), 0)
        before = lanes < request
        local = item - tl.sum(tl.where(before, all_items, 0), 0)
        num_shares = tl.sum(tl.where(lanes == request, all_shares, 0), 0)
        shared_before = tl.sum(tl.where(before & (all_shares > 1), all_blocks, 0), 0)
        query_start = tl.sum(tl.where(before, all_queries, 0), 0)
    return item, request, local, num_shares, shared_before, query_start


@triton.jit
def keys_of_rows(
    row_block: tl.tensor,
    seq_len: tl.tensor,
    prefix_len: tl.tensor,
    num_queries: tl.tensor,
    mask_width: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
) -> tl.tensor:
    """(first key, end of the keys, end of those that all rows see) of a row block."""
    first_token = row_block * BLOCK_M // GROUP
    last_token = tl.minimum((row_block * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    low = 0
    high = tl.maximum(prefix_len + last_token + 1, 0)
    plain_end = prefix_len + first_token + 1
    if TREE:
        high = seq_len
        plain_end = seq_len - mask_width
    if WINDOW > 0:
        low = tl.maximum(prefix_len + first_token - WINDOW + 1, 0)
        plain_end = 0
        if TREE:
            low = tl.maximum(prefix_len - WINDOW + 1, 0)
    return low, high, plain_end
