"""Restored KV is the KV that was computed: tiers x policies x layouts x page sizes x loops x draft.

Each case serves one prompt cold, from the device, from the host, from storage, and from storage
after a restart, and compares tokens with a server without any cache, and the bytes at the restored
slots with those computed first, in every pool. Between two runs everything free is overwritten.
By default a set of cases runs in which every pair of values occurs; all of them with
`HISPEC_HICACHE_MATRIX=all`, a random choice with a number there.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import Answer, PoolRows, ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=30, suite="hicache")

PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(150)]
NEW_TOKENS = 24
LAYERS = 6  # as many as the draft's choice of three of them needs

VALUES: dict[str, tuple[str, ...]] = {
    "write": ("write_through", "write_through_selective", "write_back"),
    "prefetch": ("wait_complete", "timeout", "best_effort"),
    # Where they do not go together the server changes one of the two.
    "layout": ("layer_first", "page_first", "page_first_direct"),
    "io": ("kernel", "direct"),
    "page": ("1", "4", "16"),
    "chunk": ("-1", "48"),
    "overlap": ("0", "1"),
    "draft": ("none", "chain", "tree"),
    "dtype": ("float32", "bfloat16"),
}
Case = dict[str, str]


def all_cases() -> list[Case]:
    return [dict(zip(VALUES, chosen)) for chosen in itertools.product(*VALUES.values())]


def covering_cases(seed: int = 7) -> list[Case]:
    """Cases in which every pair of values of two names occurs, chosen greedily."""
    rng = random.Random(seed)
    pairs = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(VALUES, 2)
        for x in VALUES[a]
        for y in VALUES[b]
    }
    chosen: list[Case] = []
    candidates = all_cases()
    while pairs:
        sample = rng.sample(candidates, 200)
        best = max(sample, key=lambda case: len(pairs & pairs_of(case)))
        chosen.append(best)
        pairs -= pairs_of(best)
    return chosen


def pairs_of(case: Case) -> set[frozenset[tuple[str, str]]]:
    return {frozenset(pair) for pair in itertools.combinations(case.items(), 2)}


def chosen_cases() -> list[Case]:
    wanted = os.environ.get("HISPEC_HICACHE_MATRIX", "")
    if wanted.isdigit():
        return random.Random(1).sample(all_cases(), int(wanted))
    return all_cases() if wanted == "all" else covering_cases()


CASES = chosen_cases()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "model": make_tiny_checkpoint(root / "model", num_hidden_layers=LAYERS),
        "draft": make_tiny_draft(root / "draft"),
    }


def model_flags(case: Case) -> list[str | int]:
    return [
        *("--page-size", case["page"], "--dtype", case["dtype"]),
        *("--chunked-prefill-size", case["chunk"]),
        *("--max-total-tokens", 320, "--max-running-requests", 2),
    ]


def draft_flags(case: Case, draft: Path) -> list[str | int]:
    if case["draft"] == "none":
        return []
    topk, tokens = ("1", 4) if case["draft"] == "chain" else ("2", 6)
    return [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)),
        *("--speculative-num-steps", 3, "--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", tokens),
    ]


def tier_flags(case: Case, folder: Path) -> list[str | int]:
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-write-policy", case["write"]),
        *("--hicache-mem-layout", case["layout"], "--hicache-io-backend", case["io"]),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", case["prefetch"]),
        "--hicache-storage-backend-extra-config",
        f'{{"file_storage_path": "{folder}", "prefetch_threshold": 1, "max_size": 100000000}}',
    ]


@pytest.fixture(scope="module")
def references(folders: Mapping[str, Path]) -> Iterator[dict[str, list[int]]]:
    """Tokens of a server without a cache, by dtype."""
    found: dict[str, list[int]] = {}
    for dtype in VALUES["dtype"]:
        case = {"page": "1", "dtype": dtype, "chunk": "-1"}
        with ServedScheduler(
            folders["model"], *model_flags(case), "--disable-radix-cache"
        ) as served:
            found[dtype] = served.answer(PROMPT, NEW_TOKENS).tokens
    yield found


def cached_part(rows: PoolRows, num_tokens: int) -> PoolRows:
    return {name: pool[:, :, :num_tokens] for name, pool in rows.items()}


class Run:
    """One case as it runs: a server, what it answered first, and the KV of that."""

    def __init__(self, served: ServedScheduler, first: Answer, rows: PoolRows, case: Case) -> None:
        self.served, self.first, self.rows, self.case = served, first, rows, case

    def again(self, tier: str, least: int) -> None:
        """Serve the prompt once more, from the tier named; the same tokens, the same bytes."""
        if tier == "storage" and self.case["prefetch"] == "best_effort":
            # It stops when its turn comes: let another request go first.
            ahead = [self.served.submit([9, 9, i], 40) for i in range(2)]
            answer = self.served.answer(PROMPT, NEW_TOKENS)
            assert all(self.served.finish(rid) for rid in ahead)
        else:
            answer = self.served.answer(PROMPT, NEW_TOKENS)
        assert answer.tokens == self.first.tokens, tier
        assert answer.sources.get(tier, 0) >= least, (tier, answer.sources)
        assert answer.cached_tokens == sum(answer.sources[t] for t in ("device", "host", "storage"))
        found = cached_part(self.served.device_kv(PROMPT), answer.cached_tokens)
        expected = cached_part(self.rows, answer.cached_tokens)
        assert found.keys() == expected.keys()
        for name, pool in found.items():
            assert pool.shape[2] == answer.cached_tokens
            assert torch.equal(pool, expected[name]), f"{name} differs after a hit in {tier}"
        self.served.settle()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case.values()))
def test_every_tier_restores_what_was_computed(
    case: Case,
    folders: Mapping[str, Path],
    references: Mapping[str, list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", case["overlap"])
    flags = [
        *model_flags(case),
        *draft_flags(case, folders["draft"]),
        *tier_flags(case, tmp_path),
    ]
    page = int(case["page"])
    full = (len(PROMPT) - 1) // page * page
    with ServedScheduler(folders["model"], *flags) as served:
        first = served.answer(PROMPT, NEW_TOKENS)
        assert first.cached_tokens == 0
        if case["dtype"] == "float32":
            assert first.tokens == references[case["dtype"]]
        rows = served.device_kv(PROMPT)
        assert set(rows) == ({"kv"} if case["draft"] == "none" else {"kv", "draft"})
        run = Run(served, first, rows, case)
        run.again("device", full)
        served.evict_device()
        run.again("host", full)
        served.evict_device()  # writes back what only the device has
        served.flush()
        run.again("storage", full)
    with ServedScheduler(folders["model"], *flags) as served:
        Run(served, first, rows, case).again("storage", full)
