"""RMS normalisation of each head's output, times a gate."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_norm_kernel(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row of [rows, width] a program. Rounds where the reference rounds."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row + column, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row + column, mask=inside, other=0.0).to(tl.float32)
    result = normed * opening * tl.sigmoid(opening)
    tl.store(out + row + column, result.to(values.dtype), mask=inside)
