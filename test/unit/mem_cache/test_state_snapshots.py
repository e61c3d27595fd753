"""Snapshots of recurrent states between the step that takes them and the tree."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang.srt.mem_cache.mamba_pool import MambaPool, StateShape
from sglang.srt.mem_cache.state_snapshots import StateSnapshots


@dataclass
class Row:
    """The part of a request that is read."""

    req_pool_idx: int | None


@pytest.fixture
def snapshots() -> StateSnapshots:
    return StateSnapshots(4, 8)


def test_a_planned_snapshot_is_handed_over_once(snapshots: StateSnapshots) -> None:
    slot = snapshots.plan(2, 16)
    assert snapshots.positions(Row(2), 17) == [16]
    assert snapshots.positions(Row(2), 16) == []
    taken = snapshots.capture(Row(2), 16)
    assert taken is not None and taken.tolist() == [slot]
    assert snapshots.capture(Row(2), 16) is None
    assert (snapshots.num_pending, snapshots.allocator.available_size()) == (0, 3)


def test_release_frees_what_nobody_took(snapshots: StateSnapshots) -> None:
    snapshots.plan(1, 4)
    snapshots.plan(1, 8)
    snapshots.plan(3, 8)
    snapshots.capture(Row(1), 4)
    snapshots.release(1)
    assert (snapshots.num_pending, snapshots.allocator.available_size()) == (1, 2)
    snapshots.release(1)
    assert snapshots.positions(Row(3), 100) == [8]


def test_of_an_output_the_last_snapshot_is_kept(snapshots: StateSnapshots) -> None:
    snapshots.plan(0, 5)
    for position in (8, 16, 24):
        assert snapshots.plan(0, position, is_output=True) is not None
    assert snapshots.positions(Row(0), 100) == [5, 24]
    assert snapshots.allocator.available_size() == 2


def test_planning_a_position_again_frees_the_first_slot(snapshots: StateSnapshots) -> None:
    snapshots.plan(0, 8, is_output=True)
    snapshots.plan(0, 8, is_output=True)
    assert (snapshots.num_pending, snapshots.allocator.available_size()) == (1, 3)


def test_without_a_free_slot_nothing_is_planned(snapshots: StateSnapshots) -> None:
    assert all(snapshots.plan(0, position) for position in range(1, 5))
    assert snapshots.plan(0, 5) is None
    assert snapshots.num_pending == 4


def test_clear_takes_everything_back(snapshots: StateSnapshots) -> None:
    snapshots.plan(0, 5)
    snapshots.clear()
    assert (snapshots.num_pending, snapshots.allocator.available_size()) == (0, 4)
    assert snapshots.capture(Row(0), 5) is None


def test_a_request_without_row_has_none(snapshots: StateSnapshots) -> None:
    assert snapshots.positions(Row(None), 9) == []
    assert snapshots.capture(Row(None), 9) is None


def test_pool_copies_all_layers_and_knows_its_size() -> None:
    shape = StateShape(
        conv_dim=6,
        conv_len=3,
        num_heads=2,
        key_dim=4,
        value_dim=5,
        conv_dtype=torch.float16,
    )
    pool = MambaPool(3, 2, shape, 2, "cpu")
    assert pool.bytes_per_slot == 2 * (6 * 3 * 2 + 2 * 4 * 5 * 4)
    assert pool.get_state_size_bytes() == pool.num_slots * pool.bytes_per_slot
    assert (pool.first_working_slot, pool.num_slots) == (4, 6)
    for buffer in pool.buffers():
        buffer[:, 4] = 7
    pool.copy(torch.tensor([4]), torch.tensor([2]))
    for layer_idx in range(2):
        assert (pool.conv_state(layer_idx)[2] == 7).all()
        assert (pool.temporal_state(layer_idx)[2] == 7).all()
        assert not pool.temporal_state(layer_idx)[3].any()
    pool.clear()
    assert not any(buffer.any() for buffer in pool.buffers())
