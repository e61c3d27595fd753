"""What is minimised: soft cross-entropy of every unrolled step, and optional terms on acceptance.

Per row (a position whose next token is an answer's) and step: the target's distribution, restricted
to the draft vocabulary and normalised again, against the draft's. Rows whose likeliest token the
draft cannot propose are left out. Step k counts decay**k.

Optional, both off by default:

* LK loss: -log of the acceptance at each step.
* Chain loss: -log of the expected number of accepted tokens of a chain (plus the bonus token, of
  the most possible). The chain from a position survives step k with the product of the acceptances
  of steps 0..k, so that a gain at an early step counts for all that follow.

Acceptance is `greedy`, the draft's probability of the target's likeliest token, or `sampled`, the
sum over tokens of the smaller of both probabilities: what rejection sampling accepts
(arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sglang.training.eagle3.draft import Eagle3Draft

_TINY = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Weights of the terms."""

    step_decay: float
    chain_weight: float  # share of the chain loss in the whole, 0..1
    lk_weight: float
    acceptance: str  # greedy | sampled
    chunk_rows: int  # rows whose draft logits exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTargets:
    """The target's word on R rows."""

    draft_logits: torch.Tensor  # [R, V_d], of the tokens in the draft vocabulary
    log_total: torch.Tensor  # float32 [R], log-sum-exp over the whole vocabulary
    top: torch.Tensor  # int64 [R], draft id of the likeliest token; -1: cannot be proposed


