"""Which copies the copy engine makes for a transfer of pages: as few and as large as possible.

Owns address arithmetic, nothing else; pure. Called by ``host_copy.py``, which hands the result to
``platforms/cuda_host.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Largest distance between two rows of a copy engine's rectangle (CUDA: "maximum pitch").
MAX_PITCH = (1 << 31) - 1
# A rectangle costs the CPU about as much to submit as this many plain copies.
RECTANGLE_COST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Pages that are consecutive on both sides: first host page, first device page, number."""

    host: np.ndarray
    device: np.ndarray
    count: np.ndarray

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, chosen: slice | np.ndarray) -> Runs:
        return Runs(host=self.host[chosen], device=self.device[chosen], count=self.count[chosen])

    def pages(self) -> Runs:
        """Return the same pages as runs of one."""
        starts = np.cumsum(self.count) - self.count
        within = np.arange(self.count.sum()) - np.repeat(starts, self.count)
        return Runs(
            host=np.repeat(self.host, self.count) + within,
            device=np.repeat(self.device, self.count) + within,
            count=np.ones(len(within), dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceAddresses:
    """Where the pieces of one buffer lie, in bytes.

    Host: ``host + page * host_page + layer * host_layer``; device: ``device + page * piece +
    layer * device_layer``.
    """

    host: int
    host_page: int
    host_layer: int
    device: int
    device_layer: int
    piece: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastBytes:
    """What makes a plan worthwhile: bytes in one row, bytes for the CPU's cost of a plain copy."""

    row: int
    submission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DmaPlan:
    """``lines`` int64 [n, 3]: host address, device address, bytes. ``rectangles`` int64 [m, 6]:
    host address, device address, bytes a row, rows, host pitch, device pitch."""

    lines: np.ndarray
    rectangles: np.ndarray

    def is_worthwhile(self, least: LeastBytes) -> bool:
        """Whether its rows and submissions have so many bytes on average."""
        num_rows = len(self.lines) + int(self.rectangles[:, 3].sum())
        cost = len(self.lines) + RECTANGLE_COST * len(self.rectangles)
        num_bytes = self.lines[:, 2].sum() + (self.rectangles[:, 2] * self.rectangles[:, 3]).sum()
        return bool(num_bytes >= max(least.row * num_rows, least.submission * cost))


class LayerPlan:
    """The copies of the ``first`` layer; those of the others differ in their addresses only."""

    def __init__(self, sides: Sequence[PieceAddresses], runs: Runs) -> None:
        lines: list[np.ndarray] = []
        rectangles: list[np.ndarray] = []
        steps: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        for side in sides:
            line, rectangle = _one_layer(side, runs)
            lines.append(line)
            rectangles.append(rectangle)
            step = np.array([[side.host_layer, side.device_layer]])
            for steps_of, rows in zip(steps, (line, rectangle)):
                steps_of.append(np.repeat(step, len(rows), axis=0))
        self.first = DmaPlan(lines=np.concatenate(lines), rectangles=np.concatenate(rectangles))
        self._line_steps, self._rectangle_steps = map(np.concatenate, steps)

    def at(self, layer: int) -> DmaPlan:
        """Return the copies of a layer."""
        lines, rectangles = self.first.lines.copy(), self.first.rectangles.copy()
        lines[:, :2] += layer * self._line_steps
        rectangles[:, :2] += layer * self._rectangle_steps
        return DmaPlan(lines=lines, rectangles=rectangles)


def can_plan_layers(sides: Sequence[PieceAddresses]) -> bool:
    """Whether layers are near enough to each other for ``plan_layers``."""
    return all(max(side.host_layer, side.device_layer) <= MAX_PITCH for side in sides)


def plan_layers(sides: Sequence[PieceAddresses], runs: Runs, num_layers: int) -> DmaPlan:
    """Cover the pages in the first ``num_layers`` layers: the rows of a rectangle are layers."""
    rectangles = []
    for side in sides:
        one_block = side.host_page == side.piece  # a run lies in one block on the host, too
        parts = runs if one_block else runs.pages()
        rectangles.append(
            _columns(
                side.host + parts.host * side.host_page,
                side.device + parts.device * side.piece,
                parts.count * side.piece,
                num_layers,
                side.host_layer,
                side.device_layer,
            )
        )
    return DmaPlan(lines=np.empty((0, 3), dtype=np.int64), rectangles=np.concatenate(rectangles))


def _columns(*columns: np.ndarray | int) -> np.ndarray:
    length = next(len(column) for column in columns if isinstance(column, np.ndarray))
    table = np.empty((length, len(columns)), dtype=np.int64)
    for place, column in enumerate(columns):
        table[:, place] = column
    return table


def _one_layer(side: PieceAddresses, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
    """Return lines and rectangles of layer 0; the rows of a rectangle are consecutive pages."""
    if side.host_page == side.piece:
        is_long, short = np.zeros(len(runs), dtype=np.bool_), runs
    else:
        is_long = runs.count > RECTANGLE_COST
        is_long &= side.host_page <= MAX_PITCH
        short = runs[~is_long].pages()
    long = runs[is_long]
    rectangles = _columns(
        side.host + long.host * side.host_page,
        side.device + long.device * side.piece,
        side.piece,
        long.count,
        side.host_page,
        side.piece,
    )
    lines = _columns(
        side.host + short.host * side.host_page,
        side.device + short.device * side.piece,
        short.count * side.piece,
    )
    return lines, rectangles
