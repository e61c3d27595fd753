"""The gated delta rule in PyTorch against the same token by token."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.mamba.ops import TorchLinearAttention
from sglang.test import linear_attention_cases as cases
from sglang.test.linear_attention_reference import HeadSizes, make_pool, make_step, prefill_part

OPS = TorchLinearAttention()
SIZES = [HeadSizes(), HeadSizes(key_heads=3, value_heads=3, key_dim=5, value_dim=7, taps=2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("same_keys", [False, True])
def test_scan_equals_token_by_token(sizes: HeadSizes, same_keys: bool) -> None:
    cases.check_delta_prefill(OPS, sizes, same_keys)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_step_equals_token_by_token(sizes: HeadSizes) -> None:
    cases.check_delta_step(OPS, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_convolution_equals_token_by_token(sizes: HeadSizes) -> None:
    cases.check_conv(OPS, sizes)


def test_without_a_plan_a_request_goes_on_or_begins_anew() -> None:
    pool = make_pool(HeadSizes())
    step = make_step(pool, [2, 4], [0, 9], [3, 2])
    assert prefill_part(step).sources.tolist() == [0, int(step.slots[1])]


def test_initial_state_is_never_written() -> None:
    pool = make_pool(HeadSizes())
    cases.check_conv(OPS, HeadSizes())
    step = make_step(pool, cases.ROWS, cases.PREFIXES, cases.LENS, cases.PLAN)
    inputs = cases.strided_inputs(HeadSizes(), sum(cases.LENS))
    OPS.delta_prefill(inputs, step.pool.temporal_state(0), step.slots, prefill_part(step))
    assert not torch.count_nonzero(step.pool.temporal_state(0)[0])
