"""Rows of a table, and sums of rows, on CUDA: what PyTorch has too, but launched early.

Called by `cuda_ops.py`. Embeddings, picked hidden states, and residual streams that are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early

_BLOCK = 1024


@triton.jit(do_not_specialize=["rows_stride"])
def _take_rows_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    table_stride: tl.tensor,
    rows_stride: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of a row). `out` is contiguous."""
    if EARLY:
        # In this order: an embedding begins a pass, and what follows it may read lengths and
        # tables, which have just been written, before its own wait.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(rows + place * rows_stride)
    values = tl.load(table + row * table_stride + column, mask=inside)
    tl.store(out + place * width + column, values, mask=inside)


@triton.jit
def _add_rows_kernel(
    x: tl.tensor,
    y: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (rows, blocks of a row)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    left = tl.load(x + row * x_stride + column, mask=inside)
    right = tl.load(y + row * y_stride + column, mask=inside)
    total = (left.to(tl.float32) + right.to(tl.float32)).to(left.dtype)
    tl.store(out + row * out_stride + column, total, mask=inside)


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """table [m, d], its rows contiguous; rows int64 [n], strided or not: [n, d]."""
    if table.stride(1) != 1:
        raise ValueError("rows must be contiguous")
    num_rows, width = rows.shape[0], table.shape[1]
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    early = launch_early(table.device, num_rows)
    _take_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        table,
        rows,
        out,
        width,
        table.stride(0),
        rows.stride(0),
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
    return out


def add_rows(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """x + y to `out`, [n, d] of one type each, the rows of all three contiguous."""
    if any(tensor.stride(1) != 1 for tensor in (x, y, out)):
        raise ValueError("rows must be contiguous")
    num_rows, width = x.shape
    if x.numel() == 0:
        return
    early = launch_early(x.device, num_rows)
    _add_rows_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        x,
        y,
        out,
        width,
        x.stride(0),
        y.stride(0),
        out.stride(0),
        BLOCK=_BLOCK,
        EARLY=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
