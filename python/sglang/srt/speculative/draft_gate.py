"""Whether drafting pays: what verifications cost, what they bring, and when to look again.

A verification of w tokens a request costs more than a plain step, how much depends on the machine
and the batch; what it brings depends on the text. `DraftGate` keeps the times of both kinds of
step by batch size, and how many tokens drafts have brought or would have brought. `DraftShadow`
finds out the latter without a verification: it follows a draft along the tokens that plain steps
produce. Scheduler thread only; ranks that record the same numbers decide alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

# Latest steps of each kind and size that count.
TIMES_KEPT = 9
MIN_TIMES = 2
# Weight of the newest observation among those of accept lengths.
NEWEST_WEIGHT = 0.2
# Where the cost of a verification is unknown it is tried from this accept length on.
HOPEFUL_LENGTH = 1.5
# A verification must promise to be this much better than plain steps.
MARGIN = 1.05
# Plain steps in a row after which old times of verifications are forgotten.
STEPS_TO_FORGET = 256
# Plain steps with a look at drafts, without success, after which nothing is drafted for a while;
# each time twice as long.
STEPS_AWAKE = 16
MIN_SLEEP, MAX_SLEEP = 16, 256


@dataclass(slots=True)
class _Times:
    """Seconds of the latest steps of one batch size (rounded up to a power of two)."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES_KEPT))
    verify: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES_KEPT))


class DraftGate:
    """Decides step by step between a verification, a plain step and one without a look at drafts.

    Ask `is_asleep`, then (awake) `wants_verification`; afterwards say what was done.
    """

    def __init__(self) -> None:
        self.accept_length = HOPEFUL_LENGTH
        self._times: dict[int, _Times] = {}
        self._steps_aside = 0  # plain steps in a row
        self._steps_awake = 0  # of them, since the last sleep
        self._sleep_left = 0
        self._next_sleep = MIN_SLEEP

    @property
    def is_asleep(self) -> bool:
        """Drafting has not paid for a while: neither draft nor learn in this step."""
        return self._sleep_left > 0

    def wants_verification(self, batch_size: int, accept_length: float | None = None) -> bool:
        """Whether drafts that exist should be verified.

        `accept_length`: what drafts have brought lately, where the caller knows better.
        """
        times = self._of(batch_size)
        if len(times.plain) < MIN_TIMES:
            return False
        length = max(self.accept_length, accept_length or 0.0)
        if len(times.verify) < MIN_TIMES:
            return length >= HOPEFUL_LENGTH
        return length * median(times.plain) > MARGIN * median(times.verify)

    def observe(self, accept_lengths: Iterable[float]) -> None:
        """Drafts have brought, or would have brought, so many tokens, the target's own included."""
        for length in accept_lengths:
            self.accept_length += NEWEST_WEIGHT * (length - self.accept_length)

    def count_verification(self, batch_size: int, seconds: float) -> None:
        """A verification was done."""
        self._of(batch_size).verify.append(seconds)
        self._steps_aside = self._steps_awake = 0
        self._next_sleep = MIN_SLEEP

    def count_plain(self, batch_size: int, seconds: float) -> None:
        """A plain step was done."""
        times = self._of(batch_size)
        times.plain.append(seconds)
        self._steps_aside += 1
        if self._steps_aside % STEPS_TO_FORGET == 0:
            # A moment's disturbance must not decide forever.
            times.verify.clear()
        if self._sleep_left > 0:
            self._sleep_left -= 1
            return
        self._steps_awake += 1
        if self._steps_awake >= STEPS_AWAKE:
            self._steps_awake = 0
            self._sleep_left = self._next_sleep
            self._next_sleep = min(2 * self._next_sleep, MAX_SLEEP)

    def _of(self, batch_size: int) -> _Times:
        return self._times.setdefault((batch_size - 1).bit_length(), _Times())


class DraftShadow:
    """A draft that is not verified, and the tokens that came instead. One request."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, int], int] | None = None
        self._node = 0
        self.length = 1  # tokens that the draft would have brought so far

    @property
    def is_over(self) -> bool:
        """Whether the next draft is wanted."""
        return self._children is None

    def start(self, token_ids: np.ndarray, parents: np.ndarray) -> None:
        """Follow the tree of these nodes, int64 [n] both; node 0 is the last known token."""
        self._children = {}
        for node, (parent, token) in enumerate(zip(parents.tolist(), token_ids.tolist())):
            self._children.setdefault((parent, token), node)
        self._node, self.length = 0, 1

    def follow(self, token_id: int) -> int | None:
        """The next token came. Once the draft is left: the accept length that it would have had."""
        if self._children is None:
            return None
        child = self._children.get((self._node, token_id))
        if child is not None:
            self._node = child
            self.length += 1
            return None
        length, self.length = self.length, 1
        self._children = None
        return length
