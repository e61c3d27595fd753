"""When to choose the next step: early enough that the device never waits, and no earlier.

The overlap loop keeps one step on the device and one queued behind it. A step that is chosen as
soon as the one before it has begun is blind to whatever arrives meanwhile: a pause has to outlast
it, a new request stands behind it. So the loop listens to its channel first, until shortly before
the running step ends. Steps of equal kind take equal time, so the end is known from the last ones.

Owns those times; the scheduler reports them and listens. Scheduler thread only. Where the host is
the slower side (small models, a CPU) there is never time to spare, and nothing changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# Steps that the estimates look back on. The shortest one counts: to launch early costs nothing.
_NUM_STEPS = 16
_LEAST_STEPS = 4
# Beside the host's own time: what waking up may take, and how much shorter a step may be.
_WAKE_UP_S = 0.0005
_SHORTER = 0.03
# A step that was over before anybody waited for it may have left the device idle: twice as much
# caution, which fades by half in some hundred steps.
_LEAST_CAUTION_S, _MOST_CAUTION_S = 0.0005, 0.1
_FADING = 0.995


class LaunchPacer:
    """Times of the last steps. All times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._kind: Hashable = None
        self._ended_at = 0.0
        self._launched_at = 0.0  # the step in flight
        self._durations: deque[float] = deque(maxlen=_NUM_STEPS)
        self._launches: deque[float] = deque(maxlen=_NUM_STEPS)
        self._in_flight: Hashable = None
        self._caution_s = 0.0

    def on_launch(self, kind: Hashable, launched_at: float, host_s: float) -> None:
        """A step was queued at this time; choosing and queueing it took the host so long."""
        self._launched_at = launched_at
        if kind != self._in_flight:
            self._in_flight = kind
            self._launches.clear()
        self._launches.append(host_s)

    def on_result(
        self, kind: Hashable, launched_at: float, ended_at: float, was_done: bool = False
    ) -> None:
        """The results of a step have come to the host; `was_done`: it had ended unattended."""
        if was_done:
            more = max(2 * self._caution_s, _LEAST_CAUTION_S)
            self._caution_s = min(more, _MOST_CAUTION_S)
        else:
            self._caution_s *= _FADING
        if kind == self._kind:
            # Without the time in which there was nothing to do.
            self._durations.append(ended_at - max(self._ended_at, launched_at))
        else:
            self._kind = kind
            self._durations.clear()
        self._ended_at = ended_at

    def spare_s(self, now: float) -> float:
        """How long the next step need not be chosen; 0 or less: choose it.

        For a loop that has read all results but the last step's.
        """
        if self._in_flight != self._kind or len(self._durations) < _LEAST_STEPS:
            return 0.0
        duration = min(self._durations)
        margin = max(self._launches) + _WAKE_UP_S + _SHORTER * duration + self._caution_s
        return max(self._ended_at, self._launched_at) + duration - margin - now
