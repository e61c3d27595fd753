"""The layer of DeepSeek-V3 that predicts one token further (MTP), as an EAGLE draft.

It joins the next token's embedding with the target's final hidden state, each under a norm of its
own, and runs one decoder layer; a norm and the target's head follow. The first of such layers
serves every step of a proposal: it reads its own normed states in place of the target's. The files
hold it as the layer behind the target's last one, with copies of embedding and head that are not
read; a folder of its own has it as layer 0.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2) and the published names.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sglang.srt.configs.draft_config import has_nextn_layers
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe import unfuse_expert_weight
from sglang.srt.layers.rotary_embedding import create_rotary_embedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.deepseek_v2 import DeepseekDecoderLayer, layer_of_weight
from sglang.srt.models.eagle_draft import EagleDraftModel

# Published names in the layer -> names in the module tree; all else is the decoder layer's.
_OWN_NAMES = {
    "eh_proj": "eh_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}


def published_layer_id(config: ModelConfig) -> int:
    """Which layer of the files the draft is."""
    return int(config.hf_config["num_hidden_layers"]) if has_nextn_layers(config) else 0


class DeepseekV3ForCausalLMNextN(EagleDraftModel):
    """See the module docstring."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self._published_layer_id = published_layer_id(config)
        self.enorm = RMSNorm(hidden_size, eps)
        self.hnorm = RMSNorm(hidden_size, eps)
        self.eh_proj = ReplicatedLinear(2 * hidden_size, hidden_size)
        rotary = create_rotary_embedding(config)
        self.layers = nn.ModuleList(
            [DeepseekDecoderLayer(config, 0, rotary, self._published_layer_id)]
        )
        self.norm = RMSNorm(hidden_size, eps)
        self._make_vocabulary_layers()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions int64 [n]; collective with more than one rank.

        `forward_batch.input_hidden_states` [n, hidden]: the target's final states (capture
        without layers), or states that this draft returned. See `EagleDraftModel`.
        """
        features = self._input_hidden_states(forward_batch)
        if features.shape[-1] != self.config.hidden_size:
            raise RuntimeError(
                f"the draft reads hidden states of width {self.config.hidden_size}, "
                f"got {features.shape[-1]}"
            )
        embedded = self.enorm(self.embed_tokens(input_ids))
        joined = torch.cat((embedded, self.hnorm(features)), dim=-1)
        hidden_states, residual = self.layers[0](
            positions, self.eh_proj(joined), None, forward_batch
        )
        normed, _ = self.norm.add_and_norm(hidden_states, residual)
        return self.logits_processor(input_ids, normed, self.lm_head, forward_batch)

    # -- checkpoint names -------------------------------------------------------------------------

    def is_foreign_weight(self, name: str) -> bool:
        return layer_of_weight(name) != self._published_layer_id

    def plain_name(self, name: str) -> str:
        prefix = f"model.layers.{self._published_layer_id}."
        if not name.startswith(prefix):
            return name
        own, _, part = name.removeprefix(prefix).rpartition(".")
        return f"{_OWN_NAMES[own]}.{part}" if own in _OWN_NAMES else f"layers.0.{own}.{part}"

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unfuse_expert_weight(self.plain_name(name), tensor)

    def published_name(self, name: str) -> str:
        """The inverse of `plain_name`."""
        prefix = f"model.layers.{self._published_layer_id}."
        own, _, part = name.rpartition(".")
        for published, plain in _OWN_NAMES.items():
            if own == plain:
                return f"{prefix}{published}.{part}"
        return prefix + name.removeprefix("layers.0.")


ENTRY_CLASSES = (DeepseekV3ForCausalLMNextN,)
