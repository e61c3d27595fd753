"""Allocators of KV slots: which row of the KV buffers belongs to which token.

Owns the free list of slots (page granular when paged) and a bitmap that makes a double free raise.
Owns no KV bytes and knows no request. Called by the scheduler thread only. All indices are CPU
int64 tensors; nothing here touches a device.

Page 0 is never handed out: it takes the writes of padding tokens. Slots are numbered
``page_size .. size + page_size - 1``. Pages are reused first-in first-out, so the order is the same
on every rank and a freed slot stays untouched as long as possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

IntVector = Sequence[int] | np.ndarray | torch.Tensor


def _as_int_array(values: IntVector) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.numpy()
    return np.asarray(values, dtype=np.int64)


class BaseTokenToKVPoolAllocator:
    """Free list (ring of pages), bitmap and free groups; page size 1 and more alike.

    Mutated by the scheduler thread only.
    """

    def __init__(self, size: int, page_size: int) -> None:
        if page_size < 1 or size < page_size or size % page_size:
            raise ValueError(f"size {size} is not a positive multiple of page size {page_size}")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self._ring = np.empty(self.num_pages, dtype=np.int64)  # page numbers, oldest free first
        self._is_free = np.empty(self.num_pages + 1, dtype=np.bool_)
        self._stamp = np.zeros(self.num_pages + 1, dtype=np.int64)  # scratch of _first_of_each
        self._head = 0
        self._num_free_pages = 0
        self._free_group: list[torch.Tensor] | None = None
        self.clear()

    def clear(self) -> None:
        """Take back every slot."""
        self._ring[:] = np.arange(1, self.num_pages + 1)
        self._is_free[:] = True  # page 0 too: freeing it is an error
        self._head = 0
        self._num_free_pages = self.num_pages
        self._free_group = None

    def available_size(self) -> int:
        """Return the number of free slots (whole pages)."""
        return self._num_free_pages * self.page_size

    def available_swa_size(self) -> int | None:
        """Return how many window rows are free beside the slots; None where there are none."""
        return None

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take ``need_size`` slots, a multiple of the page size.

        Returns int64 [need_size] or None when fewer are free (nothing is taken then).
        """
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"{need_size} slots are not whole pages of {self.page_size}")
        pages = self._take_pages(need_size // self.page_size)
        if pages is None:
            return None
        if self.page_size == 1:
            return torch.from_numpy(pages)
        slots = pages[:, None] * self.page_size + np.arange(self.page_size)
        return torch.from_numpy(slots.reshape(-1))

    def alloc_extend(
        self, prefix_lens: IntVector, seq_lens: IntVector, last_locs: IntVector
    ) -> torch.Tensor | None:
        """Take slots for the tokens [prefix_len, seq_len) of each request, all or nothing.

        ``last_locs`` is the slot of token prefix_len - 1 (anything when prefix_len is 0): its
        partly filled page is filled up first. Returns int64 [sum(seq_lens - prefix_lens)] in
        request order, or None when the pool cannot hold them.
        """
        raise NotImplementedError

    def alloc_decode(self, seq_lens: IntVector, last_locs: IntVector) -> torch.Tensor | None:
        """Take one slot a request; ``seq_lens`` include the new token.

        ``last_locs`` is the slot of each request's last token. Returns int64 [num_requests] or
        None.
        """
        raise NotImplementedError

    def free(self, indices: torch.Tensor) -> None:
        """Give slots back. Paged: every page that has a slot in ``indices`` is freed, once.

        Raises RuntimeError with the slot numbers when one is free already or was never a slot.
        """
        if indices.numel() == 0:
            return
        if self._free_group is not None:
            self._free_group.append(indices)
            return
        self._free_now(indices.numpy())

    def free_group_begin(self) -> None:
        """Collect the frees that follow and do them in one go at ``free_group_end``."""
        if self._free_group is not None:
            raise RuntimeError("a free group is open already")
        self._free_group = []

    def free_group_end(self) -> None:
        """Do the collected frees."""
        if self._free_group is None:
            raise RuntimeError("no free group is open")
        group, self._free_group = self._free_group, None
        if group:
            self._free_now(torch.cat(group).numpy())

    def is_free(self, indices: torch.Tensor) -> torch.Tensor:
        """Return bool [n]: which slots are on the free list (the reserved page counts as free)."""
        return torch.from_numpy(self._is_free[indices.numpy() // self.page_size])

    # -- the ring ---------------------------------------------------------------------------

    def _ring_slice(self, start: int, count: int) -> np.ndarray:
        end = start + count
        if end <= self.num_pages:
            return self._ring[start:end].copy()
        return np.concatenate([self._ring[start:], self._ring[: end - self.num_pages]])

    def _take_pages(self, count: int) -> np.ndarray | None:
        if count > self._num_free_pages:
            return None
        pages = self._ring_slice(self._head, count)
        self._is_free[pages] = False
        self._head = (self._head + count) % self.num_pages
        self._num_free_pages -= count
        return pages

    def _free_now(self, slots: np.ndarray) -> None:
        if slots.min() < 0 or slots.max() >= self.size + self.page_size:
            bad = slots[(slots < 0) | (slots >= self.size + self.page_size)]
            raise RuntimeError(f"freed slots that do not exist: {bad[:16].tolist()}")
        pages = slots if self.page_size == 1 else slots // self.page_size
        is_first = self._first_of_each(pages)
        already_free = self._is_free[pages]
        if self.page_size == 1:
            already_free |= ~is_first
        if already_free.any():
            bad = slots[already_free]
            raise RuntimeError(f"double free of {len(bad)} slots: {bad[:16].tolist()}")
        if self.page_size > 1:
            pages = pages[is_first]
        tail = (self._head + self._num_free_pages) % self.num_pages
        split = min(len(pages), self.num_pages - tail)
        self._ring[tail : tail + split] = pages[:split]
        self._ring[: len(pages) - split] = pages[split:]
        self._is_free[pages] = True
        self._num_free_pages += len(pages)

    def _first_of_each(self, pages: np.ndarray) -> np.ndarray:
        """Return bool [n]: True at the first occurrence of each page, in O(n) without sorting."""
        order = np.arange(len(pages))
        # Of repeated indices the last write stays; writing backwards leaves the first occurrence.
        self._stamp[pages[::-1]] = order[::-1]
        return self._stamp[pages] == order


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Page size 1: every slot on its own."""

    def __init__(self, size: int, page_size: int) -> None:
        if page_size != 1:
            raise ValueError(f"page size {page_size} needs PagedTokenToKVPoolAllocator")
        super().__init__(size, page_size)

    def alloc_extend(
        self, prefix_lens: IntVector, seq_lens: IntVector, last_locs: IntVector
    ) -> torch.Tensor | None:
        """See the base class; ``last_locs`` does not matter."""
        need = _as_int_array(seq_lens).sum() - _as_int_array(prefix_lens).sum()
        return self.alloc(int(need))

    def alloc_decode(self, seq_lens: IntVector, last_locs: IntVector) -> torch.Tensor | None:
        """See the base class; only the number of requests matters."""
        return self.alloc(len(seq_lens))


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Page size above 1: the slots of one page are consecutive and freed together."""

    def alloc_extend(
        self, prefix_lens: IntVector, seq_lens: IntVector, last_locs: IntVector
    ) -> torch.Tensor | None:
        """See the base class."""
        prefix, seq, last = map(_as_int_array, (prefix_lens, seq_lens, last_locs))
        page_size = self.page_size
        self._tokens_in_page(prefix, last)
        counts = seq - prefix
        if (counts < 0).any():
            raise ValueError("a sequence is shorter than its prefix")
        # Tokens of one request:  [prefix ........ boundary)[boundary ............... seq)
        #                          rest of the open page     whole and begun new pages
        boundary_page = -(-prefix // page_size)
        new_pages = -(-seq // page_size) - boundary_page
        pages = self._take_pages(int(new_pages.sum()))
        if pages is None:
            return None
        # Runs of consecutive slots, request by request: the open page's rest, then the new pages.
        num_runs = new_pages + 1
        last_run = np.cumsum(num_runs) - 1
        open_run = last_run - new_pages
        in_open_page = np.minimum(seq, boundary_page * page_size) - prefix
        starts = np.empty(int(num_runs.sum()), dtype=np.int64)
        lengths = np.full(len(starts), page_size)
        is_new = np.ones(len(starts), dtype=np.bool_)
        is_new[open_run] = False
        starts[is_new] = pages * page_size
        starts[open_run] = last + 1
        lengths[open_run] = in_open_page
        lengths[last_run] -= in_open_page + new_pages * page_size - counts  # begun, not filled
        offsets = np.cumsum(lengths) - lengths
        slots = np.arange(int(counts.sum())) + np.repeat(starts - offsets, lengths)
        return torch.from_numpy(slots)

    def alloc_decode(self, seq_lens: IntVector, last_locs: IntVector) -> torch.Tensor | None:
        """See the base class."""
        num_tokens = _as_int_array(seq_lens) - 1
        last = _as_int_array(last_locs)
        in_page = self._tokens_in_page(num_tokens, last)
        slots = last + 1
        if not in_page.all():
            at_end = np.flatnonzero(in_page == 0)
            pages = self._take_pages(len(at_end))
            if pages is None:
                return None
            slots[at_end] = pages * self.page_size
        return torch.from_numpy(slots)

    def _tokens_in_page(self, num_tokens: np.ndarray, last_locs: np.ndarray) -> np.ndarray:
        """Return how many of each request's tokens lie in its open page; 0: it has none.

        Raises RuntimeError where a last slot lies elsewhere in its page.
        """
        in_page: np.ndarray = num_tokens % self.page_size
        is_elsewhere = (last_locs + 1) % self.page_size != in_page
        if not is_elsewhere.any():
            return in_page
        broken = is_elsewhere & (in_page != 0)  # without an open page a last slot may be anything
        if broken.any():
            raise RuntimeError(
                f"last slots {last_locs[broken][:8].tolist()} do not fit the lengths "
                f"{num_tokens[broken][:8].tolist()} with page size {self.page_size}"
            )
        return in_page


def create_token_to_kv_pool_allocator(size: int, page_size: int) -> BaseTokenToKVPoolAllocator:
    """Return the allocator for this page size."""
    cls = TokenToKVPoolAllocator if page_size == 1 else PagedTokenToKVPoolAllocator
    return cls(size, page_size)
