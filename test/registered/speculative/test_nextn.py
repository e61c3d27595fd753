"""NEXTN: DeepSeek-V3 with the MTP layer in its own files answers as it does alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.model_check import check_model
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes import spec_rig
from sglang.test.fakes.spec_rig import Oracle, TinyPair, run_all, serve, worker_of
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=20, suite="speculative")

NEW_TOKENS = 24
PROMPTS = spec_rig.prompts(3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3")
    add_tiny_nextn_layer(folder)
    return TinyPair(folder, {"NEXTN": folder})


@pytest.fixture(scope="module")
def expected(pair: TinyPair) -> list[list[int]]:
    with serve(pair, None) as served:
        return run_all(served, PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize(
    ("topk", "page", "overlap"), [*itertools.product((1, 4), (1, 16), (False, True))]
)
def test_answers_are_those_of_the_target_alone(
    pair: TinyPair, expected: list[list[int]], topk: int, page: int, overlap: bool
) -> None:
    flags = ("--page-size", page, "--chunked-prefill-size", 32)
    with serve(pair, "NEXTN", *flags, topk=topk, overlap=overlap) as served:
        worker = worker_of(served)
        assert isinstance(worker, DraftModelWorker)
        pool = worker.model_runner.token_to_kv_pool
        assert isinstance(pool, MLATokenToKVPool) and pool.layer_num == 1
        assert run_all(served, PROMPTS, NEW_TOKENS) == expected
        oracle = Oracle(worker)
        for prompt, output in zip(PROMPTS, expected):
            oracle.know(prompt, output)
        assert run_all(served, PROMPTS, NEW_TOKENS) == expected
        assert 0 < oracle.num_steps < NEW_TOKENS - 1


def test_drafts_can_be_drawn(pair: TinyPair, expected: list[list[int]]) -> None:
    flags = ("--speculative-use-rejection-sampling", "--page-size", 16)
    with serve(pair, "NEXTN", *flags, overlap=True) as served:
        assert run_all(served, PROMPTS, NEW_TOKENS) == expected
        sampled = run_all(served, PROMPTS, NEW_TOKENS, temperature=0.9)
        assert [len(tokens) for tokens in sampled] == [NEW_TOKENS] * len(PROMPTS)
        assert sampled != expected


@pytest.mark.parametrize("algorithm", ["EAGLE", "NEXTN"])
def test_the_path_of_the_draft_may_be_left_out(
    pair: TinyPair, expected: list[list[int]], algorithm: str
) -> None:
    alone = TinyPair(pair.target, {})
    with serve(alone, algorithm) as served:
        assert run_all(served, PROMPTS[:1], NEW_TOKENS) == expected[:1]


@pytest.mark.parametrize(
    ("layers", "flags", "reason"),
    [
        (0, {"speculative_algorithm": "NEXTN"}, "has no layers.*must name a draft"),
        (0, {"speculative_algorithm": "EAGLE"}, "has no layers.*must name a draft"),
        (
            1,
            {
                "speculative_algorithm": "NEXTN",
                "enable_multi_layer_eagle": True,
                "speculative_num_steps": 3,
            },
            "1 layer that predicts .*at most 1",
        ),
    ],
)
def test_a_missing_layer_is_noticed_before_anything_starts(
    tmp_path: Path, layers: int, flags: dict[str, Any], reason: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3")
    if layers:
        add_tiny_nextn_layer(folder, num_layers=layers)
    with pytest.raises(ValueError, match=reason):
        check_model(ServerArgs(model_path=str(folder), device="cpu", **flags))


def test_a_target_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="further tokens"), serve(TinyPair(folder, {}), "NEXTN"):
        pass
