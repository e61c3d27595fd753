"""Torch implementations of every operation of `ops`, for machines without a compiler.

Same signatures, same in-place effects; the tests hold `native` against them. No state, any thread.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from sglang.srt.layers.cpu.weights import CompressedWeight


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | CompressedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.linear`."""
    if isinstance(weight, CompressedWeight):
        weight = weight.dequantized()
    return functional.linear(x, weight.to(x.dtype), bias)


# The constants of digest.h.
_STEP, _A, _B, _C = (
    np.uint64(value)
    for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_WORDS_A_PIECE = 1 << 14  # the temporaries stay in the first-level cache's neighbourhood


def word_sums(data: torch.Tensor) -> tuple[int, int]:
    """See `ops.word_sums`."""
    flat = data.numpy()
    num_words = flat.size // 8
    pieces = [
        (flat[8 * begin : 8 * min(begin + _WORDS_A_PIECE, num_words)].view(np.uint64), begin)
        for begin in range(0, num_words, _WORDS_A_PIECE)
    ]
    if flat.size % 8:
        last = np.zeros(8, dtype=np.uint8)
        last[: flat.size % 8] = flat[8 * num_words :]
        pieces.append((last.view(np.uint64), num_words))
    steps = np.arange(1, _WORDS_A_PIECE + 1, dtype=np.uint64) * _STEP
    first = second = 0
    for words, begin in pieces:
        z = words + steps[: words.size]
        z += np.uint64(begin * int(_STEP) % 2**64)
        for shift, factor in ((30, _A), (27, _B)):
            z ^= z >> np.uint64(shift)
            z *= factor
        z ^= z >> np.uint64(31)
        first += int(z.sum())
        z *= _C
        z ^= z >> np.uint64(32)
        second += int(z.sum())
    return first % 2**64, second % 2**64


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """See `ops.rmsnorm`."""
    if residual is not None:
        residual.add_(x)
        x = residual
    inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * inverse * (weight + weight_offset)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `ops.gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
) -> None:
    """See `ops.rotary`."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions].unsqueeze(1).split(half, dim=-1)  # [n, 1, half]
    for x in (q, k):
        heads = x.unflatten(-1, (-1, head_dim)) if x.ndim == 2 else x
        first, second = heads[..., :half].clone(), heads[..., half : 2 * half].clone()
        heads[..., :half] = first * cos - second * sin
        heads[..., half : 2 * half] = second * cos + first * sin


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
    """See `ops.decode_attention`."""
    out = torch.empty_like(q) if out is None else out
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        slots = req_to_token[request, :length].long()
        one = slice(row, row + 1)
        out[one] = _attend(q[one], k_buffer[slots], v_buffer[slots], scaling, window, logit_cap)
    return out


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
    """See `ops.extend_attention`."""
    out = torch.empty_like(q) if out is None else out
    start = 0
    requests = zip(req_pool_indices.tolist(), prefix_lens.tolist(), extend_lens.tolist())
    for request, prefix_len, num_tokens in requests:
        slots = req_to_token[request, : prefix_len + num_tokens].long()
        rows = slice(start, start + num_tokens)
        out[rows] = _attend(q[rows], k_buffer[slots], v_buffer[slots], scaling, window, logit_cap)
        start += num_tokens
    return out


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    window: int,
    logit_cap: float,
) -> torch.Tensor:
    """Causal attention of the last queries of one request; q [n, H, D], keys [len, Hkv, D]."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, dim=1).transpose(0, 1)  # [H, len, D]
    values = values.float().repeat_interleave(group, dim=1).transpose(0, 1)
    scores = q.transpose(0, 1) @ keys.transpose(1, 2) * scaling  # [H, n, len]
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    length = keys.shape[1]
    query_positions = torch.arange(length - q.shape[0], length)[:, None]
    key_positions = torch.arange(length)[None, :]
    hidden = key_positions > query_positions
    if window:
        hidden |= key_positions <= query_positions - window
    scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)
