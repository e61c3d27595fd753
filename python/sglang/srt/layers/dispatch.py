"""Elementary operations, one set of callables per (device, dtype), chosen when a layer is created.

Every operation has one signature and one meaning whichever set it comes from, so layers hold no
condition of their own. Inputs named as consumed must not be used afterwards: a set may write into
them and return them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.nn import functional

from sglang.srt.layers.cpu import ops as cpu_ops


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Weights of all experts of a layer and the activation between the two products."""

    gate_up: torch.Tensor  # [E, 2 * I, hidden]
    down: torch.Tensor  # [E, hidden, I]
    activation: Callable[[torch.Tensor], torch.Tensor]  # [n, 2 * I] -> [n, I]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVDestination:
    """Where new keys and values go: rows `slots` int64 [n] of [slots, kv_heads, head_dim].

    The buffers may be of another float type; values are cast.
    """

    slots: torch.Tensor
    key_buffer: torch.Tensor
    value_buffer: torch.Tensor


class Ops(Protocol):
    """What layers call."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [n, in], weight [out, in], bias [out] -> [n, out]."""
        ...

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`linear` without bias, the result in float32, whether rounded to x's dtype or not."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> torch.Tensor:
        """x / rms(x) * (weight + offset) over the last dimension, [n, d] or [n, heads, d].

        A new tensor. With an offset the sum and the product are taken in float32.
        """
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), [n, d]; consumes `residual`."""
        ...

    def norms_side_by_side(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        x_weight: torch.Tensor,
        y_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(`rms_norm` of x and of y in one row, a copy of y), x and y [n, d] -> [n, 2 * d], [n, d]:
        what a draft makes of a token and of a state that goes on as its residual."""
        ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2 * d] -> silu(first half) * second half, [n, d]."""
        ...

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 2 * d] -> gelu(first half, tanh form) * second half, [n, d]."""
        ...

    def silu_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`silu_and_mul` of `linear`: x [n, in], weight [2 * d, in], bias [2 * d] -> [n, d]."""
        ...

    def apply_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the heads of q and k [n, heads * head_dim]; consumes both.

        cos_sin is float32 [positions, rotary_dim]: cosines, then sines; features of a head from
        rotary_dim on stay. Pairs are (i, i + rotary_dim / 2).
        """
        ...

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
        """`apply_rope`, and the rotated keys and v [n, kv_heads * head_dim] to the pool."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        factors: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """Sum of the chosen experts' outputs times their factors, [n, hidden] like x.

        expert_ids int64 [n, k], no expert twice a token; factors [n, k].
        """
        ...

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """Index of the largest entry of every row, [n, width] -> int64 [n]; the first of equals.

        Some index within the row where it holds NaN.
        """
        ...

    def checked_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`argmax`, and whether the row holds NaN or +inf: bool [n]."""
        ...

    def take_rows(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows, int64 [n], of a table [m, d] of any type: [n, d]."""
        ...

    def add_rows(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        """x + y, [n, d], to `out`, a part of something wider or not."""
        ...

    def send_to_host(self, x: torch.Tensor) -> torch.Tensor:
        """x in host memory once an event recorded after the call has passed; keep it until then.

        Small results: does not wait for copies of other streams.
        """
        ...


class TorchOps:
    """Plain PyTorch, any device and dtype. The reference for every other set."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight).float()

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> torch.Tensor:
        # The mean of squares is taken in float32 whatever the dtype, and the result is rounded
        # before the weight is applied, as the checkpoints were trained.
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if weight_offset:
            # A weight close to zero keeps more digits than one close to the offset.
            return (wide * (weight.float() + weight_offset)).to(x.dtype)
        return weight * wide.to(x.dtype)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps, weight_offset), total

    def norms_side_by_side(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        x_weight: torch.Tensor,
        y_weight: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (self.rms_norm(x, x_weight, eps), self.rms_norm(y, y_weight, eps))
        return torch.cat(parts, dim=-1), y.clone()

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def silu_linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self.silu_and_mul(self.linear(x, weight, bias))

    def apply_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [n, 1, rotary_dim / 2]
        return _rotate(q, cos, sin, head_dim), _rotate(k, cos, sin, head_dim)

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
        q, k = self.apply_rope(q, k, positions, cos_sin, head_dim)
        _store(k, v, destination)
        return q, k

    def experts(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        factors: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        if x.device.type == "cpu":
            for expert in expert_ids.unique().tolist():
                tokens, choices = torch.where(expert_ids == expert)
                hidden = self._expert(x[tokens], expert, weights)
                out.index_add_(0, tokens, hidden * factors[tokens, choices].unsqueeze(1))
            return out
        # Every expert for every token, since a captured step cannot ask who was chosen.
        for expert in range(weights.down.shape[0]):
            factor = torch.where(expert_ids == expert, factors, 0.0).sum(1, keepdim=True)
            out += self._expert(x, expert, weights) * factor.to(x.dtype)
        return out

    def _expert(self, x: torch.Tensor, expert: int, weights: ExpertWeights) -> torch.Tensor:
        hidden = self.linear(x, weights.gate_up[expert], None)
        return self.linear(weights.activation(hidden), weights.down[expert], None)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)

    def checked_argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sums = x.sum(dim=-1)
        return self.argmax(x), sums.isnan() | sums.isposinf()

    def take_rows(self, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return functional.embedding(rows, table)

    def add_rows(self, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, y, out=out)

    def send_to_host(self, x: torch.Tensor) -> torch.Tensor:
        return x.to("cpu", non_blocking=True)


class CpuFloat32Ops(TorchOps):
    """Float32 on the CPU, through `layers.cpu.ops` (own kernels where they could be built)."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return cpu_ops.linear(x, weight, bias)

    def wide_linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return cpu_ops.linear(x, weight, None)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
    ) -> torch.Tensor:
        return cpu_ops.rmsnorm(x, weight, eps, weight_offset=weight_offset)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cpu_ops.rmsnorm(x, weight, eps, residual, weight_offset), residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.silu_and_mul(x)

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        return cpu_ops.gelu_tanh_and_mul(x)

    def apply_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cpu_ops.rotary(positions, q, k, cos_sin, head_dim)
        return q, k

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        # numpy's is vectorised: 0.04 ms for 8 rows of 49k, 0.7 ms by torch.
        return torch.from_numpy(x.numpy().argmax(axis=-1))


_TORCH_OPS = TorchOps()
_CPU_FLOAT32_OPS = CpuFloat32Ops()


@functools.cache
def _cuda_ops() -> Ops:
    # By name: Triton is installed where there is a GPU only.
    module = importlib.import_module("sglang.srt.layers.triton_ops.cuda_ops")
    return cast(Ops, module.CudaOps())


def select_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """The operations for parameters on `device` in `dtype`. Call it when a layer is created."""
    if device.type == "cpu" and dtype == torch.float32:
        return _CPU_FLOAT32_OPS
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return _cuda_ops()
    return _TORCH_OPS


def argmax(x: torch.Tensor) -> torch.Tensor:
    """`Ops.argmax` of the device's own set, whatever the model's dtype."""
    return _ops_of_device(x).argmax(x)


def checked_argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Ops.checked_argmax` of the device's own set, whatever the model's dtype."""
    return _ops_of_device(x).checked_argmax(x)


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`Ops.take_rows` of the device's own set, whatever the dtype."""
    return _ops_of_device(table).take_rows(table, rows)


def add_rows(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """`Ops.add_rows` of the device's own set, whatever the dtype."""
    _ops_of_device(x).add_rows(x, y, out)


def send_to_host(x: torch.Tensor) -> torch.Tensor:
    """`Ops.send_to_host` of the device's own set, whatever the dtype."""
    return _ops_of_device(x).send_to_host(x)


def _ops_of_device(x: torch.Tensor) -> Ops:
    return _cuda_ops() if x.device.type == "cuda" else _CPU_FLOAT32_OPS


def default_ops() -> Ops:
    """The operations for a layer that is being created on the default device and dtype."""
    return select_ops(torch.get_default_device(), torch.get_default_dtype())


def _store(k: torch.Tensor, v: torch.Tensor, destination: KVDestination) -> None:
    head_shape = destination.key_buffer.shape[1:]
    for rows, buffer in ((k, destination.key_buffer), (v, destination.value_buffer)):
        buffer[destination.slots] = rows.unflatten(-1, head_shape).to(buffer.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> torch.Tensor:
    half = cos.shape[-1]
    heads = x.unflatten(-1, (-1, head_dim))
    first, second, rest = heads.split([half, half, head_dim - 2 * half], dim=-1)
    a, b = first.float(), second.float()
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1).flatten(-2)
