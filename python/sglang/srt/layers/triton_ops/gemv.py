"""Product of a few rows with a weight on CUDA: bound by reading the weight, and built around that.

Called by `cuda_ops.py` for one token, and for a few where `is_worthwhile` says so: steps of small
batches, and the verification of a few drafts. A program owns some output features of up to four
rows and reads their weight rows whole, so that there is nothing to add up between programs. Its
first tile of the weight is on the way before the kernel that computes `x` has ended: weights must
be older than that. Of a fused gate and up weight a program owns rows of both halves, so that it can
activate and multiply their products itself: one launch less a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.activation import gated_product
from sglang.srt.layers.triton_ops.device import launch_early, num_multiprocessors

MAX_ROWS = 8
# Weight elements that one thread loads at a time (16 bytes of half precision).
_VECTOR = 8
# 8 warps with one vector each.
_MAX_BLOCK_IN = 2048
# Larger weights are multiplied faster by the library if there are more than two rows.
_MAX_ELEMENTS = 4 << 20
# As many fit, by their registers.
_PROGRAMS_PER_PROCESSOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """How a launch divides its work."""

    block_out: int  # rows of the weight a program; even where they are gated
    block_in: int  # input features an iteration
    num_warps: int
    rows: int = 1  # rows of x a program: 1, 2 or 4
    early: bool = False  # launch while the kernel before is still at work (Hopper and later)


@triton.jit
def _load_tile(
    lines: tl.tensor,
    start: tl.constexpr,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    place = lines[:, None] + (start + column)[None, :]
    if EVEN:
        return tl.load(place, eviction_policy="evict_first")
    return tl.load(
        place, mask=(start + column < WIDTH)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _sums_of_threads(
    tile: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    VECTORS: tl.constexpr,
    VECTOR: tl.constexpr,
) -> tl.tensor:
    """`tile` times a part of one row of x, summed within a thread: one sum, not a vector."""
    if EVEN:
        part = tl.load(row + place)
    else:
        part = tl.load(row + place, mask=place < WIDTH, other=0.0)
    product = tile.to(tl.float32) * part.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(product, (BLOCK_OUT, VECTORS, VECTOR)), 2)


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_out: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: blocks of the weight's rows, groups of ROWS (1, 2 or 4) rows of x.

    `out` [num_rows, num_out] is contiguous; the weight has 2 * num_out rows if GATED.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    FEATURES: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    part = tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    # Behind the ends the last feature and row are computed again: cheaper than masked loads.
    line = tl.minimum(tl.program_id(0) * FEATURES + part % FEATURES, num_out - 1)
    if GATED:
        line += part // FEATURES * num_out
    lines = weight + line.to(tl.int64) * weight_stride
    first = tl.program_id(1).to(tl.int64) * ROWS
    x += first * x_stride
    last = num_rows - 1 - first
    EVEN: tl.constexpr = WIDTH % BLOCK_IN == 0
    VECTORS: tl.constexpr = BLOCK_IN // VECTOR
    tile = _load_tile(lines, 0, column, WIDTH, EVEN)
    if EARLY:
        # The kernel before this one wrote `x`.
        tl.extra.cuda.gdc_wait()
    acc0 = tl.zeros((BLOCK_OUT, VECTORS), tl.float32)
    acc1 = tl.zeros((BLOCK_OUT, VECTORS), tl.float32)
    acc2 = tl.zeros((BLOCK_OUT, VECTORS), tl.float32)
    acc3 = tl.zeros((BLOCK_OUT, VECTORS), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK_IN):
        place = start + column
        current = tile
        if start + BLOCK_IN < WIDTH:
            tile = _load_tile(lines, start + BLOCK_IN, column, WIDTH, EVEN)
        acc0 += _sums_of_threads(current, x, place, WIDTH, EVEN, BLOCK_OUT, VECTORS, VECTOR)
        if ROWS > 1:
            row = x + tl.minimum(1, last) * x_stride
            acc1 += _sums_of_threads(current, row, place, WIDTH, EVEN, BLOCK_OUT, VECTORS, VECTOR)
        if ROWS > 2:
            row = x + tl.minimum(2, last) * x_stride
            acc2 += _sums_of_threads(current, row, place, WIDTH, EVEN, BLOCK_OUT, VECTORS, VECTOR)
            row = x + tl.minimum(3, last) * x_stride
            acc3 += _sums_of_threads(current, row, place, WIDTH, EVEN, BLOCK_OUT, VECTORS, VECTOR)
    # The sums of all rows together, so that the warps meet only once.
    if ROWS == 1:
        total = tl.sum(acc0, 1)[:, None]
    elif ROWS == 2:
        total = tl.sum(tl.join(acc0, acc1), 1)
    else:
        pairs = tl.join(tl.join(acc0, acc2), tl.join(acc1, acc3))
        total = tl.reshape(tl.sum(pairs, 1), (BLOCK_OUT, ROWS))
    if HAS_BIAS:
        total += tl.load(bias + line[:, None]).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    if GATED:
        halves = tl.permute(tl.reshape(result, (2, FEATURES, ROWS)), (1, 2, 0))
        gate, up = tl.split(halves)
        result = gated_product(gate, up, False)
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    number = tl.arange(0, ROWS)[None, :]
    tl.store(
        out + (first + number) * num_out + feature[:, None],
        result,
        mask=(feature < num_out)[:, None] & (number <= last),
    )


def is_worthwhile(num_rows: int, num_out: int, width: int) -> bool:
    """Whether this is faster than the library's product; weight [num_out, width]; measured."""
    if not 1 <= num_rows <= MAX_ROWS:
        return False
    return num_rows <= 2 or num_out * width <= _MAX_ELEMENTS


