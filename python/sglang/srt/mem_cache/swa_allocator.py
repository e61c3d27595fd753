"""Slots of two pools at once: of all layers, and of the layers that keep only a window.

Owns which window row belongs to which slot, and the free list of those rows. Every slot that a
request computes has a row; ``free_swa`` gives the rows of tokens that nobody looks at any more back
while their slots stay, ``free`` gives back both. Pages of both pools have one size and are paired
whole. Scheduler thread only; the one device tensor written here is the pool's ``full_to_swa``.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.swa_pool import SWAKVPool
from sglang.srt.platforms import current_platform


class SWATokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """See the module docstring. Any page size, 1 included.

    ``swa_allocator``: the rows' own allocator; its ``available_size`` is what is left for windows.
    ``window``: tokens that a query looks back on at most, itself included.
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        kvcache: SWAKVPool | None,
        window: int,
    ) -> None:
        """``kvcache`` None: only the numbers are kept (tests)."""
        self.window = window
        self.swa_allocator = PagedTokenToKVPoolAllocator(size_swa, page_size)
        # Window page of each page; 0: none.
        self._swa_page = np.zeros(size // page_size + 1, dtype=np.int64)
        self._map = None if kvcache is None else kvcache.full_to_swa
        super().__init__(size, page_size)

    @property
    def release_stride(self) -> int:
        """Tokens behind a window that are worth an operation of their own to free."""
        return max(self.page_size, self.window // 4)

    def rows_of_decode(self, step_slots: int) -> int:
        """Most rows that a request in decode holds itself, with ``step_slots`` a step."""
        return self.window + self.release_stride + 3 * self.page_size + 2 * step_slots

    @property
    def size_swa(self) -> int:
        """Rows of the window pool."""
        return self.swa_allocator.size

    def clear(self) -> None:
        """See the base class: every slot and every row."""
        super().clear()
        self.swa_allocator.clear()
        self._swa_page[:] = 0
        if self._map is not None:
            self._map.zero_()

    def available_swa_size(self) -> int:
        """See the base class."""
        return self.swa_allocator.available_size()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots *without* rows: their KV comes from elsewhere, and rows by ``bind_swa``."""
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"{need_size} slots are not whole pages of {self.page_size}")
        pages = super()._take_pages(need_size // self.page_size)
        return None if pages is None else torch.from_numpy(self._slots(pages))

    def swa_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the window row of each slot, int64 [n]; 0 where it has none."""
        array = slots.numpy()
        pages = self._swa_page[array // self.page_size]
        rows = pages * self.page_size + np.where(pages > 0, array % self.page_size, 0)
        return torch.from_numpy(rows)

    def free_swa(self, slots: torch.Tensor) -> None:
        """Give back the rows of whole pages of slots; the slots stay taken.

        Raises RuntimeError when one has no row.
        """
        self._release_rows(self._bound_pages(slots))

    def bind_swa(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Give slots without rows (whole pages) the rows, which the caller took before."""
        pages = self._pages(slots)
        if self._swa_page[pages].any():
            raise RuntimeError(f"slots have rows already: {slots[:16].tolist()}")
        self._bind(pages, rows.numpy()[:: self.page_size] // self.page_size)

    def move_swa(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Let ``to_slots``, which have none, have the rows of ``from_slots``; whole pages each."""
        rows = self.swa_rows(from_slots)
        pages = self._bound_pages(from_slots)
        self._bind(pages, np.zeros_like(pages))
        self.bind_swa(to_slots, rows)

    # -- pages ------------------------------------------------------------------------------------

    def _take_pages(self, count: int) -> np.ndarray | None:
        if count > self._num_free_pages:
            return None
        rows = self.swa_allocator.alloc(count * self.page_size)
        if rows is None:
            return None
        pages = super()._take_pages(count)
        assert pages is not None
        self._bind(pages, rows.numpy()[:: self.page_size] // self.page_size)
        return pages

    def _free_now(self, slots: np.ndarray) -> None:
        super()._free_now(slots)
        pages = np.unique(slots // self.page_size)
        self._release_rows(pages[self._swa_page[pages] > 0])

    def _pages(self, slots: torch.Tensor) -> np.ndarray:
        """Page numbers, in order, of slots that are whole pages."""
        array = slots.numpy()
        pages = array[:: self.page_size] // self.page_size
        if not np.array_equal(self._slots(pages), array):
            raise ValueError(f"slots are not whole pages: {array[:16].tolist()}")
        return pages

    def _bound_pages(self, slots: torch.Tensor) -> np.ndarray:
        pages = self._pages(slots)
        bad = pages[(self._swa_page[pages] == 0) | self._is_free[pages]]
        if len(bad):
            raise RuntimeError(f"pages without window rows: {bad[:16].tolist()}")
        return pages

    def _slots(self, pages: np.ndarray) -> np.ndarray:
        slots = pages[:, None] * self.page_size + np.arange(self.page_size)
        return cast(np.ndarray, slots.reshape(-1))

    def _release_rows(self, pages: np.ndarray) -> None:
        if len(pages):
            rows = self._slots(self._swa_page[pages])
            self._bind(pages, np.zeros_like(pages))
            self.swa_allocator.free(torch.from_numpy(rows))

    def _bind(self, pages: np.ndarray, swa_pages: np.ndarray) -> None:
        """Enter window pages (0: none) of pages, here and on the device in stream order."""
        self._swa_page[pages] = swa_pages
        if self._map is None or len(pages) == 0:
            return
        slots = torch.from_numpy(self._slots(pages))
        rows = torch.from_numpy(self._slots(swa_pages))  # of page 0: the dummy page
        if self._map.device.type == "cpu":
            self._map[slots] = rows.to(torch.int32)
            return
        packed = current_platform().to_device_async(torch.stack((slots, rows)))
        self._map[packed[0]] = packed[1].to(torch.int32)


def swa_part(allocator: BaseTokenToKVPoolAllocator) -> SWATokenToKVPoolAllocator | None:
    """The allocator where it hands out window rows, too; None where it does not."""
    return allocator if isinstance(allocator, SWATokenToKVPoolAllocator) else None
