"""A flush that may wait: at most one, answered at the first idle moment or at its deadline.

Owns the request that waits. What idle means and what a flush is, the scheduler knows; it polls once
an iteration. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang.srt.managers.io_struct import FlushCacheReqInput, FlushCacheReqOutput


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: FlushCacheReqInput
    deadline: float  # unix time


class DeferredFlush:
    """See the module docstring."""

    def __init__(
        self,
        *,
        flush: Callable[[], bool],
        is_idle: Callable[[], bool],
        reply: Callable[[FlushCacheReqInput, FlushCacheReqOutput], None],
    ) -> None:
        """`flush` may refuse (False); `is_idle`: no request, and nothing on its way to storage."""
        self._flush = flush
        self._is_idle = is_idle
        self._reply = reply
        self._waiting: _Waiting | None = None

    def handle(self, recv: FlushCacheReqInput, now: float) -> FlushCacheReqOutput | None:
        """The answer, or None where it comes later."""
        if recv.timeout_s <= 0:
            if self._flush():
                return FlushCacheReqOutput()
            return FlushCacheReqOutput(success=False, message="Flush cache failed.\n")
        if self._waiting is not None:
            busy = "Another flush_cache is already in progress."
            return FlushCacheReqOutput(success=False, message=busy)
        self._waiting = _Waiting(recv, now + recv.timeout_s)
        return None

    def poll(self, now: float) -> None:
        """Flush if this is the moment, give up if it is too late."""
        waiting = self._waiting
        if waiting is None:
            return
        if self._is_idle():
            self._waiting = None
            self._reply(waiting.request, FlushCacheReqOutput(success=self._flush()))
        elif now >= waiting.deadline:
            self._waiting = None
            late = FlushCacheReqOutput(success=False, message="Timed out waiting for idle state.")
            self._reply(waiting.request, late)
