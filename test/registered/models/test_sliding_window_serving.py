"""A model of sliding windows and full attention, served: tokens are transformers' whatever happens.

Tiny Gemma 3 (window 9), schedulers in this process. After every run the idle self-check has counted
every slot and every window row.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sglang
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.spec_rig import (
    Oracle,
    TinyPair,
    check_greedy,
    finish_all,
    run_all,
    serve,
    worker_of,
)
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=90, suite="models")

WINDOW = 9
NUM_NEW = 16
_TEXT = [(7 * i * i + 3 * i + 1) % 250 for i in range(110)]
# Around the window (9), pages and chunks (16), their multiples; then branches of a long prompt.
_LENGTHS = (1, 8, 9, 10, 15, 16, 17, 25, 32, 33, 41, 64, 65, 100)
PROMPTS = [_TEXT[:n] for n in _LENGTHS] + [
    [*_TEXT[:50], *range(30)],
    [*_TEXT[:40], 9, 8, 7],
    [*_TEXT[:96], 1],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("gemma3"), "gemma3", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Greedy continuations, computed from the whole sequence each time: no cache is involved."""
    reference: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(NUM_NEW):
                ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def serve_all(served: ServedScheduler) -> list[Answer]:
    """All prompts at once; the self-check must have run behind them."""
    num_checks = served.scheduler.checker.num_checks
    rids = [served.submit(prompt, NUM_NEW) for prompt in PROMPTS]
    served.run_until_idle()
    # With tiers copies are waited for before.
    served.run_until(lambda: served.scheduler.checker.num_checks > num_checks)
    return [served.answer_of(rid) for rid in rids]


def check_tokens(answers: list[Answer], expected: list[list[int]]) -> None:
    assert [answer.tokens for answer in answers] == expected


def num_cached(answers: list[Answer], source: str | None = None) -> int:
    if source is None:
        return sum(answer.cached_tokens for answer in answers)
    return sum(answer.sources.get(source, 0) for answer in answers)


MODES: dict[str, tuple[Any, ...]] = {
    "plain": (),
    "page 16": ("--page-size", 16),
    "chunk 16": ("--chunked-prefill-size", 16),
    "page 16, chunk 32": ("--page-size", 16, "--chunked-prefill-size", 32),
    "one pool": ("--disable-hybrid-swa-memory",),
    "few rows": ("--swa-full-tokens-ratio", 0.02),
    "few rows, page 16": ("--swa-full-tokens-ratio", 0.02, "--page-size", 16),
    "few slots and rows": (
        "--max-total-tokens",
        320,
        "--swa-full-tokens-ratio",
        0.15,
        "--schedule-conservativeness",
        0.01,
    ),
}


LOOPS = (("on", False), ("on", True), ("off", True))


def _covering() -> list[Any]:
    """Every mode in the plain loop and in one of the others; the rest with --run-slow."""
    cases = []
    for index, mode in enumerate(MODES):
        for loop in LOOPS:
            marks = () if loop in (LOOPS[0], LOOPS[1 + index % 2]) else (pytest.mark.slow,)
            cases.append(pytest.param(mode, *loop, marks=marks))
    return cases


@pytest.mark.parametrize(("mode", "cache", "overlap"), _covering())
def test_tokens_are_the_references(
    model: Path, expected: list[list[int]], mode: str, cache: str, overlap: bool
) -> None:
    flags = ["--max-total-tokens", 2048, "--max-running-requests", 12, *MODES[mode]]
    if cache == "off":
        flags.append("--disable-radix-cache")
    with envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(overlap), ServedScheduler(model, *flags) as s:
        has_rows = isinstance(s.scheduler.token_to_kv_pool_allocator, SWATokenToKVPoolAllocator)
        assert has_rows == (mode != "one pool")
        check_tokens(serve_all(s), expected)
        again = serve_all(s)
        check_tokens(again, expected)
        assert (num_cached(again) > 0) == (cache == "on")


