"""Sampling wishes at the nodes of a tree equal those of requests that had generated the path."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from sglang.srt.constrained.base_grammar_backend import GrammarMatcher
from sglang.srt.layers.sampler import adjust_logits, draw, sampling_probs
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.eagle_utils import tree_from_parents
from sglang.srt.speculative.verify_sampling import (
    VerifySampling,
    adjust_verify_logits,
    fill_tree_masks,
    target_choices,
    target_probs,
)

VOCAB = 40
PARENTS = [-1, 0, 0, 1, 1, 2, 3]
W = len(PARENTS)
PATHS = [[], [1], [2], [1, 3], [1, 4], [2, 5], [1, 3, 6]]


class CountingGrammar(GrammarMatcher):
    """A token may be followed by itself or the next; 39 ends."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def _allowed(self) -> set[int]:
        last = self.tokens[-1]
        return {39} if last == 39 else {last, (last + 1) % 39, 39}

    def accept_token(self, token_id: int) -> bool:
        if token_id not in self._allowed():
            return False
        self.tokens.append(token_id)
        return True

    def fill_mask(self, row: np.ndarray) -> None:
        row[:] = 0
        words = row.view(np.uint32)
        for token_id in self._allowed():
            words[token_id // 32] |= np.uint32(1 << token_id % 32)

    def is_terminated(self) -> bool:
        return self.tokens[-1] == 39

    def rollback(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def copy(self) -> CountingGrammar:
        return CountingGrammar(self.tokens)

    @property
    def error(self) -> str | None:
        return None


@dataclass
class FakeReq:
    sampling_params: SamplingParams
    output_ids: list[int]
    num_pending_tokens: int = 1
    grammar: GrammarMatcher | None = None
    eos_token_ids: frozenset[int] = field(default_factory=lambda: frozenset({39}))


def requests() -> list[FakeReq]:
    params = [
        SamplingParams(temperature=0.0, repetition_penalty=1.4),
        SamplingParams(temperature=0.7, top_k=5, logit_bias={"3": 2.0, "7": -4.0}),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.3, min_new_tokens=6),
        SamplingParams(temperature=1.5, top_p=0.8, min_new_tokens=4),
        SamplingParams(temperature=0.9, min_p=0.1, min_new_tokens=5),
        SamplingParams(temperature=0.0),
    ]
    outputs = [[4, 4, 5], [1], [2, 3, 3, 9], [8, 8, 8], [6, 7], [0]]
    reqs = [FakeReq(p, o) for p, o in zip(params, outputs)]
    reqs[4].grammar = CountingGrammar(reqs[4].output_ids)
    return reqs


def info_of(reqs: list[FakeReq]) -> SamplingBatchInfo:
    info = SamplingBatchInfo.from_reqs(reqs, VOCAB, "cpu")
    info.update_host_state(reqs)
    return info


def draft_ids(reqs: list[FakeReq]) -> torch.Tensor:
    rows = []
    for row, req in enumerate(reqs):
        last = req.output_ids[-1]
        rows.append([last, last, (last + 1) % 39, last, 39, 30 + row, (last + 1) % 39])
    return torch.tensor(rows)


def expected_logits(reqs: list[FakeReq], ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Node by node: each request as if the path's tokens had come."""
    expected = logits.clone().view(len(reqs), W, VOCAB)
    for row, req in enumerate(reqs):
        for node, path in enumerate(PATHS):
            tokens = [int(ids[row, i]) for i in path]
            grammar = None if req.grammar is None else req.grammar.copy()
            if grammar is not None and not all(map(grammar.accept_token, tokens)):
                continue
            there = FakeReq(req.sampling_params, req.output_ids + tokens, 1, grammar)
            adjust_logits(expected[row, node : node + 1], info_of([there]))
    return expected


@pytest.mark.parametrize("seed", range(3))
def test_logits_at_a_node_are_those_after_its_path(seed: int) -> None:
    reqs = requests()
    ids = draft_ids(reqs)
    tree = tree_from_parents(ids, torch.tensor([PARENTS] * len(reqs)))
    logits = torch.randn(len(reqs) * W, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = expected_logits(reqs, ids, logits)
    info = info_of(reqs)
    num_generated = [len(req.output_ids) for req in reqs]
    masks = fill_tree_masks(info, ids.tolist(), [PARENTS] * len(reqs), num_generated)
    prompt_lens = [10 * row + 1 for row in range(len(reqs))]
    sampling = VerifySampling.create(info, W, prompt_lens)
    # The root is the last output token.
    roots = torch.tensor(prompt_lens) + torch.tensor(num_generated) - 1
    adjust_verify_logits(logits, sampling, tree, roots, masks)
    torch.testing.assert_close(logits.view(expected.shape), expected)
    assert reqs[4].grammar is not None and reqs[4].grammar.tokens == reqs[4].output_ids  # type: ignore[attr-defined]


def test_choices_and_distributions_are_those_of_the_sampler() -> None:
    reqs = requests()
    reqs[4].grammar = None
    sampling = VerifySampling.create(info_of(reqs), W, [1] * len(reqs))
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(reqs) * W, VOCAB, generator=generator)
    coins = torch.rand((len(reqs), W), generator=generator)
    choices = target_choices(logits, sampling, coins)
    probs = target_probs(logits, sampling)
    torch.testing.assert_close(probs.sum(dim=2), torch.ones(len(reqs), W))
    for row, req in enumerate(reqs):
        for node in range(W):
            own = logits[row * W + node].unsqueeze(0)
            if req.sampling_params.is_greedy:
                assert choices[row, node] == own.argmax()
                assert probs[row, node, own.argmax()] == 1.0
                continue
            weights = sampling_probs(own.clone(), info_of([req]))
            assert choices[row, node] == draw(weights, coins[row, node].view(1, 1))
            torch.testing.assert_close(probs[row, node], weights[0] / weights.sum())


def test_greedy_batches_need_no_coins_and_sampling_ones_do() -> None:
    greedy = [FakeReq(SamplingParams(temperature=0.0), [1]) for _ in range(2)]
    logits = torch.randn(2 * W, VOCAB, generator=torch.Generator().manual_seed(1))
    choices = target_choices(logits, VerifySampling.create(info_of(greedy), W, [1, 1]), None)
    assert torch.equal(choices.flatten(), logits.argmax(dim=1))
    sampled = [FakeReq(SamplingParams(), [1])]
    with pytest.raises(ValueError, match="coins"):
        target_choices(logits[:W], VerifySampling.create(info_of(sampled), W, [1]), None)
