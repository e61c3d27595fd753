"""A trainer's group being joined in a thread of its own, while the scheduler serves.

`GroupJoin` is the attempt of one rank: wait until the trainer listens, connect, wait for the other
members. `weight_groups` starts, asks and ends it, on the scheduler thread; that all ranks come to
the same answer is the `WeightUpdater`'s.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from sglang.srt.platforms import current_platform
from sglang.srt.utils.attempt import Attempt, AttemptError
from sglang.srt.utils.network import NetworkAddress
from sglang.srt.utils.process_group import init_custom_process_group

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_PROBE_S = 2.0
# Torch notices by itself that time is up, but for a stranger that listens and never answers.
_GRACE_S = 1.0
# Clean up after a failed transfer, but do not end the process, as would be the default.
_NCCL_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
_environment_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who becomes which rank of what. `address`: of the store, which rank 0 opens."""

    group_name: str
    backend: str
    address: NetworkAddress
    rank: int
    world_size: int


class GroupJoin(Attempt[dist.ProcessGroup]):
    """One attempt to become a member; at work once it is made."""

    def __init__(self, member: Membership, timeout_s: float) -> None:
        self.member = member
        super().__init__(
            f"join-{member.group_name}",
            self._join,
            lambda group: close_group(group, member.group_name),
            timeout_s=timeout_s,
            grace_s=_GRACE_S,
            late="the time is up",
        )

    def take(self) -> dist.ProcessGroup:
        """See `Attempt`; the error says how long it took to fail."""
        try:
            return super().take()
        except AttemptError as error:
            waited_s = self._timeout_s - self.left_s
            raise AttemptError(f"{error} (after {waited_s:.0f} s)") from error.__cause__

    # -- the thread -------------------------------------------------------------------------------

    def _join(self) -> dist.ProcessGroup:
        self._wait_for_trainer()
        # Torch takes no time that is not positive.
        left = datetime.timedelta(seconds=max(self.left_s, _RETRY_S))
        member = self.member
        url = member.address.to_tcp()
        with current_platform().use_device():
            rendezvous = dist.rendezvous(url, member.rank, member.world_size, timeout=left)
            store, rank, world_size = next(iter(rendezvous))
            if self.is_given_up:  # the group's name may belong to another attempt by now
                raise RuntimeError("given up")
            store.set_timeout(left)
            with _environment_of(member.backend):
                group = init_custom_process_group(
                    backend=member.backend,
                    timeout=left,
                    world_size=world_size,
                    rank=rank,
                    store=store,
                    group_name=member.group_name,
                )
        # NCCL goes on to use it: its members find each other at the first broadcast.
        store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
        return group

    def _wait_for_trainer(self) -> None:
        """Return once the address listens. Torch would wait, too, but not end when given up."""
        address = self.member.address
        while not self.is_given_up:
            try:
                socket.create_connection((address.host, address.port), _PROBE_S).close()
                return
            except OSError as error:
                if self.left_s < _RETRY_S:
                    raise RuntimeError(f"no trainer listens at {address}: {error}") from error
            self.wait_until_given_up(_RETRY_S)
        raise RuntimeError("given up")


def close_group(group: dist.ProcessGroup, group_name: str) -> None:
    """Close a group whose sides disagree: nothing here waits for the other, which sees an error."""
    try:
        group.abort()
        dist.destroy_process_group(group)
    except RuntimeError as error:
        logger.warning("Weight update group %r did not close cleanly: %s", group_name, error)


@contextmanager
def _environment_of(backend: str) -> Iterator[None]:
    """What NCCL's groups read of the environment when they are made, which takes no time."""
    if backend != "nccl":
        yield
        return
    name, value = _NCCL_ERRORS
    with _environment_lock:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
