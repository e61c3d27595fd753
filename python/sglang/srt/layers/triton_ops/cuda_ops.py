"""`CudaOps`: the elementary operations on CUDA in half precision, own fused kernels.

Chosen by `layers.dispatch.select_ops`, which imports this module by name, since Triton is not
installed everywhere. The meaning of every operation is stated at `dispatch.Ops`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from sglang.srt.layers.dispatch import ExpertWeights, KVDestination
from sglang.srt.layers.triton_ops.activation import gate_and_mul
from sglang.srt.layers.triton_ops.argmax import argmax_rows
from sglang.srt.layers.triton_ops.gemv import gemv
from sglang.srt.layers.triton_ops.gemv import is_worthwhile as gemv_is_worthwhile
from sglang.srt.layers.triton_ops.moe import expert_product, plan_experts
from sglang.srt.layers.triton_ops.norm import add_rms_norm, norms_side_by_side, rms_norm
from sglang.srt.layers.triton_ops.rope import rope_in_place
from sglang.srt.layers.triton_ops.rows import add_rows, take_rows
from sglang.srt.layers.triton_ops.skinny import is_worthwhile as skinny_is_worthwhile
from sglang.srt.layers.triton_ops.skinny import skinny
from sglang.srt.platforms.cuda_transfers import write_to_host


class CudaOps:
    """See the module docstring."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = _own_product(x, weight)
        if product is None:
            return functional.linear(x, weight, bias)
        return product(x, weight, bias)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product = _own_product(x, weight)
        if product is None:
            # Written wide by the product itself: a cast of its own costs as much as a layer.
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return product(x, weight, None, torch.float32)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> torch.Tensor:
        return rms_norm(x, weight, eps, weight_offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps, weight_offset), residual

    def norms_side_by_side(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        x_weight: torch.Tensor,
        y_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norms_side_by_side(x, y, x_weight, y_weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(x, gelu_tanh=False)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(x, gelu_tanh=True)

    def silu_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if gemv_is_worthwhile(x.shape[0], *weight.shape):
            return gemv(x, weight, bias, gated=True)
        return self.silu_and_mul(self.linear(x, weight, bias))

    def apply_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope_in_place(q, k, positions, cos_sin, head_dim)
        return q, k

    def rope_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
        destination: KVDestination,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope_in_place(q, k, positions, cos_sin, head_dim, (v, destination))
        return q, k

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        factors: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        num_tokens, top_k = expert_ids.shape
        if num_tokens == 0:
            return torch.zeros_like(x)
        plan = plan_experts(expert_ids, weights.down.shape[0])
        hidden = weights.activation(expert_product(x, weights.gate_up, plan, top_k))
        parts = expert_product(hidden, weights.down, plan, top_k, factors.reshape(-1))
        return parts.view(num_tokens, top_k, -1).sum(1)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        return argmax_rows(x)[0]

    def checked_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return argmax_rows(x)

    def take_rows(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return take_rows(table, rows)

    def add_rows(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        add_rows(x, y, out)

    def send_to_host(self, x: torch.Tensor) -> torch.Tensor:
        return write_to_host(x)


def _own_product(x: torch.Tensor, weight: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """What multiplies so few rows faster than the library; None: nothing does."""
    if gemv_is_worthwhile(x.shape[0], *weight.shape):
        return gemv
    if skinny_is_worthwhile(x.shape[0], *weight.shape):
        return skinny
    return None
