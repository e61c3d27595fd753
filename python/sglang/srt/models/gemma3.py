"""Gemma 3 (text): most layers attend within a window, every few layers to everything.

Llama's decoder with differences that all follow from the configuration or are stated here: norms
before *and* behind each block, with zero-centred weights; heads of q and k are normed; embeddings
are scaled; layers with a window rotate by a base of their own. The head is tied to the embedding.

Source: Gemma 3 Technical Report (arXiv 2503.19786), section 2, and the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import (
    AttentionChoices,
    GatedMLP,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    pick_rows,
)

# Checkpoints hold the norms' weights less one.
_NORM_OFFSET = 1.0
# Tensors that only images need.
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")


def _norm(config: ModelConfig) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, _NORM_OFFSET)


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP, each between two norms."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        choices = AttentionChoices(
            qkv_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm=True,
            norm_offset=_NORM_OFFSET,
        )
        self.self_attn = LlamaAttention(config, layer_id, rotary, choices)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)
        self.pre_feedforward_layernorm = _norm(config)
        self.post_feedforward_layernorm = _norm(config)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaDecoderLayer`."""
        normed, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        attended = self.self_attn(positions, normed, forward_batch, rows)
        attended = self.post_attention_layernorm(attended)
        normed, residual = self.pre_feedforward_layernorm.add_and_norm(
            attended, pick_rows(residual, rows)
        )
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class Gemma3Model(LlamaModel):
    """Llama's decoder with scaled embeddings and the family's norm at the end."""

    def __init__(self, config: ModelConfig, layer_class: type[nn.Module]) -> None:
        super().__init__(config, layer_class)
        self.norm = _norm(config)
        # Rounded to the dtype, as the checkpoints were trained.
        dtype = self.embed_tokens.weight.dtype
        self._embedding_scale = torch.tensor(
            config.hidden_size**0.5, dtype=dtype, device="cpu"
        ).item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `LlamaModel`."""
        return self.embed_tokens(input_ids) * self._embedding_scale


class Gemma3ForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = Gemma3DecoderLayer
    model_class = Gemma3Model
    is_plain = False


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model in the files of one that also reads images, whose tensors are left there."""

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().split_weight(_plain_name(name), tensor)

    def is_foreign_weight(self, name: str) -> bool:
        return name.removeprefix("model.").startswith(_VISION_PREFIXES)

    def _find_weight(self, name: str) -> torch.Tensor | None:
        return super()._find_weight(_plain_name(name))


def _plain_name(name: str) -> str:
    """A published name, of either of two layouts, as it is of a model of text only."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


ENTRY_CLASSES = (Gemma3ForCausalLM, Gemma3ForConditionalGeneration)
