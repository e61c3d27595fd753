"""The experts of a model, as its `config.json` says it: how many, how wide, in which layers.

Plain JSON in, one frozen record out; read by `model_config`. How tokens choose among them, where
that is more than the best of a softmax, is in `routing_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts, under the names of the file; `num_experts` is 0 for dense models.

    It is also 0 in the DeepSeek families, which count theirs as `n_routed_experts` and say in
    another way which layers have them.
    """

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def are_in_layer(self, layer_id: int) -> bool:
        """Whether layer `layer_id` has experts instead of one dense MLP."""
        return (
            self.num_experts > 0
            and layer_id not in self.mlp_only_layers
            and (layer_id + 1) % self.decoder_sparse_step == 0
        )


def read_experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    """Read the record. Raises ModelConfigError where a token cannot choose as many as it should."""
    experts = ExpertsConfig(
        num_experts=int(raw.get("num_experts") or raw.get("num_local_experts") or 0),
        num_experts_per_tok=int(raw.get("num_experts_per_tok") or 0),
        moe_intermediate_size=int(raw.get("moe_intermediate_size") or 0),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        decoder_sparse_step=int(raw.get("decoder_sparse_step") or 1),
        mlp_only_layers=tuple(raw.get("mlp_only_layers") or ()),
    )
    if experts.num_experts and not 1 <= experts.num_experts_per_tok <= experts.num_experts:
        raise ModelConfigError(
            f"config.json: cannot choose {experts.num_experts_per_tok} experts "
            f"(num_experts_per_tok) among {experts.num_experts}"
        )
    return experts
