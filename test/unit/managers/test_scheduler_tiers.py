"""The scheduler over three tiers: what is kept of a request, and tokens under any schedule."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.io_struct import (
    AbortReq,
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import GenerationBatchResult
from sglang.srt.mem_cache.base_prefix_cache import MIXED_WEIGHTS
from sglang.test.fakes import scheduler_harness
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fake_worker import oracle
from sglang.test.fakes.hicache_model import ChaosStore
from sglang.test.fakes.tiered_scheduler import TieredScheduler

PROMPT = list(range(1, 21))


def cached_tokens_of(rig: TieredScheduler, rid: str, prompt: list[int]) -> int:
    """Serve a prompt; how much of it was cached."""
    rig.harness.generate(rid, prompt, 2, ignore_eos=True)
    rig.harness.run_until_idle()
    assert rig.harness.tokens(rid) == oracle(prompt, 2)
    return rig.harness.outputs[rid][-1].cached_tokens


# -- what is kept at the end -----------------------------------------------------------------------


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_kv_of_the_last_step_is_kept(speculative: bool, overlap: bool) -> None:
    for num_new in range(2, 18):
        rig = TieredScheduler(page_size=4, speculative=speculative, overlap=overlap)
        rig.harness.generate("r", PROMPT[:5], num_new, ignore_eos=True)
        rig.harness.run_until_idle()
        # The last token has no KV yet.
        assert rig.tree.total_size() == (5 + num_new - 1) // 4 * 4, num_new


def test_kv_that_gave_nan_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieredScheduler()
    forward = rig.worker.forward_batch_generation

    def first_is_nan(batch: ScheduleBatch) -> GenerationBatchResult:
        result = forward(batch)
        if rig.worker.num_steps == 1:
            result.nan_rows = torch.ones(len(batch), dtype=torch.bool)
        return result

    monkeypatch.setattr(rig.worker, "forward_batch_generation", first_is_nan)
    rig.harness.generate("bad", PROMPT, 5, ignore_eos=True)
    rig.settle()
    finish = rig.harness.finish("bad")
    assert finish is not None and finish["matched"] == "NaN happened"
    store = rig.store
    assert isinstance(store, MemoryStore)
    assert rig.tree.total_size() == 0 and not store.pages
    assert cached_tokens_of(rig, "good", PROMPT) == 0
    assert cached_tokens_of(rig, "again", PROMPT) == len(PROMPT) - 1


# -- updates without a flush -----------------------------------------------------------------------


def update_weights(rig: TieredScheduler, fingerprint: str, isolate: bool = True) -> None:
    """What `scheduler_update_weights_mixin` does around an update."""
    scheduler: Any = rig.scheduler
    scheduler._weight_updater = SimpleNamespace(
        kv_fingerprint=lambda: fingerprint, poll_groups=lambda: None
    )
    scheduler.config = scheduler.config.__class__(
        **{
            name: getattr(scheduler.config, name)
            for name in scheduler.config.__dataclass_fields__
            if name != "isolate_weights"
        },
        isolate_weights=isolate,
    )
    rig.tree.prepare_weights_update()
    scheduler.isolate_cached_kv()


def test_a_request_across_an_update_and_back_leaves_nothing() -> None:
    rig = TieredScheduler()
    rig.harness.generate("across", PROMPT, 12, ignore_eos=True)
    rig.harness.step(3)
    before = rig.tree.total_size()  # what of the prompt the first step left there
    update_weights(rig, "B")
    rig.harness.step(3)
    update_weights(rig, "A")
    rig.harness.run_until_idle()
    assert rig.harness.tokens("across") == oracle(PROMPT, 12)
    assert rig.tree.total_size() == before <= len(PROMPT)
    rig.harness.generate("after", PROMPT, 12, ignore_eos=True)
    rig.harness.run_until_idle()
    assert rig.tree.total_size() > before


def test_requests_that_run_during_an_update_are_marked() -> None:
    rig = TieredScheduler()
    rig.harness.generate("running", PROMPT, 30, ignore_eos=True)
    rig.harness.step(2)
    (running,) = rig.scheduler.running_batch.reqs
    update_weights(rig, "A")
    assert running.kv_fingerprint == "A"
    update_weights(rig, "B")
    assert running.kv_fingerprint == MIXED_WEIGHTS


def test_without_isolation_storage_stays_closed_until_the_flush() -> None:
    rig = TieredScheduler()
    store = rig.store
    assert isinstance(store, MemoryStore)
    update_weights(rig, "B", isolate=False)
    cached_tokens_of(rig, "of B", PROMPT)
    update_weights(rig, "A", isolate=False)
    cached_tokens_of(rig, "again", PROMPT)
    rig.settle()
    assert not store.pages, "KV of B went to storage as A's"
    assert rig.scheduler.flush_cache()
    cached_tokens_of(rig, "of A", PROMPT)
    rig.settle()
    assert store.pages


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_pool_costs_as_few_requests_as_without_tiers(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a retracted request leaves cannot be evicted while it is copied to the host."""
    whole: list[Scheduler] = []
    retract_running = Scheduler._retract_running

    def retract_all(self: Scheduler) -> None:
        whole.append(self)
        retract_running(self)

    monkeypatch.setattr(Scheduler, "_retract_running", retract_all)
    rig = TieredScheduler(num_slots=240, host_slots=1024, max_requests=16, overlap=overlap)
    rig.scheduler.new_token_ratio.value = 0.1
    monkeypatch.setattr(type(rig.scheduler.new_token_ratio), "decay", lambda self: None)
    rig.move_before_each_step(random.Random(0))
    prompts = {f"r{i}": [100 * i + j for j in range(20)] for i in range(6)}
    for rid, prompt in prompts.items():
        rig.harness.generate(rid, prompt, 40, ignore_eos=True)
    rig.harness.run_until_idle()
    for rid, prompt in prompts.items():
        assert rig.harness.tokens(rid) == oracle(prompt, 40)
    assert 0 < rig.scheduler.reports.num_retracted_total <= 3
    assert not whole


