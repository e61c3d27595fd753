"""Copies of whole pages between a host pool and a device pool.

Owns how bytes move: indexed copies on the CPU; on CUDA a kernel that reads host memory, or the copy
engine. Does not know what the pages hold nor who owns them. Called by the host pools, on the
current stream; nothing waits for the copies.

A *piece* is what one page has in one layer of one buffer (keys, values); it is contiguous on both
sides in every layout, so that a layout is a matter of strides.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang.srt.mem_cache.dma_plan import (
    DmaPlan,
    LayerPlan,
    LeastBytes,
    PieceAddresses,
    Runs,
    can_plan_layers,
    plan_layers,
)
from sglang.srt.platforms import cuda_host, current_platform

IO_BACKENDS = ("kernel", "direct")
# A load blocks its request, so the faster way is taken: the kernel, unless the engine finds rows as
# long as this and has more to copy per submission than the CPU needs to make it (several times).
_LOAD_BY_ENGINE = LeastBytes(row=128 << 10, submission=256 << 10)
# Nobody waits for a backup, but a kernel that writes to the host slows down all others: matrix
# products beside it took 1.6 to 3.5 times as long (`bench_hicache_copy.py`).
_BACKUP_BY_ENGINE = LeastBytes(row=32 << 10, submission=64 << 10)
# So many copies are submitted first, for the engine to work on while the others are.
_FIRST_COPIES = 8
# On the CPU: below this mean number of pages a run, one indexed copy is faster than a copy a run.
_MIN_PAGES_PER_RUN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One buffer (keys or values) in both tiers, in units of one integer type.

    ``host`` [layers, host pages, piece] strided, ``device`` [layers, device pages, piece]
    contiguous.
    """

    host: torch.Tensor
    device: torch.Tensor

    @property
    def piece_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.host.shape[2] * self.host.element_size()

    def addresses(self) -> PieceAddresses:
        """Return where the pieces lie."""
        itemsize = self.host.element_size()
        return PieceAddresses(
            host=self.host.data_ptr(),
            host_page=self.host.stride(1) * itemsize,
            host_layer=self.host.stride(0) * itemsize,
            device=self.device.data_ptr(),
            device_layer=self.device.stride(0) * itemsize,
            piece=self.piece_bytes,
        )


class PageMap:
    """Which host page goes with which device page, in the order of the tokens.

    Raises ValueError unless both index tensors (int64 [n] CPU) are whole pages and equally many.
    """

    def __init__(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor, page_size: int
    ) -> None:
        if host_indices.numel() != device_indices.numel():
            raise ValueError(
                f"{host_indices.numel()} host slots cannot go with "
                f"{device_indices.numel()} device slots"
            )
        self.host_pages = pages_of(host_indices, page_size)
        self.device_pages = pages_of(device_indices, page_size)
        self.runs = self._find_runs()
        self._limits = [
            (name, int(pages.min()), int(pages.max())) if len(pages) else (name, 0, -1)
            for name, pages in (("host", self.host_pages), ("device", self.device_pages))
        ]

    def _find_runs(self) -> Runs:
        breaks = (np.diff(self.host_pages) != 1) | (np.diff(self.device_pages) != 1)
        starts = np.flatnonzero(np.concatenate(([len(self) > 0], breaks)))
        return Runs(
            host=self.host_pages[starts],
            device=self.device_pages[starts],
            count=np.diff(np.append(starts, len(self))),
        )

    def __len__(self) -> int:
        return len(self.host_pages)

    def check(self, num_host_pages: int, num_device_pages: int) -> None:
        """Raise IndexError when a page is outside its pool."""
        for (name, first, last), limit in zip(self._limits, (num_host_pages, num_device_pages)):
            if first < 0 or last >= limit:
                raise IndexError(f"{name} pages {first}..{last} of {limit}")


def pages_of(indices: torch.Tensor, page_size: int) -> np.ndarray:
    """Return page numbers of slots int64 [n] CPU; ValueError unless whole pages in order."""
    slots = indices.numpy()
    if slots.dtype != np.int64 or slots.ndim != 1 or len(slots) % page_size:
        raise ValueError(f"{slots.dtype} {list(slots.shape)} are not whole pages of {page_size}")
    if page_size == 1:
        return slots
    by_page = slots.reshape(-1, page_size)
    pages = by_page[:, 0] // page_size
    if (by_page != pages[:, None] * page_size + np.arange(page_size)).any():
        raise ValueError(f"slots do not fill whole pages of {page_size} in order")
    return pages


class Copier(Protocol):
    """One transfer, worked out; the layers are copied when asked for."""

    def copy(self, layers: range) -> None:
        """Copy the pages in ``layers``; on CUDA queued on the current stream."""


def make_copier(
    sides: Sequence[Side], page_map: PageMap, *, to_host: bool, io_backend: str
) -> Copier:
    """Work out the transfer of these pages.

    On CUDA ``direct`` uses the copy engine; ``kernel`` a kernel, or the copy engine where that is
    faster and little to submit. On the CPU they are the same. Raises ValueError for an unknown
    backend, IndexError for a page outside a pool.
    """
    if io_backend not in IO_BACKENDS:
        raise ValueError(f"unknown copy backend {io_backend!r}; there are {IO_BACKENDS}")
    page_map.check(sides[0].host.shape[1], sides[0].device.shape[1])
    if not len(page_map):
        return NothingToCopy()
    if sides[0].device.device.type == "cpu":
        return CpuCopier(sides, page_map, to_host)
    if io_backend == "direct":
        return EngineCopier(sides, page_map, to_host)
    engine = EngineCopier(sides, page_map, to_host)
    if engine.plan.is_worthwhile(_BACKUP_BY_ENGINE if to_host else _LOAD_BY_ENGINE):
        return engine
    return KernelCopier(sides, page_map, to_host)


