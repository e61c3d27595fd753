"""What the attention kernel does about new tokens: rotate them and write them to the pool.

Parts of `paged_attention_kernel`, compiled into it. Pairs of features that rotate together are
(i, i + HALF); what lies behind 2 * HALF stays as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Features times cosine plus their partners times (signed) sine, rounded like the features."""
    return (first.to(tl.float32) * cos + second.to(tl.float32) * sin).to(first.dtype)


@triton.jit
def _partners(feature: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    """(feature that each is rotated with, number of the pair), pairs being (i, i + HALF).

    Features behind 2 * HALF are their own partners.
    """
    is_second = (feature >= HALF) & (feature < 2 * HALF)
    partner = tl.where(feature < HALF, feature + HALF, feature)
    partner = tl.where(is_second, feature - HALF, partner)
    pair = tl.where(is_second, feature - HALF, feature)
    return partner, pair


@triton.jit
def _loaded_angles(
    angles: tl.tensor, has_angle: tl.tensor, is_first: tl.tensor, HALF: tl.constexpr
) -> tl.tensor:
    """(cosines, sines signed for the first half of each pair) at `angles`."""
    cos = tl.load(angles, mask=has_angle, other=1.0)
    sin = tl.load(angles + HALF, mask=has_angle, other=0.0)
    return cos, tl.where(is_first, -sin, sin)


@triton.jit
def rotated_heads(
    heads: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    cos_sin: tl.tensor,
    cos_sin_stride: tl.tensor,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """What lies at `heads` [rows], each rotated by its own position; zeros where not `live`."""
    feature = tl.arange(0, BLOCK_D)
    partner, pair = _partners(feature, HALF)
    angles = cos_sin + position[:, None] * cos_sin_stride + pair[None, :]
    has_angle = live & (feature < 2 * HALF)[None, :]
    cos, sin = _loaded_angles(angles, has_angle, (feature < HALF)[None, :], HALF)
    first = tl.load(heads[:, None] + feature[None, :], mask=live, other=0.0)
    second = tl.load(heads[:, None] + partner[None, :], mask=live, other=0.0)
    return rotated(first, second, cos, sin)


@triton.jit
def angles_of(
    position_ptr: tl.tensor,
    cos_sin: tl.tensor,
    cos_sin_stride: tl.tensor,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tensor:
    """(partners of the features, cosines, signed sines) [BLOCK_D] of one position."""
    feature = tl.arange(0, BLOCK_D)
    partner, pair = _partners(feature, HALF)
    angles = cos_sin + tl.load(position_ptr) * cos_sin_stride + pair
    cos, sin = _loaded_angles(angles, feature < 2 * HALF, feature < HALF, HALF)
    return partner, cos, sin


@triton.jit
def write_new(
    key_base: tl.tensor,
    value_base: tl.tensor,
    new_keys: tl.tensor,
    new_values: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    slot_map: tl.tensor,
    cos_sin: tl.tensor,
    query_start: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    new_key_stride: tl.tensor,
    new_value_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    QUERIES: tl.constexpr,
    NEW_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    """One head's keys, rotated, and values of new tokens [first, last) of a request to the pool."""
    feature = tl.arange(0, BLOCK_D)
    new = tl.arange(0, NEW_BLOCK)
    is_meant = (new < QUERIES) & (new >= first) & (new < last)
    live = is_meant[:, None] & (feature < HEAD_DIM)[None, :]
    line = query_start + new
    slot = tl.load(slots + line, mask=is_meant, other=0)
    if MAPPED:
        slot = tl.load(slot_map + slot, mask=is_meant, other=0).to(tl.int64)
    position = tl.load(positions + line, mask=is_meant, other=0)
    values = new_values + line * new_value_stride
    value = tl.load(values[:, None] + feature[None, :], mask=live, other=0.0)
    key = rotated_heads(
        new_keys + line * new_key_stride, position, live, cos_sin, cos_sin_stride, BLOCK_D, HALF
    )  # fmt: skip
    key_rows = key_base + slot * key_stride
    value_rows = value_base + slot * value_stride
    buffer_type = key_base.dtype.element_ty
    tl.store(key_rows[:, None] + feature[None, :], key.to(buffer_type), mask=live)
    tl.store(value_rows[:, None] + feature[None, :], value.to(buffer_type), mask=live)


@triton.jit
def write_one(
    key_base: tl.tensor,
    value_base: tl.tensor,
    new_key: tl.tensor,
    new_value: tl.tensor,
    slot_ptr: tl.tensor,
    slot_map: tl.tensor,
    partner: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAPPED: tl.constexpr,
) -> None:
    """One head's key, rotated, and value of the only new token of a request to the pool."""
    feature = tl.arange(0, BLOCK_D)
    in_head = feature < HEAD_DIM
    key = tl.load(new_key + feature, mask=in_head, other=0.0)
    second = tl.load(new_key + partner, mask=in_head, other=0.0)
    key = rotated(key, second, cos, sin)
    value = tl.load(new_value + feature, mask=in_head, other=0.0)
    slot = tl.load(slot_ptr)
    if MAPPED:
        slot = tl.load(slot_map + slot).to(tl.int64)
    buffer_type = key_base.dtype.element_ty
    tl.store(key_base + slot * key_stride + feature, key.to(buffer_type), mask=in_head)
    tl.store(value_base + slot * value_stride + feature, value.to(buffer_type), mask=in_head)