def test_the_walk_over_a_large_tree_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieredScheduler()
    checker, now = rig.scheduler.checker, [100.0]
    monkeypatch.setattr("sglang.srt.managers.invariant_checker.time.perf_counter", lambda: now[0])
    walks = []

    def walk(num_requests: int) -> None:
        walks.append(now[0])
        now[0] += 0.25

    monkeypatch.setattr(rig.tree, "check_invariants", walk)
    for _ in range(60):
        checker.check_idle()
        now[0] += 1.0
    assert len(walks) == 3  # 0.25 s each may be a hundredth of the time


# -- anything at any time --------------------------------------------------------------------------


class RandomLife:
    """Requests, aborts, pauses, flushes, evictions, storage that comes and goes."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        page = rng.choice((1, 1, 4, 8))
        speculative = rng.random() < 0.3
        self.num_slots = rng.choice((12, 20, 40)) * max(page, 4)
        self.rig = TieredScheduler(
            page_size=page,
            speculative=speculative,
            is_eagle=speculative and rng.random() < 0.5,
            overlap=rng.random() < 0.5,
            num_slots=self.num_slots,
            host_slots=rng.choice((8, 20, 60)) * max(page, 4),
            write_policy=rng.choice(("write_through", "write_back", "write_through_selective")),
            prefetch_policy=rng.choice(("best_effort", "wait_complete", "timeout")),
            prefetch_threshold=rng.choice((1, page, 3 * page)),
            chunk_size=rng.choice((None, page, 2 * page, 4 * page)),
            policy=rng.choice(("fcfs", "lpm", "dfs-weight")),
            max_requests=rng.choice((2, 5, 8)),
            context_len=90,
            max_prefill_tokens=rng.choice((page, 16, 4096)),
            store=ChaosStore(seed) if rng.random() < 0.7 else None,
        )
        self.rig.move_before_each_step(rng)
        self.trunks = [[rng.randrange(1000) for _ in range(70)] for _ in range(3)]
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()

    def _new_request(self) -> None:
        rng, harness = self.rng, self.rig.harness
        trunk = rng.choice(self.trunks)
        length = rng.randint(1, min(60, self.num_slots - 10))
        cut = rng.randint(0, length) if rng.random() < 0.5 else length
        prompt = trunk[:cut] + [rng.randrange(1000) for _ in range(length - cut)]
        if self.wanted and rng.random() < 0.2:  # the next turn of a conversation
            rid = rng.choice(list(self.wanted))
            prompt = (self.wanted[rid][0] + harness.tokens(rid))[:length]
        rid = f"r{len(self.wanted)}"
        self.wanted[rid] = prompt, rng.randint(0, 20)
        harness.generate(rid, prompt, self.wanted[rid][1], ignore_eos=True)

    def _abort(self) -> None:
        if self.wanted:
            rid = self.rng.choice(list(self.wanted))
            # The ids that begin so are aborted as well.
            self.aborted |= {other for other in self.wanted if other.startswith(rid)}
            self.rig.harness.send(AbortReq(rid=rid))

    def _act(self) -> None:
        rng, harness = self.rng, self.rig.harness
        attach = AttachHiCacheStorageReqInput(
            hicache_storage_backend="memory",
            hicache_storage_backend_extra_config_json='{"prefetch_threshold": 1}',
        )
        actions = {
            self._new_request: 25 if len(self.rig.scheduler.waiting_queue) < 6 else 0,
            self._abort: 4,
            lambda: harness.send(
                PauseGenerationReqInput(mode=rng.choice(("retract", "in_place")))
            ): 1,
            lambda: harness.send(ContinueGenerationReqInput()): 3,
            lambda: harness.send(FlushCacheReqInput(timeout_s=rng.choice((0, 100)))): 1,
            lambda: harness.send(ClearHiCacheReqInput()): 1,
            lambda: harness.send(DetachHiCacheStorageReqInput()): 1,
            lambda: harness.send(attach): 2,
            lambda: self.rig.tree.evict(rng.randint(1, 40)): 2,
            lambda: None: 60,
        }
        rng.choices(list(actions), list(actions.values()))[0]()

    def run(self, num_steps: int) -> None:
        """Live, then end; every answer must be the oracle's, and every slot accounted for."""
        rig, harness = self.rig, self.rig.harness
        for _ in range(num_steps):
            self._act()
            harness.step(self.rng.randint(1, 3))
            rig.tree.check_invariants()
        harness.send(ContinueGenerationReqInput())
        for _ in range(3000):
            harness.step()
            if all(harness.finish(rid) is not None for rid in self.wanted):
                break
        rig.settle()
        for _ in range(20):
            rig.move(self.rng)
            harness.step()
        rig.settle()
        rig.scheduler.checker.check_idle()
        rig.tree.check_invariants(0)
        assert not rig.tree.has_pending_transfers()
        for rid, (prompt, num_new) in self.wanted.items():
            finish, tokens = harness.finish(rid), harness.tokens(rid)
            assert finish is not None, f"{rid} has not ended"
            expected = oracle(prompt, num_new)
            assert tokens == expected[: len(tokens)], rid
            if rid not in self.aborted and finish["type"] != "abort":
                assert len(tokens) == num_new or finish["type"] == "length", rid


@pytest.mark.parametrize("seed", range(24))
def test_random_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_harness.time, "sleep", lambda seconds: None)
    RandomLife(seed).run(num_steps=150)
