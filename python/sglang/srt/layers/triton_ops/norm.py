"""RMS normalisation on CUDA, with and without the residual addition before it.

Called by `cuda_ops.py`. Rounds where the reference set rounds: the sum with the residual, and the
normalised values before the weight is applied (not where something is added to the weight).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early


@triton.jit(do_not_specialize=["heads"])
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One row a program. A row of `x` is a head of a token; `out` is contiguous."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    offset = row // heads * row_stride + row % heads * head_stride
    values = tl.load(x + offset + column, mask=inside, other=0.0)
    if ADD:
        stream = residual + row * residual_stride + column
        values = (values.to(tl.float32) + tl.load(stream, mask=inside, other=0.0)).to(values.dtype)
        tl.store(stream, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide * scale
    if OFFSET != 0.0:
        factors += OFFSET
    else:
        normed = normed.to(values.dtype).to(tl.float32)
    tl.store(out + row * width + column, (normed * factors).to(values.dtype), mask=inside)


@triton.jit
def _two_norms_kernel(
    x: tl.tensor,
    y: tl.tensor,
    x_weight: tl.tensor,
    y_weight: tl.tensor,
    out: tl.tensor,
    copy: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (rows, 2), x and y. `out` [n, 2 * width] and `copy` are contiguous."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    is_second = tl.program_id(1) == 1
    column = tl.arange(0, BLOCK)
    inside = column < width
    if is_second:
        factors = tl.load(y_weight + column, mask=inside, other=0.0).to(tl.float32)
    else:
        factors = tl.load(x_weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if is_second:
        values = tl.load(y + row * y_stride + column, mask=inside, other=0.0)
        tl.store(copy + row * width + column, values, mask=inside)
    else:
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    place = (2 * row + tl.program_id(1)) * width + column
    tl.store(out + place, (normed * factors).to(values.dtype), mask=inside)


def norms_side_by_side(
    x: torch.Tensor,
    y: torch.Tensor,
    x_weight: torch.Tensor,
    y_weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.norms_side_by_side`; rows may be strided."""
    num_rows, width = x.shape
    if x.stride(-1) != 1 or y.stride(-1) != 1 or y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError("two tensors of one kind with contiguous rows are needed")
    out = torch.empty((num_rows, 2 * width), dtype=x.dtype, device=x.device)
    copy = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out, copy
    block = triton.next_power_of_2(width)
    early = launch_early(x.device, num_rows)
    _two_norms_kernel[(num_rows, 2)](
        x,
        y,
        x_weight,
        y_weight,
        out,
        copy,
        width,
        x.stride(0),
        y.stride(0),
        eps,
        BLOCK=block,
        EARLY=early,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if early else {}),
    )
    return out, copy


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """x [n, d] or [n, heads, d], rows and heads may be strided; a new contiguous tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    head_stride = x.stride(1) if x.dim() == 3 else 0
    _launch(x, None, weight, out, (heads, x.stride(0), head_stride), eps, weight_offset)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """Norm of x + residual [n, d], a new tensor; the sum is left in `residual`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, (1, x.stride(0), 0), eps, weight_offset)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    layout: tuple[int, int, int],
    eps: float,
    weight_offset: float,
) -> None:
    """`layout`: heads, stride of a token, stride of a head."""
    width = x.shape[-1]
    if x.numel() == 0:
        return
    if x.stride(-1) != 1 or (residual is not None and residual.stride(-1) != 1):
        raise ValueError("the normalised dimension must be contiguous")
    heads, row_stride, head_stride = layout
    block = triton.next_power_of_2(width)
    early = launch_early(x.device, x.numel() // width)
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        heads,
        width,
        row_stride,
        head_stride,
        0 if residual is None else residual.stride(0),
        eps,
        OFFSET=weight_offset,
        ADD=residual is not None,
        BLOCK=block,
        EARLY=early,
        num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if early else {}),
    )
