"""Llama: pre-norm decoder with rotary attention and a gated MLP.

The other decoder families (Qwen2, Qwen3, ...) are this model with other choices in
`make_attention` and `make_mlp`. Module names follow the HF tree, with the fused names `qkv_proj`
and `gate_up_proj`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.activation import get_gated_linear
from sglang.srt.layers.dispatch import add_rows, take_rows
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import (
    LogitsProcessor,
    LogitsProcessorOutput,
    rows_to_keep,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, create_rotary_embedding
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.models.base import LanguageModel


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, bias
        )
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)
        self._gated_linear = get_gated_linear(hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        gate_up = self.gate_up_proj
        return self.down_proj(self._gated_linear(x, gate_up.weight, gate_up.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoices:
    """What differs between families in the attention block."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before rotation
    norm_offset: float = 0.0  # added to the weights of those norms


class LlamaAttention(nn.Module):
    """Projections, rotation and attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        choices: AttentionChoices,
        input_size: int | None = None,
    ) -> None:
        """`input_size`: width of the input where it is not the hidden size (EAGLE drafts)."""
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVParallelLinear(
            input_size or config.hidden_size,
            head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            choices.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_dim, config.hidden_size, choices.output_bias
        )
        eps, offset = config.rms_norm_eps, choices.norm_offset
        self.q_norm = RMSNorm(head_dim, eps, offset) if choices.qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps, offset) if choices.qk_norm else None
        self.attn = RadixAttention(
            self.qkv_proj.num_heads,
            head_dim,
            config.attention_scaling,
            self.qkv_proj.num_kv_heads,
            layer_id,
            config.sliding_windows[layer_id],
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
        """hidden_states [n, input size] -> [n, hidden], or [r, hidden] of `rows`."""
        qkv = self.qkv_proj(hidden_states)
        q, k, v = qkv.split(self.qkv_proj.output_sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q = _norm_heads(self.q_norm, q)
            k = _norm_heads(self.k_norm, k)
        rotary = self._rotary[0]
        out = self.attn.rotate_and_attend(positions, q, k, v, rotary, forward_batch)
        return self.o_proj(pick_rows(out, rows))


def _norm_heads(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return norm(x.unflatten(-1, (-1, norm.weight.shape[0]))).flatten(-2)


def pick_rows(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Rows, int64 [r], of x [n, d]: [r, d]; None: x itself."""
    return x if rows is None else take_rows(x, rows)


def layers_and_rows(
    layers: nn.ModuleList, kept: torch.Tensor | None
) -> Iterator[tuple[nn.Module, torch.Tensor | None]]:
    """Each layer with the rows that go on behind its attention; None: all of them.

    Only attention mixes rows, so the last layer is done with those that are not `kept`.
    """
    last = len(layers) - 1
    for layer_id, layer in enumerate(layers):
        yield layer, kept if layer_id == last else None


