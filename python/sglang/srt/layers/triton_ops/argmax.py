"""Largest entry of every row of the logits, in two launches, so that few rows fill the device.

In the same pass: whether the row holds NaN or +inf, which stands as +inf among the blocks' maxima.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _block_argmax_kernel(
    x: tl.tensor,
    best: tl.tensor,
    best_index: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + column, mask=column < width, other=float("-inf"))
    wide = values.to(tl.float32)
    value, index = tl.max(wide, 0, return_indices=True)
    # A comparison with NaN is false.
    is_usable = tl.min((wide < float("inf")).to(tl.int32), 0)
    value = tl.where(is_usable != 0, value, float("inf"))
    place = row * tl.num_programs(1) + block
    tl.store(best + place, value)
    tl.store(best_index + place, block * BLOCK + index)


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_argmax_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    out: tl.tensor,
    unusable: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    values = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    tl.store(unusable + row, tl.max(values, 0) == float("inf"))
    winner = tl.minimum(tl.argmax(values, 0), num_blocks - 1)
    column = tl.load(best_index + row * num_blocks + winner)
    # In a row with NaN the padding may win: stay within the row, others index with the result.
    tl.store(out + row, tl.minimum(column, width - 1).to(tl.int64))


def argmax_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, width], rows may be strided -> (largest entries' places int64 [n], unusable bool [n]).

    The first of equal entries; in an unusable row, one with NaN or +inf, some place within it.
    """
    num_rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    unusable = torch.empty(num_rows, dtype=torch.bool, device=x.device)
    if num_rows == 0:
        return out, unusable
    num_blocks = triton.cdiv(width, _BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x.device)
    best_index = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=x.device)
    _block_argmax_kernel[(num_rows, num_blocks)](
        x, best, best_index, width, x.stride(0), BLOCK=_BLOCK, num_warps=8
    )
    _merge_argmax_kernel[(num_rows,)](
        best,
        best_index,
        out,
        unusable,
        num_blocks,
        width,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return out, unusable
