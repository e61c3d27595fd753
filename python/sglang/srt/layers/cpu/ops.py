"""Float32 operations of a decoder-only model on the CPU: one name, one meaning, fast where it can.

The implementation is chosen once, at the first call: the C++ kernels (compiled at the first call on
a machine, then cached) or, without a compiler or with HISPEC_CPU_KERNELS=off, torch. Callers cannot
tell them apart but by speed. Inputs are float32 on the CPU; rows may lie apart (views of a fused
product), the values of one row may not. ValueError otherwise.

With the kernels, the result of one row depends neither on the other rows nor on the number of
threads, for `linear` as long as the call has at most `small_rows` rows.

Used by the layers, the CPU attention backend and benchmarks; not reentrant: one model thread.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from sglang.srt.layers.cpu import build, native, reference
from sglang.srt.layers.cpu.weights import (
    WEIGHT_FORMATS,
    CompressedWeight,
    WeightFormat,
    find_lossless_format,
)

__all__ = [
    "WEIGHT_FORMATS",
    "CompressedWeight",
    "WeightFormat",
    "available",
    "decode_attention",
    "extend_attention",
    "find_lossless_format",
    "gelu_tanh_and_mul",
    "linear",
    "rmsnorm",
    "rotary",
    "silu_and_mul",
    "small_rows",
    "word_sums",
]


def available() -> bool:
    """Whether the C++ kernels are in use (False: the torch implementations are)."""
    return _chosen() is native


def small_rows() -> int:
    """How many rows `linear` computes itself; with more, torch's products are faster."""
    _chosen()  # more where the kernels find AVX-512
    return native.SMALL_ROWS


@functools.cache
def _chosen() -> ModuleType:
    library = build.load_kernels()
    if library is None:
        return reference
    native.bind(library)
    return native


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | CompressedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [n, k] times weight [m, k] transposed, plus bias [m] -> [n, m], all float32.

    Up to `small_rows` rows the kernels read the weight as it is stored: float32, bfloat16 or
    float16 tensors or a CompressedWeight; products and sums are float32 in every case. More rows
    are torch's (from a CompressedWeight: with its float32 source).
    """
    return _chosen().linear(x, weight, bias)


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """x / rms(x) * (weight + weight_offset) over the last dimension; x [n, d] or [n, heads, d].

    With `residual` (shape of x) first adds x to it *in place* and normalises the sum. Returns a
    new tensor; x is unchanged.
    """
    return _chosen().rmsnorm(x, weight, eps, residual, weight_offset)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[n, 2 * d] -> silu(first half) * second half, [n, d]."""
    return _chosen().silu_and_mul(x)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[n, 2 * d] -> gelu(first half, tanh form) * second half, [n, d]."""
    return _chosen().gelu_tanh_and_mul(x)


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
) -> None:
    """Rotate q and k *in place*, half-split form (first half with second half of a head).

    positions [n] integers; q [n, heads * head_dim] or [n, heads, head_dim], k alike with its own
    number of heads, both possibly views of one fused product; cos_sin [max positions, rotary_dim],
    cosines then sines; rotary_dim <= head_dim, further dimensions stay.
    """
    _chosen().rotary(positions, q, k, cos_sin, head_dim)


def word_sums(data: torch.Tensor) -> tuple[int, int]:
    """Two 64-bit sums over contiguous uint8 `data`, taken as little-endian 64-bit words.

    See `layers.tensor_digest`, which says what they are good for. The last word is padded with
    zero bytes.
    """
    return _chosen().word_sums(data)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    window: int = 0,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one query per request over its paged keys and values.

    q [bs, heads, head_dim]; k_buffer, v_buffer [slots, kv_heads, head_dim] float32, bfloat16 or
    float16, the query's own key already stored; req_to_token int32 [requests, positions]: slot of
    each position; req_pool_indices, seq_lens [bs] integers, seq_lens with the query's own token.
    `window` > 0: only that many latest keys; `logit_cap` > 0: cap * tanh(score / cap). Fills and
    returns `out` [bs, heads, head_dim] (new if None).
    """
    return _chosen().decode_attention(
        q,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        seq_lens,
        scaling,
        out,
        window,
        logit_cap,
    )


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    window: int = 0,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of several new tokens per request over its paged keys and values.

    q [sum of extend_lens, heads, head_dim], the requests one after the other. Request i has
    prefix_lens[i] older tokens and extend_lens[i] new ones whose keys and values are stored
    already. Other arguments as for `decode_attention`.
    """
    return _chosen().extend_attention(
        q,
        k_buffer,
        v_buffer,
        req_to_token,
        req_pool_indices,
        prefix_lens,
        extend_lens,
        scaling,
        out,
        window,
        logit_cap,
    )
