"""Gated activations on CUDA: one pass over the fused gate/up product.

Called by `cuda_ops.py`; `gemv.py` has the same behind its product. Rounds the activation before
the product, as the reference set does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early


@triton.jit
def gated_product(gate: tl.tensor, up: tl.tensor, GELU_TANH: tl.constexpr) -> tl.tensor:
    """silu(gate) * up, or with GELU's tanh form, in their type."""
    wide = gate.to(tl.float32)
    if GELU_TANH:
        # (1 + tanh(z)) / 2 is the logistic function of 2 z.
        argument = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    else:
        argument = wide
    activated = (wide / (1.0 + tl.exp(-argument))).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _gate_and_mul_kernel(
    x: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    GELU_TANH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(x + row * row_stride + width + column, mask=inside, other=0.0)
    tl.store(out + row * width + column, gated_product(gate, up, GELU_TANH), mask=inside)


def gate_and_mul(x: torch.Tensor, gelu_tanh: bool) -> torch.Tensor:
    """[n, 2 * d] -> activation(first half) * second half, [n, d]; SiLU or GELU's tanh form."""
    if x.stride(-1) != 1:
        raise ValueError("rows must be contiguous")
    num_rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block = min(triton.next_power_of_2(width), 1024)
    early = launch_early(x.device, num_rows)
    _gate_and_mul_kernel[(num_rows, triton.cdiv(width, block))](
        x,
        out,
        width,
        x.stride(0),
        GELU_TANH=gelu_tanh,
        BLOCK=block,
        EARLY=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
    return out
