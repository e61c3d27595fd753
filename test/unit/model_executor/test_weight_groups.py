"""Groups are joined beside the scheduler, and nothing that a trainer does keeps it for long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sglang.srt.model_executor import weight_group_join as joining
from sglang.srt.model_executor import weight_groups as module
from sglang.srt.model_executor import weight_updater
from sglang.srt.model_executor.weight_groups import UpdateTimeouts
from sglang.srt.model_executor.weight_updater import WeightUpdater, WeightUpdateResult
from sglang.srt.utils.attempt import AttemptState
from sglang.srt.utils.network import get_free_port
from sglang.test.fakes.trainer_group import Opening, ThreadTrainer

from .test_weight_updater import UP, Runner, assert_holds, make_runner, weights

TIMEOUTS = UpdateTimeouts(join_s=5, receive_s=1)
NAMES = ("g", "other")


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """A thread that is in torch when this process ends would abort it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith(("join-", "trainer-", "weight-group")):
            thread.join(15)
            assert not thread.is_alive()


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return make_runner(tmp_path)


def make_updater(runner: Runner, timeouts: UpdateTimeouts = TIMEOUTS) -> WeightUpdater:
    return WeightUpdater(runner, model_path="x", timeouts=timeouts)


@pytest.fixture
def updater(runner: Runner) -> Iterator[WeightUpdater]:
    made = make_updater(runner)
    yield made
    for name in NAMES:  # this process may not keep them: the next test's have the same names
        made.destroy_group(name)


def nobody(port: int | None = None, name: str = "g") -> tuple[str, int, int, int, str, str]:
    return "127.0.0.1", port or get_free_port(), 1, 2, name, "gloo"


def update(updater: WeightUpdater, name: str = "g") -> WeightUpdateResult:
    return updater.update_from_distributed([UP], ["float32"], [[10, 24]], name)


def send(updater: WeightUpdater, trainer: ThreadTrainer, name: str = "g") -> WeightUpdateResult:
    thread = threading.Thread(target=trainer.broadcast, args=(torch.ones(10, 24),))
    thread.start()
    result = update(updater, name)
    thread.join()
    return result


def test_a_group_that_is_being_opened(runner: Runner, updater: WeightUpdater) -> None:
    place = nobody()
    start = time.monotonic()
    opening = Opening(updater, *place)
    updater.poll_groups()
    assert time.monotonic() - start < 0.5 and not opening.results

    again = Opening(updater, *nobody()).results
    assert "being opened already" in again[0].message and not again[0].success
    early = update(updater)
    assert not early.success and "still being opened" in early.message
    assert "was closed" not in early.message
    assert updater.discard_distributed([UP], ["float32"], [[10, 24]], "g") is not None
    unknown = update(updater, "nosuch")
    assert "init_weights_update_group" in unknown.message
    assert updater.begin().success and updater.end().success

    trainer = ThreadTrainer("g", port=place[1])
    trainer.join()
    assert opening.wait().success
    assert send(updater, trainer).success
    assert_holds(runner, weights(0) | {UP: torch.ones(10, 24)})


def test_groups_open_in_the_order_in_which_their_trainers_come(updater: WeightUpdater) -> None:
    first, trainer = Opening(updater, *nobody(name="other")), ThreadTrainer("g")
    second = Opening(updater, *trainer.place())
    trainer.join()
    assert second.wait(10).success and not first.results
    assert send(updater, trainer).success


