"""What all language models here share: the checkpoint table and everything that follows from it.

Owns the meaning of checkpoint names for a model (through the layers' weight slots). Does not read
files (`model_loader`) nor decide when weights change (`model_executor.weight_updater`).
Used on the scheduler thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sglang.srt.configs.draft_config import default_layers_to_capture
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.weight_slot import WeightSlot, iterate_weight_slots
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Buffers that some checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class WeightLoadError(ValueError):
    """Checkpoint tensors do not match the model; the message names every one of them."""


@dataclass(slots=True)
class WeightProblems:
    """What a checkpoint (or a part of one) does not agree with the model on."""

    unexpected: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)  # "name: expected ..., got ..."
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # whole parts, in place of their tensors
    wrong_kind: list[str] = field(default_factory=list)  # "name: expected ..., got ..."
    wrong_values: list[str] = field(default_factory=list)  # what is wrong with them

    def raise_if_any(self, source: str) -> None:
        """Raise WeightLoadError listing everything; `source` says what was being loaded."""
        parts = [
            f"{label} ({len(names)}): {', '.join(names)}"
            for label, names in (
                ("not in the files", self.absent),
                ("missing tensors", self.missing),
                ("unexpected tensors", self.unexpected),
                ("tensors of the wrong shape", self.misshaped),
                ("tensors of a type that cannot be used", self.wrong_kind),
                ("values that cannot be", self.wrong_values),
            )
            if names
        ]
        if parts:
            raise WeightLoadError(f"{source} does not fit the model: {'; '.join(parts)}")


def is_of_wrong_kind(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the values of `tensor` are not what `target` holds, whatever their shape.

    Quantised values mean something only together with their scales: copying would be no error.
    """
    is_plain = tensor.is_floating_point() and tensor.dtype.itemsize > 1
    return is_plain != target.is_floating_point()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRows:
    """What of a verification counts: of b requests, `num_nodes` drafted tokens each.

    `rows` int64 [b]: of the request table; `nodes` int64 [b, d]: from the root downwards, of which
    the first `lens` int64 [b] count; `padding_row`: the table's.
    """

    num_nodes: int
    rows: torch.Tensor
    nodes: torch.Tensor
    lens: torch.Tensor
    padding_row: int


