"""Cases that every set of linear-attention operations must pass, held to the float64 reference."""

from __future__ import annotations

import torch

from sglang.srt.layers.mamba.ops import (
    DeltaInputs,
    LinearAttentionOps,
    StateMove,
    TorchLinearAttention,
)
from sglang.srt.mem_cache.state_snapshots import OWN_STATE, StatePlan, StateSnapshot
from sglang.test.linear_attention_reference import (
    HeadSizes,
    conv_by_token,
    delta_by_token,
    make_pool,
    make_step,
    prefill_part,
    random_inputs,
)

TOLERANCE = 2e-5

# Of three requests: a new one, one that goes on, one that begins with a snapshot. Snapshots lie
# inside, at the end of a chunk, at the end, and before the first token.
ROWS, PREFIXES, LENS = [3, 0, 4], [0, 7, 20], [40, 3, 33]
PLAN = StatePlan(
    sources=[0, OWN_STATE, 2],
    snapshots=[
        StateSnapshot(index=0, position=17, slot=1),
        StateSnapshot(index=0, position=40, slot=5),
        StateSnapshot(index=1, position=7, slot=3),
        StateSnapshot(index=2, position=52, slot=4),
    ],
)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double().cpu(), want, atol=TOLERANCE, rtol=1e-5)


def check_delta_prefill(ops: LinearAttentionOps, sizes: HeadSizes, same_keys: bool) -> None:
    """Outputs, final states and snapshots of a step; nothing else is written."""
    pool = make_pool(sizes)
    step = make_step(pool, ROWS, PREFIXES, LENS, PLAN)
    inputs = random_inputs(sizes, sum(LENS), same_keys=same_keys)
    states = step.pool.temporal_state(0)
    before = states.clone()
    out = ops.delta_prefill(inputs, states, step.slots, prefill_part(step))
    expected = before.double()
    begin = 0
    for index, length in enumerate(LENS):
        slot = int(step.slots[index])
        source = slot if PLAN.sources[index] == OWN_STATE else PLAN.sources[index]
        tokens = slice(begin, begin + length)
        want, after = delta_by_token(inputs, tokens, before[source])
        _close(out[tokens], want)
        expected[slot] = after[-1]
        for kept in PLAN.snapshots:
            if kept.index == index:
                taken = kept.position - PREFIXES[index]
                expected[kept.slot] = after[taken - 1] if taken else before[source].double()
        begin += length
    _close(states, expected)


def check_delta_step(ops: LinearAttentionOps, sizes: HeadSizes) -> None:
    """One token each, the states of these rows move on."""
    pool = make_pool(sizes)
    states = pool.mamba_pool.temporal_state(0)
    before = states.clone()
    slots = torch.tensor([8, 6, 10])
    inputs = random_inputs(sizes, 3, seed=4)
    out = ops.delta_step(inputs, StateMove.in_place(states, slots))
    expected = before.double()
    for index, slot in enumerate(slots.tolist()):
        want, after = delta_by_token(inputs, slice(index, index + 1), before[slot])
        _close(out[index], want[0])
        expected[slot] = after[-1]
    _close(states, expected)


def check_conv(ops: LinearAttentionOps, sizes: HeadSizes) -> None:
    """A prefill step, then a decode step."""
    pool = make_pool(sizes)
    step = make_step(pool, ROWS, PREFIXES, LENS, PLAN)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(sum(LENS), sizes.channels, generator=generator)
    weight = torch.randn(sizes.channels, sizes.taps, generator=generator)
    states = step.pool.conv_state(0)
    before = states.clone()
    out = ops.conv_prefill(x, states, weight, step.slots, prefill_part(step))
    expected = before.double()
    begin = 0
    for index, length in enumerate(LENS):
        slot = int(step.slots[index])
        source = slot if PLAN.sources[index] == OWN_STATE else PLAN.sources[index]
        want, after = conv_by_token(x[begin : begin + length], before[source], weight)
        _close(out[begin : begin + length], want)
        expected[slot] = after[-1]
        for kept in PLAN.snapshots:
            if kept.index == index:
                taken = kept.position - PREFIXES[index]
                expected[kept.slot] = after[taken - 1] if taken else before[source].double()
        begin += length
    _close(states, expected)

    before = states.clone()
    x = torch.randn(len(ROWS), sizes.channels, generator=generator)
    out = ops.conv_step(x, weight, StateMove.in_place(states, step.slots))
    expected = before.double()
    for index, slot in enumerate(step.slots.tolist()):
        want, after = conv_by_token(x[index : index + 1], before[slot], weight)
        _close(out[index], want[0])
        expected[slot] = after[-1]
    _close(states, expected)


def check_gated_norm(ops: LinearAttentionOps) -> None:
    """Like the reference's."""
    generator = torch.Generator().manual_seed(2)
    x, gate = torch.randn(2, 7, 3, 10, generator=generator).unbind(0)
    weight = torch.randn(10, generator=generator)
    want = TorchLinearAttention().gated_norm(x.double(), gate.double(), weight.double(), 1e-5)
    _close(ops.gated_norm(x, gate, weight, 1e-5), want)


def strided_inputs(sizes: HeadSizes, num_tokens: int) -> DeltaInputs:
    """Queries, keys and values as views of one tensor, as a layer has them."""
    plain = random_inputs(sizes, num_tokens, seed=7)
    joined = torch.cat([t.flatten(1) for t in (plain.query, plain.key, plain.value)], dim=1)
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = joined.split([keys, keys, joined.shape[1] - 2 * keys], dim=1)
    return DeltaInputs(
        query=q.unflatten(1, (sizes.key_heads, sizes.key_dim)),
        key=k.unflatten(1, (sizes.key_heads, sizes.key_dim)),
        value=v.unflatten(1, (sizes.value_heads, sizes.value_dim)),
        a=plain.a,
        b=plain.b,
        log_rate=plain.log_rate,
        dt_bias=plain.dt_bias,
    )
