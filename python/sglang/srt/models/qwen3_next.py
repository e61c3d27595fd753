"""Qwen3-Next: linear attention in most layers, gated full attention in the others, experts in all.

The frame (embedding, residual stream, head, captured layers) is Llama's; norms have zero-centred
weights. A full-attention layer multiplies each head's output by a gate that it computes beside the
query, and rotates a part of each head. The expert of all tokens has a gate of its own.

Source: the published checkpoints and their configuration; for the linear attention see
`layers.mamba.gated_delta_net`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.mamba.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.mamba.layer_states import AcceptedPath
from sglang.srt.layers.mamba.step_states import make_step_states
from sglang.srt.layers.moe import SparseMoeBlock, unfuse_expert_weight
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.base import VerifiedRows
from sglang.srt.models.llama import FinalStates, GatedMLP, LlamaForCausalLM, LlamaModel, pick_rows

# Checkpoints hold the norms' weights less one (but for the norm inside linear attention).
_NORM_OFFSET = 1.0
# Layers of the files that predict further tokens: a draft's.
_MTP_PREFIX = "mtp."


def _norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, _NORM_OFFSET)


class GatedAttention(nn.Module):
    """Full attention whose output is gated, head by head and feature by feature."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.attention_bias,
            query_width=2 * head_dim,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_dim, config.hidden_size, config.attention_bias
        )
        self.q_norm = _norm(config, head_dim)
        self.k_norm = _norm(config, head_dim)
        self.attn = RadixAttention(
            self.qkv_proj.num_heads,
            head_dim,
            config.attention_scaling,
            self.qkv_proj.num_kv_heads,
            layer_id,
            config.sliding_windows[layer_id],
        )
        self._head_dim = head_dim
        # Held in a tuple so that the shared table is no submodule of every layer.
        self._rotary = (rotary,)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `LlamaAttention`. Collective with more than one rank."""
        fused, k, v = self.qkv_proj(hidden_states).split(self.qkv_proj.output_sizes, dim=-1)
        # Of each head the query, then its gate.
        q, gate = fused.unflatten(-1, (-1, 2, self._head_dim)).unbind(2)
        q = self.q_norm(q.contiguous()).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self._head_dim))).flatten(-2)
        rotary = self._rotary[0]
        out = self.attn.rotate_and_attend(positions, q, k, v, rotary, forward_batch)
        return self.o_proj(pick_rows(out * gate.flatten(-2).sigmoid(), rows))


class SharedExpertMoeBlock(SparseMoeBlock):
    """Routed experts, and one for all tokens whose output has a gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(
            num_experts=config.experts.num_experts,
            top_k=config.experts.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.experts.moe_intermediate_size,
            hidden_act=config.hidden_act,
            norm_topk_prob=config.experts.norm_topk_prob,
        )
        width = int(config.hf_config["shared_expert_intermediate_size"])
        self.shared_expert = GatedMLP(config.hidden_size, width, config.hidden_act)
        self.shared_expert_gate = ReplicatedLinear(config.hidden_size, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]. Collective with more than one rank."""
        shared = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return super().forward(x) + shared


class Qwen3NextDecoderLayer(nn.Module):
    """One pre-norm layer; called like a `LlamaDecoderLayer`."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.linear_attn = self.self_attn = None
        linear = config.linear_attention
        if linear is not None and layer_id in linear.layer_ids:
            self.linear_attn = GatedDeltaNet(config, layer_id)
        else:
            self.self_attn = GatedAttention(config, layer_id, rotary)
        self.mlp: nn.Module = (
            SharedExpertMoeBlock(config)
            if config.is_moe_layer(layer_id)
            else GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        )
        self.input_layernorm = _norm(config, config.hidden_size)
        self.post_attention_layernorm = _norm(config, config.hidden_size)

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
        if self.linear_attn is not None:
            mixed = pick_rows(self.linear_attn(normed, forward_batch), rows)
        else:
            assert self.self_attn is not None
            mixed = self.self_attn(positions, normed, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_and_norm(
            mixed, pick_rows(residual, rows)
        )
        return self.mlp(normed), residual


class Qwen3NextModel(LlamaModel):
    """Llama's decoder over a batch whose states have been looked up."""

    def __init__(self, config: ModelConfig, layer_class: type[nn.Module]) -> None:
        super().__init__(config, layer_class)
        self.norm = _norm(config, config.hidden_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> FinalStates:
        """See `LlamaModel`."""
        forward_batch.step_states = make_step_states(forward_batch)
        return super().forward(input_ids, positions, forward_batch)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = Qwen3NextDecoderLayer
    model_class = Qwen3NextModel
    is_plain = False

    def commit_verified(self, kv_pool: KVCache, verified: VerifiedRows) -> None:
        """See `LanguageModel`."""
        if not isinstance(kv_pool, HybridLinearKVPool):
            raise ValueError(f"linear attention needs states, not {type(kv_pool).__name__}")
        pool = kv_pool.mamba_pool
        path = AcceptedPath(
            num_nodes=verified.num_nodes,
            nodes=verified.nodes,
            lens=verified.lens,
            slots=verified.rows + pool.first_working_slot,
            unused_slot=verified.padding_row + pool.first_working_slot,
        )
        for layer_id, layer_idx in kv_pool.linear_layer_index.items():
            layer = self.model.layers[layer_id]
            assert isinstance(layer, Qwen3NextDecoderLayer) and layer.linear_attn is not None
            layer.linear_attn.advance(pool, layer_idx, path)

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unfuse_expert_weight(name, tensor)

    def is_foreign_weight(self, name: str) -> bool:
        return name.startswith(_MTP_PREFIX)


ENTRY_CLASSES = (Qwen3NextForCausalLM,)
