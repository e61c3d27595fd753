"""The tick: what ranks agree on, and the order and number of items that a drain takes."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache import storage_control
from sglang.srt.mem_cache.storage_control import (
    StorageControlQueues,
    TickCounts,
    group_min_reduce,
)


class Rank:
    """One rank's queues, and what its drains saw."""

    def __init__(self, num_extra: int = 1, **options: Any) -> None:
        self.hit: queue.Queue[Any] = queue.Queue()
        self.backup: queue.Queue[Any] = queue.Queue()
        self.release: queue.Queue[torch.Tensor] = queue.Queue()
        self.extra: list[queue.Queue[torch.Tensor]] = [queue.Queue() for _ in range(num_extra)]
        self.seen: list[tuple[str, Any]] = []
        self.control = StorageControlQueues(
            hit=self.hit,
            backup=self.backup,
            release=self.release,
            extra_release=self.extra,
            **options,
        )

    def post(self, hits: str = "", backups: str = "", releases: str = "", extra: str = "") -> None:
        for target, items in ((self.hit, hits), (self.backup, backups)):
            for item in items:
                target.put(item)
        for release, items in ((self.release, releases), (self.extra[0], extra)):
            for item in items:
                release.put(torch.tensor([ord(item)]))

    def drain(self, counts: TickCounts | None) -> TickCounts:
        return self.control.drain(
            counts,
            on_hit=lambda item: self.seen.append(("hit", item)),
            on_backup=lambda item: self.seen.append(("backup", item)),
            on_release=lambda page: self.seen.append(("release", chr(int(page)))),
            on_extra_release=lambda index, page: self.seen.append(
                (f"extra{index}", chr(int(page)))
            ),
        )


def test_counts_survive_the_vector():
    counts = TickCounts(
        write_acks=1, load_acks=2, hits=3, backups=4, releases=5, extra_releases=(6, 7)
    )
    assert counts.to_vector() == [1, 2, 3, 4, 5, 6, 7]
    assert TickCounts.from_vector(counts.to_vector()) == counts


def test_one_rank_needs_no_reduction():
    rank = Rank()
    rank.post(hits="ab", releases="x")
    want = TickCounts(write_acks=3, hits=2, releases=1, extra_releases=(0,))
    assert rank.control.sync(3, 0) == want


def run_tick(ranks: list[Rank], acks: list[tuple[int, int]]) -> list[TickCounts]:
    """What ``sync`` does on every rank, with the reduction written out."""
    vectors = [rank.control.local_counts(*ack).to_vector() for rank, ack in zip(ranks, acks)]
    counts = TickCounts.from_vector([min(column) for column in zip(*vectors)])
    return [rank.drain(counts) for rank in ranks]


def test_ranks_take_the_same_items_whatever_their_timing():
    ranks = [Rank(), Rank()]
    ranks[0].post(hits="abc", backups="B", releases="rst", extra="e")
    ranks[1].post(hits="a", releases="xyz")
    counts = run_tick(ranks, [(2, 0), (1, 5)])
    assert counts[0] == counts[1]
    assert counts[0] == TickCounts(write_acks=1, hits=1, backups=0, releases=3, extra_releases=(0,))
    ranks[1].post(hits="bc", backups="B", extra="f")
    run_tick(ranks, [(0, 0), (0, 0)])
    # The same operations in the same order; released pages are a rank's own, their number is not.
    kinds = [[kind for kind, _ in rank.seen] for rank in ranks]
    assert kinds[0] == kinds[1]
    for kind in ("hit", "backup"):
        items = [[item for name, item in rank.seen if name == kind] for rank in ranks]
        assert items[0] == items[1] == {"hit": list("abc"), "backup": ["B"]}[kind]


def test_every_tick_is_one_reduction_of_one_shape():
    lengths: list[int] = []

    def reduce(vector: list[int]) -> list[int]:
        lengths.append(len(vector))
        return vector

    rank = Rank(min_reduce=reduce)
    rank.control.sync(0, 0)
    rank.post(hits="a", backups="b", releases="c", extra="d")
    rank.control.sync(1, 1)
    assert lengths == [6, 6]


def test_the_order_is_hits_backups_releases_extra_releases():
    rank = Rank()
    rank.post(hits="ab", backups="B", releases="r", extra="e")
    rank.drain(rank.control.local_counts(0, 0))
    assert [kind for kind, _ in rank.seen] == ["hit", "hit", "backup", "release", "extra0"]


def test_draining_without_counts_leaves_hits_alone():
    rank = Rank()
    rank.post(hits="ab", backups="B", releases="r", extra="e")
    done = rank.drain(None)
    assert done == TickCounts(backups=1, releases=1, extra_releases=(1,))
    assert [kind for kind, _ in rank.seen] == ["backup", "release", "extra0"]
    assert rank.hit.qsize() == 2


def test_items_posted_during_a_drain_wait_for_the_next_tick():
    rank = Rank()
    rank.post(releases="rs")
    taken: list[str] = []

    def on_release(page: torch.Tensor) -> None:
        taken.append(chr(int(page)))
        rank.post(releases="!")

    counts = rank.control.local_counts(0, 0)
    rank.control.drain(counts, on_hit=taken.append, on_backup=taken.append, on_release=on_release)
    assert taken == ["r", "s"]
    assert rank.release.qsize() == 2


def test_a_missing_item_is_an_error_and_nothing_of_its_queue_is_taken():
    rank = Rank()
    rank.post(hits="a")
    with pytest.raises(RuntimeError, match="hit queue holds 1 items, 2"):
        rank.drain(TickCounts(hits=2, extra_releases=(0,)))
    assert rank.hit.qsize() == 1


def test_the_number_of_extra_queues_is_fixed():
    with pytest.raises(ValueError, match="2 counts for 1"):
        Rank().drain(TickCounts(extra_releases=(0, 0)))


def test_a_group_reduces_a_vector_of_numbers(monkeypatch):
    groups = []

    def all_reduce_min(values: torch.Tensor, group: object) -> torch.Tensor:
        groups.append(group)
        return values.minimum(torch.tensor([5, 0, 2**40]))  # the other rank's

    monkeypatch.setattr(storage_control, "all_reduce_min", all_reduce_min)
    group: Any = object()
    assert group_min_reduce(group)([3, 4, 2**50]) == [3, 0, 2**40]
    assert groups == [group]
