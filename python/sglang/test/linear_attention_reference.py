"""Linear attention token by token in float64, and random inputs for it: what kernels are held to.

Formulas as in `layers.mamba.ops`, written as plainly as they can be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from sglang.srt.layers.mamba.ops import UNIT_EPS, DeltaInputs
from sglang.srt.layers.mamba.step_states import PrefillStates, StepStates, make_step_states
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.mamba_pool import MambaPool, StateShape
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.state_snapshots import StatePlan
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

NUM_ROWS = 6
NUM_SNAPSHOTS = 5


@dataclass(frozen=True)
class HeadSizes:
    """Of one rank."""

    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 12
    value_dim: int = 10
    taps: int = 4

    @property
    def channels(self) -> int:
        """Width of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def make_pool(sizes: HeadSizes, device: str = "cpu") -> HybridLinearKVPool:
    """One linear layer (number 1) whose states are random but for the initial one."""
    shape = StateShape(
        conv_dim=sizes.channels,
        conv_len=sizes.taps - 1,
        num_heads=sizes.value_heads,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        conv_dtype=torch.float32,
    )
    states = MambaPool(NUM_SNAPSHOTS, NUM_ROWS, shape, 1, device)
    generator = torch.Generator().manual_seed(5)
    for buffer in states.buffers():
        buffer[:, 1:] = torch.randn(buffer[:, 1:].shape, generator=generator).to(device)
    kv = MHATokenToKVPool(16, 1, torch.float32, 1, 4, 1, device)
    return HybridLinearKVPool(kv, states, [0], [1])


def make_step(
    pool: HybridLinearKVPool,
    rows: list[int],
    prefixes: list[int],
    lens: list[int],
    plan: StatePlan | None = None,
) -> StepStates:
    """States of a prefill step."""
    device = pool.device

    def ids(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    total = sum(lens)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(rows),
        input_ids=ids([0] * total),
        positions=ids([0] * total),
        req_pool_indices=ids(rows),
        seq_lens=ids([p + n for p, n in zip(prefixes, lens)]),
        seq_lens_cpu=[p + n for p, n in zip(prefixes, lens)],
        out_cache_loc=ids([0] * total),
        req_to_token_pool=ReqToTokenPool(NUM_ROWS - 1, 64, device),
        token_to_kv_pool=pool,
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=prefixes,
        state_plan=plan,
    )
    return make_step_states(batch)


def prefill_part(step: StepStates) -> PrefillStates:
    """The prefill of a step that has one."""
    assert step.prefill is not None
    return step.prefill


def random_inputs(
    sizes: HeadSizes, num_tokens: int, seed: int = 0, same_keys: bool = False
) -> DeltaInputs:
    """`same_keys`: every token brings the same key and keeps all, where systems are worst."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    key = randn(num_tokens, sizes.key_heads, sizes.key_dim)
    a, b = randn(num_tokens, sizes.value_heads), randn(num_tokens, sizes.value_heads)
    log_rate = randn(sizes.value_heads)
    if same_keys:
        key, b, log_rate = key[:1].expand_as(key).contiguous(), b + 8, log_rate - 12
    return DeltaInputs(
        query=randn(num_tokens, sizes.key_heads, sizes.key_dim),
        key=key,
        value=randn(num_tokens, sizes.value_heads, sizes.value_dim),
        a=a,
        b=b,
        log_rate=log_rate,
        dt_bias=randn(sizes.value_heads),
    )


def delta_by_token(
    inputs: DeltaInputs, tokens: slice, state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(outputs [t, heads, value_dim], state after each of the tokens), float64."""
    group = inputs.value.shape[1] // inputs.key.shape[1]
    state = state.double().clone()
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for t in range(tokens.start, tokens.stop):
        out = torch.empty(inputs.value.shape[1:], dtype=torch.float64)
        for head in range(inputs.value.shape[1]):
            q = inputs.query[t, head // group].double()
            k = inputs.key[t, head // group].double()
            q = q / (q.dot(q) + UNIT_EPS).sqrt() / math.sqrt(len(q))
            k = k / (k.dot(k) + UNIT_EPS).sqrt()
            opening = functional.softplus((inputs.a[t, head] + inputs.dt_bias[head]).double())
            decay = torch.exp(-inputs.log_rate[head].double().exp() * opening)
            beta = inputs.b[t, head].double().sigmoid()
            own = state[head] * decay
            change = beta * (inputs.value[t, head].double() - k @ own)
            state[head] = own + torch.outer(k, change)
            out[head] = q @ state[head]
        outputs.append(out)
        states.append(state.clone())
    return torch.stack(outputs), states


def conv_by_token(
    x: torch.Tensor, history: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(outputs [t, channels], remembered inputs after each token) of one request, float64."""
    rows = [row.double() for row in history]
    outputs, kept = [], []
    for new in x:
        rows = [*rows, new.double()]
        total = sum((row * tap for row, tap in zip(rows, weight.double().t())), torch.zeros(1))
        outputs.append(functional.silu(total))
        rows = rows[1:]
        kept.append(torch.stack(rows))
    return torch.stack(outputs), kept
