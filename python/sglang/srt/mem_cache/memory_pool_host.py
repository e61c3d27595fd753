"""Host memory of the hierarchical cache (L2): pools, their layouts and what travels together.

Owns host buffers, their free lists, and the group of pools that one copy covers. Does not decide
what is copied (``cache_controller.py``), how bytes move (``host_copy.py``) nor which tokens a page
belongs to (the trees). Free lists are mutated by the scheduler thread only; buffers are read and
written by copy streams and by storage threads, each page by one owner at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang.srt.mem_cache.host_copy import Copier, PageMap, Side, make_copier, pages_of, warm_up
from sglang.srt.mem_cache.host_memory import HostMemory
from sglang.srt.mem_cache.mamba_pool import MambaPool
from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    LayerTransferCounter,
    MHATokenToKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_transfer import ALL_PAGES, PageRule, PoolName, PoolTransfer

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
# In front of every page in one piece: what storage keeps with a page goes with it as one block.
# A multiple of what copies want their addresses to be multiples of.
PAGE_ROOM_BYTES = 512
_BLANK_UNITS = 8  # of a page's first layer: enough to tell KV from zeros
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class DevicePool(Protocol):
    """What a host pool needs of the device pool that it mirrors."""

    size: int
    layer_num: int
    device: torch.device

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all that is kept of a slot, [layer_num, slots, ...] each; waits for nobody."""

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """Set whom readers of a layer wait for."""


