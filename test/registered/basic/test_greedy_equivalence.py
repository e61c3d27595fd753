"""Greedy tokens of fifty mixed prompts are the same in every mode of the engine, and transformers'.

The real model, whole engines (all processes). A mode may differ from the reference only behind a
position where the two most likely tokens are within NEAR_TIE of each other: there, a different
order of float additions may choose either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sglang
from sglang.srt.environ import envs
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.prompts import mixed_prompts

register_cpu_ci(est_time=200, suite="basic")

NUM_NEW_TOKENS = 16
NEAR_TIE = 1e-3

# "overlap" is no argument, see `_generate_in`: the CPU's default loop is the other one.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "cache off, chunking off, two threads": {
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "num_threads": 2,
    },
    "page 64, chunk 64, overlap": {"page_size": 64, "chunked_prefill_size": 64},
    # The real model has 9 query and 3 KV heads: three ranks, not two.
    "tp 3": {"tp_size": 3},
    "small pool": {"max_total_tokens": 1536, "page_size": 16, "chunked_prefill_size": 128},
}
# One change at a time: which one it was, where a mode of several fails.
SINGLE_MODES: dict[str, dict[str, Any]] = {
    "cache off": {"disable_radix_cache": True},
    "page 16, two threads": {"page_size": 16, "num_threads": 2},
    "page 64, chunk 64": {"page_size": 64, "chunked_prefill_size": 64},
    "chunking off": {"chunked_prefill_size": -1},
    "overlap": {},
}


def _prompt_ids(model: str) -> list[list[int]]:
    tokenizer = get_tokenizer(model)
    return [tokenizer.encode(text) for text in mixed_prompts()]


def _generate(model: str, prompts: list[list[int]], *, batch: int, **args: Any) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    # Other tests run beside this one: a second thread would wait for its core most of the time.
    options = {"max_running_requests": 32, "random_seed": 1, "num_threads": 1, **args}
    outputs: list[list[int]] = []
    with sglang.Engine(model_path=model, **options) as engine:
        for start in range(0, len(prompts), batch):
            part = prompts[start : start + batch]
            replies = engine.generate(input_ids=part, sampling_params=params)
            assert isinstance(replies, list)
            outputs.extend(reply["output_ids"] for reply in replies)
    return outputs


@pytest.fixture(scope="module")
def model_path(small_model: Path) -> str:
    return str(small_model)


@pytest.fixture(scope="module")
def prompts(model_path: str) -> list[list[int]]:
    return _prompt_ids(model_path)


@pytest.fixture(scope="module")
def guesses(model_path: str, prompts: list[list[int]]) -> list[list[int]]:
    """The default mode's tokens."""
    return _generate(model_path, prompts, batch=32)


@pytest.fixture(scope="module")
def oracle(model_path: str) -> Any:
    """The model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference(
    oracle: Any, prompts: list[list[int]], guesses: list[list[int]]
) -> list[tuple[list[int], list[float]]]:
    """transformers, one prompt at a time: (tokens, gap of the two largest logits at each).

    Its greedy tokens whatever the guesses are; each right one saves a pass of the model.
    """
    with torch.inference_mode():
        return [_greedy(oracle, ids, guess) for ids, guess in zip(prompts, guesses, strict=True)]


def _greedy(model: Any, prompt: list[int], guess: list[int]) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    gaps: list[float] = []
    while len(tokens) < NUM_NEW_TOKENS:
        ahead = guess[len(tokens) : NUM_NEW_TOKENS - 1]
        # One row of logits behind the last token and one behind each guessed one.
        step = torch.tensor([[*prompt, *tokens, *ahead]])
        rows = model(step, use_cache=False, logits_to_keep=len(ahead) + 1).logits[0]
        for row, guessed in zip(rows, [*ahead, None], strict=True):
            top = row.topk(2)
            tokens.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
            if tokens[-1] != guessed:
                break  # the other rows follow a token that is none of the model's
    return tokens, gaps


def _differences(
    outputs: list[list[int]], reference: list[tuple[list[int], list[float]]]
) -> list[str]:
    """A line for each prompt whose tokens differ before the first near-tie."""
    found = []
    for index, (got, (wanted, gaps)) in enumerate(zip(outputs, reference, strict=True)):
        tie = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), NUM_NEW_TOKENS)
        if got[:tie] != wanted[:tie] or len(got) != NUM_NEW_TOKENS:
            found.append(f"prompt {index}: {got} instead of {wanted} (near-tie at {tie})")
    return found


def _generate_in(mode: str, model: str, prompts: list[list[int]]) -> list[list[int]]:
    with envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override("overlap" in mode):
        return _generate(model, prompts, batch=32, **{**MODES, **SINGLE_MODES}[mode])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same(mode, model_path, prompts, guesses, reference):
    outputs = guesses if mode == "default" else _generate_in(mode, model_path, prompts)
    assert _differences(outputs, reference) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", SINGLE_MODES)
def test_tokens_are_the_same_after_one_change(mode, model_path, prompts, reference):
    assert _differences(_generate_in(mode, model_path, prompts), reference) == []


@pytest.mark.timeout(600)
def test_batch_of_one(model_path, prompts, reference):
    outputs = _generate(model_path, prompts, batch=1)
    assert _differences(outputs, reference) == []


def test_wrong_guesses_change_nothing(oracle, prompts, reference):
    tokens = reference[4][0]
    guess = [*tokens[:5], tokens[5] + 1, *tokens[6:9]]
    with torch.inference_mode():
        assert _greedy(oracle, prompts[4], guess)[0] == tokens
        assert _greedy(oracle, prompts[4], [])[0] == tokens


def test_a_wrong_token_is_noticed(reference):
    """Negative control: the comparison is not blind."""
    outputs = [list(tokens) for tokens, _ in reference]
    assert _differences(outputs, reference) == []
    outputs[3][0] += 1
    assert len(_differences(outputs, reference)) == 1
