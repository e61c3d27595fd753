"""A layer of DeepSeek-V3 that predicts one token further, as a draft (`mtp_draft`).

The files hold it behind the target's last layer, with copies of embedding and head that are not
read; a folder of its own begins with layer 0.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) and the published names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sglang.srt.configs.draft_config import published_mtp_layer
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe import unfuse_expert_weight
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.deepseek_v2 import DeepseekDecoderLayer
from sglang.srt.models.mtp_draft import MtpDraftModel


class DeepseekV3ForCausalLMNextN(MtpDraftModel):
    """See the module docstring."""

    own_names = {
        "eh_proj": "eh_proj",
        "enorm": "enorm",
        "hnorm": "hnorm",
        "shared_head.norm": "norm",
        "shared_head.head": "lm_head",
        "embed_tokens": "embed_tokens",
    }

    @staticmethod
    def published_prefix(config: ModelConfig) -> str:
        return f"model.layers.{published_mtp_layer(config)}."

    def make_layer(self, config: ModelConfig, rotary: RotaryEmbedding) -> nn.Module:
        return DeepseekDecoderLayer(config, 0, rotary, published_mtp_layer(config))

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for plain, part in super().split_weight(name, tensor):
            yield from unfuse_expert_weight(plain, part)


ENTRY_CLASSES = (DeepseekV3ForCausalLMNextN,)
