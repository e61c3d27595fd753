"""A layer of MiMo that predicts one token further, as a draft (`mtp_draft`).

A Qwen2 layer behind the joined state and embedding, in this order; the files count these layers
apart from the target's.

Source: MiMo (arXiv 2505.07608) and the published names.
"""

from __future__ import annotations

from torch import nn

from sglang.srt.configs.draft_config import mtp_layer
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.mtp_draft import MtpDraftModel
from sglang.srt.models.qwen2 import Qwen2DecoderLayer

MTP_PREFIX = "model.mtp_layers."


class MiMoMTP(MtpDraftModel):
    """See the module docstring."""

    own_names = {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "norm",
    }
    joins_state_first = True

    @staticmethod
    def published_prefix(config: ModelConfig) -> str:
        return f"{MTP_PREFIX}{mtp_layer(config)}."

    def make_layer(self, config: ModelConfig, rotary: RotaryEmbedding) -> nn.Module:
        return Qwen2DecoderLayer(config, 0, rotary)


ENTRY_CLASSES = (MiMoMTP,)
