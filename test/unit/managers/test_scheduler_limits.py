"""Requests at and around every limit: whatever passes the front's checks is served to its end.

Pool, context, chunk, page, window, and the slots that a step of several tokens writes ahead. The
fake model's tokens are checked, and behind every request the idle self-check.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import AddResult, PrefillAdder, PrefillLimits
from sglang.test.fakes.fake_worker import FakeModelWorker, FakeSpeculativeWorker, oracle
from sglang.test.fakes.scheduler_harness import SchedulerHarness

POOL = 64
PLAIN, SPECULATIVE = FakeModelWorker, FakeSpeculativeWorker
STEPS = pytest.mark.parametrize(
    ("worker_class", "overlap"),
    [(PLAIN, False), (PLAIN, True), (SPECULATIVE, True)],
    ids=["plain", "plain-overlap", "spec-overlap"],
)
# Windows: 1, no token looks back; 5, within a page; 80, beyond the pool.
MEMORIES = [
    (1, 16, None),
    (1, 16, 1),
    (4, 8, None),
    (4, 8, 5),
    (16, None, 5),
    (16, None, 80),
    (16, 32, None),
    (16, 32, 5),
    (16, 32, 80),
]


def _harness(
    worker_class: type[FakeModelWorker],
    *,
    page_size: int = 1,
    context_len: int = 2 * POOL,
    window: int | None = None,
    max_requests: int = 8,
    **options: Any,
) -> SchedulerHarness:
    worker = worker_class(
        num_slots=POOL,
        page_size=page_size,
        max_requests=max_requests,
        context_len=context_len,
        window=window,
    )
    return SchedulerHarness(
        worker=worker,
        page_size=page_size,
        context_len=context_len,
        max_requests=max_requests,
        **options,
    )


def _prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i) % 900 + 1 for i in range(length)]


def _granted(harness: SchedulerHarness, prompt_len: int, asked: int) -> int:
    """Output tokens that context and pool leave room for; one at least."""
    in_pool = max(1, POOL - harness.worker.step_shape.num_slots + 1 - prompt_len)
    return min(asked, harness.options.context_len - prompt_len, in_pool)


def _check(harness: SchedulerHarness, rid: str, prompt: list[int], asked: int) -> None:
    num_tokens = _granted(harness, len(prompt), asked)
    assert harness.finish(rid) == {"type": "length", "length": num_tokens}, (rid, len(prompt))
    assert harness.tokens(rid) == oracle(prompt, num_tokens), (rid, len(prompt))


def _around(*limits: int) -> list[int]:
    """Prompt lengths just below, at and above the limits, as far as the pool takes them."""
    lengths = {limit + delta for limit in limits for delta in (-1, 0, 1)}
    return sorted(length for length in lengths if 1 <= length < POOL)


@STEPS
@pytest.mark.parametrize(("page", "chunk", "window"), MEMORIES)
def test_no_length_is_too_much(worker_class, overlap, page, chunk, window):
    """Into an empty pool, and into one that is full of what is only cached."""
    harness = _harness(
        worker_class, page_size=page, window=window, chunk_size=chunk, overlap=overlap
    )
    step_slots = worker_class.step_shape.num_slots
    lengths = _around(1, page, chunk or page, POOL - page, POOL - step_slots, POOL - 1)
    for index, length in enumerate(reversed(lengths)):
        for max_new in (0, 1, 2, 2 * POOL - length):
            rid, prompt = f"{length}-{max_new}", _prompt(length, 100 * index)
            harness.generate(rid, prompt, max_new, ignore_eos=True)
            harness.run_until_idle()
            _check(harness, rid, prompt, max_new)


@STEPS
@pytest.mark.parametrize("disable_cache", [False, True], ids=["tree", "no tree"])
def test_the_context_may_be_the_limit(worker_class, overlap, disable_cache):
    context_len = POOL // 2
    harness = _harness(
        worker_class,
        page_size=4,
        context_len=context_len,
        chunk_size=16,
        overlap=overlap,
        disable_cache=disable_cache,
    )
    for length in (context_len - 5, context_len - 2, context_len - 1):
        rid, prompt = f"{length}", _prompt(length)
        harness.generate(rid, prompt, context_len - length, ignore_eos=True)
        harness.run_until_idle()
        _check(harness, rid, prompt, context_len - length)


@pytest.mark.parametrize("length", [POOL, POOL + 1, 3 * POOL])
def test_a_prompt_beyond_the_pool_is_refused(length):
    harness = _harness(PLAIN, context_len=4 * POOL, page_size=16, chunk_size=32)
    harness.generate("r", _prompt(length), 4)
    harness.run_until_idle()
    finish = harness.finish("r")
    assert finish is not None and (finish["type"], finish["status_code"]) == ("abort", 400)


@STEPS
@pytest.mark.parametrize(("page", "window"), [(1, 5), (4, None), (16, None), (16, 20)])
def test_long_prompts_that_meet_take_turns(worker_class, overlap, page, window):
    """Each needs most of the pool, so chunks wait for memory and requests are retracted."""
    harness = _harness(
        worker_class,
        page_size=page,
        window=window,
        chunk_size=16,
        overlap=overlap,
        conservativeness=0.01,
        enable_priority=True,
    )
    rng = random.Random(page)
    asked = {}
    for index in range(12):
        length = rng.choice([1, page, POOL // 2, POOL - page - 1, POOL - 2, POOL - 1])
        prompt = _prompt(length, first=rng.choice([1, 300]))
        max_new = rng.choice([1, 2, 2 * POOL - length])
        asked[f"r{index}"] = (prompt, max_new)
        harness.generate(f"r{index}", prompt, max_new, ignore_eos=True, priority=index % 3)
        harness.step(rng.randrange(4))
        if index % 4 == 3:
            harness.send(PauseGenerationReqInput(control_id="p", mode="retract"))
            harness.step()
            harness.send(ContinueGenerationReqInput(control_id="c"))
    harness.run_until_idle()
    for rid, (prompt, max_new) in asked.items():
        _check(harness, rid, prompt, max_new)
    assert any(harness.outputs[rid][-1].num_retractions for rid in asked)


@pytest.mark.parametrize("overlap", [False, True])
def test_who_is_retracted_for_being_alone_and_too_long_is_counted(overlap, monkeypatch):
    harness = _harness(PLAIN, overlap=overlap)
    harness.generate("r", _prompt(5), 8, ignore_eos=True)
    harness.step(3)
    with monkeypatch.context() as patch:  # random lives do not come here
        patch.setattr(ScheduleBatch, "has_decode_memory", lambda batch: False)
        harness.step()
    harness.run_until_idle()
    _check(harness, "r", _prompt(5), 8)
    retractions = harness.outputs["r"][-1].num_retractions
    assert harness.scheduler.reports.num_retracted_total == retractions == 1


@pytest.mark.parametrize("window", [None, 80])
@pytest.mark.parametrize(("is_alone", "taken"), [(True, 48), (False, 32)])
def test_a_chunk_leaves_a_page_to_those_that_run(is_alone, taken, window):
    harness = _harness(PLAIN, page_size=16, chunk_size=16, window=window)
    harness.generate("r", _prompt(POOL - 2), 1)
    harness.step()
    scheduler, req = harness.scheduler, harness.scheduler.chunked_req
    assert req is not None
    scheduler.tree_cache.cache_unfinished_req(req, chunked=True)
    adder = PrefillAdder(
        PrefillLimits(max_prefill_tokens=POOL, chunk_size=POOL, page_size=16),
        tree_cache=scheduler.tree_cache,
        allocator=scheduler.token_to_kv_pool_allocator,
        running=[] if is_alone else [req],
        new_token_ratio=0.0,
    )
    assert adder.add_chunked_req(req) is AddResult.ADDED
    assert (req.extend_len, req.is_chunked) == (min(taken, POOL - 18), not is_alone)


def test_an_order_along_the_tree_forgets_nobody_where_there_is_no_tree():
    harness = _harness(PLAIN, policy="dfs-weight", disable_cache=True, max_requests=1)
    for rid in "abc":
        harness.generate(rid, _prompt(5), 3, ignore_eos=True)
    harness.run_until_idle()
    assert [len(harness.tokens(rid)) for rid in "abc"] == [3, 3, 3]