class HostKVCache(ABC):
    """Pages of one device pool in host memory: the slots, and what a pool can do with them.

    Slots are numbered ``0 .. size-1`` in pages of ``page_size``; a page keeps its slots together
    and in order. Freed pages are reused first-in first-out. Ranks free equally many
    at a time, but in orders of their own, so the slots of one node may differ by rank.
    """

    # Whether every tensor-parallel rank holds the same bytes, instead of a part of its own.
    is_replicated = False

    def __init__(
        self,
        *,
        device_pool: DevicePool,
        num_tokens: int,
        page_size: int,
        layout: str,
        dtype: torch.dtype,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"unknown host layout {layout!r}; there are {', '.join(LAYOUTS)}")
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(f"{num_tokens} slots are not whole pages of {page_size}")
        self.device_pool = device_pool
        self.size = num_tokens
        self.page_size = page_size
        self.page_num = num_tokens // page_size
        self.layout = layout
        self.dtype = dtype
        self.layer_num: int = device_pool.layer_num
        self.bytes_per_page = 0  # set by the subclass
        self._ring = np.empty(self.page_num, dtype=np.int64)  # free pages, oldest first
        self._is_free = np.empty(self.page_num, dtype=np.bool_)
        self._head = 0
        self._num_free_pages = 0
        self.clear()

    def clear(self) -> None:
        """Take back every slot."""
        self._ring[:] = np.arange(self.page_num)
        self._is_free[:] = True
        self._head = 0
        self._num_free_pages = self.page_num

    def available_size(self) -> int:
        """Return free slots."""
        return self._num_free_pages * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Take slots (whole pages): int64 [need_size], CPU, the caller's own; None if too many.

        Raises ValueError unless ``need_size`` is a multiple of the page size.
        """
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(f"{need_size} slots are not whole pages of {self.page_size}")
        count = need_size // self.page_size
        if count > self._num_free_pages:
            return None
        places = np.arange(self._head, self._head + count) % self.page_num
        pages = self._ring[places]
        self._is_free[pages] = False
        self._head = (self._head + count) % self.page_num
        self._num_free_pages -= count
        slots = pages[:, None] * self.page_size + np.arange(self.page_size)
        return torch.from_numpy(slots.reshape(-1))

    def free(self, indices: torch.Tensor) -> int:
        """Give slots (whole pages) back; returns how many.

        Raises RuntimeError when a page is free already, is named twice or does not exist, and
        ValueError when slots are not whole pages; nothing is freed then.
        """
        pages = pages_of(indices, self.page_size)
        if len(pages) == 0:
            return 0
        if pages.min() < 0 or pages.max() >= self.page_num:
            raise RuntimeError(f"host pages {pages.min()}..{pages.max()} of {self.page_num}")
        is_free = self._is_free[pages]
        self._is_free[pages] = True
        if is_free.any() or len(np.unique(pages)) != len(pages):
            self._is_free[pages[~is_free]] = False
            raise RuntimeError(f"host pages freed twice: among {pages[:16].tolist()}")
        tail = self._head + self._num_free_pages
        self._ring[np.arange(tail, tail + len(pages)) % self.page_num] = pages
        self._num_free_pages += len(pages)
        return indices.numel()

    def is_free(self, indices: torch.Tensor) -> torch.Tensor:
        """Return bool [n] from the allocated bitmap."""
        return torch.from_numpy(self._is_free[indices.numpy() // self.page_size])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one slot over all layers."""
        return self.bytes_per_page // self.page_size

    @abstractmethod
    def backup_from_device_all_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """Copy all layers device -> host on the current stream.

        Indices are int64 [n] CPU, whole pages. ``io_backend``: ``kernel`` | ``direct``. Raises
        ValueError for slots that are not whole pages, IndexError for pages outside a pool.
        """

    @abstractmethod
    def load_to_device_per_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """Copy one local layer host -> device on the current stream; see the backup.

        The layers of one load pass the same two tensors, unchanged in between: what follows from
        them is worked out once.
        """

    @abstractmethod
    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return the page that begins at slot ``index`` in storage order, of the pool's dtype.

        A view where the layout has the page in one piece (page-first), else a copy. ``flat``:
        [elements of a page], else the layout's shape of a page.
        """

    @abstractmethod
    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return an own flat page to read into."""

    @abstractmethod
    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a flat page (any dtype, ``bytes_per_page`` bytes) to the page at slot ``index``."""

    @abstractmethod
    def page_buffers(self, index: int) -> list[memoryview]:
        """Return the page's bytes in storage order as writable views into the pool, no copies."""

    @abstractmethod
    def get_page_buffer_meta(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return addresses and sizes in bytes of the buffers of these pages, page after page."""

    def page_with_room(self, index: int) -> memoryview | None:
        """Return ``PAGE_ROOM_BYTES`` bytes and behind them the page, as one writable view.

        The room belongs to whoever owns the page; nobody else looks at it. None where the layout
        has none: pages are not in one piece.
        """
        return None

    def memory_blocks(self) -> list[memoryview]:
        """Return the blocks of memory that pages lie in, for a transport that has to know memory
        before it moves it; none: pages are copied on their way."""
        return []

    @abstractmethod
    def byte_layout_tag(self) -> str:
        """Name the byte order of a stored page; equal exactly where pages are interchangeable."""

    @abstractmethod
    def blank_pages(self, host_indices: torch.Tensor) -> torch.Tensor:
        """Return bool [pages]: those that begin with nothing but zeros, as no KV does."""

    @abstractmethod
    def warm_up(self, device_pool: DevicePool) -> None:
        """Compile what copies need, once, while both pools are empty."""

    @abstractmethod
    def destroy(self) -> None:
        """Unpin and release the memory; idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """A load of which some layers have been copied."""

    device_pool: DevicePool
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    io_backend: str
    copier: Copier

    def is_of(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> bool:
        """Whether these very tensors are copied to this pool."""
        return (
            self.host_indices is host_indices
            and self.device_indices is device_indices
            and self.device_pool is device_pool
            and self.io_backend == io_backend
        )


class _BufferedHostPool(HostKVCache):
    """Host pages of a device pool of one or more buffers (*sides*), [layers, rows, ...] each.

    Pinned when the device pool lies on a CUDA device. A page has, for every layer and side, one
    contiguous *piece*; the layouts differ in their order (P pages, L layers, S sides):

    - ``layer_first``        [S, L, P, piece]
    - ``page_first``         [P, L, S, piece]
    - ``page_first_direct``  [P, S, L, piece]

    In the page-first layouts each page has ``PAGE_ROOM_BYTES`` bytes in front of it.
    """

    def __init__(
        self,
        device_pool: DevicePool,
        num_tokens: int,
        layout: str,
        row_bytes: Sequence[int],
        *,
        page_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`row_bytes`: of one slot and layer, for each of ``buffers()``; `dtype`: of flat pages."""
        super().__init__(
            device_pool=device_pool,
            num_tokens=num_tokens,
            page_size=page_size,
            layout=layout,
            dtype=dtype,
        )
        sides = [self.page_size * num_bytes for num_bytes in row_bytes]
        unit = next(size for size in _UNITS if all(side % size == 0 for side in sides))
        self._unit = _UNITS[unit]
        self._pieces = tuple(side // unit for side in sides)
        self.bytes_per_page = self.layer_num * sum(sides)
        self._room_bytes = 0 if layout == "layer_first" else PAGE_ROOM_BYTES
        self.memory = HostMemory(
            self.page_num * (self._room_bytes + self.bytes_per_page),
            pinned=device_pool.device.type == "cuda",
        )
        self._host_sides = self._make_views(self.memory.tensor.view(self._unit))
        self._load: _Load | None = None  # the one whose layers are being copied

    @abstractmethod
    def _shape_of_page(self, page: torch.Tensor) -> torch.Tensor:
        """Return a flat page with the shape that the layout gives it; ValueError if it has none."""

    def _make_views(self, units: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sides [L, P, piece] as views of the buffer."""
        layers, pages, all_sides = self.layer_num, self.page_num, sum(self._pieces)
        room = self._room_bytes // self._unit.itemsize
        views = []
        before = 0  # size of the sides before this one, a page and layer
        for piece in self._pieces:
            page_stride = room + layers * all_sides
            if self.layout == "layer_first":
                offset, layer_stride, page_stride = before * layers * pages, pages * piece, piece
            elif self.layout == "page_first":
                offset, layer_stride = room + before, all_sides
            else:
                offset, layer_stride = room + before * layers, piece
            views.append(
                units.as_strided((layers, pages, piece), (layer_stride, page_stride, 1), offset)
            )
            before += piece
        return tuple(views)

    def sides(self, device_pool: DevicePool) -> list[Side]:
        """Return the sides of both tiers as ``make_copier`` wants them."""
        buffers = device_pool.buffers()
        sides = []
        for host, buffer, piece in zip(self._host_sides, buffers, self._pieces, strict=True):
            device = buffer.view(self.layer_num, -1).view(self._unit)
            sides.append(Side(host=host, device=device.view(self.layer_num, -1, piece)))
        return sides

    def backup_from_device_all_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        io_backend: str,
    ) -> None:
        """See the base class."""
        page_map = PageMap(host_indices, device_indices, self.page_size)
        copier = make_copier(self.sides(device_pool), page_map, to_host=True, io_backend=io_backend)
        copier.copy(range(self.layer_num))

    def load_to_device_per_layer(
        self,
        device_pool: DevicePool,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
    ) -> None:
        """See the base class."""
        if not 0 <= layer_id < self.layer_num:
            raise IndexError(f"layer {layer_id} of {self.layer_num}")
        load = self._load
        if load is None or not load.is_of(device_pool, host_indices, device_indices, io_backend):
            page_map = PageMap(host_indices, device_indices, self.page_size)
            copier = make_copier(
                self.sides(device_pool), page_map, to_host=False, io_backend=io_backend
            )
            load = _Load(
                device_pool=device_pool,
                host_indices=host_indices,
                device_indices=device_indices,
                io_backend=io_backend,
                copier=copier,
            )
        # Not kept beyond its last layer: it holds on to the caller's tensors and the pool.
        self._load = load if layer_id < self.layer_num - 1 else None
        load.copier.copy(range(layer_id, layer_id + 1))

    def blank_pages(self, host_indices: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        pages = torch.from_numpy(pages_of(host_indices, self.page_size))
        return (self._host_sides[0][0, pages, :_BLANK_UNITS] == 0).all(dim=1)

    def warm_up(self, device_pool: DevicePool) -> None:
        """See the base class."""
        warm_up(self.sides(device_pool))

    def _page(self, index: int) -> int:
        page, in_page = divmod(index, self.page_size)
        if in_page or not 0 <= page < self.page_num:
            raise IndexError(f"no page of {self.page_size} slots begins at {index} of {self.size}")
        return page

    def _start_of(self, page: int) -> int:
        """Return where a page that is in one piece begins in the memory, in bytes."""
        return page * (self._room_bytes + self.bytes_per_page) + self._room_bytes

    def _pieces_of(self, page: int) -> list[torch.Tensor]:
        """Return the contiguous parts of a page, units, in storage order."""
        if self.layout != "layer_first":
            start = self._start_of(page)
            return [self.memory.tensor[start : start + self.bytes_per_page].view(self._unit)]
        return [side[layer, page] for side in self._host_sides for layer in range(self.layer_num)]

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """See the base class. Raises ValueError for a shape that unequal sides do not have."""
        pieces = self._pieces_of(self._page(index))
        page = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(self.dtype)
        return page if flat else self._shape_of_page(page)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """See the base class."""
        return torch.zeros(self.bytes_per_page, dtype=torch.uint8).view(self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """See the base class. Raises ValueError for a wrong number of bytes."""
        if data_page.nbytes != self.bytes_per_page:
            raise ValueError(f"a page has {self.bytes_per_page} bytes, not {data_page.nbytes}")
        units = data_page.contiguous().view(-1).view(torch.uint8).view(self._unit)
        pieces = self._pieces_of(self._page(index))
        for piece, part in zip(pieces, units.split([piece.numel() for piece in pieces])):
            piece.copy_(part)

    def page_buffers(self, index: int) -> list[memoryview]:
        """See the base class: one buffer in the page-first layouts, S * L in ``layer_first``."""
        page = self._page(index)
        if self.layout != "layer_first":
            first = self._start_of(page)
            return [self.memory.array[first : first + self.bytes_per_page].data]
        itemsize = self._unit.itemsize
        buffers = []
        for piece in self._pieces_of(page):
            start = piece.storage_offset() * itemsize
            buffers.append(self.memory.array[start : start + piece.nbytes].data)
        return buffers

    def page_with_room(self, index: int) -> memoryview | None:
        """See the base class."""
        page = self._page(index)
        if not self._room_bytes:
            return None
        start = self._start_of(page)
        return self.memory.array[start - self._room_bytes : start + self.bytes_per_page].data

    def get_page_buffer_meta(self, host_indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """See the base class."""
        pieces = [
            piece
            for page in pages_of(host_indices, self.page_size).tolist()
            for piece in self._pieces_of(self._page(page * self.page_size))
        ]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def memory_blocks(self) -> list[memoryview]:
        """See the base class."""
        return [self.memory.array.data]

    def destroy(self) -> None:
        """See the base class."""
        self._host_sides = ()
        self._load = None
        self.memory.close()


class MHATokenToKVPoolHost(_BufferedHostPool):
    """Host pages of a ``MHATokenToKVPool``.

    Shapes of the buffer (P pages, L layers, H heads, D head size; keys are 0, values 1):

    - ``layer_first``        [2, L, P, page_size, H, D]
    - ``page_first``         [P, L, 2, page_size, H, D]
    - ``page_first_direct``  [P, 2, L, page_size, H, D]

    In both page-first layouts a page is one contiguous block (the blocks have room in front of
    them, see the base class); in ``page_first`` so is one layer of a page. A page is stored in the
    order of its layout without P: pages of ``layer_first`` and of ``page_first_direct`` have the
    same bytes. Where keys and values differ in head size, the order is the same but the buffer has
    no such shape.
    """

    device_pool: MHATokenToKVPool

    def __init__(self, device_pool: MHATokenToKVPool, num_tokens: int, layout: str) -> None:
        head_bytes = device_pool.head_num * device_pool.dtype.itemsize
        super().__init__(
            device_pool,
            num_tokens,
            layout,
            (head_bytes * device_pool.head_dim, head_bytes * device_pool.v_head_dim),
            page_size=device_pool.page_size,
            dtype=device_pool.dtype,
        )

    def _shape_of_page(self, page: torch.Tensor) -> torch.Tensor:
        pool = self.device_pool
        if pool.head_dim != pool.v_head_dim:
            raise ValueError("keys and values differ in head size: the page is flat only")
        outer = (self.layer_num, 2) if self.layout == "page_first" else (2, self.layer_num)
        return page.view(*outer, self.page_size, pool.head_num, pool.head_dim)

    def byte_layout_tag(self) -> str:
        """See the base class."""
        pool = self.device_pool
        order = "layer,kv" if self.layout == "page_first" else "kv,layer"
        return (
            f"mha[{order},token,head,dim] layers={self.layer_num} page={self.page_size} "
            f"heads={pool.head_num} dims={pool.head_dim},{pool.v_head_dim} "
            f"dtype={str(self.dtype).removeprefix('torch.')}"
        )


class MLATokenToKVPoolHost(_BufferedHostPool):
    """Host pages of a ``MLATokenToKVPool``: one side, [L, P, page_size, 1, D] in ``layer_first``
    and [P, L, page_size, 1, D] in the page-first layouts (D: width of a latent row).

    A page has the same bytes in every layout, and on every tensor-parallel rank.
    """

    device_pool: MLATokenToKVPool
    is_replicated = True

    def __init__(self, device_pool: MLATokenToKVPool, num_tokens: int, layout: str) -> None:
        super().__init__(
            device_pool,
            num_tokens,
            layout,
            (device_pool.kv_cache_dim * device_pool.dtype.itemsize,),
            page_size=device_pool.page_size,
            dtype=device_pool.dtype,
        )

    def _shape_of_page(self, page: torch.Tensor) -> torch.Tensor:
        return page.view(self.layer_num, self.page_size, 1, self.device_pool.kv_cache_dim)

    def byte_layout_tag(self) -> str:
        """See the base class."""
        pool = self.device_pool
        return (
            f"mla[layer,token,dim] layers={self.layer_num} page={self.page_size} "
            f"dims={pool.kv_lora_rank},{pool.qk_rope_head_dim} "
            f"dtype={str(self.dtype).removeprefix('torch.')}"
        )


class MambaPoolHost(_BufferedHostPool):
    """Snapshots of a ``MambaPool`` on the host: a slot is a page, [slots, L, conv | temporal].

    One snapshot of all layers is one contiguous block, whatever layout KV has. Convolution inputs
    and matrices may differ in dtype: a flat page is bytes.
    """

    device_pool: MambaPool

    def __init__(self, device_pool: MambaPool, num_slots: int) -> None:
        rows = [data[0, 0].nbytes for data in device_pool.buffers()]
        super().__init__(device_pool, num_slots, "page_first", rows, page_size=1, dtype=torch.uint8)

    def _shape_of_page(self, page: torch.Tensor) -> torch.Tensor:
        return page.view(self.layer_num, -1)

    def byte_layout_tag(self) -> str:
        """See the base class."""
        parts = [
            f"{'x'.join(map(str, data.shape[2:]))}:{str(data.dtype).removeprefix('torch.')}"
            for data in self.device_pool.buffers()
        ]
        return f"state[layer,conv|temporal] layers={self.layer_num} {' '.join(parts)}"


def make_host_pool(device_pool: KVCache, num_tokens: int, layout: str) -> HostKVCache | None:
    """Return a host pool for a device pool; None where there is none for its kind."""
    if isinstance(device_pool, MHATokenToKVPool):
        return MHATokenToKVPoolHost(device_pool, num_tokens, layout)
    if isinstance(device_pool, MLATokenToKVPool):
        return MLATokenToKVPoolHost(device_pool, num_tokens, layout)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEntry:
    """A pool of a group. With ``share_indices_with_anchor`` it uses the anchor's slots, in both
    tiers (a draft model's KV); else it has slots of its own (a recurrent state). ``rule``: which of
    its pages a prefix needs."""

    name: PoolName
    host_pool: HostKVCache
    device_pool: DevicePool
    share_indices_with_anchor: bool = True
    rule: PageRule = ALL_PAGES

    def __post_init__(self) -> None:
        if self.share_indices_with_anchor and self.rule.trailing is not None:
            raise ValueError(f"pool {self.name} has a page wherever the anchor has one")


class HostPoolGroup:
    """The pools that are copied together: one anchor (KV) and whatever was registered beside it.

    A copy covers the anchor, every pool that shares its slots and the pools with own slots that are
    named in ``pool_transfers``. Scheduler thread, except the copies, which may run on one other.
    """

    def __init__(self, anchor: PoolEntry, io_backend: str) -> None:
        self.io_backend = io_backend
        self._entries: dict[PoolName, PoolEntry] = {anchor.name: anchor}
        self._anchor = anchor

    @property
    def anchor(self) -> PoolEntry:
        """The pool whose slots the others share."""
        return self._anchor

    @property
    def entries(self) -> tuple[PoolEntry, ...]:
        """All pools, the anchor first, the others in the order of registration."""
        return tuple(self._entries.values())

    @property
    def own_slot_entries(self) -> tuple[PoolEntry, ...]:
        """The pools with slots of their own, in the order of registration."""
        return tuple(entry for entry in self.entries[1:] if not entry.share_indices_with_anchor)

    def get(self, name: PoolName) -> PoolEntry | None:
        """Return a registered pool, or None."""
        return self._entries.get(name)

    def add(self, entry: PoolEntry) -> None:
        """Register a pool; nothing is in flight.

        Raises ValueError when the name is taken or when a pool that shares the anchor's slots does
        not have as many of them, on the host or on the device.
        """
        if entry.name in self._entries:
            raise ValueError(f"pool {entry.name} is registered already")
        if entry.share_indices_with_anchor:
            host, anchor = entry.host_pool, self._anchor.host_pool
            if (host.size, host.page_size) != (anchor.size, anchor.page_size):
                raise ValueError(
                    f"pool {entry.name} has {host.size} host slots in pages of {host.page_size}, "
                    f"the anchor {anchor.size} in pages of {anchor.page_size}"
                )
            if entry.device_pool.size < self._anchor.device_pool.size:
                raise ValueError(
                    f"pool {entry.name} has {entry.device_pool.size} device slots, the anchor "
                    f"{self._anchor.device_pool.size}"
                )
        self._entries[entry.name] = entry

    def remove(self, name: PoolName) -> PoolEntry:
        """Forget a pool and return it, not destroyed; nothing is in flight.

        Raises KeyError when there is none, ValueError for the anchor.
        """
        if name == self._anchor.name:
            raise ValueError(f"pool {name} is the anchor")
        return self._entries.pop(name)

    @property
    def num_layers(self) -> int:
        """Layers of the anchor: how often ``load_layer`` is to be called."""
        return self._anchor.host_pool.layer_num

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one of the anchor's slots takes over all pools that share it."""
        return sum(
            entry.host_pool.bytes_per_token
            for entry in self.entries
            if entry is self._anchor or entry.share_indices_with_anchor
        )

    def alloc(
        self, need_size: int, pool_sizes: Mapping[PoolName, int] | None = None
    ) -> dict[PoolName, torch.Tensor] | None:
        """Take host slots of the anchor and of pools with own slots, all or nothing.

        Returns int64 CPU indices by pool (the anchor's under its name), or None when any pool has
        too few. Raises ValueError for a pool that is unknown or shares the anchor's slots.
        """
        sizes = {self._anchor.name: need_size}
        for name, size in (pool_sizes or {}).items():
            sizes[self._with_own_slots(name).name] = size
        taken: dict[PoolName, torch.Tensor] = {}
        for name, size in sizes.items():
            indices = self._entries[name].host_pool.alloc(size)
            if indices is None:
                self.free(taken)
                return None
            taken[name] = indices
        return taken

    def alloc_all(self, name: PoolName) -> torch.Tensor:
        """Take every slot of one pool, all of which are free."""
        pool = self._entries[name].host_pool
        slots = pool.alloc(pool.size)
        if slots is None:
            raise RuntimeError(f"{pool.available_size()} of {pool.size} slots of {name} are free")
        return slots

    def free(self, indices: Mapping[PoolName, torch.Tensor]) -> None:
        """Give back what ``alloc`` returned."""
        for name, slots in indices.items():
            self._entries[name].host_pool.free(slots)

    def _with_own_slots(self, name: PoolName) -> PoolEntry:
        entry = self._entries.get(name)
        if entry is None or entry is self._anchor or entry.share_indices_with_anchor:
            raise ValueError(f"no pool {name} with slots of its own is registered")
        return entry

    def _parts(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        pool_transfers: Sequence[PoolTransfer],
    ) -> list[tuple[PoolEntry, torch.Tensor, torch.Tensor]]:
        """Return what is to be copied, the anchor first."""
        parts = [
            (entry, host_indices, device_indices)
            for entry in self.entries
            if entry is self._anchor or entry.share_indices_with_anchor
        ]
        for transfer in pool_transfers:
            if transfer.host_indices is None or transfer.device_indices is None:
                raise ValueError(f"the transfer of pool {transfer.name} lacks its slots")
            entry = self._with_own_slots(transfer.name)
            parts.append((entry, transfer.host_indices, transfer.device_indices))
        return parts

    def backup(
        self,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> None:
        """Copy all layers of all pools device -> host on the current stream; int64 [n] CPU."""
        for entry, host, device in self._parts(host_indices, device_indices, pool_transfers):
            entry.host_pool.backup_from_device_all_layer(
                entry.device_pool, host, device, self.io_backend
            )

    def load_layer(
        self,
        layer_id: int,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        pool_transfers: Sequence[PoolTransfer] = (),
    ) -> None:
        """Copy layer ``layer_id`` of the anchor, then that of each other pool, host -> device.

        Called for 0 .. num_layers - 1 with the same tensors. A pool with more layers than the
        anchor has loaded all of them when the anchor's last call returns (on CUDA: queued).
        """
        last = self.num_layers - 1
        for entry, host, device in self._parts(host_indices, device_indices, pool_transfers):
            pool = entry.host_pool
            end = pool.layer_num if layer_id == last else min(layer_id + 1, pool.layer_num)
            for layer in range(layer_id, end):
                pool.load_to_device_per_layer(
                    entry.device_pool, host, device, layer, self.io_backend
                )

    def clear(self) -> None:
        """Take back every slot of every pool; nothing is in flight."""
        for entry in self.entries:
            entry.host_pool.clear()

    def warm_up(self) -> None:
        """Compile what copies need, where kernels may be used; the pools must be empty."""
        if self.io_backend == "kernel":
            for entry in self.entries:
                entry.host_pool.warm_up(entry.device_pool)

    def destroy(self) -> None:
        """Release the memory of every pool; idempotent."""
        for entry in self.entries:
            entry.host_pool.destroy()
