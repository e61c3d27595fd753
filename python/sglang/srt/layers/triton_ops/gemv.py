"""Product of one row with a weight on CUDA: bound by reading the weight, and built around that.

Called by `cuda_ops.py` where there is one token. A program owns a few output features and reads
their weight rows whole, so that there is nothing to add up between programs. Its first tile of the
weight is on the way before the kernel that computes `x` has ended: weights must be older than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early, num_multiprocessors

# Weight elements that one thread loads at a time (16 bytes of half precision).
_VECTOR = 8
# 8 warps with one vector each.
_MAX_BLOCK_IN = 2048
# As many fit, by their registers.
_PROGRAMS_PER_PROCESSOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """How a launch divides its work."""

    block_out: int  # output features a program
    block_in: int  # input features an iteration
    num_warps: int
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


@triton.jit(do_not_specialize=["num_out"])
def gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_out: tl.tensor,
    weight_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    VECTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: blocks of output features."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    feature = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    # Behind the end the last feature is computed again: cheaper than masked loads.
    lines = weight + tl.minimum(feature, num_out - 1).to(tl.int64) * weight_stride
    EVEN: tl.constexpr = WIDTH % BLOCK_IN == 0
    tile = _load_tile(lines, 0, column, WIDTH, EVEN)
    if EARLY:
        # The kernel before this one wrote `x`.
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_OUT, BLOCK_IN // VECTOR), tl.float32)
    for start in tl.static_range(0, WIDTH, BLOCK_IN):
        if EVEN:
            part = tl.load(x + start + column)
        else:
            part = tl.load(x + start + column, mask=start + column < WIDTH, other=0.0)
        current = tile
        if start + BLOCK_IN < WIDTH:
            tile = _load_tile(lines, start + BLOCK_IN, column, WIDTH, EVEN)
        product = current.to(tl.float32) * part.to(tl.float32)[None, :]
        # Within a thread, so that it keeps one sum instead of a vector of them.
        acc += tl.sum(tl.reshape(product, (BLOCK_OUT, BLOCK_IN // VECTOR, VECTOR)), 2)
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + feature, mask=feature < num_out, other=0.0).to(tl.float32)
    tl.store(out + feature, total.to(out.dtype.element_ty), mask=feature < num_out)


def choose_config(num_out: int, width: int, device: torch.device) -> GemvConfig:
    """Block sizes from the shape of the weight, [num_out, width]."""
    block_in = max(min(triton.next_power_of_2(width), _MAX_BLOCK_IN), _VECTOR)
    slots = _PROGRAMS_PER_PROCESSOR * num_multiprocessors(device)
    # Larger blocks are faster but for a last round of programs that leaves the device half empty.
    waste = {
        block_out: triton.cdiv(num_out, block_out * slots) * block_out * slots / num_out
        for block_out in (4, 8)
    }
    return GemvConfig(
        block_out=8 if waste[8] < 1.02 * waste[4] else 4,
        block_in=block_in,
        num_warps=max(1, min(8, block_in // (32 * _VECTOR))),
        early=launch_early(device, 1),
    )


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """x [1, in] times weight [out, in] (rows contiguous), plus bias [out]: [1, out].

    Sums in float32; the result is like x unless `out_dtype` says otherwise. Raises ValueError for
    another layout.
    """
    num_out, width = weight.shape
    if x.shape != (1, width) or x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit")
    out = torch.empty((1, num_out), dtype=out_dtype or x.dtype, device=x.device)
    config = config or choose_config(num_out, width, x.device)
    early = {"launch_pdl": True} if config.early else {}
    gemv_kernel[(triton.cdiv(num_out, config.block_out),)](
        x,
        weight,
        x if bias is None else bias,
        out,
        num_out,
        weight.stride(0),
        WIDTH=width,
        BLOCK_OUT=config.block_out,
        BLOCK_IN=config.block_in,
        VECTOR=_VECTOR,
        HAS_BIAS=bias is not None,
        EARLY=config.early,
        num_warps=config.num_warps,
        **early,
    )
    return out