def silent_port() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_whom_waiting_is_in_vain_for(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_GRACE_S", 0.2)
    updater = make_updater(runner, UpdateTimeouts(join_s=0.3))
    stranger, port = silent_port()
    lonely = ThreadTrainer("other", world_size=3, timeout_s=1)
    lonely.join()
    with closing(stranger):
        for place, texts in (
            (nobody(), ["no trainer listens at 127.0.0.1"]),
            (nobody(port), ["time is up"]),  # torch would wait for its answer for ever
            (lonely.place(), ["timeout", "time is up"]),  # torch's time or ours, almost the same
        ):
            start = time.monotonic()
            result = Opening(updater, *place).wait(10)
            assert not result.success, result.message
            assert any(text in result.message for text in texts), result.message
            assert result.message.startswith("Failed to initialize custom process group: ")
            assert time.monotonic() - start < 4
    assert "outside of" in Opening(updater, *nobody(70000)).results[0].message
    nowhere = Opening(updater, "", *nobody()[1:]).results[0].message
    assert "master_address must not be empty" in nowhere


@pytest.mark.parametrize("phase", ["no trainer", "members missing", "joined"])
def test_destroying_what_is_being_opened(updater: WeightUpdater, phase: str) -> None:
    trainer = ThreadTrainer("g", 2 if phase == "joined" else 3, timeout_s=2)
    opening = Opening(updater, *(nobody() if phase == "no trainer" else trainer.place()))
    if phase == "joined":
        trainer.join().join(10)
    time.sleep(0.3)  # at the place that the case is about
    assert not opening.results

    start = time.monotonic()
    assert updater.destroy_group("g").success
    assert time.monotonic() - start < 1
    assert "was destroyed before all members were there" in opening.results[0].message
    assert not updater.destroy_group("g").success
    assert "init_weights_update_group" in update(updater).message

    new = ThreadTrainer("g")
    opening = Opening(updater, *new.place())
    new.join()
    assert opening.wait().success and send(updater, new).success


@pytest.mark.parametrize("sends", [False, True])
def test_broadcasts_that_never_return_cost_a_timeout(
    runner: Runner, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    trainer, blocked = ThreadTrainer("g"), threading.Event()
    opening = Opening(updater, *trainer.place())
    trainer.join()
    assert opening.wait().success
    if not sends:  # as NCCL does where a member is missing
        monkeypatch.setattr(module, "_broadcasts", lambda group, targets: blocked.wait(30) or [])
    start = time.monotonic()
    result = send(updater, trainer) if sends else update(updater)
    assert time.monotonic() - start < 3
    blocked.set()
    assert result.success is sends
    if not sends:
        assert "nothing came for 1 s; group g was closed, open it again." in result.message
        assert not result.weights_mixed
        assert_holds(runner, weights(0))
        assert "Please call" in update(updater).message


@pytest.fixture
def dead_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Groups are destroyed as NCCL's are whose other side is gone: not before an abort, or this."""
    are_back = threading.Event()
    aborted: list[dist.ProcessGroup] = []
    destroy, abort = dist.destroy_process_group, dist.ProcessGroup.abort

    def note_abort(group: dist.ProcessGroup) -> None:
        aborted.append(group)
        abort(group)

    def wait_and_destroy(group: dist.ProcessGroup) -> None:
        while group not in aborted and not are_back.wait(0.01):
            continue
        destroy(group)

    monkeypatch.setattr(dist.ProcessGroup, "abort", note_abort)
    monkeypatch.setattr(dist, "destroy_process_group", wait_and_destroy)
    timer = threading.Timer(8, are_back.set)
    timer.start()
    yield are_back
    are_back.set()
    timer.cancel()


def test_a_group_whose_trainer_died_is_opened_anew_at_once(
    runner: Runner, updater: WeightUpdater, dead_peers: threading.Event
) -> None:
    first = ThreadTrainer("g")
    opening = Opening(updater, *first.place())
    first.join()
    assert opening.wait().success
    second = ThreadTrainer("g")
    start = time.monotonic()
    opening = Opening(updater, *second.place())
    assert time.monotonic() - start < 2, "it waits for a trainer that will not come back"
    second.join()
    assert opening.wait().success and send(updater, second).success
    assert_holds(runner, weights(0) | {UP: torch.ones(10, 24)})


def test_leaving_a_trainer_that_died_costs_a_limited_time(
    updater: WeightUpdater, dead_peers: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    trainer = ThreadTrainer("g")
    opening = Opening(updater, *trainer.place())
    trainer.join()
    assert opening.wait().success
    start = time.monotonic()
    assert updater.destroy_group("g").success
    assert time.monotonic() - start < 3 and not dead_peers.is_set()


def test_what_has_failed_by_agreement_stays_failed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A join that is late on one rank may end between the agreement and the look at it."""
    may_go_on = threading.Event()
    wait_for_trainer, agree = joining.GroupJoin._wait_for_trainer, weight_updater.all_reduce_min
    joins: list[joining.GroupJoin] = []

    def wait(self: joining.GroupJoin) -> None:
        joins.append(self)
        may_go_on.wait(20)
        wait_for_trainer(self)

    def agree_then_end(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        values = agree(values, group)
        if values.tolist() == [AttemptState.FAILED]:
            may_go_on.set()
            deadline = time.monotonic() + 10
            while joins[0].state is not AttemptState.DONE and time.monotonic() < deadline:
                time.sleep(0.005)
        return values

    monkeypatch.setattr(joining, "_GRACE_S", 0.0)
    monkeypatch.setattr(joining.GroupJoin, "_wait_for_trainer", wait)
    monkeypatch.setattr(weight_updater, "all_reduce_min", agree_then_end)
    updater = make_updater(runner, UpdateTimeouts(join_s=0.2, receive_s=1))
    trainer = ThreadTrainer("g")
    trainer.join()
    result = Opening(updater, *trainer.place()).wait(10)
    assert not result.success and "the time is up" in result.message
    assert "init_weights_update_group" in update(updater).message, "the group is open"
