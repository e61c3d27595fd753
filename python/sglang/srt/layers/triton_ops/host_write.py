"""What steps exchange with the host, moved by kernels instead of copy engines.

A device has one engine for copies to the host, which works first come, first served: a few token
ids behind the backup of a long prompt (1 GB, 20 ms) would hold up the next steps until all of it is
across. A kernel reads and writes page-locked memory beside the engine, and a captured one does so
without any call of the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["num_elements"])
def _write_kernel(
    source: tl.tensor, target: tl.tensor, num_elements: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_places", "row_size", "num_elements"])
def _read_place_kernel(
    ring: tl.tensor,
    count: tl.tensor,
    target: tl.tensor,
    num_places: tl.tensor,
    row_size: tl.tensor,
    num_elements: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    row = ring + tl.load(count) % num_places * row_size
    # The host has written since this memory was last read: what a cache kept of it does not count.
    tl.store(target + place, tl.load(row + place, mask=inside, volatile=True), mask=inside)


@triton.jit(do_not_specialize=["num_places", "row_size", "num_elements"])
def _write_place_kernel(
    head: tl.tensor,
    source: tl.tensor,
    ring: tl.tensor,
    count: tl.tensor,
    num_places: tl.tensor,
    row_size: tl.tensor,
    num_elements: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    counted = tl.load(count)
    row = ring + counted % num_places * row_size
    for start in range(0, num_elements, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < num_elements
        tl.store(row + 1 + place, tl.load(source + place, mask=inside), mask=inside)
    tl.store(row, tl.load(head))
    tl.debug_barrier()  # one thread counts on, after all have read the count
    tl.store(count, counted + 1)


def read_place(ring: torch.Tensor, count: torch.Tensor, target: torch.Tensor) -> None:
    """See `dispatch.Ops`. Allocates nothing, so it can be captured."""
    num_elements = target.numel()
    _read_place_kernel[(triton.cdiv(num_elements, _BLOCK),)](
        ring, count, target, len(ring), ring.stride(0), num_elements, BLOCK=_BLOCK, num_warps=4
    )


def write_place(
    head: torch.Tensor, source: torch.Tensor, ring: torch.Tensor, count: torch.Tensor
) -> None:
    """See `dispatch.Ops`. Allocates nothing, so it can be captured."""
    _write_place_kernel[(1,)](
        head,
        source,
        ring,
        count,
        len(ring),
        ring.stride(0),
        source.numel(),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def write_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, there once an event recorded after the call has passed.

    The caller keeps it until then: the memory's allocator knows nothing of the kernel.
    """
    source = tensor.contiguous()
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
    # Two kernels at most: token ids, and flags as bytes.
    dtype = torch.int64 if source.dtype == torch.int64 else torch.uint8
    words, places = source.view(-1).view(dtype), target.view(-1).view(dtype)
    if words.numel():
        _write_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
            words, places, words.numel(), BLOCK=_BLOCK, num_warps=4
        )
    return target
