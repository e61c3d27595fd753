"""A trainer's group being joined in a thread of its own, while the scheduler serves.

`GroupJoin` owns the rendezvous of one rank: wait until the trainer listens, connect, wait for the
other members. `weight_groups` starts, asks and ends it, on the scheduler thread; that all ranks
come to the same answer is the `WeightUpdater`'s. Threads are daemons: torch cannot be interrupted
in a rendezvous, and a server that stops must not wait for one.
"""

from __future__ import annotations

import datetime
import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from sglang.srt.platforms import current_platform
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


class JoinState(enum.IntEnum):
    """The least of all ranks' states is the group's."""

    FAILED = -1
    PENDING = 0
    JOINED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Who becomes which rank of what. `address`: of the store, which rank 0 opens."""

    group_name: str
    backend: str
    address: NetworkAddress
    rank: int
    world_size: int


class GroupJoin:
    """One attempt to become a member; at work once it is made."""

    def __init__(self, member: Membership, timeout_s: float) -> None:
        self.member = member
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()  # over what follows
        self._outcome: dist.ProcessGroup | Exception | None = None
        self._is_given_up = threading.Event()
        name = f"join-{member.group_name}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def state(self) -> JoinState:
        outcome = self._outcome
        if isinstance(outcome, dist.ProcessGroup):
            return JoinState.JOINED
        is_late = time.monotonic() > self._deadline + _GRACE_S
        return JoinState.FAILED if outcome is not None or is_late else JoinState.PENDING

    def result(self) -> dist.ProcessGroup:
        """The group, which is the caller's now. Raises RuntimeError where there is none."""
        with self._lock:
            outcome, self._outcome = self._outcome, RuntimeError("the group was taken")
        if isinstance(outcome, dist.ProcessGroup):
            return outcome
        reason = "the time is up" if outcome is None else str(outcome) or type(outcome).__name__
        raise RuntimeError(f"{reason} (after {self._waited():.0f} s)") from outcome

    def give_up(self) -> None:
        """Want no group any more: one that is there, or comes, is closed. Returns at once."""
        with self._lock:
            self._is_given_up.set()
            outcome, self._outcome = self._outcome, RuntimeError("given up")
        if isinstance(outcome, dist.ProcessGroup):
            close_group(outcome, self.member.group_name)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        outcome: dist.ProcessGroup | Exception
        try:
            outcome = self._join()
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
            outcome = error
        with self._lock:
            is_given_up = self._is_given_up.is_set()
            if not is_given_up:
                self._outcome = outcome
        if is_given_up and isinstance(outcome, dist.ProcessGroup):
            close_group(outcome, self.member.group_name)

    def _join(self) -> dist.ProcessGroup:
        self._wait_for_trainer()
        member, left = self.member, datetime.timedelta(seconds=self._left())
        url = member.address.to_tcp()
        with current_platform().use_device():
            rendezvous = dist.rendezvous(url, member.rank, member.world_size, timeout=left)
            store, rank, world_size = next(iter(rendezvous))
            if self._is_given_up.is_set():  # the group's name may belong to another attempt by now
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
        while not self._is_given_up.is_set():
            try:
                socket.create_connection((address.host, address.port), _PROBE_S).close()
                return
            except OSError as error:
                if time.monotonic() + _RETRY_S > self._deadline:
                    raise RuntimeError(f"no trainer listens at {address}: {error}") from error
            self._is_given_up.wait(_RETRY_S)
        raise RuntimeError("given up")

    def _left(self) -> float:
        """Seconds; torch takes none that are not positive."""
        return max(self._deadline - time.monotonic(), _RETRY_S)

    def _waited(self) -> float:
        return time.monotonic() - self._deadline + self._timeout_s


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
