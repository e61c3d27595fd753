"""Product of a few rows with a small weight on CUDA, where a launch costs as much as the reading.

Called by `cuda_ops.py` for up to `MAX_ROWS` tokens where `gemv.py` does not pay: more rows of small
models, and the head of a vocabulary. A program owns some output features and reads their weight
rows whole, so that there is nothing to add up between programs; it is launched while the kernel
before is still at work. The rows of `x` are padded to the 16 that the matrix units want, which
costs nothing while the weight is on its way. With wide rows the library, which splits them, is
faster, but for a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early

MAX_ROWS = 16
_MAX_WIDTH = 2048
_MAX_ELEMENTS = 4 << 20
# So many features fill the device whatever their width is: the head of a vocabulary.
_MANY_FEATURES = 32768
# Fewest rows of a tile of the matrix units.
_TILE_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SkinnyConfig:
    """How a launch divides its work."""

    block_out: int  # output features a program, at least 16
    block_in: int  # input features an iteration
    num_warps: int
    num_stages: int
    early: bool = False  # launch while the kernel before is still at work (Hopper and later)


@triton.jit(do_not_specialize=["num_rows", "num_out"])
def skinny_kernel(
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
    NUM_STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: blocks of output features. out [num_rows, num_out] contiguous."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_IN)
    # Behind the ends the last feature and row are computed again: cheaper than masked loads.
    lines = weight + tl.minimum(feature, num_out - 1).to(tl.int64)[:, None] * weight_stride
    rows = x + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * x_stride
    if EARLY:
        # The kernel before this one wrote `x`.
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    EVEN: tl.constexpr = WIDTH % BLOCK_IN == 0
    for start in tl.range(0, WIDTH, BLOCK_IN, num_stages=NUM_STAGES):
        place = start + column
        if EVEN:
            tile = tl.load(lines + place[None, :], eviction_policy="evict_first")
            part = tl.load(rows + place[:, None])
        else:
            tile = tl.load(
                lines + place[None, :],
                mask=(place < WIDTH)[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            part = tl.load(rows + place[:, None], mask=(place < WIDTH)[:, None], other=0.0)
        acc = tl.dot(tile, part, acc)
    if HAS_BIAS:
        acc += tl.load(bias + feature, mask=feature < num_out, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out + row[None, :].to(tl.int64) * num_out + feature[:, None],
        acc.to(out.dtype.element_ty),
        mask=(row < num_rows)[None, :] & (feature < num_out)[:, None],
    )


def is_worthwhile(num_rows: int, num_out: int, width: int) -> bool:
    """Whether this is faster than the library's product; weight [num_out, width]."""
    if not 1 < num_rows <= MAX_ROWS:
        return False
    is_small = width <= _MAX_WIDTH and num_out * width <= _MAX_ELEMENTS
    return is_small or num_out >= _MANY_FEATURES


def choose_config(num_out: int, width: int, device: torch.device) -> SkinnyConfig:
    """Block sizes from the shape of the weight, [num_out, width]; measured, see the benchmark."""
    early = launch_early(device, 1)
    if num_out >= 2048:
        return SkinnyConfig(block_out=64, block_in=128, num_warps=4, num_stages=4, early=early)
    if width > 1024:
        return SkinnyConfig(block_out=16, block_in=256, num_warps=4, num_stages=3, early=early)
    if num_out > width:
        return SkinnyConfig(block_out=16, block_in=128, num_warps=1, num_stages=6, early=early)
    return SkinnyConfig(block_out=16, block_in=128, num_warps=2, num_stages=4, early=early)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """x [n, in] times weight [out, in] (both with contiguous rows), plus bias [out]: [n, out].

    1 <= n <= `MAX_ROWS`. Sums in float32; the result is like x unless `out_dtype` says otherwise.
    Raises ValueError for another layout.
    """
    num_out, width = weight.shape
    num_rows = x.shape[0]
    if x.shape[1:] != (width,) or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"{num_rows} rows, not 1 to {MAX_ROWS}")
    out = torch.empty((num_rows, num_out), dtype=out_dtype or x.dtype, device=x.device)
    config = config or choose_config(num_out, width, x.device)
    early = {"launch_pdl": True} if config.early else {}
    skinny_kernel[(triton.cdiv(num_out, config.block_out),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        num_out,
        x.stride(0),
        weight.stride(0),
        WIDTH=width,
        ROWS=_TILE_ROWS,
        BLOCK_OUT=config.block_out,
        BLOCK_IN=config.block_in,
        NUM_STAGES=config.num_stages,
        HAS_BIAS=bias is not None,
        EARLY=config.early,
        num_warps=config.num_warps,
        **early,
    )
    return out
