"""Results of a step to the host, written by a kernel instead of a copy engine.

A device has one engine for copies to the host, which works first come, first served: a few token
ids behind the backup of a long prompt (1 GB, 20 ms) would hold up the next steps until all of it is
across. A kernel writes to page-locked memory beside the engine.
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