class LlamaDecoderLayer(nn.Module):
    """One pre-norm layer. Families override the two `make_` methods."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.self_attn = self.make_attention(config, layer_id, rotary)
        self.mlp = self.make_mlp(config, layer_id)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def make_attention(
        self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding
    ) -> LlamaAttention:
        """The attention block of this family."""
        choices = AttentionChoices(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        return LlamaAttention(config, layer_id, rotary, choices)

    def make_mlp(self, config: ModelConfig, layer_id: int) -> nn.Module:
        """The feed-forward block of this family."""
        return GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block output, residual stream before it), [n, hidden] each; their sum goes on.

        `rows` int64 [r]: the ones that go on, [r, hidden] each; attention is over all.
        """
        normed, residual = self.input_layernorm.add_and_norm(hidden_states, residual)
        hidden_states = self.self_attn(positions, normed, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_and_norm(
            hidden_states, pick_rows(residual, rows)
        )
        return self.mlp(normed), residual


class FinalStates(NamedTuple):
    """What a decoder leaves for the head. n: the step's tokens; r: rows that get logits."""

    hidden_states: torch.Tensor  # normed: [n, hidden], or [r, hidden] where they `are_picked`
    streams: torch.Tensor | None  # captured ones side by side, [n, layers * hidden]
    are_picked: bool


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: ModelConfig, layer_class: type[nn.Module]) -> None:
        """`layer_class(config, layer_id, rotary)`: called as `LlamaDecoderLayer` is."""
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = create_rotary_embedding(config)
        # Of the layers with a window, where they rotate by other angles.
        self.local_rotary_emb = (
            None
            if config.local_rope is None
            else create_rotary_embedding(config, config.local_rope)
        )
        self.layers = nn.ModuleList(
            layer_class(config, layer_id, self._rotary_of(config, layer_id))
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Layers at whose entry the residual stream is kept (EAGLE3 features), in rising order.
        self.layers_to_capture: tuple[int, ...] = ()

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> FinalStates:
        """input_ids and positions int64 [n]; collective with more than one rank."""
        hidden_states = self.embed(input_ids)
        residual: torch.Tensor | None = None
        wanted = self._layers_wanted_by(forward_batch)
        capture = _Capture(wanted, hidden_states)
        kept = rows_to_keep(forward_batch, self._captures_all_behind(wanted, forward_batch))
        for layer_id, (layer, rows) in enumerate(layers_and_rows(self.layers, kept)):
            capture.entry_of(layer_id, hidden_states, residual)
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch, rows)
        capture.entry_of(len(self.layers), hidden_states, residual)
        normed, _ = self.norm.add_and_norm(hidden_states, residual)
        return FinalStates(normed, capture.streams, are_picked=kept is not None)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> what the first layer reads, [n, hidden]."""
        return self.embed_tokens(input_ids)

    def _rotary_of(self, config: ModelConfig, layer_id: int) -> RotaryEmbedding:
        is_local = config.sliding_windows[layer_id] is not None
        return (self.local_rotary_emb if is_local else None) or self.rotary_emb

    def _layers_wanted_by(self, forward_batch: ForwardBatch) -> tuple[int, ...]:
        if forward_batch.capture_hidden_mode is CaptureHiddenMode.NULL:
            return ()
        return self.layers_to_capture

    def _captures_all_behind(self, wanted: tuple[int, ...], forward_batch: ForwardBatch) -> bool:
        """See `rows_to_keep`. `wanted`: the layers whose entry is captured, in rising order."""
        is_full = forward_batch.capture_hidden_mode is CaptureHiddenMode.FULL
        if not wanted:
            return is_full
        # In mode LAST the head picks from the streams, and must not find them picked already.
        return not is_full or wanted[-1] == len(self.layers)


class _Capture:
    """Residual streams of one pass, each written where it belongs beside the others."""

    def __init__(self, wanted: tuple[int, ...], like: torch.Tensor) -> None:
        """`wanted`: layers whose entry counts, in order; `like` [n, hidden]: a stream's shape."""
        self._wanted, self._width = wanted, like.shape[1]
        # [n, layers * hidden]; None where no layer is wanted.
        self.streams = like.new_empty((len(like), len(wanted) * self._width)) if wanted else None

    def entry_of(
        self, layer_id: int, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        """Keep what enters a layer, if it is wanted; a copy: norms go on to consume their input."""
        if self.streams is None or layer_id not in self._wanted:
            return
        for number, wanted in enumerate(self._wanted):
            if wanted == layer_id:
                place = self.streams[:, number * self._width : (number + 1) * self._width]
                if residual is None:
                    place.copy_(hidden_states)
                else:
                    add_rows(hidden_states, residual, place)


class LlamaForCausalLM(LanguageModel):
    """The decoder with its output head. Families set `layer_class`, and `model_class` if need be.

    `is_plain`: the decoder is `LlamaModel` and its layers compute what `LlamaDecoderLayer` does, so
    that kernels for whole layers may stand in for the modules.
    """

    layer_class: type[nn.Module] = LlamaDecoderLayer
    model_class: type[LlamaModel] = LlamaModel
    is_plain: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config, self.layer_class)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.tie_to(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions int64 [n]; collective with more than one rank."""
        final: FinalStates = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(
            final.hidden_states,
            self.lm_head,
            forward_batch,
            final.streams,
            final.are_picked,
        )

    def is_ignored_weight(self, name: str) -> bool:
        # A tied checkpoint may still store the head; the embedding is what counts.
        tied_head = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_head or super().is_ignored_weight(name)

    def get_embed_and_head(self) -> tuple[nn.Parameter, nn.Parameter]:
        """This rank's embedding rows and head rows (one parameter twice where they are tied)."""
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Share another model's parameters (a draft using its target's)."""
        self.model.embed_tokens.weight = embed
        self.lm_head.weight = head

    def _capture_at(self, layer_ids: tuple[int, ...]) -> None:
        self.model.layers_to_capture = layer_ids


ENTRY_CLASSES = (LlamaForCausalLM,)
