"""Write new keys and values to their slots of the pool, both in one launch.

Called by the `triton` attention backend where the rotation did not write them already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.device import launch_early


@triton.jit(do_not_specialize=["width"])
def _store_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    slots: tl.tensor,
    key_buffer: tl.tensor,
    value_buffer: tl.tensor,
    width: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        # The kernel that follows waits for the end of this one where it has to, as this one does.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    slot = tl.load(slots + token).to(tl.int64)
    key = tl.load(k + token * k_stride + column, mask=inside)
    value = tl.load(v + token * v_stride + column, mask=inside)
    key_type = key_buffer.dtype.element_ty
    tl.store(key_buffer + slot * key_stride + column, key.to(key_type), mask=inside)
    tl.store(value_buffer + slot * value_stride + column, value.to(key_type), mask=inside)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> None:
    """k and v [n, heads, head_dim] (rows may be strided) to rows `slots` int64 [n] of the buffers.

    Buffers are [slots, heads, head_dim] of any float type; values are cast. Tokens that share a
    slot (padding, on the dummy slot) leave either one's content.
    """
    num_tokens, num_heads, head_dim = k.shape
    width = num_heads * head_dim
    if num_tokens == 0:
        return
    for tensor in (k, v, key_buffer, value_buffer):
        if tensor.stride(2) != 1 or tensor.stride(1) != head_dim:
            raise ValueError("the heads of keys and values must lie side by side")
    block = min(triton.next_power_of_2(width), 1024)
    early = launch_early(k.device, num_tokens)
    _store_kv_kernel[(num_tokens, triton.cdiv(width, block))](
        k,
        v,
        slots,
        key_buffer,
        value_buffer,
        width,
        k.stride(0),
        v.stride(0),
        key_buffer.stride(0),
        value_buffer.stride(0),
        BLOCK=block,
        EARLY=early,
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )
