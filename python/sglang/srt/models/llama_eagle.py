"""EAGLE-1/2 draft: Llama layers that continue the target's final hidden states.

`fc` joins the embedding of a token with the target's final hidden state of the token before; the
layers predict the hidden state of that token, and the target's own head reads it. So there is no
norm at the end (the target's states are normed, and so are the predicted ones), none before the
first attention, and the whole vocabulary. EAGLE-2 is the same network under another search.

Source: EAGLE (arXiv 2401.15077) and the published folders: tensors `fc`, `layers.N`, a copy of the
target's `embed_tokens`.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, create_rotary_embedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.models.llama import (
    AttentionChoices,
    GatedMLP,
    LlamaAttention,
    layers_and_rows,
    pick_rows,
)


class EagleDecoderLayer(nn.Module):
    """A Llama layer; the first one has no norm before its attention."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        choices = AttentionChoices(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        self.self_attn = LlamaAttention(config, layer_id, rotary, choices)
        self.mlp = GatedMLP(
            hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias
        )
        self.input_layernorm = RMSNorm(hidden_size, eps) if layer_id > 0 else None
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block output, residual stream before it), [n, hidden] each; consumes both inputs.

        `rows`: see `LlamaDecoderLayer`.
        """
        if self.input_layernorm is None:
            normed, residual = hidden_states, hidden_states
        else:
            normed, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        attended = self.self_attn(positions, normed, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_and_norm(
            attended, pick_rows(residual, rows)
        )
        return self.mlp(normed), residual


class LlamaForCausalLMEagle(EagleDraftModel):
    """See the module docstring."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # Files of this kind have a bias unless their config says otherwise.
        self.fc = ReplicatedLinear(
            2 * config.hidden_size, config.hidden_size, self.draft_config.fc_bias is not False
        )
        if self.fc.bias is not None:
            self.fc.bias.data.zero_()
        rotary = create_rotary_embedding(config)
        self.layers = nn.ModuleList(
            EagleDecoderLayer(config, layer_id, rotary)
            for layer_id in range(config.num_hidden_layers)
        )
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
        hidden_states = self.fc(torch.cat((self.embed_tokens(input_ids), features), dim=-1))
        residual: torch.Tensor | None = None
        kept = self._rows_to_keep(forward_batch)
        for layer, rows in layers_and_rows(self.layers, kept):
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch, rows)
        final = hidden_states if residual is None else hidden_states + residual
        return self.logits_processor(
            final, self.lm_head, forward_batch, are_picked=kept is not None
        )

    def is_optional_weight(self, name: str) -> bool:
        return name == "fc.bias" and self.draft_config.fc_bias is None


ENTRY_CLASSES = (LlamaForCausalLMEagle,)
