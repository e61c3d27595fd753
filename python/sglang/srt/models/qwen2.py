"""Qwen2 and Qwen2.5: Llama with biased q, k and v projections."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.models.llama import (
    AttentionChoices,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
)


class Qwen2DecoderLayer(LlamaDecoderLayer):
    """See the module docstring."""

    def make_attention(
        self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding
    ) -> LlamaAttention:
        return LlamaAttention(config, layer_id, rotary, AttentionChoices(qkv_bias=True))


class Qwen2ForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = Qwen2DecoderLayer


ENTRY_CLASSES = (Qwen2ForCausalLM,)
