"""Process groups that trainers open to send weights: join, receive with a deadline, leave.

Owns the groups of this rank. Their rank 0 is the trainer's. A trainer that dies or never sends
costs at most a timeout: the group is then closed and has to be opened again. Knows nothing of
models. Scheduler thread only.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang.srt.model_executor.weight_receive import ReceiveBuffers, TensorSpec
from sglang.srt.utils.network import NetworkAddress
from sglang.srt.utils.process_group import init_custom_process_group

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl")
_POLL_S = 0.0002
# Clean up after a failed transfer, but do not end the process, as would be the default.
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimeouts:
    """Seconds. How long a trainer may keep the scheduler waiting."""

    join_s: float = 300.0  # until all members of a group are there
    receive_s: float = 300.0  # until the tensors of one call have arrived


@dataclass(frozen=True, slots=True)
class _Group:
    group: dist.ProcessGroup
    device: torch.device  # where tensors are received


class WeightGroups:
    """The trainers' groups of one rank, by name."""

    def __init__(self, tp_rank: int, device: torch.device, timeouts: UpdateTimeouts) -> None:
        self._tp_rank = tp_rank
        self._device = device
        self._timeouts = timeouts
        self._groups: dict[str, _Group] = {}

    def join(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Become rank `rank_offset` + TP rank of a group; blocks until all members are there.

        A group of that name that is left from before is closed first. Raises ValueError for
        arguments that cannot be right, RuntimeError where joining fails or takes too long.
        """
        rank = rank_offset + self._tp_rank
        if not group_name:
            raise ValueError("the name of a weight update group must not be empty")
        if not 0 < rank < world_size:
            raise ValueError(f"rank {rank} is outside of a group of {world_size} led by a trainer")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        if backend == "nccl" and self._device.type != "cuda":
            raise ValueError(f"backend nccl cannot be used on {self._device.type}, gloo can")
        if group_name in self._groups:
            logger.warning("Weight update group %r is opened anew", group_name)
            self.leave(group_name)
        url = NetworkAddress(master_address.strip("[]"), int(master_port)).to_tcp()
        logger.info(
            "Joining weight update group %r at %s as %d of %d; nothing is served until all members "
            "are there, for at most %g s (SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT)",
            *(group_name, url, rank, world_size, self._timeouts.join_s),
        )
        with _environment(*_NCCL_ERRORS):
            group = init_custom_process_group(
                backend=backend,
                init_method=url,
                timeout=datetime.timedelta(seconds=self._timeouts.join_s),
                world_size=world_size,
                rank=rank,
                group_name=group_name,
            )
        # gloo ends a transfer itself after this time; NCCL is watched here and ended earlier.
        patience = self._timeouts.receive_s * (2 if backend == "nccl" else 1)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=patience), group)
        device = torch.device("cpu") if backend == "gloo" else self._device
        self._groups[group_name] = _Group(group, device)

    def leave(self, group_name: str) -> None:
        """Close a group. Raises ValueError where there is none of that name."""
        entry = self._groups.pop(group_name, None)
        if entry is None:
            raise ValueError("The group to be destroyed does not exist.")
        dist.destroy_process_group(entry.group)

    def device_of(self, group_name: str) -> torch.device:
        """Where tensors of this group arrive. Raises ValueError for an unknown group."""
        entry = self._groups.get(group_name)
        if entry is None:
            raise ValueError(
                f"Group {group_name} not in {sorted(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        return entry.device

    def receive(self, group_name: str, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The trainer's broadcasts, in the order in which they were declared.

        Raises RuntimeError where the trainer is gone or too slow, ValueError where it sent more or
        less than declared; the group is closed then.
        """
        device = self.device_of(group_name)
        group = self._groups[group_name].group
        try:
            buffers = ReceiveBuffers(specs, device, num_members=group.size())
            self._wait_for(group, buffers.targets)
            return buffers.take()
        except (RuntimeError, ValueError, MemoryError):
            self.abandon(group_name)
            raise

    def _wait_for(self, group: dist.ProcessGroup, targets: Sequence[torch.Tensor]) -> None:
        deadline = time.monotonic() + self._timeouts.receive_s
        works = [dist.broadcast(t, src=0, group=group, async_op=True) for t in targets]
        for work in works:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"nothing came for {self._timeouts.receive_s:.0f} s")
                time.sleep(_POLL_S)
            work.wait()

    def abandon(self, group_name: str) -> None:
        """Close a group, if it is open, whose sides disagree: nothing here may wait for the other.

        The trainer's broadcasts fail at once.
        """
        entry = self._groups.pop(group_name, None)
        if entry is None:
            return
        try:
            entry.group.abort()
            dist.destroy_process_group(entry.group)
        except RuntimeError as error:
            logger.warning("Weight update group %r did not close cleanly: %s", group_name, error)

    def __contains__(self, group_name: str) -> bool:
        return group_name in self._groups


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
