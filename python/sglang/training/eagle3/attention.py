"""The attention of training-time test: causal over real entries, own diagonal over unrolled ones.

At step k the query of position p sees the entries of step 0 at positions <= p, which were made of
the target's features, and of every later step only the entry of its own p. That is what a chain
draft finds in its KV cache when it proposes its k-th token after position p.

Two ways to compute it, chosen once by name (`attention_function`):

* `merged`: the fused causal kernel for step 0, and the few diagonal scores added through its
  log-sum-exp. Nothing of size T x T is kept, and the work hardly grows with k. The backward pass
  hands the kernel the output and log-sum-exp of the *whole* attention, which makes its shares
  right; the same identity lets attention be split over devices (arXiv 2310.01889).
* `masked`: one call of torch's attention over all entries with a Boolean mask. Several times the
  work, no use of torch's internal operators.

`self_check` compares both on a device before a run relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

# (queries [B, h, T, d], keys and values of steps 0..k, each [B, h, T, d]) -> [B, h, T, d]
TttAttention = Callable[
    [torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor
]

_ops = torch.ops.aten
_MAX_FUSED_HEAD_DIM = 256


def attention_function(name: str) -> TttAttention:
    """`merged` or `masked`; raises ValueError for another name."""
    functions: dict[str, TttAttention] = {"merged": merged_attention, "masked": masked_attention}
    if name not in functions:
        raise ValueError(f"unknown attention {name!r}; there are {', '.join(functions)}")
    return functions[name]


def masked_attention(
    queries: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """All entries side by side, those of step j in columns j*T .. (j+1)*T - 1."""
    length = queries.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
    own = torch.eye(length, dtype=torch.bool, device=queries.device)
    mask = torch.cat([causal, *[own] * (len(keys) - 1)], dim=1)
    return functional.scaled_dot_product_attention(
        queries, torch.cat(tuple(keys), dim=2), torch.cat(tuple(values), dim=2), attn_mask=mask
    )


def merged_attention(
    queries: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Fused causal part and diagonal part, see the module's docstring."""
    if len(keys) == 1:
        return functional.scaled_dot_product_attention(queries, keys[0], values[0], is_causal=True)
    own_keys, own_values = torch.stack(tuple(keys[1:])), torch.stack(tuple(values[1:]))
    merged: torch.Tensor = _Merged.apply(queries, keys[0], values[0], own_keys, own_values)
    return merged


class _Merged(torch.autograd.Function):
    """queries, keys, values [B, h, T, d]; own keys and values [k, B, h, T, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own_keys: torch.Tensor,
        own_values: torch.Tensor,
    ) -> torch.Tensor:
        causal_out, causal_lse, rest = _fused_forward(queries, keys, values)
        scale = queries.shape[-1] ** -0.5
        scores = torch.stack([_dot(queries, own_key) * scale for own_key in own_keys])
        lse = torch.logsumexp(torch.cat((causal_lse[None], scores)), dim=0)  # [B, h, T]
        out = causal_out.float() * (causal_lse - lse).exp()[..., None]
        for score, own_value in zip(scores, own_values):
            out += (score - lse).exp()[..., None] * own_value
        out = out.to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, out, lse, scores)
        ctx.rest = rest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        queries, keys, values, own_keys, own_values, out, lse, scores = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        grad_queries, grad_keys, grad_values = _fused_backward(
            grad_out, queries, keys, values, out, lse, ctx.rest
        )
        scale = queries.shape[-1] ** -0.5
        # [k, B, h, T]; of the softmax: ds = share * (d share - sum over all shares of d share).
        shares = (scores - lse).exp()
        mean = _dot(grad_out, out)
        grad_shares = torch.stack([_dot(grad_out, own_value) for own_value in own_values])
        grad_scores = shares * (grad_shares - mean)
        grad_scores = (grad_scores * scale).to(queries.dtype)[..., None]
        grad_own_values = shares.to(grad_out.dtype)[..., None] * grad_out
        grad_queries = grad_queries + (grad_scores * own_keys).sum(0)
        return grad_queries, grad_keys, grad_values, grad_scores * queries, grad_own_values


def _dot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """float32 [B, h, T]; products of half precision are not rounded before they are added."""
    return (x.float() * y.float()).sum(-1)


def _fused_forward(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Causal attention: output, log-sum-exp float32 [B, h, T], what the backward wants besides."""
    if queries.device.type == "cpu":
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, is_causal=True
        )
        return out, lse.float(), ()
    result = _ops._scaled_dot_product_flash_attention(queries, keys, values, is_causal=True)
    return result[0], result[1].float(), tuple(result[2:8])


def _fused_backward(
    grad_out: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    rest: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if queries.device.type == "cpu":
        grads = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, queries, keys, values, out, lse, 0.0, True
        )
    else:
        ends_q, ends_k, max_q, max_k, seed, offset = rest
        grads = _ops._scaled_dot_product_flash_attention_backward(
            grad_out, queries, keys, values, out, lse.contiguous(),
            ends_q, ends_k, max_q, max_k, 0.0, True, seed, offset,
        )  # fmt: skip
    return grads[0], grads[1], grads[2]


def self_check(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Compare `merged` with `masked`, results and gradients, on small random tensors.

    Raises RuntimeError where they differ or the fused kernel does not run here: then the run
    needs `--attention masked`.
    """
    if device.type == "cuda" and (head_dim % 8 or head_dim > _MAX_FUSED_HEAD_DIM):
        raise RuntimeError(
            f"the fused kernel takes head sizes that are multiples of 8 up to "
            f"{_MAX_FUSED_HEAD_DIM}, not {head_dim}: use --attention masked"
        )
    generator = torch.Generator().manual_seed(0)
    shape, num_steps = (2, 3, 70, head_dim), 3
    tensors = [
        torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2 * num_steps + 2)
    ]
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    results = []
    for function in (merged_attention, masked_attention):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors[:-1]]
        try:
            out = function(inputs[0], inputs[1 : num_steps + 1], inputs[num_steps + 1 :])
            grads = torch.autograd.grad(out, inputs, tensors[-1])
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise RuntimeError(
                f"{function.__name__} does not run on {device} in {dtype}: use --attention masked"
            ) from error
        results.append([out.detach(), *grads])
    for merged, masked in zip(*results):
        difference = float((merged - masked).float().abs().max())
        if not difference <= tolerance * max(1.0, float(masked.float().abs().max())):
            raise RuntimeError(
                f"merged and masked attention differ by {difference:.3g} on {device} in {dtype}: "
                "use --attention masked"
            )
