"""`TritonLinearAttention`: the operations of linear attention on CUDA.

Chosen by `layers.mamba.ops.select_linear_attention_ops`, which imports this module by name, since
Triton is not installed everywhere; meanings are stated there. The convolution of a prefill step is
the reference's: a handful of copies, whatever the number of requests.
"""

from __future__ import annotations

import torch
import triton

from sglang.srt.layers.mamba.ops import (
    UNIT_EPS,
    DeltaInputs,
    StateMove,
    TorchLinearAttention,
    decay_and_beta,
)
from sglang.srt.layers.mamba.step_states import PrefillStates, chunk_size
from sglang.srt.layers.mamba.triton_ops.conv_kernel import conv_step_kernel
from sglang.srt.layers.mamba.triton_ops.delta_kernel import delta_scan_kernel, delta_step_kernel
from sglang.srt.layers.mamba.triton_ops.gated_norm_kernel import gated_norm_kernel

# Channels a program; columns of a state a program. A state's rows are never divided.
_CONV_BLOCK = 256
_STEP_COLUMNS = 32
_SCAN_COLUMNS = 32


class TritonLinearAttention(TorchLinearAttention):
    """See the module docstring."""

    def conv_step(self, x: torch.Tensor, weight: torch.Tensor, move: StateMove) -> torch.Tensor:
        num_requests, channels = x.shape
        out = x.new_empty(num_requests, channels)
        if num_requests == 0:
            return out
        conv_step_kernel[(num_requests, triton.cdiv(channels, _CONV_BLOCK))](
            x,
            move.source,
            move.source_slots,
            move.target,
            move.target_slots,
            weight,
            out,
            channels,
            x.stride(0),
            weight.stride(0),
            TAPS=weight.shape[1],
            BLOCK=_CONV_BLOCK,
        )
        return out

    def delta_prefill(
        self, inputs: DeltaInputs, states: torch.Tensor, slots: torch.Tensor, step: PrefillStates
    ) -> torch.Tensor:
        decay, beta = decay_and_beta(inputs)
        num_tokens, num_heads, value_dim = inputs.value.shape
        out = inputs.value.new_empty(num_tokens, num_heads, value_dim)
        if num_tokens == 0:
            return out
        columns = min(_SCAN_COLUMNS, max(triton.next_power_of_2(value_dim), 16))
        grid = (slots.shape[0], num_heads, triton.cdiv(value_dim, columns))
        delta_scan_kernel[grid](
            inputs.query,
            inputs.key,
            inputs.value,
            decay,
            beta,
            states,
            step.sources,
            slots,
            step.chunk_table,
            step.chunk_starts,
            out,
            num_heads,
            num_heads // inputs.key.shape[1],
            inputs.key.shape[2],
            value_dim,
            step.chunk_table.shape[1],
            inputs.query.stride(0),
            inputs.key.stride(0),
            inputs.value.stride(0),
            UNIT_EPS,
            CHUNK=chunk_size(slots.device),
            KEYS=max(triton.next_power_of_2(inputs.key.shape[2]), 16),
            COLUMNS=columns,
            PRECISION="tf32x3" if inputs.value.dtype == torch.float32 else "tf32",
            num_warps=4,
        )
        return out

    def delta_step(self, inputs: DeltaInputs, move: StateMove) -> torch.Tensor:
        num_requests, num_heads, value_dim = inputs.value.shape
        out = inputs.value.new_empty(num_requests, num_heads, value_dim)
        if num_requests == 0:
            return out
        columns = min(_STEP_COLUMNS, triton.next_power_of_2(value_dim))
        delta_step_kernel[(num_requests, num_heads, triton.cdiv(value_dim, columns))](
            inputs.query,
            inputs.key,
            inputs.value,
            inputs.a,
            inputs.b,
            inputs.log_rate,
            inputs.dt_bias,
            move.source,
            move.source_slots,
            move.target,
            move.target_slots,
            out,
            num_heads,
            num_heads // inputs.key.shape[1],
            inputs.key.shape[2],
            value_dim,
            inputs.query.stride(0),
            inputs.key.stride(0),
            inputs.value.stride(0),
            inputs.a.stride(0),
            inputs.b.stride(0),
            UNIT_EPS,
            KEYS=triton.next_power_of_2(inputs.key.shape[2]),
            COLUMNS=columns,
            num_warps=4,
        )
        return out

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x)
        width = x.shape[-1]
        num_rows = x.numel() // width
        if num_rows == 0:
            return out
        gated_norm_kernel[(num_rows,)](
            x.contiguous(),
            gate.contiguous(),
            weight,
            out,
            width,
            eps,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
        )
        return out
