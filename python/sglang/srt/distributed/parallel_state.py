"""The tensor-parallel group of this process.

Owns the process groups: one for tensors (gloo on CPU, NCCL on CUDA) and one gloo group for
host-side coordination. With one rank no process group exists at all and every collective is the
identity. `init_distributed` is called once per process, before any layer is built; afterwards the
group is read-only and may be read from any thread.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class TPGroup:
    """Membership of this process. Both groups are None where `size` is 1."""

    size: int
    rank: int
    device_group: dist.ProcessGroup | None = None  # for tensors on the device
    cpu_group: dist.ProcessGroup | None = None  # gloo: host tensors, bytes, barriers


_SINGLE = TPGroup(size=1, rank=0)
_tp_group: TPGroup = _SINGLE


def init_distributed(
    tp_size: int,
    tp_rank: int,
    dist_init_method: str = "",
    backend: str = "gloo",
    timeout_s: float = 600.0,
) -> TPGroup:
    """Join the tensor-parallel group; collective: all `tp_size` ranks must call it.

    `dist_init_method` is a torch.distributed URL such as "tcp://127.0.0.1:29500" (unused for one
    rank). Raises RuntimeError when called twice with a group in place, ValueError for a bad rank.
    """
    global _tp_group
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"rank {tp_rank} is outside of a group of {tp_size}")
    if _tp_group.size > 1:
        raise RuntimeError("the tensor-parallel group already exists; destroy it first")
    if tp_size == 1:
        _tp_group = _SINGLE
        return _tp_group
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend=backend,
        init_method=dist_init_method,
        world_size=tp_size,
        rank=tp_rank,
        timeout=timeout,
    )
    ranks = list(range(tp_size))
    cpu_group = dist.new_group(ranks, backend="gloo", timeout=timeout)
    device_group = cpu_group if backend == "gloo" else dist.group.WORLD
    _tp_group = TPGroup(size=tp_size, rank=tp_rank, device_group=device_group, cpu_group=cpu_group)
    return _tp_group


def new_host_group() -> dist.ProcessGroup:
    """A further gloo group of all ranks, for collectives of one thread of its own. Collective.

    Raises RuntimeError where there is one rank.
    """
    if _tp_group.size == 1:
        raise RuntimeError("one rank has no groups")
    group: dist.ProcessGroup = dist.new_group(list(range(_tp_group.size)), backend="gloo")
    return group


def get_tp_group() -> TPGroup:
    """The group of this process; a group of one before `init_distributed`."""
    return _tp_group


def tp_cpu_group() -> dist.ProcessGroup | None:
    """The gloo group for host-side collectives; None where there is one rank."""
    return _tp_group.cpu_group


def get_tensor_model_parallel_world_size() -> int:
    """Number of tensor-parallel ranks."""
    return _tp_group.size


def get_tensor_model_parallel_rank() -> int:
    """Rank of this process in the tensor-parallel group."""
    return _tp_group.rank


def destroy_distributed() -> None:
    """Leave the group. Collective where it has more than one rank; harmless otherwise."""
    global _tp_group
    if _tp_group.size > 1:
        dist.destroy_process_group()
    _tp_group = _SINGLE
