"""Mixture of experts with softmax top-k routing and fused expert weights.

Experts are split over ranks inside (by intermediate size), so every rank runs every chosen expert
and the results are summed once. How the chosen ones are run is the operations' choice (`dispatch`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from sglang.srt.distributed.communication import tensor_model_parallel_all_reduce
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.activation import get_gated_activation
from sglang.srt.layers.dispatch import ExpertWeights, default_ops
from sglang.srt.layers.linear import ReplicatedLinear, split_evenly
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, new_parameter


class FusedExperts(WeightOwner):
    """Weights of all experts: gate_up [E, 2 * I, hidden] and down [E, hidden, I], I per rank."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, hidden_act: str
    ) -> None:
        super().__init__()
        group = get_tp_group()
        self.num_experts = num_experts
        self._hidden_size = hidden_size
        self._full_intermediate = intermediate_size
        self._intermediate = split_evenly(intermediate_size, group.size, "expert intermediate")
        self._first = group.rank * self._intermediate
        self.gate_up_proj = new_parameter(num_experts, 2 * self._intermediate, hidden_size)
        self.down_proj = new_parameter(num_experts, hidden_size, self._intermediate)
        self._ops = default_ops()
        self._activation = get_gated_activation(hidden_act)

    def forward(
        self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor
    ) -> torch.Tensor:
        """x [n, hidden], ids int64 [n, k], weights [n, k] -> [n, hidden].

        Collective with more than one rank.
        """
        weights = ExpertWeights(
            gate_up=self.gate_up_proj, down=self.down_proj, activation=self._activation
        )
        out = self._ops.experts(x, expert_ids, expert_weights, weights)
        return tensor_model_parallel_all_reduce(out)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        rows, full = self._intermediate, self._full_intermediate
        for expert in range(self.num_experts):
            gate_up, down = self.gate_up_proj.data[expert], self.down_proj.data[expert]
            for offset, part in ((0, "gate_proj"), (rows, "up_proj")):
                slots[f"{name}.{expert}.{part}.weight"] = WeightSlot(
                    target=gate_up.narrow(0, offset, rows),
                    full_shape=(full, self._hidden_size),
                    shard_dim=0,
                    shard_start=self._first,
                )
            slots[f"{name}.{expert}.down_proj.weight"] = WeightSlot(
                target=down,
                full_shape=(self._hidden_size, full),
                shard_dim=1,
                shard_start=self._first,
            )
        return slots


class SparseMoeBlock(nn.Module):
    """Router and experts of one layer."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        norm_topk_prob: bool,
    ) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(hidden_size, num_experts)
        self.experts = FusedExperts(num_experts, hidden_size, intermediate_size, hidden_act)
        self._top_k = top_k
        self._norm_topk_prob = norm_topk_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]. Collective with more than one rank."""
        probabilities = torch.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, expert_ids = probabilities.topk(self._top_k, dim=-1)
        if self._norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, expert_ids, weights.to(x.dtype))


def unfuse_expert_weight(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a checkpoint tensor that holds all experts into the per-expert names.

    Some files store `experts.gate_up_proj` [E, 2 * I, hidden] and `experts.down_proj`
    [E, hidden, I]; every other name passes unchanged. The parts are views.
    """
    prefix, _, part = name.rpartition(".")
    if not prefix.endswith(".experts") or tensor.dim() != 3:
        yield name, tensor
    elif part == "gate_up_proj":
        for expert, weight in enumerate(tensor):
            gate, up = weight.chunk(2, dim=0)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up
    elif part == "down_proj":
        for expert, weight in enumerate(tensor):
            yield f"{prefix}.{expert}.down_proj.weight", weight
    else:
        yield name, tensor
