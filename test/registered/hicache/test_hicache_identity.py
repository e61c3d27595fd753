"""Whatever cached bytes depend on is part of their name: a change of it misses, and only misses.

Servers with different models, weights, dtypes, page sizes, layouts, drafts and namespaces write
into one storage folder. Each finds nothing of what the others wrote, and all of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=25, suite="hicache")

PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(130)]
NEW_TOKENS = 6
Flags = list[str | int]


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Flags]:
    """Flags of servers that must not share a page. All under one served name."""
    root = tmp_path_factory.mktemp("models")
    model = make_tiny_checkpoint(root / "model", num_hidden_layers=6)
    other_weights = make_tiny_checkpoint(root / "weights", seed=1, num_hidden_layers=6)
    other_config = make_tiny_checkpoint(root / "config", num_hidden_layers=6, rope_theta=9999.0)
    base: Flags = ["--model-path", str(model), "--page-size", 8]

    def draft(seed: int) -> Flags:
        folder = make_tiny_draft(root / f"draft{seed}", seed=seed)
        return [
            *(*base, "--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", 1),
            *("--speculative-draft-model-path", str(folder), "--speculative-num-steps", 3),
            *("--speculative-num-draft-tokens", 4),
        ]

    return {
        "base": base,
        "other weights": ["--model-path", str(other_weights), "--page-size", 8],
        "other config": ["--model-path", str(other_config), "--page-size", 8],
        "bfloat16 model": [*base, "--dtype", "bfloat16"],
        "bfloat16 KV": [*base, "--kv-cache-dtype", "bfloat16"],
        "float16 KV": [*base, "--kv-cache-dtype", "fp16"],
        "pages of 4": ["--model-path", str(model), "--page-size", 4],
        "layer_first": [*base, "--hicache-mem-layout", "layer_first"],
        "draft": draft(0),
        "other draft": draft(1),
    }


def serve(flags: Flags, folder: Path) -> ServedScheduler:
    model, rest = str(flags[1]), flags[2:]
    config = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 1})
    return ServedScheduler(
        model,
        *("--max-total-tokens", 256, "--served-model-name", "one-name"),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", config),
        *rest,
    )


def ask_once(flags: Flags, folder: Path) -> Answer:
    """One prompt to a server that has just started, and its pages to storage."""
    with serve(flags, folder) as served:
        answer = served.answer(PROMPT, NEW_TOKENS)
        served.settle()
        return answer


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_every_change_misses(variants: Mapping[str, Flags], tmp_path: Path, order: str) -> None:
    names = list(variants) if order == "forwards" else list(variants)[::-1]
    first = {}
    for name in names:
        first[name] = ask_once(variants[name], tmp_path)
        assert first[name].cached_tokens == 0, name
    for name in names:
        again = ask_once(variants[name], tmp_path)
        assert again.sources.get("storage", 0) == 128, name
        assert again.tokens == first[name].tokens, name


def test_what_does_not_change_the_bytes_hits(variants: Mapping[str, Flags], tmp_path: Path) -> None:
    base = variants["base"]
    first = ask_once(base, tmp_path)
    for more in (
        ["--chunked-prefill-size", 32],
        ["--hicache-io-backend", "kernel"],
        ["--hicache-write-policy", "write_back"],
        ["--schedule-policy", "lpm"],
        ["--random-seed", 99],
    ):
        again = ask_once([*base, *more], tmp_path)
        assert (again.sources.get("storage"), again.tokens) == (128, first.tokens), more


def test_namespaces_of_requests(variants: Mapping[str, Flags], tmp_path: Path) -> None:
    keys = [None, "a", "b", "", "a\0b"]
    base = variants["base"]
    for key in keys:
        with serve(base, tmp_path) as served:
            answer = served.answer(PROMPT, NEW_TOKENS, extra_key=key)
            assert answer.cached_tokens == 0, repr(key)
            served.settle()
    for key in keys:
        with serve(base, tmp_path) as served:
            assert served.answer(PROMPT, NEW_TOKENS, extra_key=key).sources["storage"] == 128
            assert served.answer(PROMPT, NEW_TOKENS, extra_key=f"not {key!r}").cached_tokens == 0
            served.tree.check_invariants(0)


def test_two_servers_at_once_share_what_they_know(
    variants: Mapping[str, Flags], tmp_path: Path
) -> None:
    base = variants["base"]
    prompts = [[5 + number, *PROMPT] for number in range(6)]
    with serve(base, tmp_path) as one, serve(base, tmp_path) as two:
        rids = [one.submit(prompt, NEW_TOKENS) for prompt in prompts[:3]]
        rids += [two.submit(prompt, NEW_TOKENS) for prompt in prompts[3:]]
        for served in (one, two):
            served.settle()
        first = [one.answer_of(rid).tokens for rid in rids[:3]]
        first += [two.answer_of(rid).tokens for rid in rids[3:]]
        for served, others in ((one, (3, 4, 5)), (two, (0, 1, 2))):
            for number in others:
                answer = served.answer(prompts[number], NEW_TOKENS)
                assert answer.tokens == first[number]
                assert answer.sources["storage"] == 128
