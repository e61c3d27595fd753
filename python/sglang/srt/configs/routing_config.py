"""Which experts a token goes to, as a `config.json` of the DeepSeek families says it.

Plain JSON in, one frozen record out; read by `model_config`, so that a rule which cannot work is
refused before any weight is read. What the rule means is computed by `layers.moe_routing`.

Sources: DeepSeek-V2 (arXiv 2405.04434, device-limited routing), DeepSeek-V3 (arXiv 2412.19437,
sections 2.1.2 and 2.1.3), and the published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError

_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How experts are chosen.

    Experts lie in `num_groups` groups of equal size; only those of the best `num_chosen_groups`
    groups can be chosen. `uses_bias` is V3's rule: scores are sigmoids, a bias is added for the
    choice, and a group is as good as the sum of its best two. Else scores are a softmax, and a
    group is as good as its best expert. `normalize`: the chosen weights sum up to one before they
    are multiplied by `scale`.
    """

    top_k: int
    num_groups: int
    num_chosen_groups: int
    uses_bias: bool
    normalize: bool
    scale: float

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ValueError(f"cannot choose {self.num_chosen_groups} of {self.num_groups} groups")


def read_routing_rule(raw: Mapping[str, Any]) -> RoutingRule | None:
    """The rule; None for a model without such experts. ModelConfigError for one that cannot be.

    Where the file does not name the method, it is the family's own, for a model and for the drafts
    that lie beside its layers.
    """
    num_experts = int(raw.get("n_routed_experts") or 0)
    if not num_experts:
        return None
    is_v3 = any(name.startswith("DeepseekV3") for name in raw.get("architectures") or ())
    method = raw.get("topk_method") or ("noaux_tc" if is_v3 else "greedy")
    if method not in _METHODS:
        raise ModelConfigError(f"config.json: topk_method {method!r} is not supported")
    uses_bias, is_grouped = method == "noaux_tc", method != "greedy"
    scoring = raw.get("scoring_func") or ("sigmoid" if uses_bias else "softmax")
    if scoring != ("sigmoid" if uses_bias else "softmax"):
        raise ModelConfigError(
            f"config.json: scoring_func {scoring!r} does not go with topk_method {method!r}"
        )
    normalize = bool(raw.get("norm_topk_prob", False))
    scale = float(raw.get("routed_scaling_factor") or 1.0)
    if normalize and not uses_bias:
        scale = 1.0  # V2's weights are either normalized or scaled
    try:
        rule = RoutingRule(
            top_k=int(raw.get("num_experts_per_tok") or 0),
            num_groups=int(raw.get("n_group") or 1) if is_grouped else 1,
            num_chosen_groups=int(raw.get("topk_group") or 1) if is_grouped else 1,
            uses_bias=uses_bias,
            normalize=normalize,
            scale=scale,
        )
    except ValueError as error:
        raise ModelConfigError(
            f"config.json: topk_group does not go with n_group: {error}"
        ) from error
    _check_counts(rule, num_experts)
    return rule


def _check_counts(rule: RoutingRule, num_experts: int) -> None:
    if num_experts % rule.num_groups:
        raise ModelConfigError(
            f"config.json: {num_experts} experts (n_routed_experts) cannot form "
            f"{rule.num_groups} groups of equal size (n_group)"
        )
    num_eligible = num_experts // rule.num_groups * rule.num_chosen_groups
    if not 1 <= rule.top_k <= num_eligible:
        raise ModelConfigError(
            f"config.json: cannot choose {rule.top_k} experts (num_experts_per_tok) among "
            f"{num_eligible}"
        )
