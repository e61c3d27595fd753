"""What arrives in a scheduler step, the same on every tensor-parallel rank.

Rank 0 reads the channel from the front; one broadcast hands the raw bytes, the clock and the
grammars that rank 0 found compiled to all ranks, so that every later decision starts from equal
inputs. Collective: every rank calls `recv` once per loop. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch.distributed as dist

from sglang.srt.distributed.communication import broadcast_bytes
from sglang.srt.managers.io_struct import AbandonReq
from sglang.srt.managers.ipc import PullChannel, decode
from sglang.srt.utils.wakeup import Wakeup

# How long an idle scheduler sleeps on its channel. New messages end the sleep at once; the limit
# keeps the liveness counter moving and notices deadlines and compiled grammars.
IDLE_WAIT_S = 0.02
# While copies, or storage of other ranks, are at work: their ends wake nobody here.
TRANSFER_WAIT_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStep:
    """Inputs of one scheduler step. `now`: rank 0's unix time, the only clock for decisions."""

    messages: list[Any]
    ready_grammars: list[str]  # rids whose grammar rank 0 has compiled (or failed to)
    now: float


class RequestReceiver:
    """Receives on rank 0, broadcasts to the others."""

    def __init__(
        self,
        channel: PullChannel | None,
        cpu_group: dist.ProcessGroup | None,
        wakeup: Wakeup | None = None,
    ) -> None:
        self._channel = channel  # rank 0 only
        self._cpu_group = cpu_group
        self._wakeup = wakeup  # set by the cache's transfer threads

    def recv(
        self, *, idle: bool, poll_grammars: Callable[[], list[str]], transfers: bool = False
    ) -> ReceivedStep:
        """Take everything that has arrived; sleeps a little where `idle` and nothing has.

        `transfers`: something is at work whose end does not wake us, so the sleep is short.
        `poll_grammars` is asked on rank 0 only. Collective over the TP ranks.
        """
        frame = b""
        if self._channel is not None:
            raw = self._channel.recv_all_bytes_nowait()
            if not raw and idle:
                wait_s = TRANSFER_WAIT_S if transfers else IDLE_WAIT_S
                if self._channel.wait(wait_s, self._wakeup):
                    raw = self._channel.recv_all_bytes_nowait()
            if self._cpu_group is None:
                return self._decode(raw, poll_grammars(), time.time())
            frame = msgspec.msgpack.encode((raw, poll_grammars(), time.time()))
        frame = broadcast_bytes(frame, 0, self._cpu_group)
        raw, ready, now = msgspec.msgpack.decode(frame, type=tuple[list[bytes], list[str], float])
        return self._decode(raw, ready, now)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives or, within a millisecond before it, the time is over.

        On rank 0; the others wait for its broadcast anyway.
        """
        if self._channel is not None:
            self._channel.wait(timeout_s)

    @staticmethod
    def _decode(raw: list[bytes], ready: list[str], now: float) -> ReceivedStep:
        messages = merge_abandoned(decode(r) for r in raw)
        return ReceivedStep(messages=messages, ready_grammars=ready, now=now)


def merge_abandoned(messages: Iterable[Any]) -> list[Any]:
    """Make one message of neighbours that name requests without a client.

    Each such message looks at every request there is, and thousands come at once when a client
    leaves a large batch, or a proxy with all its clients.
    """
    merged: list[Any] = []
    for message in messages:
        last = merged[-1] if merged else None
        if isinstance(last, AbandonReq) and isinstance(message, AbandonReq):
            last.rids |= message.rids
        else:
            merged.append(message)
    return merged
