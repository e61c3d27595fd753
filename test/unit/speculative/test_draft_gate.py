"""When NGRAM drafts are verified: times, accept lengths, shadows and sleep."""

from __future__ import annotations

import numpy as np

from sglang.srt.speculative.draft_gate import (
    MAX_SLEEP,
    MIN_SLEEP,
    STEPS_AWAKE,
    STEPS_TO_FORGET,
    DraftGate,
    DraftShadow,
)


def gate_with(plain: float, verify: float | None, length: float, size: int = 1) -> DraftGate:
    gate = DraftGate()
    for _ in range(3):
        gate.count_plain(size, plain)
        if verify is not None:
            gate.count_verification(size, verify)
    gate.accept_length = length
    return gate


def test_plain_steps_are_timed_before_anything_is_verified() -> None:
    gate = DraftGate()
    assert not gate.wants_verification(1, 12.0)
    gate.count_plain(1, 0.1)
    assert not gate.wants_verification(1, 12.0)
    gate.count_plain(1, 0.1)
    assert gate.wants_verification(1, 12.0)


def test_a_verification_must_bring_more_than_it_costs() -> None:
    assert gate_with(0.010, 0.030, length=3.3).wants_verification(1)
    assert not gate_with(0.010, 0.030, length=3.0).wants_verification(1)
    assert gate_with(0.010, 0.030, length=1.0).wants_verification(1, 8.0)


def test_sizes_have_times_of_their_own() -> None:
    gate = gate_with(0.010, 0.020, length=2.5, size=1)
    for _ in range(3):
        gate.count_plain(8, 0.012)
        gate.count_verification(8, 0.060)
    assert gate.wants_verification(1)
    assert not gate.wants_verification(8) and not gate.wants_verification(5)
    assert not gate.wants_verification(2)  # never timed


def test_one_slow_step_decides_nothing() -> None:
    gate = gate_with(0.010, 0.020, length=3.0)
    gate.count_verification(1, 5.0)
    assert gate.wants_verification(1)


def test_bad_times_are_forgotten_in_the_end() -> None:
    gate = gate_with(0.010, 9.0, length=5.0)
    for _ in range(STEPS_TO_FORGET):
        assert not gate.wants_verification(1)
        gate.count_plain(1, 0.010)
    assert gate.wants_verification(1)


def test_sleep_grows_until_a_verification() -> None:
    gate = DraftGate()

    def steps_asleep() -> int:
        for _ in range(STEPS_AWAKE):
            assert not gate.is_asleep
            gate.count_plain(1, 0.01)
        count = 0
        while gate.is_asleep:
            gate.count_plain(1, 0.01)
            count += 1
        return count

    assert [steps_asleep() for _ in range(6)] == [16, 32, 64, 128, 256, MAX_SLEEP]
    gate.count_verification(1, 0.01)
    assert steps_asleep() == MIN_SLEEP


def test_accept_lengths_are_averaged_with_the_latest_in_front() -> None:
    gate = DraftGate()
    gate.observe([6.0] * 30)
    assert 5.9 < gate.accept_length <= 6.0
    gate.observe([1.0] * 3)
    assert 3.0 < gate.accept_length < 4.5


def test_a_shadow_goes_as_far_as_the_draft_would_have() -> None:
    shadow = DraftShadow()
    assert shadow.is_over and shadow.follow(5) is None
    # 0 - (1: 7 - 3: 9, 2: 8)
    shadow.start(np.array([4, 7, 8, 9]), np.array([-1, 0, 0, 1]))
    assert shadow.follow(7) is None and shadow.length == 2
    assert shadow.follow(9) is None
    assert shadow.follow(9) == 3 and shadow.is_over and shadow.length == 1
    shadow.start(np.array([9, 7]), np.array([-1, 0]))
    assert shadow.follow(1) == 1
