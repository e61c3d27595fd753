"""Attention of unrolled steps against one position after another, for both ways to compute it."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.training.eagle3.attention import attention_function, self_check

NUM_STEPS = 4
SHAPE = (2, 3, 9, 8)  # [B, heads, T, head size]


def _inputs(seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    make = [
        [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(NUM_STEPS)]
        for _ in range(3)
    ]
    return make[0], make[1], make[2]


def _position_by_position(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], shift: int = 0
) -> torch.Tensor:
    """What a chain from each position finds in its cache; `shift` takes another's entries."""
    batch, heads, length, size = SHAPE
    rows = []
    for b in range(batch):
        for h in range(heads):
            for p in range(length):
                own = (p + shift) % length
                seen_keys = [*keys[0][b, h, : p + 1], *(key[b, h, own] for key in keys[1:])]
                seen_values = [*values[0][b, h, : p + 1], *(v[b, h, own] for v in values[1:])]
                scores = torch.stack([query[b, h, p] @ key for key in seen_keys])
                shares = (scores / math.sqrt(size)).softmax(0)
                rows.append(shares @ torch.stack(seen_values))
    return torch.stack(rows).reshape(SHAPE)


@pytest.mark.parametrize("name", ["merged", "masked"])
def test_each_step_sees_real_entries_before_it_and_its_own_unrolled_ones(name: str) -> None:
    attention = attention_function(name)
    queries, keys, values = _inputs()
    for step in range(NUM_STEPS):
        got = attention(queries[step], keys[: step + 1], values[: step + 1])
        expected = _position_by_position(queries[step], keys[: step + 1], values[: step + 1])
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["merged", "masked"])
def test_gradients_are_those_of_the_plain_form(name: str) -> None:
    queries, keys, values = _inputs()
    inputs = [queries[-1], *keys, *values]
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    got = attention_function(name)(queries[-1], keys, values)
    expected = _position_by_position(queries[-1], keys, values)
    for mine, plain in zip(
        torch.autograd.grad(got, inputs, weight), torch.autograd.grad(expected, inputs, weight)
    ):
        torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["merged", "masked"])
def test_a_neighbour_s_unrolled_entries_would_be_noticed(name: str) -> None:
    queries, keys, values = _inputs()
    got = attention_function(name)(queries[-1], keys, values)
    wrong = _position_by_position(queries[-1], keys, values, shift=1)
    assert float((got - wrong).detach().abs().max()) > 0.05


def test_the_self_check_passes_on_the_cpu() -> None:
    self_check(torch.device("cpu"), torch.float32, 10)


def test_the_self_check_notices_a_wrong_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.training.eagle3.attention as module

    real = module._fused_forward

    def off(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[object, ...]]:
        out, lse, rest = real(*args)
        return out, lse + 0.1, rest

    monkeypatch.setattr(module, "_fused_forward", off)
    with pytest.raises(RuntimeError, match="differ"):
        self_check(torch.device("cpu"), torch.float32, 8)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="merged, masked"):
        attention_function("flex")
