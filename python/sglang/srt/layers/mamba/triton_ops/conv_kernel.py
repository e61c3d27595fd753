"""One step of a causal convolution over remembered inputs, for every request of a batch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def conv_step_kernel(
    x: tl.tensor,
    source: tl.tensor,
    source_slots: tl.tensor,
    target: tl.tensor,
    target_slots: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program: one request, a block of channels.

    `x`, `out` [b, channels]; states [slots, TAPS - 1, channels], oldest first. `source` and
    `target` may be the same: what is written was read before.
    """
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    size = (TAPS - 1) * channels
    old = source + tl.load(source_slots + request) * size + channel
    new = target + tl.load(target_slots + request) * size + channel
    taps = weight + channel * weight_stride
    latest = tl.load(x + request * x_stride + channel, mask=inside, other=0.0)
    total = latest.to(tl.float32) * tl.load(taps + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(old + tap * channels, mask=inside, other=0.0)
        total += value.to(tl.float32) * tl.load(taps + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(new + (tap - 1) * channels, value, mask=inside)
    tl.store(new + (TAPS - 2) * channels, latest.to(new.dtype.element_ty), mask=inside)
    result = total * tl.sigmoid(total)
    tl.store(out + request * channels + channel, result.to(out.dtype.element_ty), mask=inside)
