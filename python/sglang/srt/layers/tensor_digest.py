"""A 128-bit digest of each tensor's bytes, at the speed at which its device reads memory.

Two 64-bit sums, modulo 2^64, over the tensor's 64-bit words; each word is mixed with its place
first. So any single changed word, exchanged words, rows or elements change the digest, while the
sums can be taken in any order by any number of threads. Not a cryptographic hash: it tells apart
what trainers and files produce, not what an attacker who may choose weights constructs. The value
depends on the bytes alone: it is the same on every device, in every process, under every
implementation (little-endian machines).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import cast

import torch

from sglang.srt.layers.cpu import ops as cpu_ops

DIGEST_BYTES = 16


def digest_tensors(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """16 bytes for each tensor, in order; all of them on one device. Waits for the device.

    Shape and dtype are not part of it. Tensors that are not contiguous are copied one by one.
    """
    data = [_bytes_of(tensor) for tensor in tensors]
    if not data:
        return []
    if data[0].device.type == "cpu":
        sums = [cpu_ops.word_sums(each) for each in data]
    else:
        sums = _device_word_sums()(data)
    return [first.to_bytes(8, "big") + second.to_bytes(8, "big") for first, second in sums]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@functools.cache
def _device_word_sums() -> Callable[[Sequence[torch.Tensor]], list[tuple[int, int]]]:
    # Triton is an optional package, which machines without a GPU need not have.
    module = importlib.import_module("sglang.srt.layers.triton_ops.word_sums")
    return cast(Callable[[Sequence[torch.Tensor]], list[tuple[int, int]]], module.word_sums)
