"""A 128-bit digest of a checkpoint tensor that its shards add up to, however it is split.

Two 64-bit sums, modulo 2^64, of the elements' bits, each times a factor of its row and one of its
column in the whole tensor; the factors are odd and look random. So any single changed element
changes both sums, and exchanged elements, rows or columns all but certainly do. A rank sums what it
holds; the sums of all ranks are the tensor's. Slower than `tensor_digest`, which reads memory as it
lies; wanted where what follows from the weights is shared by servers that split them differently.
Plain PyTorch, any device, the same value everywhere. Not a cryptographic hash.
"""

from __future__ import annotations

import torch

from sglang.srt.layers.weight_slot import WeightSlot

# Odd, large, without pattern: the golden ratio and the 64-bit finalizer of MurmurHash3.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xFF51AFD7ED558CCD
_SECOND = 0xC4CEB9FE1A85EC53
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements at once: on the CPU the widened copy stays in the cache; a GPU wants long launches.
_CHUNKS = {"cpu": 1 << 16, "cuda": 1 << 24}


def shard_sums(slot: WeightSlot) -> torch.Tensor:
    """int64 [2] on the device: this rank's share of the sums, of the slot's tensor as stored.

    Tensors of more than two dimensions count as rows of all the others; they may be split by rows
    only. A tensor that is not split gives the whole sums on every
    rank. Does not wait for the device.
    """
    data = slot.view().detach()
    data = data.reshape(data.shape[0], -1)
    rows, columns = data.shape
    device = data.device
    row_factors = _factors(slot.shard_start if slot.shard_dim == 0 else 0, rows, 0, device)
    column_factors = _factors(slot.shard_start if slot.shard_dim == 1 else 0, columns, 2, device)
    total = torch.zeros(2, dtype=torch.int64, device=device)
    step = max(1, _CHUNKS[device.type] // max(columns, 1))
    for start in range(0, rows, step):
        part = data[start : start + step].contiguous()
        values = part.view(_INTEGERS[part.element_size()]).long()
        for which in range(2):
            by_row = (values * column_factors[which]).sum(dim=1)
            total[which] += (by_row * row_factors[which, start : start + step]).sum()
    return total


def _factors(first: int, count: int, stream: int, device: torch.device) -> torch.Tensor:
    """int64 [2, count], odd: for places first .. first + count - 1; of streams `stream` and + 1."""
    places = torch.arange(first, first + count, device=device) * 4 + stream
    both = torch.stack((places, places + 1))
    return _mix((both + 1) * _signed(_GOLDEN)) | 1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of x, modulo 2^64."""
    x = (x ^ _shifted(x, 33)) * _signed(_FIRST)
    x = (x ^ _shifted(x, 33)) * _signed(_SECOND)
    return x ^ _shifted(x, 33)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; PyTorch's repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
