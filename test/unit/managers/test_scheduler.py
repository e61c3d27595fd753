"""The scheduler over a fake model whose output is a checksum of the KV it can see.

Whatever the loop, page size, chunk, policy or pool size: every request must get the oracle's
tokens, exactly once, and an idle scheduler must have every slot and row accounted for.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GetInternalStateReqInput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    PauseGenerationReqInput,
    PingReqInput,
    ProfileReqInput,
    SlowDownReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult
from sglang.srt.mem_cache.tree_components.base import InvariantError
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.fakes.fake_worker import FakeModelWorker, FakeSpeculativeWorker, oracle
from sglang.test.fakes.scheduler_harness import SchedulerHarness


def _prompts(count: int, seed: int = 0, max_len: int = 40) -> list[list[int]]:
    """Random prompts, some of which share long prefixes."""
    rng = random.Random(seed)
    heads = [[rng.randrange(1, 900) for _ in range(rng.randrange(5, 25))] for _ in range(3)]
    prompts = []
    for _ in range(count):
        head = rng.choice(heads) if rng.random() < 0.6 else []
        tail = [rng.randrange(1, 900) for _ in range(rng.randrange(1, max_len - len(head)))]
        prompts.append(head + tail)
    return prompts


def _expected(prompt: list[int], max_new: int) -> list[int]:
    tokens = oracle(prompt, max_new)
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


def _end(harness: SchedulerHarness, rid: str) -> dict[str, Any]:
    finish = harness.finish(rid)
    assert finish is not None, f"{rid} has not ended"
    return finish


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("disable_cache", [False, True])
def test_tokens_do_not_depend_on_the_schedule(overlap, page_size, chunk_size, disable_cache):
    harness = SchedulerHarness(
        num_slots=512,
        page_size=page_size,
        chunk_size=chunk_size,
        overlap=overlap,
        disable_cache=disable_cache,
    )
    prompts = _prompts(24)
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}", prompt, 12)
        if index % 5 == 0:
            harness.step(2)
    harness.run_until_idle()
    for index, prompt in enumerate(prompts):
        assert harness.tokens(f"r{index}") == _expected(prompt, 12)
    assert harness.scheduler.checker.num_checks > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_slots", [192, 1024])
def test_steps_of_several_tokens_change_no_output(overlap, page_size, num_slots):
    """Also with a pool so small that requests are retracted, and ends inside an accepted run."""
    worker = FakeSpeculativeWorker(
        num_slots=num_slots, page_size=page_size, max_requests=16, context_len=128
    )
    harness = SchedulerHarness(
        worker=worker,
        page_size=page_size,
        chunk_size=16,
        overlap=overlap,
        max_requests=16,
        conservativeness=0.05,
    )
    prompts = _prompts(24, seed=3)
    lengths = [1 + (17 * index) % 60 for index in range(len(prompts))]
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        harness.generate(f"r{index}", prompt, length)
        if index % 5 == 0:
            harness.step(2)
    harness.run_until_idle()
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        assert harness.tokens(f"r{index}") == _expected(prompt, length)
    assert harness.scheduler.checker.num_checks > 0
    if num_slots == 192:
        assert harness.scheduler.reports.num_retracted_total > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_changes_no_output(overlap, page_size):
    harness = SchedulerHarness(
        num_slots=96, page_size=page_size, overlap=overlap, chunk_size=16, conservativeness=0.2
    )
    prompts = _prompts(12, seed=3, max_len=30)
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}", prompt, 30, ignore_eos=True)
    harness.run_until_idle()
    assert harness.scheduler.reports.num_retracted_total > 0
    for index, prompt in enumerate(prompts):
        assert harness.tokens(f"r{index}") == oracle(prompt, 30)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 3])
@pytest.mark.parametrize("max_new", [1, 2, 5])
def test_no_step_is_launched_behind_a_known_end(overlap, num_reqs, max_new):
    """The overlap loop counts tokens in flight, from the one that the prefill brings on."""
    harness = SchedulerHarness(overlap=overlap)
    for index in range(num_reqs):
        harness.generate(f"r{index}", [1 + index, 2, 3], max_new, ignore_eos=True)
    harness.run_until_idle()
    assert harness.worker.num_steps == max_new


class _NotesBudgets(FakeSpeculativeWorker):
    """Remembers the budget that each request had left when a decode step took it."""

    budgets: list[int]

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if batch.forward_mode is ForwardMode.DECODE:
            # The token of this step is in flight already.
            self.budgets += [req.remaining_new_tokens + 1 for req in batch.reqs]
        return super().forward_batch_generation(batch)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 3])
def test_steps_of_several_tokens_leave_out_who_has_a_known_end(overlap, num_reqs):
    for seed in range(8):
        worker = _NotesBudgets(
            num_slots=256, page_size=1, max_requests=4, context_len=64, seed=seed
        )
        worker.budgets = []
        harness = SchedulerHarness(worker=worker, overlap=overlap, max_requests=4, context_len=64)
        for index in range(num_reqs):
            harness.generate(f"r{index}", [1 + index, 2, 3], 20, ignore_eos=True)
        harness.run_until_idle()
        assert len(worker.budgets) > 4 and min(worker.budgets) > 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "random", "dfs-weight", "lof", "priority"])
def test_every_policy_serves_everybody(policy):
    harness = SchedulerHarness(num_slots=160, policy=policy, overlap=True, chunk_size=16)
    prompts = _prompts(16, seed=5)
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}", prompt, 6, priority=index % 3)
    harness.run_until_idle()
    for index, prompt in enumerate(prompts):
        assert harness.tokens(f"r{index}") == _expected(prompt, 6)


class _SlowPrefillWorker(FakeModelWorker):
    """Each chunk takes some time on the device."""

    chunk_s = 0.05

    def forward_batch_generation(self, batch):
        if batch.forward_mode is ForwardMode.EXTEND:
            time.sleep(self.chunk_s)
        return super().forward_batch_generation(batch)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_the_prefill_ends_when_its_last_chunk_does(overlap, num_chunks):
    worker = _SlowPrefillWorker(num_slots=256, page_size=1, max_requests=16, context_len=128)
    harness = SchedulerHarness(worker=worker, chunk_size=16, overlap=overlap)
    before = time.time()
    harness.generate("r", range(1, 16 * num_chunks), 4, ignore_eos=True)
    harness.run_until_idle()
    times = harness.outputs["r"][-1].timings or {}
    assert before <= times["forward_entry_time"] <= before + worker.chunk_s
    spent = times["prefill_finished_time"] - times["forward_entry_time"]
    assert num_chunks * worker.chunk_s <= spent <= time.time() - before


def test_prefix_is_reused_and_reported():
    harness = SchedulerHarness()
    prompt = list(range(1, 40))
    harness.generate("cold", prompt, 4)
    harness.run_until_idle()
    computed = harness.worker.num_tokens_computed
    harness.generate("warm", prompt, 4)
    harness.run_until_idle()
    assert harness.worker.num_tokens_computed == computed + 1
    assert harness.outputs["warm"][-1].cached_tokens == len(prompt) - 1
    assert harness.tokens("warm") == harness.tokens("cold")


def test_namespaces_share_nothing():
    harness = SchedulerHarness()
    prompt = list(range(1, 40))
    harness.generate("a", prompt, 4, extra_key="a")
    harness.run_until_idle()
    harness.generate("b", prompt, 4, extra_key="b")
    harness.run_until_idle()
    assert harness.outputs["b"][-1].cached_tokens == 0


def test_finish_shapes():
    harness = SchedulerHarness()
    prompt = [5, 6, 7]
    tokens = oracle(prompt, 8)
    harness.generate("length", prompt, 5, ignore_eos=True)
    harness.generate("stop", prompt, 8, stop_token_ids=[tokens[3]])
    harness.generate("none", prompt, 0)
    harness.run_until_idle()
    assert harness.finish("length") == {"type": "length", "length": 5}
    assert harness.finish("stop") == {"type": "stop", "matched": tokens[3]}
    assert harness.tokens("stop") == tokens[:4]
    assert harness.finish("none") == {"type": "length", "length": 0}
    assert harness.tokens("none") == []


@pytest.mark.parametrize("overlap", [False, True])
def test_random_aborts_lose_nothing(overlap):
    rng = random.Random(11)
    harness = SchedulerHarness(num_slots=128, page_size=4, overlap=overlap, chunk_size=8)
    prompts = _prompts(60, seed=7)
    aborted = set()
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}-", prompt, 20, stream=True, ignore_eos=True)
        harness.step(rng.randrange(3))
        if rng.random() < 0.5:
            victim = rng.randrange(index + 1)
            if harness.finish(f"r{victim}-") is None:
                aborted.add(victim)
                harness.send(AbortReq(rid=f"r{victim}-"))
    harness.run_until_idle()
    num_aborted = 0
    for index, prompt in enumerate(prompts):
        finish = harness.finish(f"r{index}-")
        assert finish is not None
        expected = oracle(prompt, 20)
        tokens = harness.tokens(f"r{index}-")
        if finish["type"] == "abort":
            num_aborted += 1
            assert index in aborted
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert num_aborted > 5


def test_abort_all_and_prefix():
    harness = SchedulerHarness(max_requests=2)
    for rid in ("x_0", "x_1", "y_0", "y_1"):
        harness.generate(rid, [1, 2, 3], 50, ignore_eos=True)
    harness.step(3)
    harness.send(AbortReq(rid="x_"))
    harness.step()
    assert _end(harness, "x_0")["type"] == "abort" and _end(harness, "x_1")["type"] == "abort"
    harness.step(3)
    assert harness.finish("y_0") is None
    harness.send(AbortReq(rid=""))  # names nobody
    harness.step()
    assert harness.finish("y_0") is None
    harness.send(AbortReq(abort_all=True, abort_message="stop it"))
    harness.run_until_idle()
    assert _end(harness, "y_0")["message"] == "stop it"


def test_queue_limit_and_priority():
    harness = SchedulerHarness(max_requests=1, max_queued=2, enable_priority=True)
    harness.generate("run", [1], 30, ignore_eos=True)
    harness.step()
    harness.generate("a", [2], 4, priority=1)
    harness.generate("b", [3], 4, priority=1)
    harness.generate("low", [4], 4, priority=0)
    harness.step()
    assert _end(harness, "low")["status_code"] == 503
    assert _end(harness, "low")["message"] == "The request queue is full."
    harness.generate("high", [5], 4, priority=9)
    harness.step()
    assert _end(harness, "b")["status_code"] == 503
    harness.run_until_idle()
    assert harness.tokens("high") == _expected([5], 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_flush_clears_everything_or_nothing(overlap):
    harness = SchedulerHarness(overlap=overlap)
    harness.generate("r", list(range(1, 30)), 6, ignore_eos=True)
    harness.step(2)
    harness.send(FlushCacheReqInput(control_id="busy"))
    harness.step()
    assert harness.replies[-1].control_id == "busy" and not harness.replies[-1].success
    harness.run_until_idle()
    assert harness.tokens("r") == oracle(list(range(1, 30)), 6)
    assert harness.tree.total_size() > 0
    harness.send(FlushCacheReqInput(control_id="idle"))
    harness.step()
    assert harness.replies[-1].success
    assert harness.tree.total_size() == 0
    assert harness.scheduler.token_to_kv_pool_allocator.available_size() == 256
    harness.send(FlushCacheReqInput(control_id="again"))
    harness.step()
    assert harness.replies[-1].success


@pytest.mark.parametrize("overlap", [False, True])
def test_who_is_busy_says_with_what(overlap):
    harness = SchedulerHarness(overlap=overlap, chunk_size=8)
    assert harness.scheduler._why_busy() is None
    harness.generate("r", list(range(1, 30)), 6, ignore_eos=True)
    seen: list[str | None] = []
    while (busy := harness.scheduler._why_busy()) is not None or not seen:
        seen.append(busy)
        harness.step()
    # A prompt whose first step is not merged into the running batch yet counts as well.
    assert not any(told and told.startswith("#queue-req: 0, #running-req: 0") for told in seen)
    assert "#queue-req: 0, #running-req: 1 (a prompt is being computed)" in seen
    assert "#queue-req: 0, #running-req: 1" in seen
    harness.run_until_idle()
    harness.send(PauseGenerationReqInput(control_id="p", mode="in_place"))
    harness.step()
    harness.generate("q", [1, 2, 3], 2)
    harness.step()
    told = "#queue-req: 1, #running-req: 0 (generation is paused)"
    assert harness.scheduler._why_busy() == told


@pytest.mark.parametrize("overlap", [False, True])
def test_flush_right_after_the_last_token_succeeds(overlap):
    harness = SchedulerHarness(overlap=overlap)
    harness.generate("r", [1, 2, 3], 6, ignore_eos=True)
    while harness.finish("r") is None:
        harness.step()
    harness.send(FlushCacheReqInput(control_id="now"))
    harness.step()
    assert harness.replies[-1].success


def test_deferred_flush_waits_and_only_one_at_a_time():
    harness = SchedulerHarness()
    harness.generate("r", [1, 2, 3], 20, ignore_eos=True)
    harness.step(2)
    harness.send(
        FlushCacheReqInput(control_id="first", timeout_s=60),
        FlushCacheReqInput(control_id="second", timeout_s=60),
    )
    harness.step()
    assert [r.control_id for r in harness.replies] == ["second"]
    assert harness.replies[0].message == "Another flush_cache is already in progress."
    harness.run_until_idle()
    harness.step()
    assert harness.replies[-1].control_id == "first" and harness.replies[-1].success
    harness.generate("s", [1, 2, 3], 50, ignore_eos=True)
    harness.step(2)
    harness.send(FlushCacheReqInput(control_id="late", timeout_s=5))
    harness.step()
    harness.receiver.now_offset = 10
    harness.step()
    assert harness.replies[-1].message == "Timed out waiting for idle state."
    harness.run_until_idle()
    assert harness.tree.total_size() > 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_continue_change_no_output(overlap, mode):
    harness = SchedulerHarness(overlap=overlap, chunk_size=8, page_size=4)
    prompts = _prompts(6, seed=9)
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}", prompt, 15, stream=True, ignore_eos=True)
    harness.step(6)
    harness.send(PauseGenerationReqInput(control_id="p", mode=mode))
    harness.step()
    before = {r: harness.tokens(r) for r in list(harness.outputs)}
    harness.step(5)
    assert {r: harness.tokens(r) for r in before} == before
    harness.send(FlushCacheReqInput(control_id="f"), PingReqInput(control_id="ping"))
    harness.step()
    flush, ping = harness.replies[-2:]
    assert ping.success and flush.success == (mode == "retract")
    harness.send(ContinueGenerationReqInput(control_id="c"))
    harness.run_until_idle()
    for index, prompt in enumerate(prompts):
        assert harness.tokens(f"r{index}") == oracle(prompt, 15)
    retracted = sum(o[-1].num_retractions > 0 for o in harness.outputs.values())
    assert (retracted > 0) == (mode == "retract")


def test_abort_while_paused_in_place_returns_at_once():
    harness = SchedulerHarness(overlap=True)
    harness.generate("r", [1, 2, 3], 40, ignore_eos=True)
    harness.step(5)
    harness.send(PauseGenerationReqInput(control_id="p", mode="in_place"))
    harness.step()
    harness.send(AbortReq(abort_all=True))
    harness.step()
    assert _end(harness, "r")["type"] == "abort"
    harness.send(ContinueGenerationReqInput(control_id="c"))
    harness.run_until_idle()


def test_time_limits_of_a_request_whose_memory_was_taken_back(monkeypatch):
    """It ran longer than anybody may wait: it goes on, and is told how long it waited in all."""
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "10")
    harness = SchedulerHarness()
    harness.generate("r", [1, 2, 3], 8, ignore_eos=True)
    harness.step(3)
    harness.receiver.now_offset = 60
    harness.step()
    harness.scheduler._retract_running()
    harness.receiver.now_offset = 65
    harness.run_until_idle()
    assert harness.tokens("r") == oracle([1, 2, 3], 8)
    timings = harness.outputs["r"][-1].timings
    assert timings is not None and 5 <= timings["queue_time"] < 8


@pytest.mark.parametrize(("limit_s", "is_late"), [(10, True), (25, False)])
def test_running_adds_up_without_the_waiting_in_between(monkeypatch, limit_s, is_late):
    """Twice 8 s of running and 50 s of waiting."""
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", str(limit_s))
    harness = SchedulerHarness()
    harness.generate("r", [1, 2, 3], 40, ignore_eos=True)
    harness.step(3)
    harness.receiver.now_offset = 8
    harness.step()
    harness.scheduler._retract_running()
    harness.receiver.now_offset = 58
    harness.step(2)
    assert harness.finish("r") is None
    harness.receiver.now_offset = 66
    harness.run_until_idle()
    assert (_end(harness, "r").get("status_code") == 503) == is_late


@pytest.mark.parametrize("modes", [("in_place",), ("retract",), ("in_place", "retract")])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_pause_counts_neither_as_waiting_nor_as_running(monkeypatch, overlap, modes):
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "10")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "10")
    harness = SchedulerHarness(max_requests=1, overlap=overlap)
    for rid in ("runs", "waits"):
        harness.generate(rid, [1, 2, 3], 40, ignore_eos=True)
    harness.step(3)
    harness.receiver.now_offset = 4
    for mode in modes:
        harness.send(PauseGenerationReqInput(control_id="p", mode=mode))
        harness.step()
        harness.receiver.now_offset += 500
    harness.generate("came", [4, 5], 40, ignore_eos=True)
    harness.step()
    harness.receiver.now_offset += 500
    harness.send(ContinueGenerationReqInput(control_id="c"))
    harness.step(2)
    harness.receiver.now_offset += 5
    harness.step()
    assert not any(harness.finish(rid) for rid in ("runs", "waits", "came"))
    harness.receiver.now_offset += 4
    harness.step(2)
    assert [_end(harness, rid)["status_code"] for rid in ("runs", "waits")] == [503, 503]
    assert harness.finish("came") is None
    harness.run_until_idle()
    assert harness.tokens("came") == oracle([4, 5], 40)


def test_weight_version_spans():
    harness = SchedulerHarness()
    harness.generate("r", [1, 2, 3], 10, ignore_eos=True)
    harness.step(4)
    harness.send(UpdateWeightVersionReqInput(new_version="v2", abort_all_requests=False))
    harness.run_until_idle()
    spans = harness.outputs["r"][-1].weight_versions
    assert [s[0] for s in spans] == ["default", "v2"]
    assert spans[0][1] == 0 and spans[0][2] == spans[1][1] and spans[1][2] == 10
    harness.generate("s", [1, 2, 3], 4, ignore_eos=True)
    harness.run_until_idle()
    assert harness.outputs["s"][-1].weight_versions == [("v2", 0, 4)]


def test_health_probe_when_busy_and_idle():
    harness = SchedulerHarness()
    harness.generate("h1", [0], 1, is_health_check=True)
    harness.run_until_idle()
    assert _end(harness, "h1")["type"] != "abort"
    assert harness.tree.total_size() == 0
    harness.generate("r", [1, 2, 3], 20, ignore_eos=True)
    harness.step(2)
    harness.generate("h2", [0], 1, is_health_check=True)
    harness.step()
    assert harness.finish("h2") is not None
    harness.run_until_idle()


def test_loads_report():
    harness = SchedulerHarness(max_requests=1)
    for rid in "abc":
        harness.generate(rid, [1, 2, 3], 20, ignore_eos=True)
    harness.step(2)
    harness.send(GetLoadsReqInput(control_id="l"))
    harness.step()
    reply = harness.replies[-1]
    assert isinstance(reply, GetLoadsReqOutput)
    load = reply.load
    assert load["num_running_reqs"] == 1 and load["num_waiting_reqs"] == 2
    assert load["num_total_reqs"] == 3
    harness.run_until_idle()


def test_a_lone_request_may_fill_the_pool_to_the_last_slot():
    for page_size, prompt_len in ((1, 31), (16, 31), (16, 17)):
        harness = SchedulerHarness(num_slots=32, page_size=page_size)
        prompt = list(range(1, prompt_len + 1))
        harness.generate("r", prompt, 100, ignore_eos=True)
        harness.run_until_idle()
        assert harness.tokens("r") == oracle(prompt, 32 - prompt_len)


def test_idle_check_notices_a_leak():
    """Negative control: a slot taken behind the scheduler's back is found at the next idle."""
    harness = SchedulerHarness()
    harness.scheduler.token_to_kv_pool_allocator.alloc(1)
    harness.generate("r", [1, 2], 2)
    with pytest.raises(InvariantError, match="1 lost"):
        harness.run_until_idle()