def warm_up(sides: Sequence[Side]) -> None:
    """Compile the kernels, or the first copies of each size would wait seconds for a compiler.

    For pools that are still empty: goes through the first host pages with page 0 of the device,
    which ends as it was. Does nothing on the CPU.
    """
    if sides[0].device.device.type == "cpu":
        return
    kernels = importlib.import_module("sglang.srt.mem_cache.triton_ops.page_copy")
    counts = kernels.page_counts(sides[0].host.shape[2], sides[0].host.element_size())
    for count in counts:
        if count > sides[0].host.shape[1]:
            break
        page_map = PageMap(torch.arange(count), torch.zeros(count, dtype=torch.int64), 1)
        for to_host in (True, False):
            KernelCopier(sides, page_map, to_host).copy(range(sides[0].host.shape[0]))


class NothingToCopy:
    """A transfer of no pages."""

    def copy(self, layers: range) -> None:
        """Do nothing."""


class KernelCopier:
    """One launch, however many layers and pages, of a kernel that accesses the host memory."""

    def __init__(self, sides: Sequence[Side], page_map: PageMap, to_host: bool) -> None:
        # By name: Triton is not installed where there is no device for it.
        kernels = importlib.import_module("sglang.srt.mem_cache.triton_ops.page_copy")
        pages = torch.from_numpy(np.stack((page_map.host_pages, page_map.device_pages)))
        self._kernel = kernels.PageCopy(
            [side.host for side in sides],
            [side.device for side in sides],
            current_platform().to_device_async(pages),
            to_host=to_host,
        )

    def copy(self, layers: range) -> None:
        """See ``Copier``; on the stream on which this was made."""
        self._kernel.launch(layers)


class EngineCopier:
    """Copies of the copy engine, consecutive pages merged."""

    def __init__(self, sides: Sequence[Side], page_map: PageMap, to_host: bool) -> None:
        addresses = [side.addresses() for side in sides]
        self._to_host = to_host
        self._num_layers = sides[0].host.shape[0]
        self._all_layers: DmaPlan | None = None
        self._by_layer: LayerPlan | None = None
        # What is backed up is complete; what is loaded is needed layer by layer.
        if to_host and self._num_layers > 1 and can_plan_layers(addresses):
            self._all_layers = plan_layers(addresses, page_map.runs, self._num_layers)
        else:
            self._by_layer = LayerPlan(addresses, page_map.runs)

    @property
    def plan(self) -> DmaPlan:
        """What is submitted at once: all layers, or the first one."""
        if self._by_layer is not None:
            return self._by_layer.first
        assert self._all_layers is not None
        return self._all_layers

    def copy(self, layers: range) -> None:
        """See ``Copier``. Raises ValueError when a backup is not of all layers."""
        if self._by_layer is not None:
            for layer in layers:
                self._submit(self._by_layer.at(layer))
            return
        if layers != range(self._num_layers):
            raise ValueError(f"a backup is of all {self._num_layers} layers, not of {layers}")
        plan = self.plan
        for chosen in (slice(0, _FIRST_COPIES), slice(_FIRST_COPIES, None)):
            self._submit(DmaPlan(lines=plan.lines, rectangles=plan.rectangles[chosen]))

    def _submit(self, plan: DmaPlan) -> None:
        cuda_host.copy_async(plan.lines, plan.rectangles, to_host=self._to_host)


class CpuCopier:
    """Indexed copies, done when the call returns."""

    def __init__(self, sides: Sequence[Side], page_map: PageMap, to_host: bool) -> None:
        self._sides = sides
        self._to_host = to_host
        runs = page_map.runs
        self._runs: list[tuple[int, int, int]] | None = None
        if len(runs) * _MIN_PAGES_PER_RUN <= len(page_map) or len(runs) <= 2:
            self._runs = list(zip(runs.host.tolist(), runs.device.tolist(), runs.count.tolist()))
        self._host_pages = torch.from_numpy(page_map.host_pages)
        self._device_pages = torch.from_numpy(page_map.device_pages)

    def copy(self, layers: range) -> None:
        """See ``Copier``."""
        for side in self._sides:
            host = side.host[layers.start : layers.stop]
            device = side.device[layers.start : layers.stop]
            if self._to_host:
                self._copy(host, self._host_pages, device, self._device_pages)
            else:
                self._copy(device, self._device_pages, host, self._host_pages)

    def _copy(
        self, to: torch.Tensor, to_pages: torch.Tensor, of: torch.Tensor, of_pages: torch.Tensor
    ) -> None:
        if self._runs is None:
            to[:, to_pages] = of[:, of_pages]
            return
        for host_page, device_page, count in self._runs:
            start, origin = (host_page, device_page) if self._to_host else (device_page, host_page)
            to[:, start : start + count].copy_(of[:, origin : origin + count])
