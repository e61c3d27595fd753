"""AdamW for everything, or Muon for the matrices and AdamW for the rest.

Muon's update has the size of AdamW's here (`match_rms_adamw`, arXiv 2502.16982), so that one
learning rate serves both.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang.training.eagle3.draft import Eagle3Draft
from sglang.training.eagle3.options import TrainOptions


class Optimizers:
    """One or two torch optimisers that step together."""

    def __init__(self, draft: Eagle3Draft, options: TrainOptions, fused: bool) -> None:
        named = list(draft.named_parameters())
        matrices: list[torch.nn.Parameter] = []
        if options.optimizer == "muon":
            # Rows of the head belong to tokens, not to a map between spaces.
            matrices = [p for name, p in named if p.dim() == 2 and not name.startswith("lm_head")]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                rest, lr=options.lr, betas=(0.9, options.beta2),
                weight_decay=options.weight_decay, fused=fused,
            )
        ]  # fmt: skip
        if matrices:
            self._all.append(
                torch.optim.Muon(
                    matrices, lr=options.lr, weight_decay=options.weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )  # fmt: skip
        self.learning_rate = options.lr

    def set_learning_rate(self, value: float) -> None:
        """Of the next step."""
        self.learning_rate = value
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = value

    def step(self) -> None:
        """Apply the gradients and drop them."""
        for optimizer in self._all:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [optimizer.state_dict() for optimizer in self._all]

    def restore(self, states: list[dict[str, Any]]) -> None:
        """What `state` gave, of the same kind of optimiser."""
        if len(states) != len(self._all):
            raise ValueError("the checkpoint is of another optimiser")
        for optimizer, state in zip(self._all, states):
            optimizer.load_state_dict(state)
