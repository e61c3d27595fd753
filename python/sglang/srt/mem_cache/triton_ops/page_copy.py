"""Copy pages between device memory and page-locked host memory, which the device reads directly.

Called by ``host_copy.py`` for small pieces: one launch covers all pages of a transfer and any
number of layers, where the copy engine would need one submission a piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# The fewest programs that fill the bus (PCIe 5). More of them only slow down other kernels, the
# more so when they write to the host.
_PROGRAMS_TO_HOST = 4
_PROGRAMS_TO_DEVICE = 16
_TILE_BYTES = 16384
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_pages", "first_layer", "num_layers", "num_tasks"])
def _page_copy_kernel(
    host: tl.tensor,
    device: tl.tensor,
    table: tl.tensor,
    num_pages: tl.tensor,
    first_layer: tl.tensor,
    num_layers: tl.tensor,
    piece: tl.tensor,
    host_page_stride: tl.tensor,
    host_layer_stride: tl.tensor,
    host_side_stride: tl.tensor,
    device_layer_stride: tl.tensor,
    device_side_stride: tl.tensor,
    num_tasks: tl.tensor,
    NUM_SIDES: tl.constexpr,
    TO_HOST: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks = tl.cdiv(piece, BLOCK)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        block = task % blocks
        rest = task // blocks
        side = (rest % NUM_SIDES).to(tl.int64)
        rest = rest // NUM_SIDES
        layer = (first_layer + rest % num_layers).to(tl.int64)
        page = (rest // num_layers) * PAGES + tl.arange(0, PAGES)
        is_page = page < num_pages
        host_page = tl.load(table + page, mask=is_page, other=0)
        device_page = tl.load(table + num_pages + page, mask=is_page, other=0)
        within = block * BLOCK + tl.arange(0, BLOCK)
        inside = is_page[:, None] & (within < piece)[None, :]
        host_start = layer * host_layer_stride + side * host_side_stride
        device_start = layer * device_layer_stride + side * device_side_stride
        on_host = host + host_start + (host_page * host_page_stride)[:, None] + within[None, :]
        on_device = device + device_start + (device_page * piece)[:, None] + within[None, :]
        if TO_HOST:
            tl.store(on_host, tl.load(on_device, mask=inside), mask=inside)
        else:
            tl.store(on_device, tl.load(on_host, mask=inside), mask=inside)


def page_counts(piece: int, itemsize: int, tile_bytes: int = _TILE_BYTES) -> list[int]:
    """Numbers of pages, one for each form in which the kernel is compiled."""
    tile = tile_bytes // itemsize
    most = max(1, tile // min(tile, triton.next_power_of_2(piece)))
    return [1 << power for power in range(most.bit_length())]


class PageCopy:
    """Pages to copy in any layers: what does not depend on the layers is worked out once.

    ``hosts`` / ``devices``: buffers (keys, values) [layers, pages, piece] of one integer type, the
    pieces contiguous and those of the device one after another. ``table`` int64 [2, n] on the
    device: host page, device page. Pages are not checked.
    """

    def __init__(
        self,
        hosts: Sequence[torch.Tensor],
        devices: Sequence[torch.Tensor],
        table: torch.Tensor,
        *,
        to_host: bool,
        tile_bytes: int = _TILE_BYTES,
    ) -> None:
        self._table = table
        self._to_host = to_host
        self._num_programs = _PROGRAMS_TO_HOST if to_host else _PROGRAMS_TO_DEVICE
        self._tile_bytes = tile_bytes
        if len(hosts) == 2 and _differ_in_address_only(hosts) and _differ_in_address_only(devices):
            self._groups = [(hosts, devices)]
        else:
            self._groups = [([host], [device]) for host, device in zip(hosts, devices)]

    def launch(self, layers: range) -> None:
        """Copy the pages in ``layers`` on the current stream."""
        for hosts, devices in self._groups:
            self._launch(hosts, devices, layers)

    def _launch(
        self, hosts: Sequence[torch.Tensor], devices: Sequence[torch.Tensor], layers: range
    ) -> None:
        host, device, table = hosts[0], devices[0], self._table
        piece = host.shape[2]
        num_pages = table.shape[1]
        itemsize = host.element_size()
        tile = self._tile_bytes // itemsize
        block = min(tile, triton.next_power_of_2(piece))
        pages = min(tile // block, triton.next_power_of_2(num_pages))
        num_pieces = triton.cdiv(num_pages, pages) * len(layers) * len(hosts)
        num_tasks = num_pieces * triton.cdiv(piece, block)
        # The second buffer is reached from the first one's address, though it may be an allocation
        # of its own: all memory has one address space.
        host_side, device_side = (
            (sides[-1].data_ptr() - sides[0].data_ptr()) // itemsize for sides in (hosts, devices)
        )
        _page_copy_kernel[(min(self._num_programs, num_tasks),)](
            host,
            device,
            table,
            num_pages,
            layers.start,
            len(layers),
            piece,
            host.stride(1),
            host.stride(0),
            host_side,
            device.stride(0),
            device_side,
            num_tasks,
            NUM_SIDES=len(hosts),
            TO_HOST=self._to_host,
            PAGES=pages,
            BLOCK=block,
            num_warps=_NUM_WARPS,
        )


def _differ_in_address_only(sides: Sequence[torch.Tensor]) -> bool:
    first, second = sides
    return (
        first.shape == second.shape
        and first.stride() == second.stride()
        and (second.data_ptr() - first.data_ptr()) % first.element_size() == 0
    )
