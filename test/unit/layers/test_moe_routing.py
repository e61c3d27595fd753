"""Routing rules against a slow reading of their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from sglang.srt.layers.moe_routing import RoutingRule, choose_experts

EXPERTS = 12


def rule(**changes: object) -> RoutingRule:
    values: dict[str, object] = {
        "top_k": 3,
        "num_groups": 4,
        "num_chosen_groups": 2,
        "uses_bias": False,
        "normalize": False,
        "scale": 1.5,
    }
    return RoutingRule(**{**values, **changes})  # type: ignore[arg-type]


def slow_choice(logits: list[float], wanted: RoutingRule, bias: list[float]) -> dict[int, float]:
    """Expert -> weight of one token."""
    if wanted.uses_bias:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    ranked = [s + b for s, b in zip(scores, bias)]
    size = len(logits) // wanted.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(wanted.num_groups)]
    best_of = 2 if wanted.uses_bias else 1

    def worth(group: range) -> float:
        return sum(sorted((ranked[e] for e in group), reverse=True)[:best_of])

    kept = sorted(groups, key=worth, reverse=True)[: wanted.num_chosen_groups]
    allowed = sorted((e for g in kept for e in g), key=lambda e: ranked[e], reverse=True)
    chosen = allowed[: wanted.top_k]
    norm = sum(scores[e] for e in chosen) if wanted.normalize else 1.0
    return {e: scores[e] / norm * wanted.scale for e in chosen}


@pytest.mark.parametrize("uses_bias", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (4, 1), (2, 2), (12, 5)])
def test_choice_is_the_defined_one(
    uses_bias: bool, normalize: bool, groups: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, EXPERTS, generator=generator)
    # Large enough to change choices, and below zero for all experts of some groups.
    bias = torch.randn(EXPERTS, generator=generator) - 1.0
    wanted = rule(
        uses_bias=uses_bias, normalize=normalize, num_groups=groups[0], num_chosen_groups=groups[1]
    )
    weights, ids = choose_experts(logits, wanted, bias if uses_bias else None)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    for row in range(len(logits)):
        shown = bias.tolist() if uses_bias else [0.0] * EXPERTS
        expected = slow_choice(logits[row].tolist(), wanted, shown)
        found = dict(zip(ids[row].tolist(), weights[row].tolist()))
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_bias_changes_the_choice_but_not_the_weight() -> None:
    logits = torch.zeros(1, EXPERTS)
    bias = torch.zeros(EXPERTS)
    bias[[2, 7, 11]] = 1.0
    wanted = rule(uses_bias=True, num_groups=1, num_chosen_groups=1, scale=1.0)
    weights, ids = choose_experts(logits, wanted, bias)
    assert sorted(ids[0].tolist()) == [2, 7, 11] and weights.eq(0.5).all()


def test_what_does_not_go_together_is_refused() -> None:
    logits = torch.zeros(1, EXPERTS)
    with pytest.raises(ValueError, match="bias"):
        choose_experts(logits, rule(uses_bias=True), None)
    with pytest.raises(ValueError, match="bias"):
        choose_experts(logits, rule(), torch.zeros(EXPERTS))
    with pytest.raises(ValueError, match="groups"):
        choose_experts(logits, rule(num_groups=5), None)
    with pytest.raises(ValueError, match="of 4 groups"):
        rule(num_chosen_groups=5)
