"""Full attention and recurrent states in the whole engine: what is reused never changes a token.

A tiny random Qwen3-Next. Expected tokens are those of an engine that caches nothing and never cuts
a prompt; `models/test_against_transformers.py` holds the model itself to its reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AbortReq,
    FlushCacheReqInput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import serve

register_cpu_ci(est_time=60, suite="hybrid")

CHUNK = 32
PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(90)]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("qwen3_next"), "qwen3_next", seed=3)


@contextmanager
def serving(
    model: Path, *flags: str | int | float, overlap: bool = False
) -> Iterator[ServedScheduler]:
    own = ("--max-total-tokens", 640, "--max-running-requests", 4, "--grammar-backend", "none")
    with ExitStack() as stack:
        stack.enter_context(envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(overlap))
        yield stack.enter_context(ServedScheduler(model, *own, *flags))


class Plain:
    """Answers of an engine without any reuse."""

    def __init__(self, served: ServedScheduler) -> None:
        self._served = served
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], count: int = NEW_TOKENS) -> list[int]:
        key = (*prompt, -count)
        if key not in self._known:
            self._known[key] = self._served.answer(prompt, count).tokens
        return self._known[key]


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Plain]:
    with serving(model, "--disable-radix-cache", "--chunked-prefill-size", -1) as served:
        yield Plain(served)


def cache_of(served: ServedScheduler) -> MambaRadixCache:
    cache = served.tree
    assert isinstance(cache, MambaRadixCache)
    return cache


def num_checks(served: ServedScheduler) -> int:
    return served.scheduler.checker.num_checks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_every_length_around_a_chunk_is_reused_to_its_last_page(
    model: Path, plain: Plain, page: int, overlap: bool
) -> None:
    flags = ("--page-size", page, "--chunked-prefill-size", CHUNK)
    with serving(model, *flags, overlap=overlap) as served:
        for length in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 90):
            served.control(FlushCacheReqInput(timeout_s=10.0))
            prompt = PROMPT[:length]
            answers = [served.answer(prompt, NEW_TOKENS) for _ in range(3)]
            assert [a.tokens for a in answers] == [plain.tokens(prompt)] * 3
            last_page = (length - 1) // page * page
            assert [a.cached_tokens for a in answers] == [0, last_page, last_page], length
        served.settle()


@pytest.mark.parametrize("page", [1, 16])
def test_a_longer_prompt_goes_on_from_the_end_of_a_shorter_one(
    model: Path, plain: Plain, page: int
) -> None:
    with serving(model, "--page-size", page, "--chunked-prefill-size", CHUNK) as served:
        for length in (40, 64, 90):
            answer = served.answer(PROMPT[:length], NEW_TOKENS)
            assert answer.tokens == plain.tokens(PROMPT[:length])
        assert answer.cached_tokens == 64
        served.settle()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_goes_on_within_the_answer(model: Path, plain: Plain, overlap: bool) -> None:
    with serving(model, "--mamba-track-interval", 8, overlap=overlap) as served:
        first = served.answer(PROMPT[:50], 21)
        turn = PROMPT[:50] + first.tokens + [9, 9, 7]
        second = served.answer(turn, NEW_TOKENS)
        # KV of the answer's last token does not exist: 70 tokens, of which 64 end an interval.
        assert second.cached_tokens == 64
        assert second.tokens == plain.tokens(turn)
        served.settle()


def test_the_third_prompt_with_a_common_head_begins_where_they_part(
    model: Path, plain: Plain
) -> None:
    with serving(model) as served:
        prompts = [PROMPT[:50] + [token] * 20 for token in (11, 12, 13)]
        answers = [served.answer(prompt, NEW_TOKENS) for prompt in prompts]
        assert [a.cached_tokens for a in answers] == [0, 0, 50]
        assert [a.tokens for a in answers] == [plain.tokens(prompt) for prompt in prompts]
        served.settle()


@pytest.mark.parametrize("overlap", [False, True])
def test_few_states_are_taken_from_who_was_used_least_recently(
    model: Path, plain: Plain, overlap: bool
) -> None:
    prompts = [[seed, *PROMPT[:70]] for seed in range(6)]
    with serving(model, "--max-mamba-cache-size", 6, overlap=overlap) as served:
        assert cache_of(served)._states.allocator.size == 3
        for prompt in [*prompts, prompts[5], prompts[0]]:
            answer = served.answer(prompt, NEW_TOKENS)
            assert answer.tokens == plain.tokens(prompt)
            if prompt is prompts[5]:
                reused = answer.cached_tokens
        assert reused == 70
        assert answer.cached_tokens == 0
        served.settle()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_requests_together_get_what_each_gets_alone(
    model: Path, plain: Plain, page: int, overlap: bool
) -> None:
    rng = random.Random(page)
    prompts = [PROMPT[: rng.randrange(1, 60)] + [rng.randrange(200)] for _ in range(12)]
    flags = ("--page-size", page, "--chunked-prefill-size", CHUNK, "--max-mamba-cache-size", 10)
    with serving(model, *flags, overlap=overlap) as served:
        rids = [served.submit(prompt, NEW_TOKENS) for prompt in prompts]
        served.run_until_idle()
        for rid, prompt in zip(rids, prompts):
            assert served.answer_of(rid).tokens == plain.tokens(prompt)
        served.settle()


@pytest.mark.parametrize("overlap", [False, True])
def test_retracted_requests_go_on_as_if_nothing_was(
    model: Path, plain: Plain, overlap: bool
) -> None:
    prompts = [[seed, *PROMPT[:20]] for seed in range(4)]
    flags = ("--max-total-tokens", 120, "--schedule-conservativeness", 0.1)
    with serving(model, *flags, overlap=overlap) as served:
        rids = [served.submit(prompt, 40) for prompt in prompts]
        served.run_until_idle()
        for rid, prompt in zip(rids, prompts):
            assert served.answer_of(rid).tokens == plain.tokens(prompt, 40)
        assert sum(outputs[-1].num_retractions for outputs in served.outputs.values()) > 0
        served.settle()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page", [1, 16])
def test_aborts_at_any_step_lose_no_slot(
    model: Path, plain: Plain, page: int, overlap: bool
) -> None:
    rng = random.Random(17 + page)
    flags = ("--page-size", page, "--chunked-prefill-size", CHUNK, "--max-mamba-cache-size", 9)
    with serving(model, *flags, "--mamba-track-interval", 4, overlap=overlap) as served:
        for _ in range(12):
            rids = [
                served.submit(PROMPT[: rng.randrange(1, 90)], rng.randrange(1, 20))
                for _ in range(3)
            ]
            served.step(rng.randrange(1, 9))
            for rid in rng.sample(rids, 2):
                served.send(AbortReq(rid=rid, exact=True))
            served.step(rng.randrange(0, 3))
            served.run_until_idle()
            served.settle()
        assert num_checks(served) >= 12
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert answer.tokens == plain.tokens(PROMPT)


def test_a_flush_takes_every_state_back(model: Path, plain: Plain) -> None:
    with serving(model) as served:
        served.answer(PROMPT, NEW_TOKENS)
        allocator = cache_of(served)._states.allocator
        assert allocator.available_size() < allocator.size
        served.control(FlushCacheReqInput(timeout_s=10.0))
        assert allocator.available_size() == allocator.size
        answer = served.answer(PROMPT, NEW_TOKENS)
        assert (answer.cached_tokens, answer.tokens) == (0, plain.tokens(PROMPT))


@pytest.mark.parametrize("flush", [False, True])
def test_new_weights_begin_with_new_states(
    model: Path, tmp_path_factory: pytest.TempPathFactory, plain: Plain, flush: bool
) -> None:
    other = make_tiny_checkpoint(tmp_path_factory.mktemp("other"), "qwen3_next", seed=4)
    # Files may hold layers that only a draft would use.
    weights = load_file(str(other / "model.safetensors"))
    weights["mtp.layers.0.mlp.gate.weight"] = torch.zeros(3, 3)
    save_file(weights, str(other / "model.safetensors"), {"format": "pt"})
    with serving(other, "--disable-radix-cache") as served:
        expected = served.answer(PROMPT, NEW_TOKENS).tokens
    assert expected != plain.tokens(PROMPT)
    with serving(model) as served:
        assert served.answer(PROMPT, NEW_TOKENS).tokens == plain.tokens(PROMPT)
        update = UpdateWeightFromDiskReqInput(model_path=str(other), flush_cache=flush)
        assert served.control(update).success
        answers = [served.answer(PROMPT, NEW_TOKENS) for _ in range(2)]
        assert [a.tokens for a in answers] == [expected] * 2
        assert [a.cached_tokens for a in answers] == [0, 89]
        served.settle()


def test_two_ranks_reuse_alike(model: Path, plain: Plain) -> None:
    flags = ("--tp-size", 2, "--chunked-prefill-size", CHUNK, "--page-size", 4)
    with serve(str(model), *flags, "--max-mamba-cache-size", 12) as server:
        for expected in (0, 88, 88):
            params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            reply = server.generate(input_ids=PROMPT, sampling_params=params)
            assert reply["output_ids"] == plain.tokens(PROMPT)
            assert reply["meta_info"]["cached_tokens"] == expected
        assert server.get("/health_generate").status_code == 200
