"""Collectives over the tensor-parallel group.

Every function is the identity without a process group (one rank) and a collective otherwise: all
ranks must call it, in the same order, with the same shapes. Layers use the tensor ones; the
scheduler uses `broadcast_bytes`, `all_reduce_min` and `barrier` on the host group. Not thread safe
per group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from sglang.srt.distributed.parallel_state import get_tp_group


def tensor_model_parallel_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place. Collective. Returns `tensor`."""
    group = get_tp_group()
    if group.device_group is not None:
        dist.all_reduce(tensor, group=group.device_group)
    return tensor


def tensor_model_parallel_all_gather(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Concatenate every rank's `tensor` (equal shapes) along `dim` in rank order. Collective."""
    group = get_tp_group()
    if group.device_group is None:
        return tensor
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(group.size)]
    dist.all_gather(parts, tensor, group=group.device_group)
    return torch.cat(parts, dim=dim)


def broadcast_bytes(data: bytes, src: int, group: dist.ProcessGroup | None) -> bytes:
    """Send `data` of group rank `src` to every rank; returns it everywhere.

    Collective over `group` (a gloo group); None means one rank: `data` comes back. The value of
    `data` on other ranks is ignored. Two messages: the length, then the bytes.
    """
    if group is None:
        return data
    is_source = dist.get_rank(group) == src
    length = torch.tensor([len(data) if is_source else 0], dtype=torch.int64)
    dist.broadcast(length, group=group, group_src=src)
    num_bytes = int(length[0])
    if num_bytes == 0:
        return b""
    if is_source:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    else:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
    dist.broadcast(payload, group=group, group_src=src)
    return data if is_source else payload.numpy().tobytes()


def all_reduce_min(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Element-wise MIN over ranks, in place, of a host tensor. Collective; None = one rank."""
    if group is not None:
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=group)
    return values


def barrier(group: dist.ProcessGroup | None) -> None:
    """Wait for every rank of a host group. Collective; None = one rank, returns at once."""
    if group is not None:
        dist.barrier(group=group)
