"""One layer's states in a step, and where each is read and written. Records of device tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.mamba.ops import StateMove


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Inputs of decay and beta, [n, value_heads] each."""

    a: torch.Tensor
    b: torch.Tensor

    def unflatten(self, num_requests: int, num_nodes: int) -> Gates:
        """The same as [num_requests, num_nodes, value_heads]."""
        shape = (num_requests, num_nodes)
        return Gates(a=self.a.unflatten(0, shape), b=self.b.unflatten(0, shape))

    def at(self, node: int) -> Gates:
        """Of one node of every request."""
        return Gates(a=self.a[:, node], b=self.b[:, node])

    def rows(self, rows: torch.Tensor) -> Gates:
        """Some rows, int64 [m]."""
        return Gates(a=self.a[rows], b=self.b[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMoves:
    """Where a one-token step reads and writes both states."""

    conv: StateMove
    temporal: StateMove


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStates:
    """Both states of one layer; see `MambaPool`."""

    conv: torch.Tensor
    temporal: torch.Tensor

    def empty(self, num_slots: int) -> LayerStates:
        """Other slots of the same kind."""
        return LayerStates(
            conv=self.conv.new_empty((num_slots, *self.conv.shape[1:])),
            temporal=self.temporal.new_empty((num_slots, *self.temporal.shape[1:])),
        )

    def to(
        self, target: LayerStates, source_slots: torch.Tensor, target_slots: torch.Tensor
    ) -> StateMoves:
        """A step from these slots to others."""

        def move(source: torch.Tensor, destination: torch.Tensor) -> StateMove:
            return StateMove(
                source=source,
                source_slots=source_slots,
                target=destination,
                target_slots=target_slots,
            )

        return StateMoves(
            conv=move(self.conv, target.conv), temporal=move(self.temporal, target.temporal)
        )

    def in_place(self, slots: torch.Tensor) -> StateMoves:
        """A step of these slots."""
        return self.to(self, slots, slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedPath:
    """What of a verification counts, of b requests with `num_nodes` nodes each.

    `nodes` int64 [b, d]: from the root downwards, of which the first `lens` int64 [b] count.
    `slots` int64 [b]: the requests' states; `unused_slot`: one that nobody reads.
    """

    num_nodes: int
    nodes: torch.Tensor
    lens: torch.Tensor
    slots: torch.Tensor
    unused_slot: int
