"""Torch implementations of every operation of `ops`, for machines without a compiler.

Same signatures, same in-place effects; the tests hold `native` against them. No state, any thread.
"""

from __future__ import annotations

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
