"""RMS normalisation, with the residual addition that precedes it in pre-norm transformers."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang.srt.layers.dispatch import default_ops
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, new_parameter


class RMSNorm(WeightOwner):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, weight_offset: float = 0.0) -> None:
        """`weight_offset`: added to the weight, for checkpoints that store it zero-centred."""
        super().__init__()
        self.weight = new_parameter(size)
        self.eps = eps
        self.weight_offset = weight_offset
        self.ops = default_ops()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, size] or [n, heads, size]; a new tensor of that shape."""
        return self.ops.rms_norm(x, self.weight, self.eps, self.weight_offset)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); residual None counts as zero.

        Consumes `residual` (it may be written to and returned).
        """
        if residual is None:
            return self.forward(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps, self.weight_offset)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        return {
            f"{name}.weight": WeightSlot(
                target=self.weight.data, full_shape=tuple(self.weight.shape)
            )
        }


def norms_side_by_side(
    x_norm: RMSNorm, x: torch.Tensor, y_norm: RMSNorm, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(both norms in one row, a copy of y), x and y [n, size] -> [n, 2 * size], [n, size].

    Raises ValueError where the norms are not of one kind, or add something to their weights.
    """
    if x_norm.eps != y_norm.eps or x_norm.weight_offset or y_norm.weight_offset:
        raise ValueError("these norms cannot be taken in one go")
    return x_norm.ops.norms_side_by_side(x, y, x_norm.weight, y_norm.weight, x_norm.eps)
