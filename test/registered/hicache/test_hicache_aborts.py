"""Requests that leave the queue at every stage of their prefetch, by every way out.

After each: no capacity is taken, no page is lost or free twice, the threads are idle, and the next
request is served from storage.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.request_receiver import ReceivedStep
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=25, suite="hicache")

PAGE = 8
LENGTH = 130
FULL = 128  # tokens of a prompt that storage can have
MAX_QUEUED = 4


def prompt(number: int) -> list[int]:
    return [3 + (number * 37 + 7 * i + i * i // 9) % 190 for i in range(LENGTH)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def served(model: Path) -> Iterator[ServedScheduler]:
    config = {
        "backend_name": "faulty",
        "module_path": "sglang.test.fakes.fault_store",
        "class_name": "FaultStore",
        "prefetch_threshold": PAGE,
    }
    with ServedScheduler(
        model,
        *("--max-total-tokens", 512, "--page-size", PAGE, "--max-running-requests", 2),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
        *("--max-queued-requests", MAX_QUEUED, "--enable-priority-scheduling"),
    ) as running:
        yield running
        store_of(running).release()


def store_of(served: ServedScheduler) -> FaultStore:
    store = served.tree.cache_controller.storage_backend
    assert isinstance(store, FaultStore)
    return store


def fill_storage(served: ServedScheduler, count: int) -> list[list[int]]:
    """Let storage know `count` prompts, the tiers above it nothing; their tokens."""
    answers = [served.answer(prompt(number), 4).tokens for number in range(count)]
    served.flush()
    return answers


def assert_nothing_is_left(served: ServedScheduler, answers: list[list[int]]) -> None:
    store = store_of(served)
    store.release()
    store.plans.clear()
    store.delay_s = 0.0
    served.tree.prefetch_stop_policy = "wait_complete"
    served.scheduler.brake.sleep_s = None
    served.settle()
    assert served.tree.prefetch_tokens_occupied == 0
    assert not served.tree.ongoing_prefetch
    assert not served.tree.prefetch_loaded_tokens_by_reqid
    pool = served.tree.cache_controller.mem_pool_host
    # Pages of reads that hung come back as soon as those have returned.
    served.run_until(lambda: served.tree._num_returning_pages == 0)
    served.flush()
    assert pool.available_size() == pool.size
    again = served.answer(prompt(0), 4)
    assert again.tokens == answers[0]
    assert again.sources["storage"] == FULL


# -- stages ----------------------------------------------------------------------------------------


def in_query(served: ServedScheduler, rid: str) -> None:
    """The look-up of its pages does not return."""
    store_of(served).plans.append(FaultPlan(fault=Fault.HANG, call="exists", nth=None))
    served.submit(prompt(1), 4, rid=rid)
    served.step(2)
    store_of(served).wait_until_hanging()


def behind_a_query(served: ServedScheduler, rid: str) -> None:
    """The look-up of another one does not return."""
    in_query(served, "ahead")
    served.submit(prompt(2), 4, rid=rid)
    served.step(2)


def in_read(served: ServedScheduler, rid: str) -> None:
    """Its host pages are being read into."""
    store_of(served).plans.append(FaultPlan(fault=Fault.HANG, call="get", nth=None))
    served.submit(prompt(1), 4, rid=rid)
    served.run_until(lambda: is_allocated(served, rid))
    store_of(served).wait_until_hanging()


def behind_a_read(served: ServedScheduler, rid: str) -> None:
    """It has host pages and waits for the reads of another one."""
    in_read(served, "ahead")
    served.submit(prompt(2), 4, rid=rid)
    served.run_until(lambda: is_allocated(served, rid))


def done_and_waiting(served: ServedScheduler, rid: str) -> None:
    """All is in the tree, but two others run and it waits for its turn."""
    for number in range(2):
        served.submit([5, 6, number], 150, rid=f"running{number}", priority=9)
    served.scheduler.brake.sleep_s = 0.005
    served.run_until(lambda: len(served.scheduler.running_batch.reqs) == 2)
    served.submit(prompt(1), 4, rid=rid)
    served.run_until(lambda: rid in served.tree.prefetch_loaded_tokens_by_reqid)


def is_allocated(served: ServedScheduler, rid: str) -> bool:
    found = served.tree.ongoing_prefetch.get(rid)
    return found is not None and found.is_allocated


# -- ways out --------------------------------------------------------------------------------------


def aborted(served: ServedScheduler, rid: str) -> None:
    served.send(AbortReq(rid=rid))
    served.step(2)


def all_aborted(served: ServedScheduler, rid: str) -> None:
    served.send(AbortReq(abort_all=True))
    served.step(2)


def pushed_out(served: ServedScheduler, rid: str) -> None:
    """The queue is full and somebody more important comes."""
    for number in range(MAX_QUEUED):
        served.submit([7, 8, number], 2, rid=f"important{number}", priority=5)
    # All at once: in one step the queue is never empty in between.
    served.step(1)


def expired(served: ServedScheduler, rid: str) -> None:
    """It waited for longer than the limit."""
    deadline = time.monotonic() + 5
    while served.finish(rid) is None and time.monotonic() < deadline:
        served.step()


STAGES = (in_query, behind_a_query, in_read, behind_a_read, done_and_waiting)
WAYS = (aborted, all_aborted, pushed_out, expired)


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("reach", STAGES, ids=lambda stage: stage.__name__)
def test_leaving(
    served: ServedScheduler,
    reach: Callable[[ServedScheduler, str], None],
    leave: Callable[[ServedScheduler, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = fill_storage(served, 3)
    reach(served, "victim")
    if leave is expired:
        monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "0.1")
    if leave is pushed_out and reach in (behind_a_query, behind_a_read):
        served.send(AbortReq(rid="ahead"))  # else that one would have to go first
    leave(served, "victim")
    finish = served.finish("victim")
    assert finish is not None and finish["type"] == "abort", finish
    monkeypatch.delenv("SGLANG_REQ_WAITING_TIMEOUT", raising=False)
    served.send(AbortReq(abort_all=True))
    assert_nothing_is_left(served, answers)


def test_the_same_request_again_gets_its_own_pages(served: ServedScheduler) -> None:
    """A late result of the first attempt is nobody's."""
    answers = fill_storage(served, 3)
    in_query(served, "twice")
    served.send(AbortReq(rid="twice"))
    served.step(2)
    served.outputs.clear()
    served.submit(prompt(2), 4, rid="twice")
    served.step(2)
    store_of(served).release()
    store_of(served).plans.clear()
    served.run_until(lambda: served.finish("twice") is not None)
    answer = served.answer_of("twice")
    assert answer.tokens == answers[2]
    assert answer.sources["storage"] == FULL
    assert_nothing_is_left(served, answers)


