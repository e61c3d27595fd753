"""The loss against formulas written out row by row."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from sglang.training.eagle3.attention import attention_function
from sglang.training.eagle3.draft import DraftShape, Eagle3Draft
from sglang.training.eagle3.loss import (
    LossOptions,
    LossReport,
    RowTargets,
    batch_loss,
    row_targets,
)
from sglang.training.eagle3.samples import collate, make_sample
from sglang.training.eagle3.vocabulary import DraftVocabulary

HIDDEN, VOCAB, NUM_STEPS = 12, 30, 3
OPTIONS = LossOptions(
    step_decay=0.8, chain_weight=0.0, lk_weight=0.0, acceptance="greedy", chunk_rows=1000
)


class Case:
    """Two random sequences, a random target head, a random draft."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shape = DraftShape(
            hidden_size=HIDDEN,
            intermediate_size=20,
            num_heads=2,
            num_kv_heads=1,
            head_dim=6,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            num_features=3,
        )
        self.token_ids = torch.arange(0, VOCAB, 2)
        vocabulary = DraftVocabulary(token_ids=self.token_ids, target_size=VOCAB)
        self.draft = Eagle3Draft(shape, vocabulary)
        self.draft.init_weights(0, None)
        samples = [
            make_sample(range(5), range(5, 14)),
            make_sample(range(3), range(9, 15), weight=0.5),
        ]
        self.batch = collate(samples, NUM_STEPS)
        size, length = self.batch.token_ids.shape
        self.head = torch.randn(VOCAB, HIDDEN)
        self.last = torch.randn(size, length, HIDDEN)
        self.embeds = torch.randn(size, length + NUM_STEPS, HIDDEN)
        self.features = torch.randn(size, length, 3 * HIDDEN)

    def targets(self, chunk_rows: int = 1000) -> RowTargets:
        last = self.last.flatten(0, 1)[self.batch.rows]
        return row_targets(lambda x: x @ self.head.T, self.draft, last, chunk_rows)

    def states(self) -> list[torch.Tensor]:
        attention = attention_function("merged")
        return list(self.draft.unroll(self.embeds, self.features, NUM_STEPS, attention))

    def loss(self, **changes: object) -> LossReport:
        options = dataclasses.replace(OPTIONS, **changes)  # type: ignore[arg-type]
        targets = self.targets(options.chunk_rows)
        batch = self.batch
        return batch_loss(
            self.draft, self.states(), targets, batch.rows, batch.row_weights, options
        )


@pytest.fixture
def case() -> Case:
    return Case()


def _row_by_row(case: Case, acceptance: str) -> tuple[list[float], list[dict[int, float]]]:
    """Mean cross-entropy of every step; acceptance of every row at every step."""
    means, acceptances = [], []
    for step, states in enumerate(case.states()):
        total, weight, accepted = 0.0, 0.0, {}
        for row, row_weight in zip(case.batch.rows.tolist(), case.batch.row_weights.tolist()):
            logits = case.head @ case.last.flatten(0, 1)[row]
            mine = case.draft.logits(states.flatten(0, 1)[row - 1 - step]).log_softmax(-1)
            whole, top = logits.softmax(-1), int(logits.argmax())
            restricted = logits[case.token_ids].softmax(-1)
            if acceptance == "sampled":
                accepted[row] = float(
                    torch.minimum(whole[case.token_ids], mine.exp()).detach().sum()
                )
            else:
                accepted[row] = float(mine[top // 2].detach().exp()) if top % 2 == 0 else 0.0
            if top % 2 == 0:
                total -= row_weight * float((restricted * mine).detach().sum())
                weight += row_weight
        means.append(total / weight)
        acceptances.append(accepted)
    return means, acceptances


def test_cross_entropy_over_the_draft_vocabulary_without_rows_it_cannot_propose(case: Case) -> None:
    report = case.loss()
    assert bool((case.targets().top < 0).any()), "the case must have such rows"
    means, _ = _row_by_row(case, "greedy")
    torch.testing.assert_close(report.step_losses, torch.tensor(means), atol=1e-5, rtol=1e-5)
    expected = sum(0.8**step * mean for step, mean in enumerate(means))
    assert report.total.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("acceptance", ["greedy", "sampled"])
def test_chain_loss_is_the_expected_number_of_accepted_tokens(case: Case, acceptance: str) -> None:
    report = case.loss(chain_weight=1.0, acceptance=acceptance)
    _, accepted = _row_by_row(case, acceptance)
    weights = dict(zip(case.batch.rows.tolist(), case.batch.row_weights.tolist()))
    total = weight = 0.0
    for row in weights:
        if not all(row + step in weights for step in range(NUM_STEPS)):
            continue
        survival, expected = 1.0, 0.0
        for step in range(NUM_STEPS):
            survival *= accepted[step][row + step]
            expected += survival
        total -= weights[row] * math.log((1 + expected) / (1 + NUM_STEPS))
        weight += weights[row]
    assert weight > 0
    assert report.total.item() == pytest.approx(total / weight, rel=1e-5)


def test_lk_loss_adds_the_log_of_the_acceptance(case: Case) -> None:
    plain, more = case.loss(acceptance="sampled"), case.loss(acceptance="sampled", lk_weight=0.5)
    _, accepted = _row_by_row(case, "sampled")
    top = case.targets().top
    added = 0.0
    for step, rows in enumerate(accepted):
        weights = case.batch.row_weights * (top >= 0)
        logs = torch.tensor([math.log(value) for value in rows.values()])
        added -= 0.5 * 0.8**step * float((weights * logs).sum() / weights.sum())
    assert (more.total - plain.total).item() == pytest.approx(added, rel=1e-4)


def test_chunks_of_rows_change_nothing(case: Case) -> None:
    grads = []
    for chunk_rows in (1000, 2):
        case.draft.zero_grad()
        case.loss(chunk_rows=chunk_rows, chain_weight=0.3).total.backward()
        grads.append([p.grad.clone() for p in case.draft.parameters() if p.grad is not None])
    assert len(grads[0]) == len(list(case.draft.parameters()))
    for whole, parts in zip(*grads):
        torch.testing.assert_close(whole, parts, atol=1e-6, rtol=1e-4)
