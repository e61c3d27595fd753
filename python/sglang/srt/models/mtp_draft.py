"""A layer that predicts one token further (MTP), as an EAGLE draft: what the families share.

It joins the next token's embedding with the target's final hidden state, each under a norm of its
own, and runs one decoder layer; a norm and the target's head follow. One such layer may serve every
step of a proposal: it reads its own normed states in place of the target's. Or each step has a
layer of its own, a model each, that reads the normed states of the one before. A family says how
the tensors are called, in which order the two are joined, and which decoder layer it is.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.layernorm import RMSNorm, norms_side_by_side
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, create_rotary_embedding
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.base import WeightProblems
from sglang.srt.models.eagle_draft import EagleDraftModel


class MtpDraftModel(EagleDraftModel):
    """See the module docstring. The layer's tensors are the only ones of the files that it reads.

    `own_names`: published names within the layer -> names in the module tree; all others are the
    decoder layer's. `joins_state_first`: whether the state comes before the embedding.
    """

    own_names: ClassVar[Mapping[str, str]]
    joins_state_first: ClassVar[bool] = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self._prefix = self.published_prefix(config)
        self.enorm = RMSNorm(hidden_size, eps)
        self.hnorm = RMSNorm(hidden_size, eps)
        self.eh_proj = ReplicatedLinear(2 * hidden_size, hidden_size)
        self.layers = nn.ModuleList([self.make_layer(config, create_rotary_embedding(config))])
        self.norm = RMSNorm(hidden_size, eps)
        self._make_vocabulary_layers()

    @staticmethod
    @abstractmethod
    def published_prefix(config: ModelConfig) -> str:
        """What the names of all tensors of the layer begin with, the dot at the end included."""

    @abstractmethod
    def make_layer(self, config: ModelConfig, rotary: RotaryEmbedding) -> nn.Module:
        """The decoder layer, called as a `LlamaDecoderLayer` is; number 0 of the KV pool."""

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions int64 [n]; collective with more than one rank.

        `forward_batch.input_hidden_states` [n, hidden]: the target's final states (capture
        without layers), or states that such a draft returned. See `EagleDraftModel`.
        """
        features = self._input_hidden_states(forward_batch)
        if features.shape[-1] != self.config.hidden_size:
            raise RuntimeError(
                f"the draft reads hidden states of width {self.config.hidden_size}, "
                f"got {features.shape[-1]}"
            )
        embedded = self.embed_tokens(input_ids)
        if self.joins_state_first:
            joined, _ = norms_side_by_side(self.hnorm, features, self.enorm, embedded)
        else:
            joined, _ = norms_side_by_side(self.enorm, embedded, self.hnorm, features)
        kept = self._rows_to_keep(forward_batch)
        hidden_states, residual = self.layers[0](
            positions, self.eh_proj(joined), None, forward_batch, kept
        )
        normed, _ = self.norm.add_and_norm(hidden_states, residual)
        return self.logits_processor(
            normed, self.lm_head, forward_batch, are_picked=kept is not None
        )

    # -- checkpoint names -------------------------------------------------------------------------

    def is_foreign_weight(self, name: str) -> bool:
        return not name.startswith(self._prefix)

    def plain_name(self, name: str) -> str:
        if not name.startswith(self._prefix):
            return name
        own, _, part = name.removeprefix(self._prefix).rpartition(".")
        plain = self.own_names.get(own)
        return f"layers.0.{own}.{part}" if plain is None else f"{plain}.{part}"

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.plain_name(name), tensor

    def check_weights(
        self,
        infos: Iterable[tuple[str, torch.Tensor]],
        complete: bool,
        table: Mapping[str, WeightSlot] | None = None,
    ) -> WeightProblems:
        infos = list(infos)
        if complete and all(self.is_foreign_weight(name) for name, _ in infos):
            # The usual case of configurations that promise a layer which was not saved.
            layer = self._prefix.removesuffix(".")
            return WeightProblems(absent=[f"{layer}, which predicts one token further (NextN)"])
        return super().check_weights(infos, complete, table)

    def published_name(self, name: str) -> str:
        """The inverse of `plain_name`."""
        own, _, part = name.rpartition(".")
        for published, plain in self.own_names.items():
            if own == plain:
                return f"{self._prefix}{published}.{part}"
        return self._prefix + name.removeprefix("layers.0.")