def test_who_only_waits_for_storage_sleeps(served: ServedScheduler) -> None:
    """The loop sleeps until storage, or a message, wakes it; it does not look again and again."""
    answers = fill_storage(served, 3)
    in_query(served, "waiting")
    seen: list[tuple[bool, bool]] = []
    receiver = served.scheduler.receiver
    recv = receiver.recv

    def spy(*, idle: bool, transfers: bool = False, **rest: Any) -> ReceivedStep:
        seen.append((idle, transfers))
        return recv(idle=idle, transfers=transfers, **rest)

    receiver.recv = spy  # type: ignore[method-assign]
    served.step(3)
    assert seen == [(True, False)] * 3
    store_of(served).release()
    served.run_until(lambda: served.finish("waiting") is not None)
    assert served.answer_of("waiting").sources["storage"] == FULL
    assert_nothing_is_left(served, answers)


def test_retracted_requests_do_not_leave_anything(served: ServedScheduler) -> None:
    """Too little device memory for two: one of them starts over, with a prefetch of its own."""
    answers = fill_storage(served, 4)
    rids = [served.submit(prompt(number), 150) for number in range(4)]
    served.run_until(lambda: all(served.finish(rid) for rid in rids))
    assert served.scheduler.reports.num_retracted_total > 0
    for number, rid in enumerate(rids):
        assert served.answer_of(rid).tokens[:4] == answers[number]
    assert_nothing_is_left(served, answers)


@pytest.mark.parametrize("seed", range(6))
def test_storms(served: ServedScheduler, seed: int) -> None:
    """Hundreds of requests come and go while storage is slow and unreliable."""
    answers = fill_storage(served, 8)
    rng = random.Random(seed)
    store = store_of(served)
    served.tree.prefetch_stop_policy = rng.choice(["best_effort", "wait_complete", "timeout"])
    alive: dict[str, int] = {}
    for number in range(150):
        store.delay_s = rng.choice([0.0, 0.0, 0.001, 0.004])
        store.failure_rate = rng.choice([0.0, 0.0, 0.1])
        which = rng.randrange(8)
        alive[f"s{number}"] = which
        served.submit(prompt(which), 4, rid=f"s{number}", priority=rng.randrange(3))
        served.step(rng.randrange(3))
        if rng.random() < 0.4:
            served.send(AbortReq(rid=rng.choice(list(alive))))
        if rng.random() < 0.03:
            served.send(AbortReq(abort_all=True))
    store.failure_rate = 0.0
    served.run_until_idle()
    for rid, which in alive.items():
        answer = served.answer_of(rid)
        if answer.finish["type"] != "abort":
            assert answer.tokens == answers[which]
    assert any(served.answer_of(rid).finish["type"] == "length" for rid in alive)
    assert_nothing_is_left(served, answers)