@torch.no_grad()
def row_targets(
    head: Callable[[torch.Tensor], torch.Tensor],
    draft: Eagle3Draft,
    last: torch.Tensor,
    chunk_rows: int,
) -> RowTargets:
    """From the target's normed last states [R, H]; `head` makes logits [..., V] of them.

    Full logits exist for one chunk at a time.
    """
    kept, totals, tops = [], [], []
    for part in last.split(chunk_rows):
        logits = head(part)
        kept.append(logits[:, draft.token_ids])
        totals.append(logits.float().logsumexp(-1))
        tops.append(draft.draft_ids[logits.argmax(-1)])
    return RowTargets(
        draft_logits=torch.cat(kept), log_total=torch.cat(totals), top=torch.cat(tops)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReport:
    """Numbers of one batch, all on the device; detached but for `total`."""

    total: torch.Tensor
    step_losses: torch.Tensor  # float32 [steps], mean cross-entropy
    step_hits: torch.Tensor  # float32 [steps], share of rows whose likeliest tokens agree
    accept_length: torch.Tensor  # of chains from every row, the bonus token included


def batch_loss(
    draft: Eagle3Draft,
    steps: Iterable[torch.Tensor],
    targets: RowTargets,
    rows: torch.Tensor,
    row_weights: torch.Tensor,
    options: LossOptions,
) -> LossReport:
    """`steps` yields the draft's states [B, T, H]; `rows` int64 [R] are flat, see `Batch`.

    Step k's prediction for row r is made at position r - 1 - k, which `Batch` guarantees to exist.
    """
    can_propose = targets.top >= 0
    weights = row_weights * can_propose
    total_weight = weights.sum().clamp_min(_TINY)
    losses, hits, acceptances = [], [], []
    loss = torch.zeros((), device=rows.device)
    num_cells = 0
    for step, states in enumerate(steps):
        num_cells = states.shape[0] * states.shape[1]
        at = rows - 1 - step
        terms = _row_terms(draft, states.flatten(0, 1)[at], targets, options)
        step_loss = (weights * terms.cross_entropy).sum() / total_weight
        lk_loss = -(weights * terms.acceptance.clamp_min(_TINY).log()).sum() / total_weight
        loss = loss + options.step_decay**step * (step_loss + options.lk_weight * lk_loss)
        losses.append(step_loss.detach())
        hits.append(terms.is_hit)
        acceptances.append(terms.acceptance)
    chains = _Chains(rows, num_cells, len(losses))
    if options.chain_weight:
        chain_loss = chains.loss(acceptances, row_weights)
        loss = (1 - options.chain_weight) * loss + options.chain_weight * chain_loss
    return LossReport(
        total=loss,
        step_losses=torch.stack(losses),
        step_hits=torch.stack([hit.float().mean() for hit in hits]),
        accept_length=chains.mean_length(hits),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowTerms:
    """[R] each."""

    cross_entropy: torch.Tensor
    acceptance: torch.Tensor
    is_hit: torch.Tensor


def _row_terms(
    draft: Eagle3Draft, states: torch.Tensor, targets: RowTargets, options: LossOptions
) -> _RowTerms:
    size = options.chunk_rows
    is_greedy = options.acceptance == "greedy"
    parts = []
    chunks = zip(
        states.split(size),
        targets.draft_logits.split(size),
        targets.log_total.split(size),
        targets.top.split(size),
    )
    for inputs in chunks:
        if states.shape[0] > size and states.requires_grad:
            # Logits are made again in the backward pass instead of being kept for all rows.
            parts.append(
                checkpoint(
                    _terms, draft, *inputs, is_greedy,
                    use_reentrant=False, preserve_rng_state=False,
                )
            )  # fmt: skip
        else:
            parts.append(_terms(draft, *inputs, is_greedy))
    cross_entropy, acceptance, is_hit = (torch.cat(column) for column in zip(*parts))
    return _RowTerms(cross_entropy=cross_entropy, acceptance=acceptance, is_hit=is_hit)


def _terms(
    draft: Eagle3Draft,
    states: torch.Tensor,
    target_logits: torch.Tensor,
    log_total: torch.Tensor,
    top: torch.Tensor,
    is_greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_shares = functional.log_softmax(draft.logits(states).float(), dim=-1)
    wide = target_logits.float()
    cross_entropy = -(wide.softmax(-1) * log_shares).sum(-1)
    if is_greedy:
        top_share = log_shares.gather(-1, top.clamp_min(0)[:, None])[:, 0].exp()
        acceptance = top_share * (top >= 0)
    else:
        acceptance = torch.minimum((wide - log_total[:, None]).exp(), log_shares.exp()).sum(-1)
    return cross_entropy, acceptance, log_shares.argmax(-1) == top


class _Chains:
    """Which rows continue which: chains start at any row and are whole where no row is missing."""

    def __init__(self, rows: torch.Tensor, num_cells: int, num_steps: int) -> None:
        self._num_steps = num_steps
        index = torch.full((num_cells + num_steps,), -1, device=rows.device)
        index[rows] = torch.arange(len(rows), device=rows.device)
        # [steps, R]: the row that step k of the chain beginning at a row predicts. Rows of one
        # sequence never touch those of the next: the first `num_steps` positions hold none.
        row_of = torch.stack([index[rows + step] for step in range(num_steps)])
        self._is_whole = (row_of >= 0).all(0)
        self._row_of = row_of.clamp_min(0)

    def accepted(self, acceptances: list[torch.Tensor]) -> torch.Tensor:
        """Expected accepted drafts of the chain from every row, float32 [R]; of whole ones only."""
        survival: torch.Tensor = self._is_whole.float()
        accepted = torch.zeros_like(survival)
        for rows, acceptance in zip(self._row_of, acceptances):
            survival = survival * acceptance[rows]
            accepted = accepted + survival
        return accepted

    def mean_length(self, hits: list[torch.Tensor]) -> torch.Tensor:
        """Accepted drafts and the bonus token, mean over whole chains."""
        total = self.accepted([hit.float() for hit in hits]).sum()
        return 1 + total / self._is_whole.sum().clamp_min(1)

    def loss(self, acceptances: list[torch.Tensor], row_weights: torch.Tensor) -> torch.Tensor:
        """-log((1 + accepted) / (1 + steps)), mean over whole chains."""
        weights = row_weights * self._is_whole
        losses = -((1 + self.accepted(acceptances)) / (1 + self._num_steps)).log()
        return (weights * losses).sum() / weights.sum().clamp_min(_TINY)
