"""Products of tokens with the weights of their experts, on CUDA, without asking the host.

Called by `cuda_ops.py`. A *pair* is a token with one of its experts; pairs are sorted by expert,
and a program multiplies up to `block_pairs` pairs of one expert with some of its output features.
Which program has which pairs is found on the device, and every launch has the same shape whatever
the router chose, so a captured step stays right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Ids that a program of the plan looks at in one go.
_PLAN_BLOCK = 1024
_MIN_PAIRS, _MAX_PAIRS = 16, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Where the pairs of a batch are. P = tokens * experts per token."""

    expert_ids: torch.Tensor  # int64 [P], of every pair: token after token
    order: torch.Tensor  # int32 [P], pairs sorted by expert
    # int32 [1 + blocks]: a counter, then places in `order` where a block begins; -1: no block.
    blocks: torch.Tensor
    block_pairs: int


@triton.jit(do_not_specialize=["num_pairs"])
def _plan_kernel(
    expert_ids: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    num_pairs: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
) -> None:
    """Grid: experts. Sorts the expert's pairs, in their order, and announces its blocks."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    place = 0
    for start in tl.range(0, num_pairs, BLOCK):
        pair = start + lanes
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=1 << 30)
        place += tl.sum((ids < expert).to(tl.int32), 0)
    rank = 0
    for start in tl.range(0, num_pairs, BLOCK):
        pair = start + lanes
        ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=1 << 30)
        mine = (ids == expert).to(tl.int32)
        own_rank = rank + tl.cumsum(mine, 0) - 1
        tl.store(order + place + own_rank, pair, mask=mine != 0)
        rank += tl.sum(mine, 0)
        # In any order: a block's result does not depend on the others. The counter starts at -1.
        leads = (mine != 0) & (own_rank % BLOCK_PAIRS == 0)
        slot = tl.atomic_add(blocks + 0 * lanes, 1, mask=leads) + 1
        tl.store(blocks + 1 + slot, place + own_rank, mask=leads)


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_product_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    expert_ids: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    factors: tl.tensor,
    num_pairs: tl.tensor,
    num_out: tl.tensor,
    x_stride: tl.tensor,
    expert_stride: tl.tensor,
    weight_stride: tl.tensor,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Grid: (blocks of output features, blocks of pairs). See `expert_product`."""
    first = tl.load(blocks + 1 + tl.program_id(1))
    if first < 0:
        return
    place = first + tl.arange(0, BLOCK_PAIRS)
    pair = tl.load(order + place, mask=place < num_pairs, other=0)
    expert = tl.load(expert_ids + tl.load(order + first))
    live = (place < num_pairs) & (tl.load(expert_ids + pair) == expert)
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    row = place if LAST else pair // TOP_K
    rows = x + tl.where(live, row, 0).to(tl.int64)[:, None] * x_stride
    # Behind the end the last feature is computed again: cheaper than masked loads.
    line = tl.minimum(feature, num_out - 1).to(tl.int64) * weight_stride
    lines = weight + expert * expert_stride + line[:, None]
    EVEN: tl.constexpr = WIDTH % BLOCK_IN == 0
    acc = tl.zeros((BLOCK_PAIRS, BLOCK_OUT), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_IN):
        if EVEN:
            left = tl.load(rows + (start + column)[None, :])
            right = tl.load(lines + (start + column)[None, :])
        else:
            inside = (start + column < WIDTH)[None, :]
            left = tl.load(rows + (start + column)[None, :], mask=inside, other=0.0)
            right = tl.load(lines + (start + column)[None, :], mask=inside, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
    if LAST:
        acc = acc * tl.load(factors + pair, mask=live, other=0.0).to(tl.float32)[:, None]
    target = pair if LAST else place
    tl.store(
        out + target.to(tl.int64)[:, None] * num_out + feature[None, :],
        acc.to(out.dtype.element_ty),
        mask=live[:, None] & (feature < num_out)[None, :],
    )


def plan_experts(expert_ids: torch.Tensor, num_experts: int) -> ExpertPlan:
    """Sort the pairs of `expert_ids` int64 [n, k], n > 0, by expert; no synchronisation."""
    flat = expert_ids.reshape(-1)
    num_pairs = flat.shape[0]
    mean_pairs = triton.next_power_of_2(max(num_pairs // num_experts, 1))
    block_pairs = min(max(mean_pairs, _MIN_PAIRS), _MAX_PAIRS)
    # Every expert may leave its last block incomplete; a block has a pair at least.
    num_blocks = min(num_pairs, num_pairs // block_pairs + num_experts)
    order = torch.empty(num_pairs, dtype=torch.int32, device=flat.device)
    blocks = torch.full((1 + num_blocks,), -1, dtype=torch.int32, device=flat.device)
    # A lane for every thread at least: none of the counting is done twice.
    block = min(max(triton.next_power_of_2(num_pairs), 128), _PLAN_BLOCK)
    _plan_kernel[(num_experts,)](
        flat, order, blocks, num_pairs, BLOCK=block, BLOCK_PAIRS=block_pairs, num_warps=4
    )
    return ExpertPlan(expert_ids=flat, order=order, blocks=blocks, block_pairs=block_pairs)


def expert_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    plan: ExpertPlan,
    top_k: int,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each pair's row times its expert's weight [E, out, in] (rows contiguous): [P, out].

    Without `factors`: x [n, in] holds a row a token, the result a row for each place of
    `plan.order`. With `factors` [P], one a pair: x [P, in] is such a result, and rows of what comes
    back, times their factor, are the pairs in their own order. Sums in float32.
    """
    num_pairs = plan.order.shape[0]
    num_out, width = weight.shape[1:]
    if x.stride(1) != 1 or weight.stride(2) != 1 or x.shape[1] != width:
        raise ValueError(f"x {tuple(x.shape)} and weights {tuple(weight.shape)} do not fit")
    out = torch.empty((num_pairs, num_out), dtype=x.dtype, device=x.device)
    is_wide = x.dtype == torch.float32
    block_out = min(triton.next_power_of_2(num_out), 32 if is_wide else 64)
    block_in = min(triton.next_power_of_2(width), 32 if is_wide else 128)
    _expert_product_kernel[(triton.cdiv(num_out, block_out), plan.blocks.shape[0] - 1)](
        x,
        weight,
        out,
        plan.expert_ids,
        plan.order,
        plan.blocks,
        x if factors is None else factors,
        num_pairs,
        num_out,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        WIDTH=width,
        TOP_K=top_k,
        LAST=factors is not None,
        BLOCK_PAIRS=plan.block_pairs,
        BLOCK_OUT=max(block_out, 16),
        BLOCK_IN=max(block_in, 16),
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=4,
        num_stages=3,
    )
    return out
