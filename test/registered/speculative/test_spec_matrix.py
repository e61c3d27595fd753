"""Every combination of algorithm, topk, page size and loop on tiny models; random traffic; chance.

The unit tests run a covering set of the combinations; here are all of them. One command:
`python -m pytest test/registered/speculative/test_spec_matrix.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.speculative.base_spec_worker import AcceptanceRule
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.spec_rig import (
    Oracle,
    TinyPair,
    finish_all,
    matrix,
    prompts,
    run_all,
    serve,
    worker_of,
)
from sglang.test.small_server import serve as serve_processes

register_cpu_ci(est_time=200, suite="speculative")

PROMPTS = prompts(8, seed=2)
NUM_NEW = 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def greedy(pair: TinyPair) -> list[list[int]]:
    with serve(pair, None) as served:
        return run_all(served, PROMPTS, NUM_NEW)


@pytest.mark.parametrize("case", list(matrix()), ids=lambda case: "-".join(map(str, case.values())))
def test_every_combination_yields_the_targets_tokens(
    pair: TinyPair, greedy: list[list[int]], case: dict[str, Any]
) -> None:
    page = case["page"]
    variants: list[tuple[str | int | float, ...]] = [
        (),
        ("--chunked-prefill-size", 16),
        ("--max-total-tokens", 320, "--schedule-conservativeness", 0.01),
        ("--disable-radix-cache",),
    ]
    for flags in variants:
        options = {"topk": case["topk"], "overlap": case["overlap"]}
        with serve(pair, case["algorithm"], "--page-size", page, *flags, **options) as served:
            assert run_all(served, PROMPTS[:3], NUM_NEW) == greedy[:3]
            if case["algorithm"] != "NGRAM":
                oracle = Oracle(worker_of(served))
                for prompt, output in zip(PROMPTS, greedy):
                    oracle.know(prompt, output)
            assert run_all(served, PROMPTS, NUM_NEW) == greedy


# ------------------------------------------------------------------------------------------------
# Random traffic
# ------------------------------------------------------------------------------------------------

NUM_REQUESTS = 500


@pytest.mark.parametrize(
    ("algorithm", "topk", "page", "overlap"),
    [
        ("EAGLE3", 1, 16, True),
        ("EAGLE3", 4, 4, False),
        ("STANDALONE", 4, 1, True),
        ("NGRAM", 1, 16, True),
    ],
)
def test_random_traffic_leaves_nothing_behind(
    pair: TinyPair, algorithm: str, topk: int, page: int, overlap: bool
) -> None:
    """Aborts, retractions and ends of every kind; the pool equations are checked at the end."""
    generator = random.Random(f"{algorithm}{topk}{page}")
    texts = prompts(40, seed=7)
    flags = ("--max-total-tokens", 448, "--schedule-conservativeness", 0.05)
    chunk = ("--chunked-prefill-size", 32)
    options: dict[str, Any] = {"topk": topk, "overlap": overlap}
    with serve(pair, algorithm, "--page-size", page, *flags, *chunk, **options) as served:
        rids = []
        for _ in range(NUM_REQUESTS):
            wishes: dict[str, Any] = generator.choice(
                [
                    {},
                    {"temperature": 1.0},
                    {"ignore_eos": False, "stop_token_ids": list(range(0, 250, 17))},
                    {"frequency_penalty": 0.5},
                    {"min_new_tokens": 5, "ignore_eos": False, "temperature": 1.0},
                    {"return_logprob": True},
                ]
            )
            count = generator.choice([0, 1, 2, 9, 33])
            rids.append(served.submit(generator.choice(texts), count, **wishes))
            if generator.random() < 0.1:
                served.send(AbortReq(rid=generator.choice(rids[-8:]), exact=True))
            if generator.random() < 0.6:
                served.step()
        finish_all(served, rids)
        assert served.scheduler.reports.num_retracted_total > 0
        rows = served.scheduler.req_to_token_pool
        assert rows.available_size() == rows.size


# ------------------------------------------------------------------------------------------------
# Chance
# ------------------------------------------------------------------------------------------------

LENGTH = 4
# Two outcomes a place keep the number of sequences small enough to count.
CHANCE = {"temperature": 1.4, "top_k": 2}
CHI_SQUARE_999_OF_15 = 37.70


def _probabilities(served: ServedScheduler, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of all sequences of LENGTH tokens, by asking the target token by token."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, share in found.items():
            rid = served.submit([*prompt, *tokens], 1, return_logprob=True, top_logprobs_num=2)
            finish_all(served, [rid])
            logprobs = served.outputs[rid][-1].logprobs
            assert logprobs is not None and logprobs.output_top is not None
            top = logprobs.output_top[0]
            assert top is not None
            weights = (torch.tensor(top[0]).double() / CHANCE["temperature"]).softmax(0).tolist()
            for token, weight in zip(top[1], weights):
                longer[(*tokens, token)] = share * weight
        found = longer
    return found


def _chi_square(
    served: ServedScheduler, prompt: list[int], shares: dict[Any, float], num_draws: int
) -> float:
    counts = dict.fromkeys(shares, 0)
    rids = [served.submit(prompt, LENGTH, **CHANCE) for _ in range(num_draws)]
    finish_all(served, rids)
    for rid in rids:
        counts[tuple(served.answer_of(rid).tokens)] += 1
    return sum(
        (counts[tokens] - num_draws * share) ** 2 / (num_draws * share)
        for tokens, share in shares.items()
    )


@pytest.mark.parametrize(
    ("algorithm", "topk", "is_rejecting", "num_draws"),
    [
        (None, 1, False, 5_000),
        ("STANDALONE", 1, True, 20_000),
        ("STANDALONE", 4, False, 20_000),
        ("EAGLE3", 1, True, 5_000),
    ],
)
def test_sampled_tokens_have_the_targets_distribution(
    pair: TinyPair, algorithm: str | None, topk: int, is_rejecting: bool, num_draws: int
) -> None:
    prompt = PROMPTS[0]
    with serve(pair, None) as served:
        shares = _probabilities(served, prompt)
    # More verified tokens at once and the worker would step aside.
    flags: tuple[str | int, ...] = ("--max-running-requests", 64, "--max-total-tokens", 8192)
    if is_rejecting and algorithm == "EAGLE3":
        flags += ("--speculative-use-rejection-sampling",)
    with serve(pair, algorithm, *flags, topk=topk, overlap=True) as served:
        if is_rejecting and algorithm == "STANDALONE":
            worker_of(served).rule = AcceptanceRule(use_rejection_sampling=True)
        statistic = _chi_square(served, prompt, shares, num_draws)
        total = served.scheduler.result_processor.spec_total
    assert statistic < CHI_SQUARE_999_OF_15
    if algorithm == "STANDALONE":
        assert total is not None and total.accept_length > 1.3


def test_a_wrong_distribution_is_noticed(pair: TinyPair) -> None:
    """Drafts accepted below a threshold shift the shares; the statistic must say so."""
    prompt = PROMPTS[0]
    with serve(pair, None) as served:
        shares = _probabilities(served, prompt)
    loose = ("--speculative-accept-threshold-acc", 0.5, "--max-running-requests", 128)
    with serve(pair, "STANDALONE", *loose, "--max-total-tokens", 8192) as served:
        assert _chi_square(served, prompt, shares, 5_000) > 3 * CHI_SQUARE_999_OF_15


# ------------------------------------------------------------------------------------------------
# Two ranks
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_two_ranks_agree(pair: TinyPair, greedy: list[list[int]], algorithm: str) -> None:
    flags: list[str | int | Path] = ["--tp-size", 2, "--speculative-algorithm", algorithm]
    if algorithm == "EAGLE3":
        flags += ["--speculative-draft-model-path", pair.drafts[algorithm]]
        flags += ["--speculative-num-steps", 3, "--speculative-eagle-topk", 4]
        flags += ["--speculative-num-draft-tokens", 8]
    params = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    with serve_processes(str(pair.target), *map(str, flags)) as server:
        for _ in range(2):
            replies = server.generate(input_ids=PROMPTS, sampling_params=params)
            assert [reply["output_ids"] for reply in replies] == greedy
        # Without `ignore_eos` an answer may end with its first token, before any verification.
        sampled = {"temperature": 1.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
        replies = server.generate(input_ids=PROMPTS, sampling_params=sampled)
        assert all(reply["meta_info"]["spec_verify_ct"] > 0 for reply in replies)
