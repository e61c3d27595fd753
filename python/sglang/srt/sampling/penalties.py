"""Frequency, presence and repetition penalties of one batch.

Owns, for the rows of a batch that have a penalty, how often each token was generated. All three
penalties look at generated tokens only, never at the prompt:

    repetition:  logit > 0 ? logit / r : logit * r    for tokens seen at least once
    frequency:   logit - f * (times seen)
    presence:    logit - p                            for tokens seen at least once

Used by `SamplingBatchInfo` on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.sampling.sampling_params import SamplingParams


class PenaltyState:
    """Token counts of the penalised rows of one batch, brought up to date before each step."""

    def __init__(
        self,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """`rows`: batch rows with a penalty, `params`: theirs, in the same order."""
        self.rows = list(rows)
        self._vocab_size = vocab_size
        self._num_counted = [0] * len(self.rows)
        table = torch.tensor(
            [[p.frequency_penalty, p.presence_penalty, p.repetition_penalty] for p in params],
            dtype=torch.float32,
        ).to(device)
        self._frequency, self._presence, self._repetition = table.unsqueeze(1).unbind(2)  # [p, 1]
        self._row_index = torch.tensor(self.rows, dtype=torch.int64).to(device)
        # float32, because it is multiplied with the frequency penalty in every step.
        self._counts = torch.zeros((len(self.rows), vocab_size), dtype=torch.float32, device=device)

    def update(self, output_ids: Sequence[Sequence[int]]) -> None:
        """Count what is new in the output of each penalised row (same order as `rows`).

        Raises RuntimeError where an output has become shorter: a new state must be built then.
        """
        slots: list[int] = []
        for index, ids in enumerate(output_ids):
            num_counted = self._num_counted[index]
            if len(ids) < num_counted:
                raise RuntimeError(
                    f"row {self.rows[index]}: {num_counted} counted, {len(ids)} left"
                )
            base = index * self._vocab_size
            slots.extend(base + token_id for token_id in ids[num_counted:])
            self._num_counted[index] = len(ids)
        if slots:
            index_tensor = torch.tensor(slots, dtype=torch.int64).to(self._counts.device)
            ones = torch.ones(len(slots), dtype=torch.float32, device=self._counts.device)
            self._counts.view(-1).index_add_(0, index_tensor, ones)

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise the rows of `logits` float32 [b, V], in place."""
        part = logits.index_select(0, self._row_index)
        seen = self._counts > 0
        scaled = torch.where(part > 0, part / self._repetition, part * self._repetition)
        part = torch.where(seen, scaled - self._presence, part)
        logits.index_copy_(0, self._row_index, part - self._frequency * self._counts)
