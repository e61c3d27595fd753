"""The next step is chosen late, but never so late that the device waits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import pytest

from sglang.srt.managers.io_struct import PauseGenerationReqInput
from sglang.srt.managers.launch_pacer import LaunchPacer
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult
from sglang.test.fakes.fake_worker import FakeModelWorker, oracle
from sglang.test.fakes.scheduler_harness import SchedulerHarness

STEP_S = 0.05


def paced(durations, *, kind="decode", launch_s=0.001):
    """A pacer after steps of these durations from time 0 on; the next of the kind is running."""
    pacer = LaunchPacer()
    now = 0.0
    pacer.on_launch(kind, now, launch_s)
    pacer.on_result(kind, now, now)
    for duration in durations:
        launched_at, now = now, now + duration
        pacer.on_launch(kind, now, launch_s)
        pacer.on_result(kind, launched_at, now)
    return pacer, now


def test_spare_time_ends_before_the_step_does():
    pacer, now = paced([0.010] * 5)
    assert pacer.spare_s(now) == pytest.approx(0.010 - 0.001 - 0.0005 - 0.0003)
    assert pacer.spare_s(now + 0.009) < 0


def test_the_shortest_step_and_the_slowest_launch_count():
    pacer, now = paced([0.010, 0.006, 0.030, 0.010, 0.010])
    pacer.on_launch("decode", now, 0.002)
    assert pacer.spare_s(now) == pytest.approx(0.006 - 0.002 - 0.0005 - 0.00018)


def test_a_slow_host_has_no_spare_time():
    pacer, now = paced([0.001] * 8)
    assert pacer.spare_s(now) <= 0


def test_steps_of_another_kind_say_nothing():
    pacer, now = paced([0.010] * 8)
    pacer.on_launch("prefill", now, 0.001)
    assert pacer.spare_s(now) == 0
    pacer.on_result("prefill", now, now + 0.010)
    pacer.on_launch("decode", now + 0.010, 0.001)
    assert pacer.spare_s(now + 0.010) == 0


def test_a_few_steps_are_not_enough():
    pacer, now = paced([0.010] * 3)
    assert pacer.spare_s(now) == 0


def test_caution_grows_with_each_late_step_and_fades():
    pacer, now = paced([0.010] * 5)
    spare_s = pacer.spare_s(now)
    for _ in range(2):
        now += 0.010
        pacer.on_result("decode", now - 0.010, now, was_done=True)
    assert pacer.spare_s(now) == pytest.approx(spare_s - 0.001)
    for _ in range(300):
        now += 0.010
        pacer.on_result("decode", now - 0.010, now)
    assert spare_s - 0.0003 < pacer.spare_s(now) < spare_s


def test_time_without_a_step_is_no_part_of_any():
    pacer, now = LaunchPacer(), 0.0
    for _ in range(6):
        now += 1.0
        pacer.on_launch("prefill", now, 0.001)
        pacer.on_result("prefill", now, now + 0.010)
    now += 0.5
    pacer.on_launch("prefill", now, 0.001)
    assert pacer.spare_s(now) == pytest.approx(0.010 - 0.001 - 0.0005 - 0.0003)


class _End:
    """The event of a step that ends at a time."""

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


class _TimedWorker(FakeModelWorker):
    """Steps run on a device of their own, one after the other."""

    def __init__(self) -> None:
        super().__init__(num_slots=512, page_size=1, max_requests=4, context_len=256)
        self.end = 0.0
        self.step_s = STEP_S
        self.idle_s: list[float] = []  # of the device, before each step

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = super().forward_batch_generation(batch)
        now = time.perf_counter()
        self.idle_s.append(max(0.0, now - self.end))
        self.end = max(now, self.end) + self.step_s
        result.copy_done = _End(self.end)
        return result


def test_a_pause_meets_the_running_step_alone():
    worker = _TimedWorker()
    harness = SchedulerHarness(worker=worker, overlap=True, context_len=256)
    harness.generate("r", [5, 6, 7], 100, ignore_eos=True)
    harness.step(10)
    queued_s: list[float] = []
    num_steps: list[int] = []

    def pause(timeout_s: float) -> None:
        if not queued_s:
            time.sleep(STEP_S / 4)
            harness.send(PauseGenerationReqInput(mode="in_place"))
            num_steps.append(worker.num_steps)
            queued_s.append(worker.end - time.perf_counter())

    harness.receiver.on_wait = pause
    harness.step(4)
    assert harness.scheduler.is_paused
    assert queued_s[0] < STEP_S
    assert worker.num_steps == num_steps[0]
    assert harness.tokens("r") == oracle([5, 6, 7], len(harness.tokens("r")))


def test_the_device_does_not_wait_for_the_host():
    worker = _TimedWorker()
    harness = SchedulerHarness(worker=worker, overlap=True, context_len=256)
    waits: list[float] = []

    def wait(timeout_s: float) -> None:
        waits.append(timeout_s)
        time.sleep(timeout_s)

    harness.receiver.on_wait = wait
    harness.generate("r", [5, 6, 7], 40, ignore_eos=True)
    harness.step(22)
    assert len(waits) > 10
    assert statistics.median(waits) > STEP_S / 2
    # What a loaded machine needs to wake up is more than is allowed for.
    assert statistics.median(worker.idle_s[8:]) < STEP_S / 4


def answer_s(harness: SchedulerHarness, rid: str, prompt: Sequence[int]) -> float:
    """Seconds to the only token of a request."""
    harness.generate(rid, prompt, 1)
    start = time.perf_counter()
    while harness.finish(rid) is None:
        harness.step()
    return time.perf_counter() - start


def test_a_seldom_used_server_answers_as_soon_as_a_step_has_ended():
    harness = SchedulerHarness(worker=_TimedWorker(), overlap=True, context_len=256)
    for index in range(6):
        answer_s(harness, f"r{index}", [5, 6, 7])
        time.sleep(3 * STEP_S)
    answer_s(harness, "soon", [5, 6, 7])
    assert answer_s(harness, "next", [5, 6, 7]) < 2 * STEP_S


def test_a_short_prompt_is_not_expected_to_take_as_long_as_those_before():
    worker = _TimedWorker()
    harness = SchedulerHarness(worker=worker, overlap=True, context_len=256)
    for index in range(6):
        answer_s(harness, f"r{index}", range(1 + index, 101 + index))
    worker.step_s = STEP_S / 50
    assert answer_s(harness, "short", [5, 6, 7]) < STEP_S / 2
