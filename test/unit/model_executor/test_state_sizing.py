"""How many recurrent states there are."""

from __future__ import annotations

import dataclasses

import pytest

from sglang.srt.model_executor.state_sizing import (
    StateBudget,
    StateCounts,
    divide_states,
    num_states_that_fit,
)

GB = 1_000_000_000
BUDGET = StateBudget(
    device="cuda",
    total_bytes=100 * GB,
    free_bytes=60 * GB,
    bytes_per_state=GB // 20,
    mem_fraction_static=0.8,
    ratio=1.0,
    max_states=None,
    max_running_requests=None,
    keep_snapshots=True,
)


def budget(**changes: object) -> StateBudget:
    return dataclasses.replace(BUDGET, **changes)  # type: ignore[arg-type]


def test_ratio_divides_what_the_fraction_leaves() -> None:
    # 60 GB free of which 20 are to be left; half of the rest.
    assert num_states_that_fit(BUDGET) == 400 - 2
    assert num_states_that_fit(budget(ratio=3.0)) == 600 - 2


def test_explicit_number_wins_over_the_ratio() -> None:
    assert num_states_that_fit(budget(max_states=7)) == 7


def test_more_states_than_requests_could_use_are_not_made() -> None:
    assert num_states_that_fit(budget(bytes_per_state=1000, max_running_requests=2)) == 512
    assert num_states_that_fit(budget(bytes_per_state=1000, max_running_requests=500)) == 2000


def test_half_at_most_is_of_running_requests() -> None:
    assert divide_states(BUDGET, 9) == StateCounts(max_running=4, num_snapshots=5)
    few = budget(max_running_requests=2)
    assert divide_states(few, 9) == StateCounts(max_running=2, num_snapshots=7)


def test_without_a_prefix_cache_all_are_of_running_requests() -> None:
    alone = budget(keep_snapshots=False)
    assert divide_states(alone, 9) == StateCounts(max_running=9, num_snapshots=0)
    assert num_states_that_fit(budget(keep_snapshots=False, max_states=1)) == 1


def test_memory_counts_the_initial_and_the_padding_state() -> None:
    assert StateCounts(max_running=3, num_snapshots=4).num_bytes(10) == 90


@pytest.mark.parametrize("changes", [{"max_states": 1}, {"free_bytes": 20 * GB}])
def test_too_few_states_are_an_error(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="--max-mamba-cache-size"):
        num_states_that_fit(budget(**changes))
