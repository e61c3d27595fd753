"""The sampler against a naive reference: filters, distributions, seeds, penalties, logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers.sampler import (
    MIN_LOGPROB,
    Sampler,
    draw,
    hash_uniform,
    nan_rows,
    sampling_probs,
)
from sglang.srt.model_executor.forward_batch_info import LogprobRequest
from sglang.srt.sampling import penalties as penalties_module
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.test.fakes.sampling_reqs import FakeOutput, FakeReq, batch_info, params

SEED = 20240
VOCAB_SIZE = 40
# Chi-square quantile for p = 1e-6 by the Wilson-Hilferty approximation.
NORMAL_QUANTILE = 4.753


def reference_probs(logits: np.ndarray, p: Any) -> np.ndarray:
    """The distribution of one row, written as the words say it."""
    scaled = logits.astype(np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    if p.top_k != -1:
        probs[np.argsort(-probs, kind="stable")[p.top_k :]] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        order = np.argsort(-probs, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn((num_rows, vocab_size), generator=generator) * scale


def sample(
    logits: torch.Tensor,
    reqs: list[FakeReq],
    *,
    sampler: Sampler | None = None,
    positions: torch.Tensor | None = None,
    logprobs: LogprobRequest | None = None,
) -> tuple[torch.Tensor, FakeOutput]:
    output = FakeOutput(logits.clone())
    if positions is None:
        positions = torch.zeros(len(reqs), dtype=torch.int64)
    info = batch_info(reqs, logits.shape[1])
    tokens = (sampler or Sampler(SEED)).forward(output, info, logprobs, positions)
    assert tokens.dtype == torch.int64 and tokens.shape == (len(reqs),)
    return tokens, output


def chi_square_limit(freedom: int) -> float:
    part = 2 / (9 * freedom)
    return freedom * (1 - part + NORMAL_QUANTILE * math.sqrt(part)) ** 3


def assert_fits(counts: np.ndarray, probs: np.ndarray) -> None:
    """Counts of draws against probabilities; tokens of probability 0 must never be drawn."""
    assert counts[probs == 0].sum() == 0
    expected = probs * counts.sum()
    is_big = expected >= 5
    observed = np.append(counts[is_big], counts[~is_big].sum())
    wanted = np.append(expected[is_big], max(expected[~is_big].sum(), 1e-9))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert statistic < chi_square_limit(max(len(wanted) - 1, 1)), statistic


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 2, "temperature": 2.0},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.6},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    {"top_k": 1000},
]


@pytest.mark.parametrize("wish", FILTERS, ids=str)
def test_draws_follow_the_filtered_distribution(wish: dict[str, Any]) -> None:
    logits = random_logits(1)
    num_rows, num_steps = 400, 25
    reqs = [FakeReq(params(**wish)) for _ in range(num_rows)]
    info = batch_info(reqs, VOCAB_SIZE)
    sampler = Sampler(SEED)
    counts = np.zeros(VOCAB_SIZE)
    for _ in range(num_steps):
        output = FakeOutput(logits.repeat(num_rows, 1))
        tokens = sampler.forward(output, info, None, torch.zeros(num_rows, dtype=torch.int64))
        counts += np.bincount(tokens.numpy(), minlength=VOCAB_SIZE)
    assert_fits(counts, reference_probs(logits[0].numpy(), params(**wish)))


def test_the_chi_square_test_notices_a_wrong_distribution() -> None:
    logits = random_logits(1)
    probs = reference_probs(logits[0].numpy(), params(temperature=1.1))
    wrong = reference_probs(logits[0].numpy(), params())
    counts = np.random.default_rng(SEED).multinomial(10_000, probs).astype(float)
    assert_fits(counts, probs)
    with pytest.raises(AssertionError):
        assert_fits(counts, wrong)


@pytest.mark.parametrize("vocab_size", [40, 3000, 20_000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_mixed_batch_filters_every_row_by_its_own_wishes(vocab_size: int, scale: float) -> None:
    wishes: list[dict[str, Any]] = [*FILTERS, {"temperature": 0.0}, {"top_k": 300, "top_p": 0.95}]
    logits = random_logits(len(wishes), vocab_size, scale)
    reqs = [FakeReq(params(**wish)) for wish in wishes]
    info = batch_info(reqs, vocab_size)
    probs = sampling_probs(logits, info)
    assert len(probs) == len(info.sampled_rows) == len(wishes) - 1
    for index, row in enumerate(info.sampled_rows):
        got = (probs[index] / probs[index].sum()).double().numpy()
        wanted = reference_probs(logits[row].numpy(), reqs[row].sampling_params)
        # A token at the very edge of top-p may fall on either side in float32.
        edge = (got > 0) != (wanted > 0)
        assert edge.sum() <= 1 and wanted[edge].sum() < 1e-3, wishes[row]
        np.testing.assert_allclose(got[~edge], wanted[~edge], rtol=2e-3, atol=1e-7)


def test_head_of_the_vocabulary_settles_limited_rows() -> None:
    wishes: list[dict[str, Any]] = [
        {"top_k": 5},
        {"top_k": 300, "top_p": 0.9},
        {},
        {"top_k": 1, "top_p": 0.5},
    ]
    reqs = [FakeReq(params(**wish)) for wish in wishes]
    logits = random_logits(len(reqs), 5000)
    info = batch_info(reqs, 5000)
    assert info.head_size == 300
    by_head = sampling_probs(logits, info)
    info.head_size = None
    by_everything = sampling_probs(logits, info)
    assert torch.equal(by_head > 0, by_everything > 0)
    assert batch_info([*reqs, FakeReq(params(top_p=0.9))], 5000).head_size is None


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_quick_head_gives_the_same_as_the_whole_vocabulary(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random_logits(7, 20_000, scale)
    wishes: list[dict[str, Any]] = [{"top_p": p} for p in (0.01, 0.3, 0.6, 0.9, 0.99, 0.9999)]
    reqs = [FakeReq(params(**wish)) for wish in [*wishes, {"top_k": 9000, "top_p": 0.8}]]
    info = batch_info(reqs, 20_000)
    by_head = sampling_probs(logits, info)
    monkeypatch.setattr(sampler_module, "QUICK_HEAD_SIZE", 10**9)
    assert torch.equal(by_head, sampling_probs(logits, info))


def test_quick_head_settles_no_row_whose_top_k_reaches_beyond_it() -> None:
    """Its share is of all that top-k leaves, which the head alone does not tell."""
    vocab_size = 20_000
    logits = random_logits(2, vocab_size, scale=0.3)
    logits[1, :100] += 12.0  # settled by its head
    wish = FakeReq(params(top_k=12_000, top_p=0.9))
    reqs = [wish, FakeReq(params(top_p=0.5))]
    info = batch_info(reqs, vocab_size)
    assert info.head_size is None
    alone = sampling_probs(logits[:1], batch_info([wish], vocab_size))
    together = sampling_probs(logits, info)
    assert torch.equal(alone[0], together[0])
    assert int((alone[0] > 0).sum()) > sampler_module.QUICK_HEAD_SIZE


def test_equally_likely_tokens_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    probs = sampling_probs(logits, batch_info([FakeReq(params(top_k=2))], 5))
    assert (probs[0] > 0).tolist() == [False, True, True, True, False]


def test_greedy_rows_take_the_most_likely_token() -> None:
    logits = random_logits(4)
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 1},
        {"temperature": 1e-7},
        {"top_p": 1e-6},
    ]
    tokens, _ = sample(logits, [FakeReq(params(**wish)) for wish in wishes])
    assert torch.equal(tokens, logits.argmax(-1))


def test_greedy_row_among_sampled_ones_is_undisturbed() -> None:
    logits = random_logits(3)
    reqs = [FakeReq(params()), FakeReq(params(temperature=0)), FakeReq(params())]
    for seed in range(20):
        tokens, _ = sample(logits, reqs, sampler=Sampler(seed))
        assert tokens[1] == logits[1].argmax()


def test_equal_seeds_of_samplers_draw_equal_tokens() -> None:
    logits = random_logits(64)
    reqs = [FakeReq(params()) for _ in range(64)]
    first, _ = sample(logits, reqs, sampler=Sampler(1))
    again, _ = sample(logits, reqs, sampler=Sampler(1))
    other, _ = sample(logits, reqs, sampler=Sampler(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_draw_at_the_edges_of_the_uniform_number() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    last = 1 - 2.0**-24
    for uniform, token in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (last, 4)):
        assert draw(weights, torch.tensor([[uniform]])).tolist() == [token], uniform


# -- seeds --------------------------------------------------------------------------------------


def test_seeded_row_is_the_same_in_any_batch() -> None:
    logits = random_logits(1, 500)
    positions = list(range(7, 57))
    wish: dict[str, Any] = {"sampling_seed": 99, "top_p": 0.98, "temperature": 1.5}

    def alone(position: int) -> int:
        tokens, _ = sample(logits, [FakeReq(params(**wish))], positions=torch.tensor([position]))
        return int(tokens[0])

    expected = [alone(position) for position in positions]
    assert len(set(expected)) > 10  # the position matters
    others: list[dict[str, Any]] = [
        {"top_k": 3},
        {"temperature": 0},
        {"sampling_seed": 1},
        {"min_p": 0.1},
    ]
    batch = random_logits(5, 500, 3.0)
    for place in range(5):
        wishes = [*others[:place], wish, *others[place:]]
        batch[place] = logits[0]
        for position, token in zip(positions, expected):
            where = torch.randint(0, 1000, (5,))
            where[place] = position
            reqs = [FakeReq(params(**values)) for values in wishes]
            tokens, _ = sample(batch, reqs, sampler=Sampler(position), positions=where)
            assert tokens[place] == token


def test_seeded_draws_follow_the_distribution() -> None:
    logits = random_logits(1)
    num_rows = 10_000
    for make in (
        lambda row: (5, row),  # one seed, many positions
        lambda row: (row, 5),  # many seeds, one position
    ):
        pairs = [make(row) for row in range(num_rows)]
        reqs = [FakeReq(params(sampling_seed=seed)) for seed, _ in pairs]
        positions = torch.tensor([position for _, position in pairs])
        tokens, _ = sample(logits.repeat(num_rows, 1), reqs, positions=positions)
        counts = np.bincount(tokens.numpy(), minlength=VOCAB_SIZE).astype(float)
        assert_fits(counts, reference_probs(logits[0].numpy(), params()))


def test_hash_is_uniform_and_uncorrelated_between_neighbours() -> None:
    count = 50_000
    numbers = torch.arange(count)
    fixed = torch.full((count,), -(2**63))
    for values in (hash_uniform(fixed, numbers), hash_uniform(numbers, torch.zeros_like(numbers))):
        assert float(values.min()) >= 0 and float(values.max()) < 1
        bins = torch.histc(values, 100, 0, 1).double()
        statistic = float(((bins - count / 100) ** 2 / (count / 100)).sum())
        assert statistic < chi_square_limit(99)
        centred = values.double() - 0.5
        assert abs(float((centred[1:] * centred[:-1]).mean() * 12)) < 5 / math.sqrt(count)


# -- what comes before the draw -----------------------------------------------------------------


def test_logit_bias_is_added_to_its_row_only() -> None:
    logits = random_logits(2)
    reqs = [FakeReq(params(temperature=0, logit_bias={"7": 50, "3": -1})), FakeReq(params())]
    tokens, output = sample(logits, reqs)
    wanted = logits.clone()
    wanted[0, 7] += 50
    wanted[0, 3] -= 1
    assert torch.equal(output.next_token_logits, wanted)
    assert tokens[0] == 7


def reference_penalties(row: np.ndarray, output_ids: list[int], p: Any) -> np.ndarray:
    row = row.copy()
    for token_id in set(output_ids):
        value = row[token_id]
        value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output_ids.count(token_id) + p.presence_penalty
        row[token_id] = value
    return row


def test_penalties_follow_the_output_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties_module, "_INITIAL_CAPACITY", 2)  # grows under way
    wishes = [
        {"frequency_penalty": 0.5},
        {},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": -1, "presence_penalty": 2, "repetition_penalty": 0.5},
    ]
    reqs = [FakeReq(params(**wish), output_ids=[3, 3, 9]) for wish in wishes]
    reqs[3].output_ids = []
    info = SamplingBatchInfo.from_reqs(reqs, VOCAB_SIZE, "cpu")
    assert info.has_penalties and info.needs_host_tokens
    generator = np.random.default_rng(SEED)
    for step in range(8):
        info.update_host_state(reqs)
        logits = random_logits(len(reqs))
        output = FakeOutput(logits.clone())
        Sampler(step).forward(output, info, None, torch.zeros(len(reqs), dtype=torch.int64))
        for row, req in enumerate(reqs):
            wanted = reference_penalties(logits[row].numpy(), req.output_ids, req.sampling_params)
            np.testing.assert_allclose(output.next_token_logits[row].numpy(), wanted, rtol=1e-5)
            # Several tokens a step, as after an accepted draft.
            ids = generator.integers(0, 5 * step + 1, size=1 + step % 3)
            req.output_ids.extend(ids.tolist())


def test_tiny_repetition_penalty_makes_no_infinity() -> None:
    reqs = [FakeReq(params(repetition_penalty=1e-45), output_ids=[3, 4])]
    state = penalties_module.PenaltyState([0], [reqs[0].sampling_params])
    state.update([[3, 4]])
    logits = random_logits(1)
    logits[0, 3], logits[0, 4] = 5.0, -5.0
    tree = logits.clone()
    state.apply(logits)
    state.apply_to_tree(tree, torch.tensor([[4]]), torch.ones((1, 1, 1), dtype=torch.bool))
    assert torch.isfinite(logits).all() and int(logits.argmax()) == 3
    assert torch.equal(logits, tree)
    assert torch.isfinite(torch.softmax(logits, dim=-1)).all()


def test_shrunken_output_of_a_penalised_row_is_noticed() -> None:
    reqs = [FakeReq(params(frequency_penalty=1.0), output_ids=[1, 2])]
    info = batch_info(reqs, VOCAB_SIZE)
    reqs[0].output_ids.pop()
    with pytest.raises(RuntimeError, match="2 tokens counted, 1 left"):
        info.update_host_state(reqs)


def test_end_tokens_wait_for_min_new_tokens() -> None:
    wish = {"min_new_tokens": 3, "stop_token_ids": [5]}
    req = FakeReq(params(**wish), eos_token_ids=frozenset({0, 10**6}))
    free = FakeReq(params(), eos_token_ids=frozenset({0}))
    ignoring = FakeReq(params(**wish, ignore_eos=True))
    reqs = [free, req, ignoring]
    info = SamplingBatchInfo.from_reqs(reqs, VOCAB_SIZE, "cpu")
    for num_output in range(5):
        # Half of what was generated is still in flight; the coming step counts as one more.
        for each in reqs:
            each.output_ids = [1] * (num_output - num_output // 2)
            each.num_pending_tokens = num_output // 2 + 1
        info.update_host_state(reqs)
        output = FakeOutput(random_logits(3))
        Sampler(0).forward(output, info, None, torch.zeros(3, dtype=torch.int64))
        forbidden = output.next_token_logits == -torch.inf
        wanted = torch.zeros_like(forbidden)
        wanted[1, [0, 5]] = num_output < 3
        assert torch.equal(forbidden, wanted), num_output


def test_nan_and_infinite_rows_are_flagged_and_sampled_without_a_crash() -> None:
    logits = random_logits(5)
    logits[1, 3] = torch.nan
    logits[2, :] = torch.nan
    logits[3, 0] = torch.inf
    logits[4, 1:] = -torch.inf  # what a grammar may leave
    assert nan_rows(logits).tolist() == [False, True, True, True, False]
    for wish in ({}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"temperature": 0}):
        tokens, _ = sample(logits, [FakeReq(params(**wish)) for _ in range(5)])
        assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
        assert tokens[4] == 0


def test_huge_and_tiny_temperatures_stay_finite() -> None:
    logits = random_logits(2)
    logits[:, :10] = -torch.inf
    reqs = [FakeReq(params(temperature=1e308)), FakeReq(params(temperature=1e-6))]
    probs = sampling_probs(logits, batch_info(reqs, VOCAB_SIZE))
    assert probs.isfinite().all()
    np.testing.assert_allclose(probs[0, 10:].numpy(), 1 / (VOCAB_SIZE - 10), rtol=1e-4)
    assert probs[1].argmax() == logits[1].argmax() and probs[1].max() > 0.99


# -- logprobs -----------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    logits = random_logits(4)
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.5, "top_k": 4},
        {"top_p": 0.5},
        {},
    ]
    request = LogprobRequest(
        enabled=[True, True, True, False],
        top_nums=[3, 0, VOCAB_SIZE + 5, 7],
        token_ids=[None, [5, 1, 5], [], [2]],
    )
    reqs = [FakeReq(params(**wish)) for wish in wishes]
    tokens, output = sample(logits, reqs, logprobs=request)
    for row, temperature in enumerate((1.0, 0.5, 1.0)):
        wanted = torch.log_softmax(logits[row].double() / temperature, -1)
        assert output.next_token_logprobs is not None
        got = float(output.next_token_logprobs[row])
        assert got == pytest.approx(float(wanted[tokens[row]]), abs=1e-5)
        top = torch.topk(wanted, min(request.top_nums[row], VOCAB_SIZE))
        assert output.next_token_top_logprobs_idx is not None
        assert output.next_token_top_logprobs_val is not None
        assert output.next_token_top_logprobs_idx[row] == top.indices.tolist()
        assert output.next_token_top_logprobs_val[row] == pytest.approx(
            top.values.tolist(), abs=1e-5
        )
        assert output.next_token_token_ids_logprobs_val is not None
        assert output.next_token_token_ids_logprobs_idx is not None
        ids = request.token_ids[row] or []
        assert output.next_token_token_ids_logprobs_idx[row] == ids
        assert output.next_token_token_ids_logprobs_val[row] == pytest.approx(
            [float(wanted[token_id]) for token_id in ids], abs=1e-5
        )
    # A row that asked for nothing gets nothing.
    assert output.next_token_top_logprobs_idx is not None
    assert output.next_token_token_ids_logprobs_idx is not None
    assert output.next_token_top_logprobs_idx[3] == []
    assert output.next_token_token_ids_logprobs_idx[3] == []


def test_top_logprobs_agree_with_the_greedy_choice() -> None:
    logits = random_logits(8)
    request = LogprobRequest(enabled=[True] * 8, top_nums=[1] * 8, token_ids=[None] * 8)
    reqs = [FakeReq(params(temperature=0)) for _ in range(8)]
    tokens, output = sample(logits, reqs, logprobs=request)
    assert output.next_token_top_logprobs_idx == [[token] for token in tokens.tolist()]


def test_forbidden_tokens_have_finite_logprobs() -> None:
    req = FakeReq(params(min_new_tokens=1, temperature=0))
    request = LogprobRequest(enabled=[True], top_nums=[VOCAB_SIZE], token_ids=[[0]])
    _, output = sample(random_logits(1), [req], logprobs=request)
    assert output.next_token_token_ids_logprobs_val == [[MIN_LOGPROB]]
    assert output.next_token_top_logprobs_val is not None
    assert output.next_token_top_logprobs_val[0][-1] == MIN_LOGPROB


def test_no_logprobs_where_nobody_asked() -> None:
    request = LogprobRequest(enabled=[False], top_nums=[5], token_ids=[[1]])
    for wishes in (None, request):
        _, output = sample(random_logits(1), [FakeReq(params())], logprobs=wishes)
        assert output.next_token_logprobs is None
        assert output.next_token_top_logprobs_val is None


# -- flags --------------------------------------------------------------------------------------


def test_flags_say_what_the_batch_needs() -> None:
    plain = batch_info([FakeReq(params(temperature=0))], VOCAB_SIZE)
    assert plain.is_all_greedy and not plain.needs_host_tokens and not plain.need_temperature
    # Filters of a greedy row are no work.
    greedy = batch_info([FakeReq(params(temperature=0, top_p=0.5, min_p=0.1))], VOCAB_SIZE)
    assert not (greedy.need_top_p or greedy.need_min_p or greedy.need_top_k)
    all_of_it = FakeReq(
        params(top_p=0.5, top_k=3, min_p=0.1, logit_bias={"1": 1}, min_new_tokens=2, temperature=2)
    )
    info = batch_info([all_of_it], VOCAB_SIZE)
    assert info.need_top_p and info.need_top_k and info.need_min_p and info.need_temperature
    assert info.logit_bias is not None and info.min_new_tokens
    assert not (info.is_all_greedy or info.has_penalties or info.has_grammar)
    with pytest.raises(RuntimeError, match="1 rows, 2 requests"):
        info.update_host_state([all_of_it, all_of_it])


def test_empty_batch_is_legal() -> None:
    info = batch_info([], VOCAB_SIZE)
    assert info.is_all_greedy and info.batch_size == 0
