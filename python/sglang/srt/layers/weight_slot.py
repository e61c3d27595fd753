"""Where each checkpoint tensor goes: `WeightSlot`, and the table of a whole module tree.

Layers fuse several checkpoint tensors in one parameter and keep only their rank's shard of it.
Each layer that owns parameters says so once, in `weight_slots()`; loading, in-place updates,
reading a weight back and checking a checkpoint's completeness all follow from that table, so that
they cannot disagree. Layers import it; `model_loader` and `models` build and use the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSlot:
    """One checkpoint tensor's place in this rank's parameters.

    `target` is a view of a parameter's storage, so writing to it never rebinds the parameter.
    The checkpoint tensor has `full_shape`; this rank keeps `target.shape[shard_dim]` entries from
    `shard_start` on along `shard_dim` (None: the whole tensor). `num_valid` < target size where
    the tail of the target is padding that no checkpoint tensor fills.
    """

    target: torch.Tensor
    full_shape: tuple[int, ...]
    shard_dim: int | None = None
    shard_start: int = 0
    num_valid: int | None = None

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the checkpoint tensor, as a view."""
        if self.shard_dim is None:
            return full
        return full.narrow(self.shard_dim, self.shard_start, self._valid_length())

    def view(self) -> torch.Tensor:
        """The part of the parameter that the checkpoint tensor fills, as a view."""
        if self.shard_dim is None:
            return self.target
        return self.target.narrow(self.shard_dim, 0, self._valid_length())

    def write(self, full: torch.Tensor) -> None:
        """Copy this rank's part of `full` in place, converting the dtype.

        Raises ValueError where `full` has another shape than the checkpoint tensor should have.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"expected shape {self.full_shape}, got {tuple(full.shape)}")
        self.view().copy_(self.shard_of(full))

    def _valid_length(self) -> int:
        if self.num_valid is not None:
            return self.num_valid
        return self.target.shape[self.shard_dim] if self.shard_dim is not None else 0


class WeightOwner(nn.Module):
    """A layer that owns parameters and can say which checkpoint tensors fill them."""

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        """Checkpoint names -> slots, given this module's dotted name in the tree."""
        raise NotImplementedError


def sibling_name(name: str, part: str) -> str:
    """`name` with its last component replaced: ("a.qkv_proj", "q_proj") -> "a.q_proj"."""
    parent, _, _ = name.rpartition(".")
    return f"{parent}.{part}" if parent else part


def iterate_weight_slots(root: nn.Module) -> Iterator[tuple[str, WeightSlot]]:
    """Every (checkpoint name, slot) of a module tree, in module order.

    A module that is reachable under several names (tied weights) is listed once.
    """
    for name, module in root.named_modules():
        if isinstance(module, WeightOwner):
            yield from module.weight_slots(name).items()


def new_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter on the default device and dtype, without gradient."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)
