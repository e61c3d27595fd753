"""Gemma 3 270M: greedy tokens equal transformers', on prompts shorter and longer than its window.

They may differ only behind a position where the two most likely tokens are within NEAR_TIE of each
other: there, a different order of float additions may choose either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import ServedScheduler

register_cpu_ci(est_time=75, suite="models")

NUM_NEW = 16
NEAR_TIE = 1e-3
WINDOW = 512
# The tables of grammars are another two seconds for so large a vocabulary.
POOL = ("--max-total-tokens", 6144, "--grammar-backend", "none")

_TOWNS = ("Ulm", "Graz", "Bern", "Lund", "Brno", "Gent", "Vigo", "Pisa", "Bath", "Cork", "Metz")
_STORY = "Once upon a time, a little girl went from town to town. " + " ".join(
    f"On day {day} she came to {_TOWNS[day * 7 % 11]}, where {day * 3 + 2} people lived and "
    f"{day * 5 % 13 + 1} of them sold apples."
    for day in range(1, 48)
)
TEXTS = ("The capital of France is", _STORY[:400], _STORY, "1, 2, 3, 5, 8, 13,")


@pytest.fixture(scope="module")
def prompts(gemma_model: Path) -> list[list[int]]:
    tokenizer = get_tokenizer(str(gemma_model))
    found = [tokenizer.encode(text) for text in TEXTS]
    assert all(ids[0] == 2 for ids in found), "no beginning-of-sequence token"
    assert max(map(len, found)) > 2 * WINDOW
    # One ends just where the window begins to leave something out.
    return [*found, found[2][:WINDOW], found[2][: WINDOW + 1]]


@pytest.fixture(scope="module")
def reference(gemma_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens up to the first near-tie."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(gemma_model, dtype=torch.float32).eval()
    found = []
    with torch.inference_mode():
        for ids in prompts:
            tokens: list[int] = []
            step, cache = torch.tensor([ids]), None
            while len(tokens) < NUM_NEW:
                out = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, top = out.past_key_values, out.logits[0, -1].topk(2)
                if float(top.values[0] - top.values[1]) < NEAR_TIE:
                    break
                tokens.append(int(top.indices[0]))
                step = torch.tensor([tokens[-1:]])
            found.append(tokens)
    assert sum(map(len, found)) > 4 * NUM_NEW
    return found


def check(served: ServedScheduler, prompts: list[list[int]], reference: list[list[int]]) -> int:
    """Serve all at once and compare; returns how many tokens were cached."""
    rids = [served.submit(prompt, NUM_NEW) for prompt in prompts]
    served.run_until_idle(timeout_s=300)
    answers = [served.answer_of(rid) for rid in rids]
    got = [answer.tokens[: len(wanted)] for answer, wanted in zip(answers, reference)]
    assert got == reference
    return sum(answer.cached_tokens for answer in answers)


@pytest.mark.timeout(600)
def test_tokens_are_the_references(
    gemma_model: Path, prompts: list[list[int]], reference: list[list[int]], tmp_path: Path
) -> None:
    flags = (*POOL, "--page-size", 16, "--chunked-prefill-size", 256)
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", 2)
    with ServedScheduler(gemma_model, *flags, *tiers, "--swa-full-tokens-ratio", 0.3) as served:
        allocator = served.scheduler.token_to_kv_pool_allocator
        assert isinstance(allocator, SWATokenToKVPoolAllocator) and allocator.size_swa < 2048
        check(served, prompts, reference)
        assert check(served, prompts, reference) > 1500
        served.evict_device()
        assert check(served, prompts, reference) > 1500


@pytest.mark.timeout(600)
def test_one_pool_and_no_cache(
    gemma_model: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    flags = (*POOL, "--disable-radix-cache", "--disable-hybrid-swa-memory")
    with ServedScheduler(gemma_model, *flags) as served:
        assert check(served, prompts, reference) == 0


def test_the_tokenizer_keeps_the_text(gemma_model: Path) -> None:
    tokenizer = get_tokenizer(str(gemma_model))
    for text in (*TEXTS, "a  b\n\n\tdef f(x):  return 'ß' 🤗 日本語", "<table>x</table>"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    # Pieces of published Gemma tokenizers, by their ids.
    assert tokenizer.encode("Once upon a time") == [2, 14946, 3324, 496, 990]
