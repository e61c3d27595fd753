"""Functions of users that write a model's weights: finding them, and running them safely.

They are named by `--custom-weight-loader`, and a trainer asks for one by its name. Captured steps,
the draft of a target and tables of names hold the model's memory, so a function must write where
the tensors lie. One that does otherwise fails, and the tensors lie where they lay before.
Used by the weight updater; scheduler thread only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from sglang.srt.model_loader.weight_fingerprint import persistent_tensors, place_of

CustomLoader = Callable[[nn.Module, list[tuple[str, torch.Tensor]]], object]


def resolve_custom_loader(name: str, allowed: Collection[str]) -> CustomLoader:
    """The function behind a dotted name from `--custom-weight-loader`.

    Raises ValueError for names that the flag does not list, and where there is no such function.
    """
    if name not in allowed:
        known = ", ".join(["direct", "flattened_bucket", *allowed])
        raise ValueError(
            f"Unknown load_format={name}: known are {known}; functions of your own are listed by "
            "--custom-weight-loader"
        )
    return import_custom_loader(name)


def import_custom_loader(name: str) -> CustomLoader:
    """The function behind a dotted name. Raises ValueError where there is none."""
    module, _, function = name.rpartition(".")
    try:
        loader: CustomLoader = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--custom-weight-loader {name} cannot be imported: {error}") from error
    return loader


def run_custom_loader(
    loader: CustomLoader, model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Let `loader` write to the tensors of `model`.

    Raises what it raises, and RuntimeError where it moved, added or removed parameters or buffers.
    Then every tensor lies where it lay before, but for memory that it freed; what was written there
    stays.
    """
    layout = _Layout(model)
    try:
        loader(model, list(named))
    except BaseException as error:
        layout.restore()
        if isinstance(error, Exception):
            raise
        # The function must not end the server (SystemExit).
        raise RuntimeError(f"the loader raised {error!r}") from error
    changed = layout.changed()
    if changed:
        layout.restore()
        raise RuntimeError(
            f"the loader put {', '.join(changed)} into other memory; it must write in place"
        )


def _model_load_weights_direct(
    model: nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """A custom loader: parameters of this rank under their own names, as load format "direct"."""
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)


class _Branch(NamedTuple):
    """One module's own entries: copies of torch's tables, and names of its plain attributes."""

    module: nn.Module
    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    children: dict[str, nn.Module | None]
    attributes: frozenset[str]

    def shadows(self) -> list[str]:
        """New plain attributes that hide an entry of a table: Python looks at them first."""
        entries = self.parameters.keys() | self.buffers.keys() | self.children.keys()
        return [name for name in entries - self.attributes if name in self.module.__dict__]


class _Layout:
    """Where the tensors of a model lie, as of now; keeps their memory from being freed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._branches = [
            _Branch(
                each,
                dict(each._parameters),
                dict(each._buffers),
                dict(each._modules),
                frozenset(each.__dict__),
            )
            for each in model.modules()
        ]
        self._places = {name: place_of(tensor) for name, tensor in _tensors(model)}
        # What a parameter's memory is can be replaced under it: second tensors of that memory.
        self._memory = [(tensor, tensor.detach()) for _, tensor in _tensors(model)]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor, _ in self._memory]

    def changed(self) -> list[str]:
        """Names of tensors that lie elsewhere, have another form, are gone or new."""
        now = {name: place_of(tensor) for name, tensor in _tensors(self._model)}
        moved = {name for name, place in self._places.items() if now.get(name) != place}
        moved |= persistent_tensors(self._model).keys() - self._places.keys()
        moved |= {name for branch in self._branches for name in branch.shadows()}
        if any(size > alias.untyped_storage().nbytes() for (_, alias), size in self._aliases()):
            moved.add("tensors that it made smaller")
        return sorted(moved)

    def _aliases(self) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
        return zip(self._memory, self._sizes)

    def restore(self) -> None:
        """Make the tree of modules, and the memory of its tensors, what they were."""
        for branch in self._branches:
            module = branch.module
            for name in branch.shadows():
                del module.__dict__[name]
            for table, kept in (
                (module._parameters, branch.parameters),
                (module._buffers, branch.buffers),
                (module._modules, branch.children),
            ):
                table.clear()
                table.update(kept)  # type: ignore[arg-type]
        for (_, alias), size in self._aliases():
            if alias.untyped_storage().nbytes() < size:
                # What was there is lost, but nobody reads memory that is not there.
                alias.untyped_storage().resize_(size)
                alias.zero_()
        for tensor, alias in self._memory:
            if place_of(tensor) != place_of(alias):
                tensor.data = alias


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
