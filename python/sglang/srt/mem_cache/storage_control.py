"""The tick: how many finished transfers every rank processes now, and in which order.

Owns the vector that ranks agree on and the drain of the storage queues, written once for all
trees. Owns neither the queues' producers (storage threads) nor what an item means (callbacks).
Scheduler thread only. ``StorageControlQueues.sync`` is a collective: every rank calls it once a
tick, whatever its queues hold.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.distributed.communication import all_reduce_min

MinReduce = Callable[[list[int]], list[int]]
"""Element-wise MIN over ranks of vectors of equal length. Collective."""


def group_min_reduce(group: dist.ProcessGroup) -> MinReduce:
    """Return the reduction over a gloo group; use one group from one thread only."""

    def reduce(values: list[int]) -> list[int]:
        result: list[int] = all_reduce_min(torch.tensor(values, dtype=torch.int64), group).tolist()
        return result

    return reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class TickCounts:
    """How many items of each kind to process; ``extra_releases``: per pool, in fixed order."""

    write_acks: int = 0
    load_acks: int = 0
    hits: int = 0
    backups: int = 0
    releases: int = 0
    extra_releases: tuple[int, ...] = ()

    def to_vector(self) -> list[int]:
        """Return [write acks, load acks, hit, backup, release, *extra]."""
        head = [self.write_acks, self.load_acks, self.hits, self.backups, self.releases]
        return [*head, *self.extra_releases]

    @classmethod
    def from_vector(cls, vector: Sequence[int]) -> TickCounts:
        """Undo ``to_vector``."""
        write_acks, load_acks, hits, backups, releases, *extra = vector
        return cls(
            write_acks=write_acks,
            load_acks=load_acks,
            hits=hits,
            backups=backups,
            releases=releases,
            extra_releases=tuple(extra),
        )


class StorageControlQueues:
    """The queues through which storage threads report, as the scheduler thread sees them.

    ``extra_release``: queues of pools with slots of their own, in the same order on every rank.
    ``min_reduce``: how ranks agree; None where there is one.
    """

    def __init__(
        self,
        *,
        hit: queue.Queue[Any],
        backup: queue.Queue[Any],
        release: queue.Queue[torch.Tensor],
        extra_release: Sequence[queue.Queue[torch.Tensor]] = (),
        min_reduce: MinReduce | None = None,
    ) -> None:
        self._hit = hit
        self._backup = backup
        self._release = release
        self._extra_release = tuple(extra_release)
        self._min_reduce = min_reduce

    def is_empty(self) -> bool:
        """Whether no storage thread of this rank has reported anything since the last drain."""
        queues = (self._hit, self._backup, self._release, *self._extra_release)
        return not any(items.qsize() for items in queues)

    def local_counts(self, write_acks: int, load_acks: int) -> TickCounts:
        """Return what this rank could process now."""
        return TickCounts(
            write_acks=write_acks,
            load_acks=load_acks,
            hits=self._hit.qsize(),
            backups=self._backup.qsize(),
            releases=self._release.qsize(),
            extra_releases=tuple(extra.qsize() for extra in self._extra_release),
        )

    def sync(self, write_acks: int, load_acks: int) -> TickCounts:
        """Return what every rank can process now. Collective, unconditionally.

        ``write_acks``/``load_acks``: leading acknowledgements that are done on this rank.
        """
        local = self.local_counts(write_acks, load_acks)
        if self._min_reduce is None:
            return local
        return TickCounts.from_vector(self._min_reduce(local.to_vector()))

    def drain(
        self,
        counts: TickCounts | None,
        *,
        on_hit: Callable[[Any], None],
        on_backup: Callable[[Any], None],
        on_release: Callable[[torch.Tensor], None],
        on_extra_release: Callable[[int, torch.Tensor], None] | None = None,
    ) -> TickCounts:
        """Process exactly ``counts`` items: hits, backups, releases, extra releases (index, slots).

        None: all that is here, except hits, so that nothing is allocated any more (detaching).
        Returns what was processed. Raises RuntimeError when a queue holds less than agreed.
        """
        if counts is None:
            here = self.local_counts(0, 0)
            counts = TickCounts(
                backups=here.backups, releases=here.releases, extra_releases=here.extra_releases
            )
        if len(counts.extra_releases) != len(self._extra_release):
            raise ValueError(
                f"{len(counts.extra_releases)} counts for {len(self._extra_release)} extra queues"
            )
        _drain_queue("hit", self._hit, counts.hits, on_hit)
        _drain_queue("backup", self._backup, counts.backups, on_backup)
        _drain_queue("release", self._release, counts.releases, on_release)
        for index, (extra, count) in enumerate(zip(self._extra_release, counts.extra_releases)):
            if count and on_extra_release is None:
                raise ValueError(f"{count} releases of extra queue {index} have no taker")
            for item in _take(f"extra release {index}", extra, count):
                assert on_extra_release is not None
                on_extra_release(index, item)
        return counts


def _take(name: str, items: queue.Queue[Any], count: int) -> list[Any]:
    # Only this thread takes items: what was counted is still here.
    if items.qsize() < count:
        raise RuntimeError(f"the {name} queue holds {items.qsize()} items, {count} were agreed on")
    return [items.get_nowait() for _ in range(count)]


def _drain_queue(
    name: str, items: queue.Queue[Any], count: int, handle: Callable[[Any], None]
) -> None:
    for item in _take(name, items, count):
        handle(item)
