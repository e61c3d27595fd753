"""Names of the kinds of cached bytes, which of their pages a prefix needs, and what a copy moves.

Owns the words that host pools, storage backends, the controller and the trees share, and the rule
by which they agree on how long a prefix is. Pure; any thread.

**A pool beside full-attention KV** is declared once, by a ``PoolEntry`` with a ``PageRule``; the
storage half (``storage_io.py``) knows pools by their rules only:

=============  ==========================  ===================================================
pool           rule                        a prefix of n pages needs of it
=============  ==========================  ===================================================
KV, DRAFT      ``PageRule()``              every page
MAMBA          ``PageRule(trailing=1)``    the one at its end: the state after its last token
SWA            ``PageRule(trailing=w)``    its last w pages, w = ceil(window / page size)
=============  ==========================  ===================================================

A *span* is a run of KV pages that one operation covers; *positions* number them from 0. Pages of a
trailing pool that lie before a span are the tree's matter: a span continues a node at whose end the
pool can go on. What of a pool goes with a span is a ``SpanPages``:

- written: whatever the component has on the host for the nodes (``TreeComponent.host_pages``);
- found: ``usable_ends`` of what exists; ranks intersect these sets;
- read: ``PageRule.needed`` of the span's end, before any KV page; all of it or the span is of no
  use, so it is inserted whole or not at all (``TreeComponent.attach_fetched``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

import torch


class PoolName(StrEnum):
    """Kinds of cached bytes that travel together."""

    KV = "kv"
    DRAFT = "draft"
    MAMBA = "mamba"
    SWA = "swa"


class PoolHitPolicy(Enum):
    """Which pages of a pool must exist for a prefix to be usable; see ``PageRule``."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass(frozen=True, slots=True)
class PageRule:
    """Which pages of a pool a prefix needs. ``trailing``: only so many at its end; None: all.

    Raises ValueError for less than one page.
    """

    trailing: int | None = None

    def __post_init__(self) -> None:
        if self.trailing is not None and self.trailing < 1:
            raise ValueError(f"a prefix cannot end in {self.trailing} pages")

    @property
    def policy(self) -> PoolHitPolicy:
        """The rule's kind."""
        return PoolHitPolicy.ALL_PAGES if self.trailing is None else PoolHitPolicy.TRAILING_PAGES

    def needed(self, num_pages: int) -> range:
        """Return the positions that a span of ``num_pages`` needs."""
        return range(0 if self.trailing is None else max(0, num_pages - self.trailing), num_pages)

    def usable_ends(self, present: Sequence[bool]) -> list[bool]:
        """Return for each n = 1 .. len(present) whether the first n pages have what they need.

        ``present``: which pages of this pool exist, by position.
        """
        ends = []
        run = 0  # pages in a row that exist, up to here
        for position, exists in enumerate(present):
            run = run + 1 if exists else 0
            ends.append(run >= len(self.needed(position + 1)))
        return ends


ALL_PAGES = PageRule()


def deepest_end(ends: Sequence[bool], num_pages: int) -> int:
    """Return the largest n <= num_pages with ``ends[n - 1]``; 0 where there is none."""
    for end in range(min(num_pages, len(ends)), 0, -1):
        if ends[end - 1]:
            return end
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPages:
    """Pages of one pool with slots of its own that go with a span.

    ``positions``: of which KV pages of the span, ascending. ``host_indices``: int64 CPU, the pool's
    page size of slots for each position (one slot a recurrent state), in the same order.
    """

    name: PoolName
    positions: tuple[int, ...]
    host_indices: torch.Tensor

    def within(self, start: int, stop: int | None = None) -> SpanPages:
        """Return what lies in positions [start, stop), numbered from ``start`` on."""
        kept = [
            index
            for index, position in enumerate(self.positions)
            if position >= start and (stop is None or position < stop)
        ]
        pages = self.host_indices.chunk(max(len(self.positions), 1))
        return SpanPages(
            name=self.name,
            positions=tuple(self.positions[index] - start for index in kept),
            host_indices=torch.cat([self.host_indices[:0], *(pages[index] for index in kept)]),
        )


def slots_by_pool(kv: torch.Tensor, extra: Iterable[SpanPages]) -> dict[PoolName, torch.Tensor]:
    """Return all host slots of an operation by pool, KV first."""
    return {PoolName.KV: kv, **{pages.name: pages.host_indices for pages in extra}}


@dataclass(slots=True, kw_only=True)
class PoolTransfer:
    """What one pool contributes to a copy between tiers, or to a question about storage.

    ``host_indices``/``device_indices``: slots int64 on the CPU, whole pages of the pool.
    ``keys``: one storage key a page, as the backend sees it (with the pool's prefix).
    ``rule``: which of the pages a prefix needs; read by ``batch_exists_v2``.
    """

    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    rule: PageRule = ALL_PAGES

    @property
    def hit_policy(self) -> PoolHitPolicy:
        """The kind of ``rule``."""
        return self.rule.policy
