"""Process groups that trainers open to send weights: join, receive with a deadline, leave.

Owns the groups of this rank, those that are still being joined included. Their rank 0 is the
trainer's. A trainer that dies or never sends costs at most a timeout: the group is then closed and
has to be opened again. Knows nothing of models. Scheduler thread only.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from sglang.srt.model_executor.weight_group_join import (
    GroupJoin,
    Membership,
    close_group,
)
from sglang.srt.model_executor.weight_receive import ReceiveBuffers, TensorSpec
from sglang.srt.platforms import current_platform
from sglang.srt.utils.attempt import AttemptState
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

BACKENDS = ("gloo", "nccl")
_POLL_S = 0.0002
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimeouts:
    """Seconds."""

    join_s: float = 300.0  # until all members of a group are there; the scheduler goes on meanwhile
    receive_s: float = 300.0  # until the tensors of one call have arrived; nothing is served


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
        self._joins: dict[str, GroupJoin] = {}

    # -- joining ----------------------------------------------------------------------------------

    def start_joining(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Become rank `rank_offset` + TP rank of a group, in a thread; `join_states` tells when.

        A group of that name that is left from before is closed first. Raises ValueError for
        arguments that cannot be right.
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
        address = NetworkAddress(master_address.strip("[]"), int(master_port))
        if not address.host:
            raise ValueError("master_address must not be empty")
        if not 0 < address.port < 65536:
            raise ValueError(f"port {address.port} is outside of [1, 65535]")
        member = Membership(
            group_name=group_name,
            backend=backend,
            address=address,
            rank=rank,
            world_size=world_size,
        )
        if group_name in self._groups:
            # Nobody has closed it, so its trainer may be dead: it must not be waited for.
            logger.warning("Weight update group %r is opened anew", group_name)
            self.abandon(group_name)
        logger.info(
            "Joining weight update group %r at %s as %d of %d, for at most %g s "
            "(SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT)",
            *(group_name, member.address, rank, world_size, self._timeouts.join_s),
        )
        self._joins[group_name] = GroupJoin(member, self._timeouts.join_s)

    @property
    def join_states(self) -> dict[str, AttemptState]:
        """Of the groups that are being joined; the same names in the same order on all ranks."""
        return {name: join.state for name, join in self._joins.items()}

    def finish_joining(self, group_name: str) -> None:
        """Open the group if it was joined. Raises RuntimeError where joining failed.

        Nothing if it goes on.
        """
        join = self._joins[group_name]
        if join.state is AttemptState.PENDING:
            return
        group = join.take()
        del self._joins[group_name]
        # gloo ends a transfer itself after this time; NCCL is watched here and ended earlier.
        is_nccl = join.member.backend == "nccl"
        patience = self._timeouts.receive_s * (2 if is_nccl else 1)
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=patience), group)
        device = self._device if is_nccl else torch.device("cpu")
        self._groups[group_name] = _Group(group, device)

    def stop_joining(self, group_name: str) -> None:
        """Let nothing come of it any more, be it joined already or not even begun."""
        join = self._joins.pop(group_name, None)
        if join is not None:
            join.give_up()
        self.abandon(group_name)

    # -- open groups ------------------------------------------------------------------------------

    def leave(self, group_name: str) -> None:
        """Close a group. Raises ValueError where there is none of that name.

        NCCL waits for the other side there, which may be dead: not for longer than `_CLOSE_S`.
        """
        entry = self._groups.pop(group_name, None)
        if entry is None:
            raise ValueError("The group to be destroyed does not exist.")
        group = entry.group
        if not _is_done_by(_closing_time(), lambda: dist.destroy_process_group(group)):
            logger.warning("Weight update group %r: its trainer does not leave it", group_name)
            # The thread that waits for it goes on then, and forgets the group.
            if not _is_done_by(_closing_time(), group.abort):
                logger.warning("Weight update group %r takes long to close", group_name)

    def device_of(self, group_name: str) -> torch.device:
        """Where tensors of this group arrive. Raises ValueError unless it is open."""
        if group_name in self._joins:
            raise ValueError(
                f"Group {group_name} is still being opened: wait for the answer to "
                "`init_weights_update_group`."
            )
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
        late = f"nothing came for {self._timeouts.receive_s:.0f} s"
        # What was queued for this memory comes first: the thread has a queue of its own.
        current_platform().synchronize()
        # NCCL brings its members together in the first broadcast, and does not return before all
        # are there; later ones wait when too many are queued on the device.
        works: list[dist.Work] = []
        if not _is_done_by(deadline, lambda: works.extend(_broadcasts(group, targets))):
            raise RuntimeError(late)
        for work in works:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(late)
                time.sleep(_POLL_S)
            work.wait()

    def abandon(self, group_name: str) -> None:
        """Close a group, if it is open, whose sides disagree: nothing here may wait for the other.

        The trainer's broadcasts fail at once.
        """
        entry = self._groups.pop(group_name, None)
        if entry is None:
            return
        if not _is_done_by(_closing_time(), lambda: close_group(entry.group, group_name)):
            logger.warning("Weight update group %r takes long to close", group_name)

    def __contains__(self, group_name: str) -> bool:
        return group_name in self._groups


def _closing_time() -> float:
    return time.monotonic() + _CLOSE_S


def _broadcasts(group: dist.ProcessGroup, targets: Sequence[torch.Tensor]) -> list[dist.Work]:
    with current_platform().use_device():
        return [dist.broadcast(target, src=0, group=group, async_op=True) for target in targets]


def _is_done_by(deadline: float, action: Callable[[], None]) -> bool:
    """Run what may never return in a thread; whether it has, by a time of `time.monotonic`.

    Raises what it raises.
    """
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below, if it comes in time
            errors.append(error)

    thread = threading.Thread(target=run, name="weight-group", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    return not thread.is_alive()
