"""EAGLE-3 draft: one Llama layer over the target's fused features and the next token's embedding.

The features are streams of three target layers side by side; `fc` brings them to the draft's
width. The draft's own hidden states, which later steps of a proposal read, have that width already
and skip `fc`. The head covers a reduced vocabulary; `d2t` says which tokens those are. Published
folders load unchanged: `midlayer` is `layers.0`, a prefix `model.` is dropped, `t2d` serves
training only.

Sources: EAGLE-3 (arXiv 2503.01840); EAGLE-3.1 (arXiv 2605.09992) for the norms of single features
and of the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from sglang.srt.configs.draft_config import HeadSource
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm, norms_side_by_side
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, create_rotary_embedding
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.base import WeightLoadError, WeightProblems
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.models.llama import (
    AttentionChoices,
    GatedMLP,
    LlamaAttention,
    layers_and_rows,
    pick_rows,
)

_DRAFT_TO_TARGET = "d2t"
_OLD_NORM_NAMES = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


class Eagle3DecoderLayer(nn.Module):
    """A Llama layer. The first one attends over embedding and hidden state side by side."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        is_first = layer_id == 0
        choices = AttentionChoices(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        width = 2 * hidden_size if is_first else hidden_size
        self.self_attn = LlamaAttention(config, layer_id, rotary, choices, width)
        self.mlp = GatedMLP(
            hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias
        )
        self.input_layernorm = RMSNorm(hidden_size, eps) if is_first else None
        self.hidden_norm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        embeds: torch.Tensor,
        forward_batch: ForwardBatch,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block output, residual stream before it), [n, hidden] each; consumes `residual`.

        The stream is that of the hidden states; `embeds` enter the first layer's attention only.
        `rows`: see `LlamaDecoderLayer`.
        """
        if self.input_layernorm is not None:
            normed, residual = norms_side_by_side(
                self.input_layernorm, embeds, self.hidden_norm, hidden_states
            )
        else:
            normed, residual = self.hidden_norm.add_and_norm(hidden_states, residual)
        attended = self.self_attn(positions, normed, forward_batch, rows)
        normed, residual = self.post_attention_layernorm.add_and_norm(
            attended, pick_rows(residual, rows)
        )
        return self.mlp(normed), residual


class DraftToTarget(WeightOwner):
    """The checkpoint's `d2t`, int64 [draft vocabulary]: what to add to each draft id.

    Starts as zeros: draft ids are token ids.
    """

    def __init__(self, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.offsets: torch.Tensor
        self.token_ids: torch.Tensor  # of every draft id; the same storage for good
        zeros = torch.zeros(draft_vocab_size, dtype=torch.int64)
        self.register_buffer("offsets", zeros, persistent=False)
        self.register_buffer("token_ids", torch.arange(draft_vocab_size), persistent=False)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        return {name: WeightSlot(target=self.offsets, full_shape=tuple(self.offsets.shape))}

    def token_ids_of(self, offsets: torch.Tensor) -> torch.Tensor:
        """The token of every draft id. Raises WeightLoadError where the offsets make no sense."""
        offsets = offsets.to(self.offsets.device, torch.int64)
        token_ids = offsets + torch.arange(len(offsets), device=offsets.device)
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self._vocab_size:
            raise WeightLoadError(
                f"d2t leads to tokens {lowest}..{highest}, the vocabulary has {self._vocab_size}"
            )
        if len(token_ids.unique()) != len(token_ids):
            raise WeightLoadError("d2t leads several draft ids to one token")
        return token_ids

    def refresh(self) -> None:
        """Follow new offsets. Raises WeightLoadError where they make no sense; no change then."""
        self.token_ids.copy_(self.token_ids_of(self.offsets))


class LlamaForCausalLMEagle3(EagleDraftModel):
    """See the module docstring."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        draft, eps = self.draft_config, config.rms_norm_eps
        # Nothing to fuse where one feature has the draft's width: the target's final states.
        self.fc: ReplicatedLinear | None = None
        if draft.input_width != config.hidden_size:
            self.fc = ReplicatedLinear(draft.input_width, config.hidden_size, bool(draft.fc_bias))
        self.input_norm = RMSNorm(draft.input_width, eps) if draft.norm_before_fc else None
        feature_norms = draft.num_features if draft.fc_norm else 0
        self.fc_norm = nn.ModuleList(
            RMSNorm(draft.target_hidden_size, eps) for _ in range(feature_norms)
        )
        rotary = create_rotary_embedding(config)
        self.layers = nn.ModuleList(
            Eagle3DecoderLayer(config, layer_id, rotary)
            for layer_id in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps)
        owns_head = draft.head is HeadSource.OWN
        self.d2t = DraftToTarget(draft.draft_vocab_size, draft.vocab_size) if owns_head else None
        self._make_vocabulary_layers()

    @property
    def hot_token_id(self) -> torch.Tensor | None:
        """int64 [draft_vocab_size]: the token that each draft id stands for; None: itself."""
        return None if self.d2t is None else self.d2t.token_ids

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids (target ids) and positions int64 [n]; collective with more than one rank.

        `forward_batch.input_hidden_states`: [n, features * target hidden], or [n, hidden] for
        states that this draft returned. See `EagleDraftModel` for what comes back.
        """
        hidden_states = self._to_own_width(self._input_hidden_states(forward_batch))
        embeds = self.embed_tokens(input_ids)
        residual: torch.Tensor | None = None
        kept = self._rows_to_keep(forward_batch)
        for layer, rows in layers_and_rows(self.layers, kept):
            hidden_states, residual = layer(
                positions, hidden_states, residual, embeds, forward_batch, rows
            )
        normed, stream = self.norm.add_and_norm(hidden_states, residual)
        recurrent = normed if self.draft_config.norm_output else stream
        return self.logits_processor(
            normed, self.lm_head, forward_batch, recurrent, kept is not None
        )

    def _to_own_width(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden]."""
        width, own_width = hidden_states.shape[-1], self.config.hidden_size
        if self.fc is not None and width == self.draft_config.input_width:
            return self.fc(self._norm_features(hidden_states))
        if width == own_width:
            return hidden_states
        raise RuntimeError(
            f"the draft reads hidden states of width {self.draft_config.input_width} (the "
            f"target's) or {own_width} (its own), got {width}"
        )

    def _norm_features(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            return self.input_norm(features)
        if not self.fc_norm:
            return features
        parts = features.chunk(len(self.fc_norm), dim=-1)
        normed = [norm(part.contiguous()) for norm, part in zip(self.fc_norm, parts)]
        return torch.cat(normed, dim=-1)

    # -- checkpoint names -------------------------------------------------------------------------

    def plain_name(self, name: str) -> str:
        name = super().plain_name(name)
        if name.startswith("midlayer."):
            return "layers.0." + name.removeprefix("midlayer.")
        first, dot, rest = name.partition(".")
        return _OLD_NORM_NAMES.get(first, first) + dot + rest

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        for plain, part in super().split_weight(name, tensor):
            # Offsets that went through a float type may have been rounded.
            if plain == _DRAFT_TO_TARGET and part.is_floating_point() and not part.is_meta:
                raise WeightLoadError(f"{name} must hold integers, got {part.dtype}")
            yield plain, part

    def is_ignored_weight(self, name: str) -> bool:
        if name == "t2d":
            return True
        # Files of several layers may hold this norm for each; only the first layer embeds tokens.
        layer_id, _, part = name.removeprefix("layers.").partition(".")
        later_layer = layer_id.isdigit() and int(layer_id) > 0
        return (later_layer and part == "input_layernorm.weight") or super().is_ignored_weight(name)

    def is_optional_weight(self, name: str) -> bool:
        # Over the whole vocabulary every draft id is its token's id.
        covers_all = self.draft_config.draft_vocab_size == self.draft_config.vocab_size
        return name == _DRAFT_TO_TARGET and covers_all

    def check_weights(
        self,
        infos: Iterable[tuple[str, torch.Tensor]],
        complete: bool,
        table: Mapping[str, WeightSlot] | None = None,
    ) -> WeightProblems:
        """As in the base; a `d2t` that has come is looked into, too."""
        infos = list(infos)
        problems = super().check_weights(infos, complete, table)
        for name, tensor in self._named_parts(infos):
            is_map = name == _DRAFT_TO_TARGET and self.d2t is not None and not tensor.is_meta
            if is_map and not (problems.misshaped or problems.wrong_kind):
                assert self.d2t is not None
                try:
                    self.d2t.token_ids_of(tensor)
                except WeightLoadError as error:
                    problems.wrong_values.append(str(error))
        return problems

    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        table: Mapping[str, WeightSlot] | None = None,
    ) -> set[str]:
        """As in the base; raises WeightLoadError, too, for a `d2t` out of the vocabulary."""
        loaded = super().load_weights(weights, table)
        if self.d2t is not None and _DRAFT_TO_TARGET in loaded:
            self.d2t.refresh()
        return loaded


ENTRY_CLASSES = (LlamaForCausalLMEagle3,)
