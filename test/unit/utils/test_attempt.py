"""Attempts in threads: who gets what was made, and who closes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.utils.attempt import Attempt, AttemptError, AttemptState

PATIENCE_S = 10.0


class Maker:
    """Makes its own list of what was closed, once it is let go, or raises `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.go = threading.Event()
        self.closed: list[str] = []
        self._error = error

    def make(self) -> str:
        assert self.go.wait(PATIENCE_S)
        if self._error is not None:
            raise self._error
        return "thing"

    def start(self, *, timeout_s: float = 60.0, grace_s: float = 0.0) -> Attempt[str]:
        return Attempt(
            "try", self.make, self.closed.append, timeout_s=timeout_s, grace_s=grace_s, late="late"
        )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def wait_for_state(attempt: Attempt[Any], state: AttemptState) -> None:
    wait_for(lambda: attempt.state is state)


def end_thread(attempt: Attempt[str]) -> None:
    """Wait until nothing more can come of it."""
    for thread in threading.enumerate():
        if thread.name == attempt._name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_result_is_handed_out_once_and_never_closed() -> None:
    maker = Maker()
    attempt = maker.start()
    assert attempt.state is AttemptState.PENDING and attempt.failure is None
    with pytest.raises(AttemptError, match="late"):
        attempt.take()  # too early, which changes nothing
    maker.go.set()
    wait_for_state(attempt, AttemptState.DONE)
    assert attempt.failure is None
    assert attempt.take() == "thing"
    assert attempt.state is AttemptState.FAILED and "was taken" in str(attempt.failure)
    with pytest.raises(AttemptError, match="was taken"):
        attempt.take()
    attempt.give_up()
    assert maker.closed == []


def test_what_is_given_up_before_it_ends_is_closed_when_it_comes() -> None:
    maker = Maker()
    attempt = maker.start()
    begun = time.monotonic()
    attempt.give_up()
    attempt.give_up()
    assert time.monotonic() - begun < PATIENCE_S / 2, "nobody waits for the thread"
    assert attempt.state is AttemptState.FAILED and "given up" in str(attempt.failure)
    assert maker.closed == []
    maker.go.set()
    wait_for(lambda: bool(maker.closed))
    end_thread(attempt)
    with pytest.raises(AttemptError, match="given up"):
        attempt.take()
    assert maker.closed == ["thing"]


def test_what_is_given_up_after_its_end_is_closed_at_once() -> None:
    maker = Maker()
    maker.go.set()
    attempt = maker.start()
    wait_for_state(attempt, AttemptState.DONE)
    attempt.give_up()
    assert maker.closed == ["thing"]
    attempt.give_up()
    assert maker.closed == ["thing"] and attempt.state is AttemptState.FAILED


def test_giving_up_at_any_moment_closes_exactly_once() -> None:
    for number in range(200):
        maker = Maker()
        maker.go.set()
        attempt = maker.start()
        for _ in range(number % 20):
            _ = attempt.state
        attempt.give_up()
        end_thread(attempt)
        assert maker.closed == ["thing"]


def test_taking_and_giving_up_at_the_same_time_have_one_winner() -> None:
    for _ in range(100):
        maker = Maker()
        maker.go.set()
        attempt = maker.start()
        wait_for_state(attempt, AttemptState.DONE)
        taken: list[str] = []

        def take(attempt: Attempt[str] = attempt, taken: list[str] = taken) -> None:
            try:
                taken.append(attempt.take())
            except AttemptError as error:
                assert "given up" in str(error)

        taker = threading.Thread(target=take)
        taker.start()
        attempt.give_up()
        taker.join(PATIENCE_S)
        assert taken + maker.closed == ["thing"]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_late_is_failed_and_what_comes_then_is_still_there(is_wanted: bool) -> None:
    maker = Maker()
    attempt = maker.start(timeout_s=0.02, grace_s=0.02)
    wait_for_state(attempt, AttemptState.FAILED)
    assert attempt.left_s < -0.02, "the grace comes on top"
    assert attempt.failure == "late"
    with pytest.raises(AttemptError, match="late"):
        attempt.take()
    if not is_wanted:
        attempt.give_up()
    maker.go.set()
    if is_wanted:
        wait_for_state(attempt, AttemptState.DONE)
        assert attempt.failure is None and maker.closed == []
        attempt.give_up()
    wait_for(lambda: bool(maker.closed))
    end_thread(attempt)
    assert maker.closed == ["thing"]


def test_what_the_making_raises_is_the_reason() -> None:
    for error, reason in ((OSError("no net"), "no net"), (ValueError(), "ValueError()")):
        maker = Maker(error)
        maker.go.set()
        attempt = maker.start()
        wait_for_state(attempt, AttemptState.FAILED)
        assert attempt.failure == reason
        for _ in range(2):
            with pytest.raises(AttemptError) as raised:
                attempt.take()
            assert str(raised.value) == reason and raised.value.__cause__ is error
        attempt.give_up()
        assert attempt.failure == reason and maker.closed == []
    maker = Maker(OSError("no net"))
    attempt = maker.start()
    attempt.give_up()
    maker.go.set()
    end_thread(attempt)
    assert maker.closed == []


class Panic(BaseException):
    """What an extension in another language may raise."""


def test_what_is_no_exception_is_a_reason_too() -> None:
    maker = Maker(Panic("index out of bounds"))
    maker.go.set()
    attempt = maker.start()
    wait_for_state(attempt, AttemptState.FAILED)
    assert attempt.failure == "Panic('index out of bounds')"


@pytest.mark.parametrize("comes_first", [True, False])
def test_closing_may_fail(comes_first: bool, caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    def fail(thing: str) -> None:
        raise OSError(f"{thing} is stuck")

    def make() -> str:
        assert go.wait(PATIENCE_S)
        return "thing"

    attempt = Attempt("try", make, fail, timeout_s=60)
    if comes_first:
        go.set()
        wait_for_state(attempt, AttemptState.DONE)
    attempt.give_up()
    go.set()
    end_thread(attempt)
    (message,) = caplog.messages
    assert message == "Closing the result of try failed: OSError('thing is stuck')"


def test_results_may_be_exceptions_or_none() -> None:
    for thing in (None, OSError("a result")):
        closed: list[object] = []

        def make(thing: object = thing) -> object:
            return thing

        attempt: Attempt[object] = Attempt("try", make, closed.append, timeout_s=60)
        wait_for_state(attempt, AttemptState.DONE)
        assert attempt.take() is thing
        assert closed == []


class Waiting(Attempt[str]):
    """Makes nothing until it is given up."""

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended
        super().__init__("wait", self._wait, ended.append, timeout_s=60)

    def _wait(self) -> str:
        assert not self.wait_until_given_up(0.0)
        assert 0 < self.left_s <= 60 and not self.is_given_up
        assert self.wait_until_given_up(PATIENCE_S) and self.is_given_up
        self._ended.append("noticed")
        raise RuntimeError("given up")


def test_makers_notice_that_they_are_given_up() -> None:
    ended: list[str] = []
    attempt = Waiting(ended)
    time.sleep(0.01)
    begun = time.monotonic()
    attempt.give_up()
    end_thread(attempt)
    assert ended == ["noticed"] and time.monotonic() - begun < PATIENCE_S / 2


def test_of_several_ranks_the_least_state_counts() -> None:
    assert AttemptState.FAILED < AttemptState.PENDING < AttemptState.DONE
    assert [int(state) for state in AttemptState] == [-1, 0, 1]
