"""Operations of linear attention with the gated delta rule, chosen by device.

The meaning, per head, with state S [key_dim, value_dim], and q and k of unit length:

    S <- exp(g) S                     decay, g = -exp(log_rate) softplus(a + dt_bias)
    S <- S + k (beta (v - k S))       the value stored under k moves towards v, beta = sigmoid(b)
    out = q S / sqrt(key_dim)

Sources: Gated Delta Networks (arXiv 2412.06464, equation 10); for the form that takes many tokens
at a time, its section 3.3 and DeltaNet (arXiv 2406.06484, section 3).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch.nn import functional

from sglang.srt.layers.mamba.step_states import PrefillStates

# Added to the sum of squares before q and k are brought to unit length.
UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """Of n tokens. Each key head serves value_heads / key_heads value heads in a row."""

    query: torch.Tensor  # [n, key_heads, key_dim]
    key: torch.Tensor  # [n, key_heads, key_dim]
    value: torch.Tensor  # [n, value_heads, value_dim]
    a: torch.Tensor  # [n, value_heads]
    b: torch.Tensor  # [n, value_heads]
    log_rate: torch.Tensor  # float32 [value_heads]
    dt_bias: torch.Tensor  # float32 [value_heads]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMove:
    """Where a one-token step reads and writes the states of its b requests.

    `source`, `target` [slots, ...], the same tensor or not; slots int64 [b]. Where they are the
    same place, it is updated.
    """

    source: torch.Tensor
    source_slots: torch.Tensor
    target: torch.Tensor
    target_slots: torch.Tensor

    @classmethod
    def in_place(cls, states: torch.Tensor, slots: torch.Tensor) -> StateMove:
        """The states of `slots` move on."""
        return cls(source=states, source_slots=slots, target=states, target_slots=slots)


class LinearAttentionOps(Protocol):
    """What `GatedDeltaNet` calls. States are written in place."""

    def conv_prefill(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        weight: torch.Tensor,
        slots: torch.Tensor,
        step: PrefillStates,
    ) -> torch.Tensor:
        """silu of the causal convolution of x [n, channels] with weight [channels, taps].

        `states` [slots, taps - 1, channels]: the last inputs. Read at the step's sources, written
        at `slots` and where its snapshots say.
        """
        ...

    def conv_step(self, x: torch.Tensor, weight: torch.Tensor, move: StateMove) -> torch.Tensor:
        """The same for one token a request, x [b, channels]; inputs as in `conv_prefill`."""
        ...

    def delta_prefill(
        self, inputs: DeltaInputs, states: torch.Tensor, slots: torch.Tensor, step: PrefillStates
    ) -> torch.Tensor:
        """Scan each request's tokens from its source; [n, value_heads, value_dim] like values.

        `states` float32 [slots, value_heads, key_dim, value_dim]. Final states go to `slots`,
        others where the step's snapshots say.
        """
        ...

    def delta_step(self, inputs: DeltaInputs, move: StateMove) -> torch.Tensor:
        """One token a request, states as in `delta_prefill`; [b, value_heads, value_dim]."""
        ...

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x / rms(x) * weight * silu(gate) over the last dimension, both [n, heads, d]."""
        ...


def select_linear_attention_ops(device: torch.device) -> LinearAttentionOps:
    """The operations for parameters on `device`. Call it when a layer is created."""
    if device.type != "cuda":
        return TorchLinearAttention()
    # By name: Triton is installed where there is a GPU only.
    module = importlib.import_module("sglang.srt.layers.mamba.triton_ops.linear_attention")
    return cast(LinearAttentionOps, module.TritonLinearAttention())


