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

register_cpu_ci(est_time=400, suite="basic")

NUM_NEW_TOKENS = 16
NEAR_TIE = 1e-3

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "cache off": {"disable_radix_cache": True},
    "page 16": {"page_size": 16},
    "page 64, chunk 64": {"page_size": 64, "chunked_prefill_size": 64},
    "chunking off": {"chunked_prefill_size": -1},
    "overlap": {},  # through the environment: the CPU's default loop is the other one
    # The real model has 9 query and 3 KV heads: three ranks, not two.
    "tp 3": {"tp_size": 3, "num_threads": 1},
    "small pool": {"max_total_tokens": 1536, "page_size": 16, "chunked_prefill_size": 128},
}


def _prompt_ids(model: str) -> list[list[int]]:
    tokenizer = get_tokenizer(model)
    return [tokenizer.encode(text) for text in mixed_prompts()]


def _generate(model: str, prompts: list[list[int]], *, batch: int, **args: Any) -> list[list[int]]:
    params = {"temperature": 0.0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
    outputs: list[list[int]] = []
    with sglang.Engine(model_path=model, max_running_requests=32, random_seed=1, **args) as engine:
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
def reference(model_path: str, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """transformers, one prompt at a time: (tokens, gap of the two largest logits at each)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    results = []
    with torch.inference_mode():
        for ids in prompts:
            tokens, gaps, step, cache = [], [], torch.tensor([ids]), None
            for _ in range(NUM_NEW_TOKENS):
                out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                top = out.logits[0, -1].topk(2)
                tokens.append(int(top.indices[0]))
                gaps.append(float(top.values[0] - top.values[1]))
                step = torch.tensor([[tokens[-1]]])
            results.append((tokens, gaps))
    return results


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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_the_same(mode, model_path, prompts, reference):
    with envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(mode == "overlap"):
        outputs = _generate(model_path, prompts, batch=32, **MODES[mode])
    assert _differences(outputs, reference) == []


@pytest.mark.timeout(600)
def test_batch_of_one(model_path, prompts, reference):
    outputs = _generate(model_path, prompts, batch=1)
    assert _differences(outputs, reference) == []


def test_a_wrong_token_is_noticed(reference):
    """Negative control: the comparison is not blind."""
    outputs = [list(tokens) for tokens, _ in reference]
    assert _differences(outputs, reference) == []
    outputs[3][0] += 1
    assert len(_differences(outputs, reference)) == 1
