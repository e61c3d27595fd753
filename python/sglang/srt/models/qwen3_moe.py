"""Qwen3-MoE: Qwen3 attention, experts in place of the MLP in the layers that the config says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe import SparseMoeBlock, unfuse_expert_weight
from sglang.srt.models.llama import GatedMLP, LlamaForCausalLM
from sglang.srt.models.qwen3 import Qwen3DecoderLayer


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """See the module docstring."""

    def make_mlp(self, config: ModelConfig, layer_id: int) -> nn.Module:
        if not config.is_moe_layer(layer_id):
            return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        return SparseMoeBlock(
            num_experts=config.experts.num_experts,
            top_k=config.experts.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.experts.moe_intermediate_size,
            hidden_act=config.hidden_act,
            norm_topk_prob=config.experts.norm_topk_prob,
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = Qwen3MoeDecoderLayer

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unfuse_expert_weight(name, tensor)


ENTRY_CLASSES = (Qwen3MoeForCausalLM,)
