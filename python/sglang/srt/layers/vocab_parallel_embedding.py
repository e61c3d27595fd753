"""The token embedding and the output head, split over ranks by vocabulary rows.

The vocabulary is padded to a multiple of the number of ranks; padding rows are zero and their
logits are cut off by the logits processor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from sglang.srt.distributed.communication import tensor_model_parallel_all_reduce
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.dispatch import default_ops, take_rows
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot


class VocabParallelEmbedding(WeightOwner):
    """Rows [first_token, first_token + rows) of the embedding table."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        group = get_tp_group()
        self.vocab_size = vocab_size
        self._num_ranks = group.size
        rows = -(-vocab_size // group.size)
        self._first_token = group.rank * rows
        # Zero, not empty: the padding rows are multiplied like any other.
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [n] -> [n, hidden]. Collective with more than one rank."""
        if self._num_ranks == 1:
            return take_rows(self.weight, input_ids)
        local = input_ids - self._first_token
        outside = (local < 0) | (local >= self.weight.shape[0])
        out = take_rows(self.weight, local.masked_fill(outside, 0))
        out.masked_fill_(outside.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(out)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        rows = self.weight.shape[0]
        return {
            f"{name}.weight": WeightSlot(
                target=self.weight.data,
                full_shape=(self.vocab_size, self.weight.shape[1]),
                shard_dim=0,
                shard_start=min(self._first_token, self.vocab_size),
                num_valid=max(0, min(rows, self.vocab_size - self._first_token)),
            )
        }


class ParallelLMHead(VocabParallelEmbedding):
    """The same rows used as the output projection; the logits processor calls it."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__(vocab_size, hidden_size)
        self._ops = default_ops()

    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's parameter; both names then mean one storage."""
        self.weight = embedding.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> float32 logits of this rank's tokens [n, rows], padding included."""
        return self._ops.wide_linear(hidden_states, self.weight)
