"""Largest entry of every row of the logits, in two launches, so that few rows fill the device."""

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
    value, index = tl.max(values.to(tl.float32), 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, value)
    tl.store(best_index + place, block * BLOCK + index)


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_argmax_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    BLOCKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    values = tl.load(best + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    winner = tl.minimum(tl.argmax(values, 0), num_blocks - 1)
    column = tl.load(best_index + row * num_blocks + winner)
    # In a row with NaN the padding may win: stay within the row, others index with the result.
    tl.store(out + row, tl.minimum(column, width - 1).to(tl.int64))


def argmax_rows(x: torch.Tensor) -> torch.Tensor:
    """x [n, width], rows may be strided -> int64 [n]; the first of equal entries."""
    num_rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    if num_rows == 0:
        return out
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
        num_blocks,
        width,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
    )
    return out
