"""Which tokens a draft can propose: counting, choosing, enlarging, and the two maps.

A draft id plus `d2t[id]` is the token; `t2d` tells which tokens are among them. Draft ids rise with
their tokens. Pure functions of tensors on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.training.eagle3.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVocabulary:
    """`token_ids` int64 [V_d], rising."""

    token_ids: torch.Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.token_ids
        if not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise ValueError(f"draft tokens must lie within 0..{self.target_size - 1}")
        if not bool((ids.diff() > 0).all()):
            raise ValueError("draft tokens must rise and be different")

    @property
    def size(self) -> int:
        """V_d."""
        return len(self.token_ids)

    @property
    def d2t(self) -> torch.Tensor:
        """int64 [V_d]: what to add to a draft id."""
        return self.token_ids - torch.arange(self.size)

    @property
    def t2d(self) -> torch.Tensor:
        """bool [V]."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.token_ids] = True
        return mask

    @property
    def draft_ids(self) -> torch.Tensor:
        """int64 [V]: the draft id of every token, -1 where it has none."""
        ids = torch.full((self.target_size,), -1)
        ids[self.token_ids] = torch.arange(self.size)
        return ids


def vocabulary_of_d2t(d2t: torch.Tensor, target_size: int) -> DraftVocabulary:
    """The vocabulary that a published draft has."""
    ids = d2t + torch.arange(len(d2t))
    return DraftVocabulary(token_ids=ids, target_size=target_size)


def count_answer_tokens(samples: Iterable[Sample], target_size: int) -> torch.Tensor:
    """int64 [V]: how often each token stands in an answer."""
    counts = torch.zeros(target_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.token_ids[sample.is_answer], minlength=target_size)
    return counts


def choose_vocabulary(
    counts: torch.Tensor, size: int, always: Iterable[int] = ()
) -> DraftVocabulary:
    """The `size` most frequent tokens; those in `always` (an older draft's, ends of turns) first.

    Among equally frequent tokens the lower id is taken, so that the choice does not depend on the
    machine. Raises ValueError where `always` is larger than `size`.
    """
    target_size = len(counts)
    forced = sorted(set(always))
    if len(forced) > size:
        raise ValueError(f"{len(forced)} tokens must be in a draft vocabulary of {size}")
    ranks = counts.clone()
    ranks[forced] = torch.iinfo(torch.int64).max
    order = ranks.argsort(descending=True, stable=True)
    chosen = order[: min(size, target_size)].sort().values
    return DraftVocabulary(token_ids=chosen, target_size=target_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of the answers a draft vocabulary can propose."""

    draft_vocab_size: int
    answer_tokens: int
    covered_share: float
    used_tokens: int  # different tokens that occur in answers
    used_tokens_covered: int
    share_by_size: dict[int, float]  # of the N most frequent tokens, for other choices of N


def coverage(vocabulary: DraftVocabulary, counts: torch.Tensor) -> Coverage:
    """Of the answers that `counts` [V] were taken from."""
    total = max(int(counts.sum()), 1)
    by_rank = counts.sort(descending=True).values.cumsum(0)
    sizes = [2**n for n in range(10, 20) if 2**n < len(counts)]
    chosen = counts[vocabulary.token_ids]
    return Coverage(
        draft_vocab_size=vocabulary.size,
        answer_tokens=int(counts.sum()),
        covered_share=int(chosen.sum()) / total,
        used_tokens=int((counts > 0).sum()),
        used_tokens_covered=int((chosen > 0).sum()),
        share_by_size={size: int(by_rank[size - 1]) / total for size in sizes},
    )


def write_coverage(path: Path, report: Coverage) -> None:
    """As JSON."""
    names = type(report).__dataclass_fields__
    content = {name: getattr(report, name) for name in names}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def predict_head_rows(
    target_rows: torch.Tensor,
    known_ids: torch.Tensor,
    known_rows: torch.Tensor,
    new_ids: torch.Tensor,
) -> torch.Tensor:
    """Head rows [new, H] for tokens that a trained head does not have.

    Fits the linear map from the target's rows [V, H] to the trained ones [known, H] by ridge
    regression and applies it: tokens that are alike for the target get rows that are alike.
    """
    inputs = target_rows[known_ids].double()
    gram = inputs.T @ inputs
    ridge = 1e-4 * gram.diagonal().mean()
    gram.diagonal().add_(ridge)
    mapping = torch.linalg.solve(gram, inputs.T @ known_rows.double())
    return (target_rows[new_ids].double() @ mapping).to(known_rows.dtype)
