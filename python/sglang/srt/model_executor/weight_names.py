"""Names under which trainers send tensors, and which model each tensor is meant for.

Two name spaces: those of checkpoints (unfused, full shapes) and those of this rank's own
parameters (fused, split). Both say which names a model has, what does not fit, and write in place.
Pure apart from `write`; used by the weight updater.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from sglang.srt.model_executor.weight_receive import TensorSpec
from sglang.srt.models.base import LanguageModel, WeightLoadError, WeightProblems, is_of_wrong_kind

NamedTensors = Sequence[tuple[str, torch.Tensor]]

logger = logging.getLogger(__name__)

_NUM_SHOWN = 5

TARGET, DRAFT, ALL = "target", "draft", "all"
SELECTORS = (ALL, TARGET, DRAFT)


class ModelNames(Protocol):
    """One model's tensors in one name space."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every name with the shape in which it is sent."""
        ...

    def knows(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the model has a use for the name (or is known to ignore it)."""
        ...

    def is_foreign(self, name: str) -> bool:
        """Whether the name is known to be that of another model's tensor."""
        ...

    def check(self, named: NamedTensors) -> None:
        """Raise WeightLoadError naming every tensor that does not fit. Writes nothing."""
        ...

    def write(self, named: NamedTensors) -> set[str]:
        """Copy the values in place; returns the names (of `shapes`) that were written."""
        ...

    def target_of(self, name: str) -> torch.Tensor:
        """Where a name of `shapes` is written: a parameter or a view of one."""
        ...

    def in_checkpoint(self, names: Iterable[str]) -> set[str]:
        """The tensors of a checkpoint that names of `shapes` stand for; unknown ones for none."""
        ...


class CheckpointNames:
    """Names and shapes as in a Hugging Face checkpoint; shards are cut out here."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._table = model.weight_table()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: slot.full_shape for name, slot in self._table.items()}

    def knows(self, name: str, tensor: torch.Tensor) -> bool:
        parts = [part for part, _ in self._model.split_weight(name, tensor)]
        return any(p in self._table or self._model.is_ignored_weight(p) for p in parts)

    def is_foreign(self, name: str) -> bool:
        return self._model.is_foreign_weight(name)

    def check(self, named: NamedTensors) -> None:
        self.problems(named, complete=False).raise_if_any("the update")

    def problems(self, infos: NamedTensors, complete: bool) -> WeightProblems:
        """As `LanguageModel.check_weights`."""
        return self._model.check_weights(infos, complete, self._table)

    def write(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """May be a stream: a checkpoint need not fit in memory a second time."""
        return self._model.load_weights(named, self._table)

    def target_of(self, name: str) -> torch.Tensor:
        return self._table[name].target

    def in_checkpoint(self, names: Iterable[str]) -> set[str]:
        return self._table.keys() & set(names)


class ParameterNames:
    """Names and shapes of this rank's parameters, tied ones under each of their names.

    `prefix`: in front of every name, where several models have parameters of the same names.
    """

    def __init__(self, model: LanguageModel, prefix: str = "") -> None:
        self._model = model
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {prefix + name: parameter for name, parameter in named}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._parameters.items()}

    def knows(self, name: str, tensor: torch.Tensor) -> bool:
        return name in self._parameters

    def is_foreign(self, name: str) -> bool:
        return False

    def check(self, named: NamedTensors) -> None:
        wrong = []
        for name, tensor in named:
            expected = tuple(self._parameters[name].shape)
            if tuple(tensor.shape) != expected:
                wrong.append(f"{name}: expected {expected}, got {tuple(tensor.shape)}")
            _check_kind(name, tensor, self._parameters[name])
        if wrong:
            raise WeightLoadError(f"tensors of the wrong shape ({len(wrong)}): {', '.join(wrong)}")

    @torch.no_grad()
    def write(self, named: NamedTensors) -> set[str]:
        for name, tensor in named:
            self._parameters[name].copy_(tensor)
        return {name for name, _ in named}

    def target_of(self, name: str) -> torch.Tensor:
        return self._parameters[name]

    def in_checkpoint(self, names: Iterable[str]) -> set[str]:
        # A parameter holds several tensors of the checkpoint, and a storage several parameters.
        found = [self._parameters[name] for name in names if name in self._parameters]
        spans = sorted((parameter.data_ptr(), parameter.nbytes) for parameter in found)
        table = self._model.weight_table()
        return {name for name, slot in table.items() if _begins_in(slot.target, spans)}


def assign(
    named: NamedTensors, selector: str, target: ModelNames, drafts: Sequence[ModelNames]
) -> list[list[tuple[str, torch.Tensor]]]:
    """Deal out tensors: one list for the target, then one for each draft.

    A draft's names may be those of quite different tensors of the target, so with selector "all" a
    tensor that the target has is a draft's only where the draft is a model of the same form (same
    names, same shapes). Raises WeightLoadError for tensors that nobody has a use for, ValueError
    for a selector that cannot be followed.
    """
    if selector not in SELECTORS:
        raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
    if selector == DRAFT and not drafts:
        raise ValueError("there is no draft model to update")
    to_target = [selector != DRAFT and target.knows(name, tensor) for name, tensor in named]
    claimed = list(to_target)
    parts = [[each for each, taken in zip(named, to_target) if taken]]
    for draft in drafts:
        mine: list[tuple[str, torch.Tensor]] = []
        if selector != TARGET:
            is_twin = selector == ALL and draft.shapes() == target.shapes()
            for index, (name, tensor) in enumerate(named):
                if (is_twin or not to_target[index]) and draft.knows(name, tensor):
                    mine.append((name, tensor))
                    claimed[index] = True
        parts.append(mine)
    # A draft that is not loaded is missed by nobody.
    unexpected = [
        name
        for (name, _), taken in zip(named, claimed)
        if not taken and not target.is_foreign(name)
    ]
    # A draft is often sent all of a checkpoint and takes what it has.
    if unexpected and (selector != DRAFT or not any(parts)):
        raise WeightLoadError(f"unexpected tensors ({len(unexpected)}): {', '.join(unexpected)}")
    if unexpected:
        logger.info(
            "%d of %d tensors sent for the draft are not its own and were left out (%s)",
            *(len(unexpected), len(named), first_names(unexpected)),
        )
    return parts


def check_no_name_twice(named: NamedTensors) -> None:
    """Raise ValueError where one name came with two tensors."""
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ValueError(f"tensors that came more than once ({len(twice)}): {first_names(twice)}")


def first_names(names: Sequence[str]) -> str:
    """For messages: a few of many names."""
    return ", ".join(names[:_NUM_SHOWN]) + (", ..." if len(names) > _NUM_SHOWN else "")


def pairs_of(payload: Any) -> list[tuple[Any, Any]]:
    """The entries of a payload, two parts each. Raises ValueError where it is something else."""
    entries = list(payload)
    if isinstance(payload, Mapping) or not all(
        isinstance(entry, tuple | list) and len(entry) == 2 for entry in entries
    ):
        raise ValueError(
            "expected a list of pairs of name and tensor (a bucket needs load_format "
            f"flattened_bucket), got {type(payload).__name__}"
            + ("" if isinstance(payload, Mapping) else " with other entries")
        )
    return [(first, second) for first, second in entries]


def check_named_tensors(payload: Any) -> list[tuple[str, torch.Tensor]]:
    """The payload as a list of (name, tensor). Raises ValueError where it is something else."""
    named = pairs_of(payload)
    for name, tensor in named:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                "expected pairs of name and tensor, got one of "
                f"{type(name).__name__} and {type(tensor).__name__}"
            )
    return named


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype by its torch name, with or without "torch.". Raises ValueError for others."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {dtype!r}")
    return found


def declared_tensors(
    names: Sequence[str],
    dtypes: Sequence[str | torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> list[TensorSpec]:
    """What a trainer says that it sends. Raises ValueError where that makes no sense."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ValueError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not match"
        )
    for name, shape in zip(names, shapes):
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name}: a tensor cannot have the shape {list(shape)}")
    return [
        TensorSpec(name, parse_dtype(dtype), tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes)
    ]


def with_likely_sizes(
    specs: Sequence[TensorSpec], models: Sequence[ModelNames]
) -> list[TensorSpec]:
    """With the size that the first model's tensor of each name has, where one has such a tensor."""
    shapes: dict[str, tuple[int, ...]] = {}
    for model in reversed(models):
        shapes |= model.shapes()
    return [
        spec._replace(likely_bytes=math.prod(shapes.get(spec.name, (0,))) * spec.dtype.itemsize)
        for spec in specs
    ]


def _check_kind(name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if is_of_wrong_kind(tensor, target):
        raise WeightLoadError(f"{name}: expected values like {target.dtype}, got {tensor.dtype}")


def _begins_in(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a tensor begins in one of these (address, bytes), rising."""
    place = tensor.data_ptr()
    index = bisect.bisect_right(spans, place, key=lambda span: span[0]) - 1
    return index >= 0 and place < sum(spans[index])
