"""DeepSeek-V2 and -V3: latent attention, and experts of which some are shared by all tokens.

The frame (embedding, residual stream, head, captured layers) is Llama's. Heads and experts are
split over ranks; the latent vector and the router are computed on every rank. V3 differs in the
router: sigmoid scores and a bias for the choice.

Sources: arXiv 2405.04434 (V2), arXiv 2412.19437 (V3); checkpoint names as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError, RopeConfig
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.mla import LatentAttention
from sglang.srt.layers.moe import FusedExperts, unfuse_expert_weight
from sglang.srt.layers.moe_routing import choose_experts
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, new_parameter
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import GatedMLP, LlamaForCausalLM, pick_rows

# The norms of the compressed vectors have this epsilon whatever the config says of the others.
_LATENT_NORM_EPS = 1e-6
_LAYER_PREFIX = "model.layers."


def attention_scaling(qk_head_dim: int, rope: RopeConfig) -> float:
    """Factor on attention logits: 1/sqrt(width), times YaRN's where the config has one for all.

    Elsewhere YaRN scales the rotated features; here a part of each head is not rotated, so the
    square of `0.1 * mscale_all_dim * ln(factor) + 1` goes to the logits.
    """
    scaling = qk_head_dim**-0.5
    factor, weight = float(rope.get("factor", 1.0)), float(rope.get("mscale_all_dim", 0.0))
    if rope.rope_type != "yarn" or factor <= 1.0 or not weight:
        return scaling
    return scaling * (0.1 * weight * math.log(factor) + 1.0) ** 2


class DeepseekAttention(nn.Module):
    """Projections of one layer around latent attention."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        mla = config.mla
        if mla is None:
            raise ModelConfigError("config.json lacks the sizes of latent attention: kv_lora_rank")
        hidden_size, heads, bias = (
            config.hidden_size,
            config.num_attention_heads,
            config.attention_bias,
        )
        self._sizes = [mla.kv_lora_rank, mla.qk_rope_head_dim]
        self.q_a_proj = self.q_a_layernorm = self.q_b_proj = self.q_proj = None
        if mla.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, heads * mla.qk_head_dim)
        else:
            self.q_a_proj = ReplicatedLinear(hidden_size, mla.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, _LATENT_NORM_EPS)
            self.q_b_proj = ColumnParallelLinear(mla.q_lora_rank, heads * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, mla.latent_dim, bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, _LATENT_NORM_EPS)
        # Never called: attention takes its weight apart.
        self.kv_b_proj = ColumnParallelLinear(
            mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        )
        self.o_proj = RowParallelLinear(heads * mla.v_head_dim, hidden_size, bias)
        rows_a_head = mla.qk_nope_head_dim + mla.v_head_dim
        self.attention = LatentAttention(
            mla,
            self.kv_b_proj.weight.shape[0] // rows_a_head,
            attention_scaling(mla.qk_head_dim, config.rope),
            layer_id,
            rope_interleaved=bool(config.hf_config.get("rope_interleave", True)),
        )
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
        compressed, key_to_rotate = self.kv_a_proj_with_mqa(hidden_states).split(
            self._sizes, dim=-1
        )
        out = self.attention(
            positions,
            self._queries(hidden_states),
            self.kv_a_layernorm(compressed.contiguous()),
            key_to_rotate,
            self.kv_b_proj.weight,
            self._rotary[0],
            forward_batch,
        )
        return self.o_proj(pick_rows(out, rows))

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.q_proj is not None:
            return self.q_proj(hidden_states)
        assert self.q_a_proj and self.q_a_layernorm and self.q_b_proj
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))


class Router(WeightOwner):
    """Scores of all experts, in float32; the bias takes part in the choice only."""

    def __init__(self, hidden_size: int, num_experts: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = new_parameter(num_experts, hidden_size)
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_bias:
            # Trained in steps that half types cannot tell apart.
            zeros = torch.zeros(num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(zeros, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> float32 [n, experts]."""
        return functional.linear(x.float(), self.weight.float())

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        slots = {
            f"{name}.weight": WeightSlot(
                target=self.weight.data, full_shape=tuple(self.weight.shape)
            )
        }
        bias = self.e_score_correction_bias
        if bias is not None:
            slots[f"{name}.e_score_correction_bias"] = WeightSlot(
                target=bias.data, full_shape=tuple(bias.shape)
            )
        return slots


class DeepseekMoE(nn.Module):
    """Routed experts beside the shared ones, which are one MLP of their joint width."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        raw = config.hf_config
        num_experts, width = int(raw["n_routed_experts"]), config.experts.moe_intermediate_size
        num_shared = int(raw.get("n_shared_experts") or 0)
        if config.routing is None:
            raise ModelConfigError("config.json lacks the number of experts: n_routed_experts")
        self._rule = config.routing
        self.gate = Router(config.hidden_size, num_experts, self._rule.uses_bias)
        self.experts = FusedExperts(num_experts, config.hidden_size, width, config.hidden_act)
        self.shared_experts = (
            GatedMLP(config.hidden_size, width * num_shared, config.hidden_act)
            if num_shared
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]. Collective with more than one rank."""
        weights, expert_ids = choose_experts(
            self.gate(x), self._rule, self.gate.e_score_correction_bias
        )
        out: torch.Tensor = self.experts(x, expert_ids, weights.to(x.dtype))
        return out if self.shared_experts is None else out + self.shared_experts(x)


def has_experts(config: ModelConfig, layer_id: int) -> bool:
    """Whether a layer has experts: none of the first ones, then every `moe_layer_freq`-th."""
    raw = config.hf_config
    return (
        bool(raw.get("n_routed_experts"))
        and layer_id >= int(raw.get("first_k_dense_replace") or 0)
        and layer_id % int(raw.get("moe_layer_freq") or 1) == 0
    )


def layer_of_weight(name: str) -> int | None:
    """The layer that a published tensor belongs to; None for those of no layer."""
    if not name.startswith(_LAYER_PREFIX):
        return None
    layer_id = name.removeprefix(_LAYER_PREFIX).partition(".")[0]
    return int(layer_id) if layer_id.isdigit() else None


class DeepseekDecoderLayer(nn.Module):
    """One pre-norm layer; called like a `LlamaDecoderLayer`."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        published_layer_id: int | None = None,
    ) -> None:
        """`layer_id`: of the KV pool. `published_layer_id`: in the files, where it differs."""
        super().__init__()
        self.self_attn = DeepseekAttention(config, layer_id, rotary)
        self.mlp: nn.Module = (
            DeepseekMoE(config)
            if has_experts(config, layer_id if published_layer_id is None else published_layer_id)
            else GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        )
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

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
        hidden_states = self.self_attn(positions, normed, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_and_norm(
            hidden_states, pick_rows(residual, rows)
        )
        return self.mlp(normed), residual


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """See the module docstring."""

    layer_class = DeepseekDecoderLayer

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield from unfuse_expert_weight(name, tensor)

    def is_foreign_weight(self, name: str) -> bool:
        # Layers behind the last one predict further tokens: a draft's (`deepseek_nextn`).
        layer_id = layer_of_weight(name)
        return layer_id is not None and layer_id >= self.config.num_hidden_layers


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """See the module docstring."""


ENTRY_CLASSES = (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM)
