"""Gated activations: the checkpoint's `hidden_act` -> a function of the fused gate/up product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from sglang.srt.layers.dispatch import Ops, default_ops

GatedActivation = Callable[[torch.Tensor], torch.Tensor]  # [n, 2 * d] -> [n, d]
# x [n, in], weight [2 * d, in], bias [2 * d] -> [n, d]
GatedLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def _gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


_GATED_ACTIVATIONS: dict[str, Callable[[Ops], GatedActivation]] = {
    "silu": lambda ops: ops.silu_and_mul,
    "swish": lambda ops: ops.silu_and_mul,
    "gelu": lambda ops: _gelu_and_mul,
    "gelu_pytorch_tanh": lambda ops: ops.gelu_tanh_and_mul,
    "gelu_new": lambda ops: ops.gelu_tanh_and_mul,
}


def get_gated_activation(name: str) -> GatedActivation:
    """The function for `hidden_act`, for a layer on the default device and dtype.

    Raises ValueError naming the known ones.
    """
    if name not in _GATED_ACTIVATIONS:
        known = ", ".join(sorted(_GATED_ACTIVATIONS))
        raise ValueError(f"activation {name!r} is not supported; known ones: {known}")
    return _GATED_ACTIVATIONS[name](default_ops())


def get_gated_linear(name: str) -> GatedLinear:
    """The product with a fused gate/up weight, and `get_gated_activation(name)` of it.

    Raises ValueError as that does.
    """
    ops, activation = default_ops(), get_gated_activation(name)
    if name in ("silu", "swish"):
        return ops.silu_linear
    return lambda x, weight, bias: activation(ops.linear(x, weight, bias))