def test_oracle_notices_a_wrong_slot():
    """Negative control: one slot with foreign content changes the tokens."""
    harness = SchedulerHarness()
    prompt = list(range(1, 20))
    harness.generate("a", prompt, 4, ignore_eos=True)
    harness.run_until_idle()
    harness.worker.slot_tokens[harness.worker.slot_tokens == 7] = 8
    harness.generate("b", prompt, 4, ignore_eos=True)
    harness.run_until_idle()
    assert harness.tokens("b") != oracle(prompt, 4)


def test_profile_writes_a_trace_or_says_why_not(tmp_path):
    harness = SchedulerHarness()
    file = tmp_path / "file"
    file.write_text("in the way")
    for folder, success in ((tmp_path / "traces", True), (file, False)):
        harness.send(ProfileReqInput(control_id="go", output_dir=str(folder), activities=["CPU"]))
        harness.step()
        assert harness.replies[-1].success
        harness.generate(f"r{success}", [1, 2, 3], 3)
        harness.run_until_idle()
        harness.send(ProfileReqInput(control_id="stop", start=False))
        harness.step()
        assert harness.replies[-1].success == success, harness.replies[-1].message
    assert list((tmp_path / "traces").glob("*.trace.json.gz"))


def test_hostile_control_requests_are_answered_not_fatal(monkeypatch):
    harness = SchedulerHarness()
    for seconds in (-1.0, 1e308, float("nan")):
        harness.send(SlowDownReqInput(control_id="s", forward_sleep_time=seconds))
        harness.step()
        assert not harness.replies[-1].success
    harness.send(ProfileReqInput(control_id="p", activities=["nonsense"]))
    harness.step()
    assert not harness.replies[-1].success
    monkeypatch.setattr(harness.scheduler.reports, "internal_state", lambda: 1 // 0)
    harness.send(GetInternalStateReqInput(control_id="i"))
    harness.step()
    assert harness.replies[-1].message.startswith("ZeroDivisionError")
    harness.generate("r", [1, 2, 3], 3)
    harness.run_until_idle()
    assert harness.tokens("r") == _expected([1, 2, 3], 3)


def test_clients_have_their_tokens_before_the_cache_takes_the_sequence():
    harness = SchedulerHarness()
    cached_when_sent = []
    send = harness._on_output

    def on_output(message: Any) -> None:
        cached_when_sent.append(harness.tree.total_size())
        send(message)

    harness.scheduler.streamer._send = on_output
    harness.generate("r", range(1, 17), 3, stream=True, ignore_eos=True)
    harness.run_until_idle()
    assert cached_when_sent == [0, 16, 16]
    assert harness.tree.total_size() == 18  # the last token has no KV
    assert len(harness.tokens("r")) == 3 and _end(harness, "r")["type"] == "length"
