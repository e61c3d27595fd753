"""Largest entry of every row of the logits, in two launches, so that few rows fill the device.

In the same pass: whether the row holds NaN or +inf, which stands as +inf among the blocks' maxima.
Kernels that go on with the result do the second half themselves: `block_maxima`, `merge_maxima`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early

_BLOCK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMaxima:
    """The first half: the largest entry of every block of every row."""

    values: torch.Tensor  # float32 [n, blocks]; +inf in a block with NaN or +inf
    places: torch.Tensor  # int32 [n, blocks], in the row
    width: int  # of a row

    @property
    def num_blocks(self) -> int:
        return int(self.values.shape[1])

    @property
    def padded_blocks(self) -> int:
        """What `merge_maxima` takes as BLOCKS."""
        return int(triton.next_power_of_2(self.num_blocks))


@triton.jit
def _block_argmax_kernel(
    x: tl.tensor,
    best: tl.tensor,
    best_index: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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


@triton.jit
def merge_maxima(
    best: tl.tensor,
    best_index: tl.tensor,
    rows: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of rows int64 [m]: (places of the largest int64 [m], whether they hold NaN or +inf [m])."""
    block = tl.arange(0, BLOCKS)[None, :]
    start = rows[:, None] * num_blocks
    values = tl.load(best + start + block, mask=block < num_blocks, other=float("-inf"))
    winner = tl.minimum(tl.argmax(values, 1), num_blocks - 1)
    place = tl.load(best_index + rows * num_blocks + winner)
    # In a row with NaN the padding may win: stay within the row, others index with the result.
    return tl.minimum(place, width - 1).to(tl.int64), tl.max(values, 1) == float("inf")


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_argmax_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    out: tl.tensor,
    unusable: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    place, is_unusable = merge_maxima(best, best_index, rows, num_blocks, width, BLOCKS)
    tl.store(unusable + rows, is_unusable)
    tl.store(out + rows, place)


def block_maxima(x: torch.Tensor) -> BlockMaxima:
    """x [n, width], rows may be strided, n > 0. Raises ValueError where a row is not contiguous."""
    num_rows, width = x.shape
    if x.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    num_blocks = triton.cdiv(width, _BLOCK)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x.device)
    best_index = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=x.device)
    early = launch_early(x.device, num_rows)
    _block_argmax_kernel[(num_rows, num_blocks)](
        x,
        best,
        best_index,
        width,
        x.stride(0),
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=8,
        **({"launch_pdl": True} if early else {}),
    )
    return BlockMaxima(values=best, places=best_index, width=width)


def argmax_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, width], rows may be strided -> (largest entries' places int64 [n], unusable bool [n]).

    The first of equal entries; in an unusable row, one with NaN or +inf, some place within it.
    """
    num_rows = x.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    unusable = torch.empty(num_rows, dtype=torch.bool, device=x.device)
    if num_rows == 0:
        return out, unusable
    maxima = block_maxima(x)
    early = launch_early(x.device, num_rows)
    _merge_argmax_kernel[(num_rows,)](
        maxima.values,
        maxima.places,
        out,
        unusable,
        maxima.num_blocks,
        maxima.width,
        BLOCKS=maxima.padded_blocks,
        EARLY=early,
        num_warps=1,
        **({"launch_pdl": True} if early else {}),
    )
    return out, unusable
