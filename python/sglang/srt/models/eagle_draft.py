"""What all EAGLE draft models share: the target's embedding and head, names, input features.

A draft reads, for each token, the target's hidden states of the token before it (later its own)
and proposes the token after. It borrows the target's embedding and, where it has none of its own,
the target's head; `set_embed_and_head` must have been called before the first forward. Created by
`model_loader.loader`, driven by the speculative workers on the scheduler thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from sglang.srt.configs.draft_config import EagleDraftConfig, HeadSource, read_eagle_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessor, rows_to_keep
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.models.base import LanguageModel, WeightProblems

logger = logging.getLogger(__name__)

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"


class EagleDraftModel(LanguageModel):
    """A draft of one or more layers over the target's vocabulary.

    Its forward reads `forward_batch.input_hidden_states` beside the tokens, and returns logits
    over the draft vocabulary for the rows that the batch asks for (`logits_rows`, else each
    request's last in an extend, every row in a decode). With capture mode LAST (those rows) or FULL
    (all rows) it also returns the hidden states that its next step reads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.draft_config: EagleDraftConfig = read_eagle_config(config)

    def _make_vocabulary_layers(self) -> None:
        """To be called last by a subclass: parameters of shared layers have no memory yet."""
        draft = self.draft_config
        self._shares_embedding = not draft.has_own_embedding
        with _place(is_shared=self._shares_embedding):
            self.embed_tokens = VocabParallelEmbedding(draft.vocab_size, draft.hidden_size)
        with _place(is_shared=draft.head is not HeadSource.OWN):
            self.lm_head = ParallelLMHead(draft.draft_vocab_size, draft.hidden_size)
        if draft.head is HeadSource.EMBEDDING:
            self.lm_head.tie_to(self.embed_tokens)
        self.logits_processor = LogitsProcessor(draft.draft_vocab_size)

    # -- what is the target's ---------------------------------------------------------------------

    def set_embed(self, embed: nn.Parameter) -> None:
        """Use the target's embedding, unless the draft has its own.

        Raises ValueError where the shapes differ.
        """
        if not self._shares_embedding:
            return
        _check_same_shape("embedding", embed, self.embed_tokens.weight)
        self.embed_tokens.weight = embed
        if self.draft_config.head is HeadSource.EMBEDDING:
            self.lm_head.weight = embed

    def set_embed_and_head(self, embed: nn.Parameter, head: nn.Parameter) -> None:
        """Use the target's parameters (`get_embed_and_head` of it) for what the draft lacks.

        One storage is shared: in-place updates of the target are seen. Raises ValueError where
        the shapes differ.
        """
        self.set_embed(embed)
        if self.draft_config.head is HeadSource.TARGET:
            _check_same_shape("head", head, self.lm_head.weight)
            self.lm_head.weight = head

    def get_embed_and_head(self) -> tuple[nn.Parameter, nn.Parameter]:
        """This rank's embedding rows and head rows, shared ones included."""
        return self.embed_tokens.weight, self.lm_head.weight

    @property
    def hot_token_id(self) -> torch.Tensor | None:
        """int64 [draft_vocab_size]: the token that each draft id stands for; None: itself."""
        return None

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of the target for ids of the draft vocabulary, int64 of any shape."""
        hot_token_id = self.hot_token_id
        return draft_ids if hot_token_id is None else hot_token_id[draft_ids]

    def own_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that are not the target's."""
        shared = {id(weight) for weight in self._shared_weights()}
        return (p for p in self.parameters() if id(p) not in shared)

    # -- checkpoint names -------------------------------------------------------------------------

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield self.plain_name(name), tensor

    def plain_name(self, name: str) -> str:
        """A published name in the form that this module tree has."""
        return name.removeprefix("model.")

    def is_ignored_weight(self, name: str) -> bool:
        return self._is_shared_name(name) or super().is_ignored_weight(name)

    def is_optional_weight(self, name: str) -> bool:
        """Whether the draft is complete without this tensor."""
        return False

    def check_weights(
        self,
        infos: Iterable[tuple[str, torch.Tensor]],
        complete: bool,
        table: Mapping[str, WeightSlot] | None = None,
    ) -> WeightProblems:
        infos = list(infos)
        unused = [name for name, _ in infos if self._is_shared_name(self.plain_name(name))]
        if unused:
            logger.info("Not read from the draft, shared weights are used instead: %s", unused)
        problems = super().check_weights(infos, complete, table)
        problems.missing = [
            name for name in problems.missing if not self.is_optional_weight(self.plain_name(name))
        ]
        return problems

    def _find_weight(self, name: str) -> torch.Tensor | None:
        return super()._find_weight(self.plain_name(name))

    def _is_shared_name(self, name: str) -> bool:
        if name == _EMBEDDING:
            return self._shares_embedding
        return name == _HEAD and self.draft_config.head is not HeadSource.OWN

    def _shared_weights(self) -> Iterator[nn.Parameter]:
        if self._shares_embedding:
            yield self.embed_tokens.weight
        if self.draft_config.head is HeadSource.TARGET:
            yield self.lm_head.weight

    # -- forward ----------------------------------------------------------------------------------

    def _input_hidden_states(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """[n, width]; raises RuntimeError where the caller left something out."""
        if self.embed_tokens.weight.is_meta or self.lm_head.weight.is_meta:
            raise RuntimeError("the draft has no embedding or head: call set_embed_and_head first")
        hidden_states = forward_batch.input_hidden_states
        if hidden_states is None:
            raise RuntimeError("a draft's batch needs input_hidden_states")
        if hidden_states.shape[0] != forward_batch.num_tokens:
            raise RuntimeError(
                f"{forward_batch.num_tokens} draft tokens came with hidden states of "
                f"{hidden_states.shape[0]}"
            )
        return hidden_states

    def _rows_to_keep(self, forward_batch: ForwardBatch) -> torch.Tensor | None:
        """See `logits_processor`; all that a draft returns comes from behind its last layer."""
        is_full = forward_batch.capture_hidden_mode is CaptureHiddenMode.FULL
        return rows_to_keep(forward_batch, all_captured=is_full)


def _place(is_shared: bool) -> AbstractContextManager[object]:
    """Parameters that will be replaced by the target's get no memory."""
    return torch.device("meta") if is_shared else nullcontext()


def _check_same_shape(what: str, given: torch.Tensor, expected: torch.Tensor) -> None:
    if given.shape != expected.shape:
        raise ValueError(
            f"the target's {what} has shape {tuple(given.shape)}, "
            f"the draft needs {tuple(expected.shape)}"
        )