class TorchLinearAttention:
    """Plain PyTorch, any device: the reference."""

    def conv_prefill(
        self,
        x: torch.Tensor,
        states: torch.Tensor,
        weight: torch.Tensor,
        slots: torch.Tensor,
        step: PrefillStates,
    ) -> torch.Tensor:
        rows = x.new_empty(step.num_conv_rows, x.shape[1])
        rows[step.token_rows] = x
        rows[step.history_rows] = states[step.sources].flatten(0, 1).to(x.dtype)
        states[slots] = _kept(rows, step.last_rows, states)
        if len(step.snapshot_slots):
            states[step.snapshot_slots] = _kept(rows, step.snapshot_rows, states)
        taps = weight.shape[1]
        out = torch.zeros_like(x)
        for tap in range(taps):
            out += rows[step.token_rows - (taps - 1) + tap] * weight[:, tap]
        return functional.silu(out)

    def conv_step(self, x: torch.Tensor, weight: torch.Tensor, move: StateMove) -> torch.Tensor:
        remembered = move.source[move.source_slots].to(x.dtype)
        window = torch.cat((remembered, x.unsqueeze(1)), dim=1)  # [b, taps, channels]
        move.target[move.target_slots] = window[:, 1:].to(move.target.dtype)
        return functional.silu((window * weight.t()).sum(1))

    def delta_prefill(
        self, inputs: DeltaInputs, states: torch.Tensor, slots: torch.Tensor, step: PrefillStates
    ) -> torch.Tensor:
        query, key, value, decay, beta = _wide_heads(inputs)
        out = torch.empty_like(value)
        for index, chunks in enumerate(step.chunks):
            state = states[step.sources[index]]
            for chunk in chunks:
                part = slice(chunk.begin, chunk.end)
                if chunk.begin < chunk.end:
                    out[part], state = _scan_chunk(
                        query[part], key[part], value[part], decay[part], beta[part], state
                    )
                if chunk.slot:
                    states[chunk.slot] = state
            states[slots[index]] = state
        return out.to(inputs.value.dtype)

    def delta_step(self, inputs: DeltaInputs, move: StateMove) -> torch.Tensor:
        query, key, value, decay, beta = _wide_heads(inputs)
        # [b, heads, key_dim, value_dim]
        state = move.source[move.source_slots] * decay.exp()[..., None, None]
        stored = torch.einsum("bhk,bhkv->bhv", key, state)
        change = (value - stored) * beta.unsqueeze(-1)
        state = state + key.unsqueeze(-1) * change.unsqueeze(-2)
        move.target[move.target_slots] = state
        return torch.einsum("bhk,bhkv->bhv", query, state).to(inputs.value.dtype)

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return (weight * normed * functional.silu(gate.float())).to(x.dtype)


def _kept(rows: torch.Tensor, wanted: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Some rows as slots of `states`."""
    return rows[wanted].view(-1, *states.shape[1:]).to(states.dtype)


def decay_and_beta(inputs: DeltaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(g <= 0, beta), float32 [n, value_heads]."""
    decay = -inputs.log_rate.exp() * functional.softplus(inputs.a.float() + inputs.dt_bias)
    return decay, inputs.b.float().sigmoid()


def _wide_heads(
    inputs: DeltaInputs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query (scaled), key, value, g and beta in float32, one of each a value head."""
    group = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = _unit(inputs.query), _unit(inputs.key)
    query = query * query.shape[-1] ** -0.5
    decay, beta = decay_and_beta(inputs)
    query, key = query.repeat_interleave(group, dim=1), key.repeat_interleave(group, dim=1)
    return query, key, inputs.value.float(), decay, beta


def _unit(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + UNIT_EPS)


def _scan_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk at once: (outputs [t, heads, value_dim], state after it).

    With G the running sum of g, the change u_i that token i stores under k_i is
    beta_i (v_i - exp(G_i) k_i S - sum over j < i of exp(G_i - G_j) (k_i k_j) u_j): a triangular
    system in u.
    """
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))  # [heads, t, dim]
    beta = beta.t().unsqueeze(-1)
    total = decay.t().cumsum(-1)  # [heads, t]
    since = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()  # [heads, t, t]
    system = (beta * (key @ key.transpose(-1, -2)) * since).tril(-1)
    reach = total.exp().unsqueeze(-1)
    wanted = beta * (value - reach * (key @ state))
    change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    out = reach * (query @ state) + (query @ key.transpose(-1, -2) * since) @ change
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    state = reach[:, -1:] * state + (key * left).transpose(-1, -2) @ change
    return out.transpose(0, 1), state