def test_as_much_is_cached_as_with_one_pool(model: Path, expected: list[list[int]]) -> None:
    """With rows enough, what windows need costs no hit."""
    counts = []
    for flags in ((), ("--disable-hybrid-swa-memory",)):
        with ServedScheduler(model, "--max-total-tokens", 4096, *flags) as served:
            counts.append([num_cached(serve_all(served)) for _ in range(2)])
    assert counts[0] == counts[1]
    assert counts[0][1] > 600


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_tokens_are_the_same_from_every_tier(
    model: Path, expected: list[list[int]], tmp_path: Path, page_size: int, layout: str
) -> None:
    options = f'{{"prefetch_threshold": 1, "file_storage_path": "{tmp_path}"}}'
    flags: list[Any] = ["--max-total-tokens", 4096, "--page-size", page_size]
    flags += ["--enable-hierarchical-cache", "--hicache-mem-layout", layout]
    flags += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config"]
    flags += [options, "--hicache-storage-prefetch-policy", "wait_complete"]
    with ServedScheduler(model, *flags) as served:
        check_tokens(serve_all(served), expected)
        served.evict_device()
        from_host = serve_all(served)
        check_tokens(from_host, expected)
        assert num_cached(from_host, "host") > 90
        served.flush()
        from_storage = serve_all(served)
        check_tokens(from_storage, expected)
        # What short prompts compute sooner than it is read is found on the device.
        assert num_cached(from_storage, "storage") > 0
        served.evict_device()
        served.flush()
    with ServedScheduler(model, *flags) as served:
        rid = served.submit(PROMPTS[-1], NUM_NEW)
        served.run_until_idle()
        restored = served.answer_of(rid)
        assert restored.tokens == expected[-1]
        assert restored.sources["storage"] == len(PROMPTS[-1]) - 1
        check_tokens(serve_all(served), expected)
    # Storage without the rows: nothing is found, nothing breaks.
    for path in tmp_path.rglob("*.swa*"):
        path.unlink()
    with ServedScheduler(model, *flags) as served:
        check_tokens(serve_all(served), expected)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_few_rows_and_slow_copies(
    model: Path, expected: list[list[int]], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of nodes that are being copied cannot be had: steps wait for the copies."""
    flags: list[Any] = ["--max-total-tokens", 320, "--swa-full-tokens-ratio", 0.02]
    flags += ["--chunked-prefill-size", 16, "--enable-hierarchical-cache"]
    flags += ["--hicache-write-policy", policy]
    with ServedScheduler(model, *flags) as served:
        controller = served.tree.cache_controller
        monkeypatch.setattr(controller, "_copy_hook", lambda kind, layer: time.sleep(0.01))
        check_tokens(serve_all(served), expected)
        check_tokens(serve_all(served), expected)
        served.settle()


def test_a_window_beyond_the_pool_comes_back_from_the_host(tmp_path: Path) -> None:
    """All of the pool is enough for what is loaded and what is computed, if only just."""
    model = make_tiny_checkpoint(tmp_path, "gemma3", sliding_window=200)
    flags = ("--max-total-tokens", 64, "--page-size", 16, "--chunked-prefill-size", 32)
    with ServedScheduler(model, *flags, "--enable-hierarchical-cache") as served:
        first = served.answer(_TEXT[:62], 2)
        served.evict_device()
        again = served.answer(_TEXT[:62], 2)
        assert again.tokens == first.tokens and len(again.tokens) == 2
        assert again.sources == {"device": 0, "host": 48}
        served.settle()


def test_a_lost_window_shows_in_the_tokens(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: rows given back one token too early change what is generated."""

    def too_early(self: BasePrefixCache, reqs: Any) -> None:
        windows = self._swa_allocator
        assert windows is not None
        for req in reqs:
            behind = req.kv_committed_len - (WINDOW - 3)
            start = max(req.cache_protected_len, self._window_starts.get(req.req_pool_idx, 0))
            if behind > start:
                windows.free_swa(self.req_to_token_pool.read(req.req_pool_idx, start, behind))
                self._window_starts[req.req_pool_idx] = behind

    monkeypatch.setattr(BasePrefixCache, "release_out_of_window", too_early)
    flags = ("--max-total-tokens", 2048, "--disable-radix-cache")
    with ServedScheduler(model, *flags) as served:
        answers = serve_all(served)
    assert [answer.tokens for answer in answers] != expected


# -- speculation ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("pair"), "gemma3")


@pytest.fixture(scope="module")
def greedy(pair: TinyPair) -> list[list[int]]:
    with serve(pair, None) as served:
        return run_all(served, PROMPTS, NUM_NEW)


@pytest.mark.parametrize(
    ("algorithm", "topk", "page_size", "overlap"),
    [
        ("NGRAM", 1, 1, False),
        ("NGRAM", 1, 16, True),
        ("EAGLE3", 1, 1, True),
        ("EAGLE3", 1, 16, False),
        ("EAGLE3", 4, 1, False),
        ("EAGLE3", 4, 16, True),
        ("STANDALONE", 1, 16, True),
        ("STANDALONE", 4, 1, False),
    ],
)
def test_speculation_changes_no_token(
    pair: TinyPair,
    greedy: list[list[int]],
    algorithm: str,
    topk: int,
    page_size: int,
    overlap: bool,
) -> None:
    tight = ("--max-total-tokens", 384, "--swa-full-tokens-ratio", 0.3)
    no_cache = ("--disable-radix-cache", "--chunked-prefill-size", 16)
    for flags in ((), tight, no_cache) if overlap else (tight, no_cache):
        options: dict[str, Any] = {"topk": topk, "overlap": overlap}
        with serve(pair, algorithm, "--page-size", page_size, *flags, **options) as served:
            assert check_greedy(served, PROMPTS, greedy, NUM_NEW).num_correct_drafts > 20


@pytest.mark.parametrize(
    ("algorithm", "topk", "page_size", "overlap"),
    [("EAGLE3", 1, 16, True), ("EAGLE3", 4, 1, False), ("NGRAM", 1, 4, True)],
)
def test_speculation_over_every_tier(
    pair: TinyPair,
    greedy: list[list[int]],
    tmp_path: Path,
    algorithm: str,
    topk: int,
    page_size: int,
    overlap: bool,
) -> None:
    """The draft's KV has slots like the target's full attention, whatever becomes of the rows."""
    options = f'{{"prefetch_threshold": 1, "file_storage_path": "{tmp_path}"}}'
    flags: list[Any] = ["--page-size", page_size, "--enable-hierarchical-cache"]
    flags += ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config"]
    flags += [options, "--hicache-storage-prefetch-policy", "wait_complete"]

    def check(served: ServedScheduler, source: str | None) -> None:
        if algorithm != "NGRAM":
            oracle = Oracle(worker_of(served))
            for prompt, output in zip(PROMPTS, greedy):
                oracle.know(prompt, output)
        answers = serve_all(served)
        check_tokens(answers, greedy)
        assert source is None or num_cached(answers, source) > 60

    shape: dict[str, Any] = {"topk": topk, "overlap": overlap}
    with serve(pair, algorithm, *flags, **shape) as served:
        check(served, None)
        served.evict_device()
        check(served, "host")
        served.flush()
        check(served, "storage")
        served.flush()
    with serve(pair, algorithm, *flags, **shape) as served:
        check(served, "storage")


# -- many requests in little room ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "overlap", "cache"),
    [(1, True, "on"), (4, False, "on"), (16, True, "on"), (4, True, "off")],
)
def test_random_traffic_leaves_nothing_behind(
    model: Path, page_size: int, overlap: bool, cache: str
) -> None:
    """Aborts, retractions and evictions; the equations of both pools are checked at the end."""
    rng = random.Random(f"{page_size}{overlap}{cache}")
    flags: list[Any] = ["--max-total-tokens", 320, "--page-size", page_size]
    flags += ["--swa-full-tokens-ratio", 0.25, "--schedule-conservativeness", 0.05]
    flags += ["--chunked-prefill-size", 32, "--max-running-requests", 12]
    flags += [] if cache == "on" else ["--disable-radix-cache"]
    with envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(overlap), ServedScheduler(model, *flags) as s:
        rids = []
        for _ in range(100):
            prompt = [*rng.choice(PROMPTS), *(rng.randrange(250) for _ in range(rng.randrange(9)))]
            rids.append(s.submit(prompt, rng.choice([0, 1, 2, 9, 33])))
            if rng.random() < 0.1:
                s.send(AbortReq(rid=rng.choice(rids[-8:]), exact=True))
            if rng.random() < 0.6:
                s.step()
        finish_all(s, rids)
        assert s.scheduler.reports.num_retracted_total > 0
        allocator = s.scheduler.token_to_kv_pool_allocator
        assert isinstance(allocator, SWATokenToKVPoolAllocator)
        tree = s.scheduler.tree_cache
        assert isinstance(tree, SWARadixCache) == (cache == "on")
        cached = tree.swa_evictable_size()
        assert allocator.available_swa_size() + cached == allocator.size_swa
        s.scheduler.flush_cache()
        assert allocator.available_swa_size() == allocator.size_swa


# -- ranks and weights ---------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_two_ranks_and_new_weights(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Whole engines: tensor parallel, few rows; then other weights from disk, and back."""
    other = make_tiny_checkpoint(tmp_path / "other", "gemma3", seed=1, sliding_window=WINDOW)
    params = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    with sglang.Engine(
        model_path=str(model),
        tp_size=2,
        num_threads=1,
        max_total_tokens=1024,
        swa_full_tokens_ratio=0.1,
        random_seed=1,
        page_size=4,
    ) as engine:

        def tokens() -> list[list[int]]:
            replies = engine.generate(input_ids=PROMPTS, sampling_params=params)
            assert isinstance(replies, list)
            return [reply["output_ids"] for reply in replies]

        assert tokens() == expected
        assert engine.update_weights_from_disk(str(other))[0]
        assert tokens() != expected
        assert engine.update_weights_from_disk(str(model))[0]
        assert tokens() == expected
