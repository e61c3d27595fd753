"""Frequency, presence and repetition penalties of one batch.

Owns, for the rows of a batch that have a penalty, how often each token was generated. All three
penalties look at generated tokens only, never at the prompt:

    repetition:  logit > 0 ? logit / r : logit * r    for tokens seen at least once
    frequency:   logit - f * (times seen)
    presence:    logit - p                            for tokens seen at least once

Only the logits of tokens that were seen are read and written, so the cost follows the length of
the outputs and not the size of the vocabulary. Used by `SamplingBatchInfo`, scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.sampling.sampling_params import MAX_LOGIT_BIAS, SamplingParams

_INITIAL_CAPACITY = 256


class PenaltyState:
    """Token counts of the penalised rows of one batch, brought up to date before each step.

    A *cell* is one (row, token) pair that was seen; cells are numbered in order of appearance.
    """

    def __init__(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """`rows`: batch rows with a penalty, `params`: theirs, in the same order."""
        self.rows = list(rows)
        self._num_counted = [0] * len(self.rows)
        self._cell_of: list[dict[int, int]] = [{} for _ in self.rows]  # token -> cell, per row
        self._num_cells = 0
        # Per penalised row: frequency, presence, repetition.
        self._wishes = np.array(
            [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params],
            dtype=np.float32,
        ).reshape(-1, 3)
        # Per cell, grown by doubling: (batch row, token), and
        # (repetition, frequency * times seen + presence).
        self._places = np.empty((2, _INITIAL_CAPACITY), dtype=np.int64)
        self._factors = np.empty((2, _INITIAL_CAPACITY), dtype=np.float32)

    def update(self, output_ids: Sequence[Sequence[int]]) -> None:
        """Count what is new in the output of each penalised row (same order as `rows`).

        Raises RuntimeError where an output has become shorter: a new state must be built then.
        """
        for index, ids in enumerate(output_ids):
            num_counted = self._num_counted[index]
            if len(ids) < num_counted:
                raise RuntimeError(
                    f"row {self.rows[index]}: {num_counted} tokens counted, {len(ids)} left"
                )
            for token_id in ids[num_counted:]:
                self._count(index, token_id)
            self._num_counted[index] = len(ids)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise the rows of `logits` float32 [b, V], in place."""
        if self._num_cells == 0:
            return
        places = torch.from_numpy(self._places[:, : self._num_cells]).to(logits.device)
        factors = torch.from_numpy(self._factors[:, : self._num_cells]).to(logits.device)
        rows, token_ids = places.unbind(0)
        repetition, subtrahend = factors.unbind(0)
        values = logits[rows, token_ids]
        logits.index_put_((rows, token_ids), _repeated(values, repetition) - subtrahend)

    def apply_to_tree(
        self, logits: torch.Tensor, token_ids: torch.Tensor, is_ancestor: torch.Tensor
    ) -> None:
        """Penalise logits float32 [b * w, V] of trees of tokens that may follow, in place.

        token_ids int64 [b, w]; node 0 was counted already. is_ancestor bool [b, w, w]: [i, j] = j
        lies on the path to i, i included. A node's row counts the tokens of its path besides.
        """
        num_nodes, vocab_size = token_ids.shape[1], logits.shape[1]
        device = logits.device
        rows = torch.tensor(self.rows, device=device)
        wishes = torch.from_numpy(self._wishes).to(device).unsqueeze(1)  # [r, 1, 3]
        frequency, presence, repetition = wishes.split(1, dim=2)
        seen = torch.zeros((len(self.rows), vocab_size), dtype=torch.bool, device=device)
        subtrahend = torch.zeros(seen.shape, device=device)
        index = np.searchsorted(self.rows, self._places[0, : self._num_cells])
        cells = (
            torch.from_numpy(index).to(device),
            torch.from_numpy(self._places[1, : self._num_cells]).to(device),
        )
        seen[cells] = True
        subtrahend[cells] = torch.from_numpy(self._factors[1, : self._num_cells]).to(device)

        on_path = is_ancestor[rows].to(torch.float32)  # [r, w, w]
        on_path[:, :, 0] = 0.0
        tokens = token_ids[rows].unsqueeze(1).expand_as(on_path)
        times = torch.zeros((len(self.rows), num_nodes, vocab_size), device=device)
        times.scatter_add_(2, tokens, on_path)
        is_new = (times > 0) & ~seen.unsqueeze(1)

        view = logits.view(-1, num_nodes, vocab_size)
        values = view[rows]
        values = torch.where(is_new | seen.unsqueeze(1), _repeated(values, repetition), values)
        view[rows] = values - (subtrahend.unsqueeze(1) + frequency * times + presence * is_new)

    def _count(self, index: int, token_id: int) -> None:
        frequency, presence, repetition = self._wishes[index]
        cell = self._cell_of[index].get(token_id)
        if cell is not None:
            self._factors[1, cell] += frequency
            return
        cell = self._num_cells
        if cell == self._places.shape[1]:
            self._places = np.concatenate([self._places, np.empty_like(self._places)], axis=1)
            self._factors = np.concatenate([self._factors, np.empty_like(self._factors)], axis=1)
        self._cell_of[index][token_id] = cell
        self._places[:, cell] = self.rows[index], token_id
        self._factors[:, cell] = repetition, frequency + presence
        self._num_cells += 1


def _repeated(logits: torch.Tensor, repetition: torch.Tensor) -> torch.Tensor:
    """Logits under a repetition penalty. A tiny one must not make an infinity of a logit."""
    changed = torch.where(logits > 0, logits / repetition, logits * repetition)
    return changed.clamp_(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
