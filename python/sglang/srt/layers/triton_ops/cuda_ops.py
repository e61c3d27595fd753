"""`CudaOps`: the elementary operations on CUDA in half precision, own fused kernels.

Chosen by `layers.dispatch.select_ops`, which imports this module by name, since Triton is not
installed everywhere. The meaning of every operation is stated at `dispatch.Ops`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang.srt.layers.dispatch import KVDestination
from sglang.srt.layers.triton_ops.activation import gate_and_mul
from sglang.srt.layers.triton_ops.argmax import argmax_rows
from sglang.srt.layers.triton_ops.gemv import gemv
from sglang.srt.layers.triton_ops.norm import add_rms_norm, rms_norm
from sglang.srt.layers.triton_ops.rope import rope_in_place


class CudaOps:
    """See the module docstring."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.shape[0] == 1:
            return gemv(x, weight, bias)
        return functional.linear(x, weight, bias)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return gemv(x, weight, None, torch.float32)
        # Written wide by the product itself: a cast of its own costs as much as a layer.
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(x, residual, weight, eps), residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(x, gelu_tanh=False)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(x, gelu_tanh=True)

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

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        return argmax_rows(x)
