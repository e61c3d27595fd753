"""Which experts a token goes to, and with what weight: the rules of the DeepSeek families.

Pure functions of router logits. Called by the models' expert blocks, on any device, without reading
anything back from it.

Sources: DeepSeek-V2 (arXiv 2405.04434, device-limited routing), DeepSeek-V3 (arXiv 2412.19437,
sections 2.1.2 and 2.1.3: sigmoid scores, a bias that balances the load and only takes part in the
choice, node-limited routing).
"""

from __future__ import annotations

import torch

from sglang.srt.configs.routing_config import RoutingRule


def choose_experts(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32 [n, k], expert ids int64 [n, k]) for router logits [n, experts].

    `bias` float32 [experts], with `rule.uses_bias` only. Raises ValueError where the groups do not
    divide the experts or the bias does not go with the rule.
    """
    if (bias is not None) != rule.uses_bias:
        raise ValueError("a bias goes with the rule that uses one, and only with it")
    wide = logits.float()
    scores = wide.sigmoid() if rule.uses_bias else wide.softmax(dim=-1)
    ranked = scores if bias is None else scores + bias
    if rule.num_chosen_groups < rule.num_groups:
        ranked = _keep_best_groups(ranked, rule)
    expert_ids = ranked.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if rule.normalize:
        # The sum of sigmoids may be next to nothing.
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * rule.scale, expert_ids


def _keep_best_groups(ranked: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """`ranked` [n, experts] with minus infinity in the groups that are out."""
    if ranked.shape[-1] % rule.num_groups:
        raise ValueError(f"{ranked.shape[-1]} experts do not fill {rule.num_groups} groups")
    grouped = ranked.unflatten(-1, (rule.num_groups, -1))
    if rule.uses_bias:
        group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    else:
        group_scores = grouped.amax(dim=-1)
    best = group_scores.topk(rule.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
