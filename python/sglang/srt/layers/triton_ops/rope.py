"""Rotary embedding on CUDA, in place, optionally with the write of K and V to the pool.

Called by `cuda_ops.py`. One launch rotates the heads of q and k; with a pool it also stores the
rotated keys and the values at the tokens' slots, which saves two launches and a pass over k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.dispatch import KVDestination
from sglang.srt.layers.triton_ops.device import launch_early

_HEADS_PER_PROGRAM = 4


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _rope_kernel(  # noqa: PLR0915 - a kernel is one program
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    slots: tl.tensor,
    key_buffer: tl.tensor,
    value_buffer: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    table_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS: tl.constexpr,
    STORE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (tokens, blocks of q heads, then of k heads, then of v heads if STORE)."""
    if EARLY:
        # The kernel that follows waits for the end of this one where it has to, as this one does.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = (num_heads + HEADS - 1) // HEADS
    kv_blocks = (num_kv_heads + HEADS - 1) // HEADS
    is_query = block < q_blocks
    if STORE:
        slot = tl.load(slots + token).to(tl.int64)
        buffer_type = key_buffer.dtype.element_ty
        if block >= q_blocks + kv_blocks:
            head = (block - q_blocks - kv_blocks) * HEADS + tl.arange(0, HEADS)
            feature = tl.arange(0, BLOCK_D)
            inside = (head < num_kv_heads)[:, None] & (feature < HEAD_DIM)[None, :]
            offset = head[:, None] * HEAD_DIM + feature[None, :]
            value = tl.load(v + token * v_stride + offset, mask=inside)
            tl.store(value_buffer + slot * value_stride + offset, value.to(buffer_type), inside)
            return
    if is_query:
        rows = q + token * q_stride
        head = block * HEADS + tl.arange(0, HEADS)
        head_live = head < num_heads
    else:
        rows = k + token * k_stride
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        head_live = head < num_kv_heads
    pair = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions + token)
    cos_row = cos_sin + position * table_stride + pair
    cos = tl.load(cos_row, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(cos_row + HALF, mask=pair < HALF, other=0.0)[None, :]
    offset = head[:, None] * HEAD_DIM + pair[None, :]
    inside = head_live[:, None] & (pair < HALF)[None, :]
    first = tl.load(rows + offset, mask=inside, other=0.0)
    second = tl.load(rows + offset + HALF, mask=inside, other=0.0)
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    rotated_first = (a * cos - b * sin).to(first.dtype)
    rotated_second = (b * cos + a * sin).to(first.dtype)
    tl.store(rows + offset, rotated_first, mask=inside)
    tl.store(rows + offset + HALF, rotated_second, mask=inside)
    if STORE:
        if not is_query:
            target = key_buffer + slot * key_stride
            tl.store(target + offset, rotated_first.to(buffer_type), mask=inside)
            tl.store(target + offset + HALF, rotated_second.to(buffer_type), mask=inside)
            if HEAD_DIM > 2 * HALF:
                rest = 2 * HALF + tl.arange(0, BLOCK_REST)
                rest_offset = head[:, None] * HEAD_DIM + rest[None, :]
                in_rest = head_live[:, None] & (rest < HEAD_DIM)[None, :]
                plain = tl.load(rows + rest_offset, mask=in_rest)
                tl.store(target + rest_offset, plain.to(buffer_type), mask=in_rest)


def rope_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
    store: tuple[torch.Tensor, KVDestination] | None = None,
) -> None:
    """Rotate the heads of q and k [n, heads * head_dim] in place; see `Ops.apply_rope`.

    `store`: the values [n, kv_heads * head_dim] and where they and the rotated keys go.
    """
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return
    v = k if store is None else store[0]
    if q.stride(1) != 1 or k.stride(1) != 1 or v.stride(1) != 1:
        raise ValueError("heads must lie side by side")
    num_heads, num_kv_heads = q.shape[1] // head_dim, k.shape[1] // head_dim
    half = cos_sin.shape[1] // 2
    key_buffer = value_buffer = k
    slots = positions
    if store is not None:
        slots, key_buffer, value_buffer = (
            store[1].slots,
            store[1].key_buffer,
            store[1].value_buffer,
        )
    kv_blocks = triton.cdiv(num_kv_heads, _HEADS_PER_PROGRAM)
    blocks = triton.cdiv(num_heads, _HEADS_PER_PROGRAM) + kv_blocks * (1 if store is None else 2)
    early = launch_early(q.device, num_tokens)
    _rope_kernel[(num_tokens, blocks)](
        q,
        k,
        v,
        positions,
        cos_sin,
        slots,
        key_buffer,
        value_buffer,
        num_heads,
        num_kv_heads,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        cos_sin.stride(0),
        key_buffer.stride(0),
        value_buffer.stride(0),
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
        BLOCK_D=triton.next_power_of_2(head_dim),
        HEADS=_HEADS_PER_PROGRAM,
        STORE=store is not None,
        EARLY=early,
        num_warps=2,
        **({"launch_pdl": True} if early else {}),
    )