class LanguageModel(nn.Module):
    """A decoder with an output head, loadable from checkpoint tensors by their HF names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """input_ids and positions int64 [n]; collective with more than one rank."""

    def get_embed_and_head(self) -> tuple[nn.Parameter, nn.Parameter]:
        """This rank's rows of the embedding and of the head, which a draft may share.

        Raises RuntimeError where the family lends neither.
        """
        raise RuntimeError(f"{type(self).__name__} shares no weights with a draft")

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        """Choose the layers at whose entry the residual stream is kept, before any norm.

        None takes the usual early, middle and late layer. An id equal to the number of layers
        means the stream after the last one. From then on every forward whose capture mode is
        not NULL returns them side by side, in layer order, instead of the final hidden states;
        forwards with mode NULL do nothing more than before. A layer named twice comes twice, so
        that the width is always that of all ids.
        Raises ValueError for an id out of range, RuntimeError where the family cannot do it.
        """
        num_layers = self.config.num_hidden_layers
        chosen = default_layers_to_capture(num_layers) if layer_ids is None else layer_ids
        if any(not 0 <= layer_id <= num_layers for layer_id in chosen):
            raise ValueError(f"layers to capture {chosen} are not within 0..{num_layers}")
        self._capture_at(tuple(sorted(chosen)))

    def _capture_at(self, layer_ids: tuple[int, ...]) -> None:
        """Keep the streams that enter these layers. Families whose decoder can override it."""
        raise RuntimeError(f"{type(self).__name__} cannot capture hidden states of its layers")

    def commit_verified(self, kv_pool: KVCache, verified: VerifiedRows) -> None:
        """Make accepted drafts part of what the model keeps of a sequence besides KV.

        After every verification, before the next step of its requests. KV alone needs nothing.
        """
        return

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Bring a checkpoint tensor to the names of the table. Families may override.

        Called with meta tensors, too, when only shapes are checked.
        """
        yield name, tensor

    def published_name(self, name: str) -> str:
        """What a tensor of the table is called in the files, for messages."""
        return name

    def is_foreign_weight(self, name: str) -> bool:
        """Whether a tensor, by its name in the files, is another model's: not to be read."""
        return False

    def is_ignored_weight(self, name: str) -> bool:
        """Whether a checkpoint tensor is known to carry nothing for this model."""
        return name.endswith(_DERIVED_SUFFIXES)

    def weight_table(self) -> dict[str, WeightSlot]:
        """Checkpoint name -> place in the parameters, for every tensor that the model needs.

        Built on every call, so that it is right after tied or shared parameters were replaced.
        """
        return {
            name: slot
            for name, slot in iterate_weight_slots(self)
            if not self.is_ignored_weight(name)
        }

    def check_weights(
        self,
        infos: Iterable[tuple[str, torch.Tensor]],
        complete: bool,
        table: Mapping[str, WeightSlot] | None = None,
    ) -> WeightProblems:
        """Compare names, shapes and types without reading or writing a value.

        `infos` may hold meta tensors. With `complete`, every tensor of the table must occur.
        `table`: what `weight_table` gave just now, for callers that have it.
        """
        table = self.weight_table() if table is None else table
        problems = WeightProblems()
        seen: set[str] = set()
        for name, tensor in self._named_parts(infos):
            slot = table.get(name)
            published = self.published_name(name)
            if slot is None:
                problems.unexpected.append(published)
            elif tuple(tensor.shape) != slot.full_shape:
                problems.misshaped.append(
                    f"{published}: expected {slot.full_shape}, got {tuple(tensor.shape)}"
                )
            elif is_of_wrong_kind(tensor, slot.target):
                problems.wrong_kind.append(
                    f"{published}: expected values like {slot.target.dtype}, got {tensor.dtype}"
                )
            seen.add(name)
        if complete:
            problems.missing = [self.published_name(n) for n in table if n not in seen]
        return problems

    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        table: Mapping[str, WeightSlot] | None = None,
    ) -> set[str]:
        """Copy checkpoint tensors (full shapes, HF names) into this rank's parameters, in place.

        Any subset of the model's tensors may come. Returns the names that were loaded. Raises
        WeightLoadError after the last tensor if some were unknown or misshapen; the others have
        been written by then (`check_weights` tells beforehand). `table`: see there.
        """
        table = self.weight_table() if table is None else table
        problems = WeightProblems()
        loaded: set[str] = set()
        for name, tensor in self._named_parts(weights):
            slot = table.get(name)
            if slot is None:
                problems.unexpected.append(self.published_name(name))
                continue
            try:
                slot.write(tensor)
            except ValueError as error:
                problems.misshaped.append(f"{self.published_name(name)}: {error}")
                continue
            loaded.add(name)
        problems.raise_if_any("the set of weights")
        return loaded

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any] | None:
        """First `truncate_size` rows of a checkpoint tensor as nested lists of floats.

        `name` is the HF (unfused) name, or that of a parameter of the module tree. With several
        ranks: this rank's shard. None where there is no such tensor.
        """
        values = self._find_weight(name)
        if values is None:
            return None
        rows: list[Any] = values[:truncate_size].float().cpu().tolist()
        return rows

    def _find_weight(self, name: str) -> torch.Tensor | None:
        for slot_name, slot in iterate_weight_slots(self):
            if slot_name == name:
                return slot.view()
        return dict(self.named_parameters(remove_duplicate=False)).get(name)

    def _named_parts(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self.is_foreign_weight(name):
                continue
            for part_name, part in self.split_weight(name, tensor):
                if not self.is_ignored_weight(part_name):
                    yield part_name, part
