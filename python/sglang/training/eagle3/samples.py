"""Token sequences to learn from, their file, and batches of bounded size.

A `Sample` says of every token whether it belongs to an answer: only those are learnt to be
predicted. Batches hold sequences of like length, right-padded; their order depends on the seed and
the epoch alone, so that a resumed run goes on with the very batch that would have come next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence."""

    token_ids: torch.Tensor  # int64 [n]
    is_answer: torch.Tensor  # bool [n]
    weight: float = 1.0  # of its tokens in the loss

    def cut(self, max_length: int) -> Sample:
        """The first `max_length` tokens."""
        return Sample(
            token_ids=self.token_ids[:max_length],
            is_answer=self.is_answer[:max_length],
            weight=self.weight,
        )

    @property
    def prompt_length(self) -> int:
        """Tokens before the first answer token; all of them where there is no answer."""
        answers = self.is_answer.nonzero()
        return int(answers[0]) if len(answers) else len(self.token_ids)


def make_sample(prompt: Sequence[int], answer: Sequence[int], weight: float = 1.0) -> Sample:
    """A sequence of one prompt and one answer."""
    is_answer = torch.zeros(len(prompt) + len(answer), dtype=torch.bool)
    is_answer[len(prompt) :] = True
    return Sample(
        token_ids=torch.tensor([*prompt, *answer], dtype=torch.int64),
        is_answer=is_answer,
        weight=weight,
    )


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """One safetensors file; appears complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    save_file(
        {
            "token_ids": torch.cat([s.token_ids for s in samples]).to(torch.int32),
            "is_answer": torch.cat([s.is_answer for s in samples]),
            "lengths": torch.tensor([len(s.token_ids) for s in samples]),
            "weights": torch.tensor([s.weight for s in samples], dtype=torch.float32),
        },
        str(partial),
    )
    partial.rename(path)


def load_samples(path: Path) -> list[Sample]:
    """What `save_samples` wrote."""
    tensors = load_file(path)
    lengths = tensors["lengths"].tolist()
    parts = zip(
        tensors["token_ids"].long().split(lengths),
        tensors["is_answer"].split(lengths),
        tensors["weights"].tolist(),
    )
    return [Sample(token_ids=ids, is_answer=mask, weight=weight) for ids, mask, weight in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Right-padded with token 0. All on the CPU."""

    token_ids: torch.Tensor  # int64 [B, T]
    # Flat indices b * T + r of positions whose target logits are learnt from, int64 [R].
    rows: torch.Tensor
    row_weights: torch.Tensor  # float32 [R]
    num_tokens: int  # without padding


def collate(samples: Sequence[Sample], num_steps: int) -> Batch:
    """Pad to the longest. Rows are those that every one of `num_steps` steps can reach.

    The target's row r says what follows token r; it is learnt from where token r + 1 is an answer
    token. Step k predicts it at position r - 1 - k, so that r >= num_steps.
    """
    length = max(len(sample.token_ids) for sample in samples)
    token_ids = torch.zeros(len(samples), length, dtype=torch.int64)
    is_row = torch.zeros(len(samples), length, dtype=torch.bool)
    for index, sample in enumerate(samples):
        n = len(sample.token_ids)
        token_ids[index, :n] = sample.token_ids
        is_row[index, : n - 1] = sample.is_answer[1:]
    is_row[:, :num_steps] = False
    weights = torch.tensor([s.weight for s in samples])[:, None].expand(-1, length)
    return Batch(
        token_ids=token_ids,
        rows=is_row.flatten().nonzero()[:, 0],
        row_weights=weights[is_row].float(),
        num_tokens=sum(len(s.token_ids) for s in samples),
    )


class BatchPlan:
    """Batches of at most `batch_tokens` padded tokens in a reproducible order."""

    def __init__(
        self, samples: Sequence[Sample], batch_tokens: int, num_steps: int, seed: int
    ) -> None:
        # A sequence teaches only where it has rows.
        self._samples = [s for s in samples if bool(s.is_answer[num_steps + 1 :].any())]
        if not self._samples:
            raise ValueError("no sequence is long enough to learn from")
        self._batch_tokens = batch_tokens
        self._num_steps = num_steps
        self._seed = seed
        self._epoch = -1
        self._order: list[list[int]] = []

    @property
    def num_tokens(self) -> int:
        """Of one epoch."""
        return sum(len(s.token_ids) for s in self._samples)

    def batch(self, epoch: int, index: int) -> Batch | None:
        """Batch `index` of an epoch; None behind the last one."""
        if epoch != self._epoch:
            self._order, self._epoch = self._plan(epoch), epoch
        if index >= len(self._order):
            return None
        return collate([self._samples[i] for i in self._order[index]], self._num_steps)

    def _plan(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        lengths = torch.tensor([len(s.token_ids) for s in self._samples], dtype=torch.float32)
        # Some disorder in the sorting puts other neighbours together in every epoch.
        jitter = 1 + 0.1 * torch.rand(len(lengths), generator=generator)
        batches: list[list[int]] = []
        current: list[int] = []
        longest = 0
        for index in (lengths * jitter).argsort(stable=True).tolist():
            longest_then = max(longest, len(self._samples[index].token_ids))
            if current and longest_then * (len(current) + 1) > self._batch_tokens:
                batches.append(current)
                current, longest_then = [], len(self._samples[index].token_ids)
            current.append(index)
            longest = longest_then
        batches.append(current)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
