"""Memory that a trainer's broadcasts are received into, and whether as much came as was declared.

Neither gloo nor NCCL tells how long a message was. Gloo leaves memory behind a shorter message
alone, and ends the process at a longer one; so there is more room than declared behind every
tensor on the CPU, and marks at the end of each tensor and behind it show what was overwritten.
Knows nothing of groups. Used by `weight_groups`; scheduler thread only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import psutil
import torch

logger = logging.getLogger(__name__)

_PAGE = 4096
_MARK = 16  # bytes
_FLOAT_MARK = 4  # bytes: one or two NaNs, which no weights end in
_SMALLEST_MARKED = 4  # bytes; fewer could be the mark by chance
_MAP_NORESERVE = 0x4000  # Linux; has a name in Python from 3.13
_MIB = 1 << 20
_MOST_SPARE = 16 << 30
_HUGE_PAGE = 2 * _MIB
# Of a declaration on a device, whose own allocator says no to less.
_ABSURD = 1 << 46
# The same on all ranks: gloo's forwarding members pass it on, and it must not look like more data.
_BEHIND = bytes((0xA7, 0xF9, 0x5D, 0xFB, 0xC4, 0xF3, 0x6E, 0xFD) * 2)


class TensorSpec(NamedTuple):
    """A tensor as a trainer declares it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Of the model's own tensor of this name: what comes if the declaration is wrong.
    likely_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


class ReceiveBuffers:
    """Room for the tensors of one call. `targets`: what to broadcast into, in order."""

    def __init__(
        self, specs: Sequence[TensorSpec], device: torch.device, *, num_members: int
    ) -> None:
        """`num_members`: of the group, the trainer included.

        Raises ValueError for more than there can be, MemoryError or RuntimeError for more than
        there is.
        """
        self._specs = list(specs)
        sizes = [spec.num_bytes for spec in specs]
        limit = psutil.virtual_memory().total if device.type == "cpu" else _ABSURD
        if sum(sizes) > limit:
            raise ValueError(f"{sum(sizes)} bytes are declared, more than the memory of this host")
        if device.type == "cpu":
            rooms, self._flat = _reserve(self._specs, num_members)
        else:
            rooms = [_rounded(size) for size in sizes]
            self._flat = torch.empty(sum(rooms), dtype=torch.uint8, device=device)
        starts = [0, *itertools.accumulate(rooms)]
        self._places = list(zip(starts, sizes))
        self._marked = [i for i, size in enumerate(sizes) if size >= _SMALLEST_MARKED]
        self._index, self._mark = self._set_marks()
        self._behind = self._set_behind() if device.type == "cpu" else None
        if device.type == "cpu":
            self.targets = [self._flat[s : s + room] for s, room in zip(starts, rooms)]
        else:
            self.targets = self._views()

    def take(self) -> list[torch.Tensor]:
        """What was received. Waits for the device once.

        Raises ValueError where fewer or more bytes came than were declared for a tensor.
        """
        if self._behind is not None:
            index, expected = self._behind
            self._complain((self._flat[index] != expected).any(1), range(len(self._specs)), "more")
        self._complain((self._flat[self._index] == self._mark).all(1).cpu(), self._marked, "fewer")
        return self._views()

    def _views(self) -> list[torch.Tensor]:
        return [
            self._flat[start : start + size].view(spec.dtype).view(spec.shape)
            for spec, (start, size) in zip(self._specs, self._places)
        ]

    def _set_marks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a pattern to the last bytes of each tensor; places and values, [m, 16] each.

        The value depends on the place alone, so that a part of it may be written, places twice.
        """
        marks = [
            (sum(self._places[i]), min(self._places[i][1], _mark_of(self._specs[i].dtype)))
            for i in self._marked
        ]
        places = self._on_device(marks, torch.int64).reshape(-1, 2)
        ends, lengths = places[:, :1], places[:, 1:]
        steps = torch.arange(_MARK, device=self._flat.device)
        index = ends + (steps - _MARK).maximum(-lengths)
        pattern = self._on_device(list(_pattern()), torch.uint8)
        values = pattern[index % _MARK]
        self._flat[index] = values
        return index, values

    def _on_device(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._flat.device, non_blocking=True)

    def _set_behind(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a pattern behind each tensor; places [n, 16] and values [16]."""
        ends = torch.tensor([[start + size] for start, size in self._places], dtype=torch.int64)
        index = ends.reshape(-1, 1) + torch.arange(_MARK)
        values = torch.tensor(list(_BEHIND), dtype=torch.uint8)
        self._flat[index] = values
        return index, values

    def _complain(self, is_wrong: torch.Tensor, indices: Sequence[int], what: str) -> None:
        wrong = [indices[row] for row in is_wrong.nonzero().flatten().tolist()]
        if wrong:
            others = f" and {len(wrong) - 1} other tensors" if len(wrong) > 1 else ""
            raise ValueError(f"{what} bytes came than declared for {self._specs[wrong[0]]}{others}")


def _rooms(specs: Sequence[TensorSpec], num_members: int) -> list[int]:
    """Bytes on the CPU for each tensor: untouched memory costs nothing but addresses.

    Of more than two members some forward what they receive, and they forward all of the room.
    """
    sizes = [max(spec.num_bytes, spec.likely_bytes) for spec in specs]
    if num_members > 2:
        return [_rounded(2 * size + 16 * _PAGE) for size in sizes]
    # One broadcast may also hold what was declared as many.
    spare = max(_MIB, min(2 * sum(sizes), _MOST_SPARE))
    return [_rounded(8 * size + spare) for size in sizes]


def _reserve(specs: Sequence[TensorSpec], num_members: int) -> tuple[list[int], torch.Tensor]:
    """The room of each tensor, and the memory for all."""
    sizes = [spec.num_bytes for spec in specs]
    rooms = _rooms(specs, num_members)
    try:
        return rooms, _address_space(sum(rooms), with_huge_pages=_are_large(sizes))
    except MemoryError as error:
        if num_members > 2:
            raise  # others would forward more than fits
        logger.warning("A broadcast longer than declared would end this process: %s", error)
    rooms = [_rounded(size + _MARK) for size in sizes]
    return rooms, _address_space(sum(rooms), with_huge_pages=_are_large(sizes))


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _are_large(sizes: Sequence[int]) -> bool:
    return sum(sizes) >= 2 * _HUGE_PAGE * len(sizes)


def _address_space(num_bytes: int, *, with_huge_pages: bool) -> torch.Tensor:
    """uint8 [num_bytes] on the CPU whose pages take memory once they are written to."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes of addresses: {error}") from error
    # They are faster to come by, but each of many small tensors would take several.
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE if with_huge_pages else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _mark_of(dtype: torch.dtype) -> int:
    return _FLOAT_MARK if dtype.is_floating_point else _MARK


def _pattern() -> bytes:
    """Drawn anew each time; in every floating-point type of two bytes or more a NaN."""
    return bytes(byte for high in os.urandom(_MARK // 2) for byte in (0xF0 | high % 15, 0xFF))
