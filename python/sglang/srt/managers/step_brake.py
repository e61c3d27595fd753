"""`/slow_down`: sleep before every step, so that what takes milliseconds can be watched.

Owns how long. Scheduler thread only.
"""

from __future__ import annotations

import time

from sglang.srt.managers.io_struct import SlowDownReqInput, SlowDownReqOutput

MAX_SLEEP_S = 60.0


class StepBrake:
    """See the module docstring."""

    def __init__(self) -> None:
        self.sleep_s: float | None = None  # None: not at all

    def handle(self, recv: SlowDownReqInput) -> SlowDownReqOutput:
        """Sleep so long from now on."""
        seconds = recv.forward_sleep_time
        if seconds is not None and not 0 <= seconds <= MAX_SLEEP_S:
            wanted = f"forward_sleep_time must be in [0, {MAX_SLEEP_S:g}] seconds."
            return SlowDownReqOutput(success=False, message=wanted)
        self.sleep_s = seconds
        return SlowDownReqOutput()

    def before_step(self) -> None:
        if self.sleep_s is not None:
            time.sleep(self.sleep_s)
