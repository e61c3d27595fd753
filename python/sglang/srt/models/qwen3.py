"""Qwen3: Llama with RMS-normed heads of q and k."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.llama import (
    AttentionChoices,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """See the module docstring."""

    def make_attention(
        self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding
    ) -> LlamaAttention:
        choices = AttentionChoices(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True
        )
        return LlamaAttention(config, layer_id, rotary, choices)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = Qwen3DecoderLayer


ENTRY_CLASSES = (Qwen3ForCausalLM,)