def choose_config(num_rows: int, num_out: int, width: int, device: torch.device) -> GemvConfig:
    """Block sizes from the number of rows of x and the shape of the weight, [num_out, width]."""
    block_in = max(min(triton.next_power_of_2(width), _MAX_BLOCK_IN), _VECTOR)
    num_warps = max(1, min(8, block_in // (32 * _VECTOR)))
    early = launch_early(device, 1)
    if num_rows > 4:
        warps = 1 if width <= 1024 else 2
        return GemvConfig(block_out=2, block_in=block_in, num_warps=warps, rows=4, early=early)
    if num_rows > 1:
        # Two rows a program and the weight from the cache once more, so that more are at work.
        return GemvConfig(block_out=4, block_in=block_in, num_warps=num_warps, rows=2, early=early)
    slots = _PROGRAMS_PER_PROCESSOR * num_multiprocessors(device)
    # Larger blocks are faster but for a last round of programs that leaves the device half empty.
    waste = {
        block_out: triton.cdiv(num_out, block_out * slots) * block_out * slots / num_out
        for block_out in (4, 8)
    }
    return GemvConfig(
        block_out=8 if waste[8] < 1.02 * waste[4] else 4,
        block_in=block_in,
        num_warps=num_warps,
        early=early,
    )


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    config: GemvConfig | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x [n, in] times weight [out, in] (both with contiguous rows), plus bias [out]: [n, out].

    `gated`: silu(first half) * second half of that, [n, out / 2], rounded as by two operations. Any
    n >= 1 is right, few are fast. Sums in float32; the result is like x unless `out_dtype` says
    otherwise. Raises ValueError for another layout.
    """
    num_lines, width = weight.shape
    num_rows = x.shape[0]
    if x.shape[1:] != (width,) or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if gated and num_lines % 2:
        raise ValueError(f"a weight {tuple(weight.shape)} has no two halves")
    num_out = num_lines // 2 if gated else num_lines
    out = torch.empty((num_rows, num_out), dtype=out_dtype or x.dtype, device=x.device)
    config = config or choose_config(num_rows, num_lines, width, x.device)
    early = {"launch_pdl": True} if config.early else {}
    gemv_kernel[(triton.cdiv(num_lines, config.block_out), triton.cdiv(num_rows, config.rows))](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        WIDTH=width,
        ROWS=config.rows,
        BLOCK_OUT=config.block_out,
        BLOCK_IN=config.block_in,
        VECTOR=_VECTOR,
        HAS_BIAS=bias is not None,
        GATED=gated,
        EARLY=config.early,
        num_warps=config.num_warps,
        **early,
    )
    return out
