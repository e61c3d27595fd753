"""Small transfers between host and device, by kernels instead of copy engines.

A device has one copy engine for each direction, which works first come, first served: a few token
ids behind a long prompt's KV (1 GB, 20 ms) would hold up the step until all of it is across. A
kernel reads and writes page-locked memory beside the engines.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
# Room of a `_Staging`, in two halves: several prefill steps of 8,192 tokens, 230 KB each.
_HALF_BYTES = 2 << 20
_ALIGNMENT = 16


@triton.jit(do_not_specialize=["source", "target", "num_elements"])
def _copy_kernel(
    source: tl.tensor, target: tl.tensor, num_elements: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_elements
    # Either side may be the host's, which changes what it holds: no cache counts.
    values = tl.load(source + place, mask=inside, volatile=True)
    tl.store(target + place, values, mask=inside)


def write_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in page-locked memory, there once an event recorded after the call has passed.

    The caller keeps it until then: the memory's allocator knows nothing of the kernel.
    """
    source = tensor.contiguous()
    target = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
    _copy(source, target)
    return target


class HostReader:
    """Copies from the host to one device. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()

    def read(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor of the host to one of the device, equal in shape and type, not strided.

        In order of the current stream. Afterwards the caller may change `source`.
        """
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"{source.dtype} {list(source.shape)} does not fit into "
                f"{target.dtype} {list(target.shape)}"
            )
        if source.nbytes <= _HALF_BYTES:
            _copy(self._staging().keep(source), target)
        else:
            target.copy_(source.pin_memory(), non_blocking=True)

    def _staging(self) -> _Staging:
        """The thread's own for the current stream."""
        is_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device).cuda_stream if is_cuda else 0
        stagings: dict[int, _Staging] = self._of_thread.__dict__.setdefault("by_stream", {})
        staging = stagings.get(stream)
        if staging is None:
            staging = stagings[stream] = _Staging(is_cuda)
        return staging


class _Staging:
    """Page-locked memory for what kernels of one stream have yet to read. One thread's."""

    def __init__(self, is_cuda: bool) -> None:
        self._memory = torch.empty(2 * _HALF_BYTES, dtype=torch.uint8, pin_memory=is_cuda)
        # Of each half: passed when the kernels have read what was kept before it was left.
        self._left: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._half = 0
        self._used = 0  # bytes of this half

    def keep(self, source: torch.Tensor) -> torch.Tensor:
        """A copy, of at most half of the memory, which is valid for kernels launched right away.

        Waits where both halves are full of what has not been read.
        """
        num_bytes = source.nbytes
        if self._used + num_bytes > _HALF_BYTES:
            self._change_half()
        start = self._half * _HALF_BYTES + self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        kept = self._memory[start : start + num_bytes].view(source.dtype).view(source.shape)
        kept.copy_(source)
        return kept

    def _change_half(self) -> None:
        left, entered = self._left[self._half], self._left[1 - self._half]
        if left is not None:
            left.record()
            entered.synchronize()
        self._half = 1 - self._half
        self._used = 0


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Both are contiguous, of the same size; the host's is page-locked."""
    if not target.is_contiguous():
        raise ValueError("the target must be contiguous")
    dtype = _word_type(source, target)
    words = source.view(-1).view(dtype)
    if words.numel():
        _copy_kernel[(triton.cdiv(words.numel(), _BLOCK),)](
            words, target.view(-1).view(dtype), words.numel(), BLOCK=_BLOCK, num_warps=4
        )


def _word_type(source: torch.Tensor, target: torch.Tensor) -> torch.dtype:
    """The largest of few, since each is a kernel of its own."""
    for dtype in (torch.int64, torch.int32):
        if not any(
            value % dtype.itemsize
            for value in (source.nbytes, source.data_ptr(), target.data_ptr())
        ):
            return dtype
    return torch.uint8
