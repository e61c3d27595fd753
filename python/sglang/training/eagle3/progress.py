"""Progress bars of the trainer, and the clock that a run's time limit is measured by."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm


def bar(total: int | None, what: str, unit: str) -> Any:
    """A bar on standard error; in a log, a line every few seconds."""
    interval = 0.5 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, desc=what, unit=unit, file=sys.stderr, mininterval=interval, ncols=100)


class Clock:
    """Seconds that a run has taken, those before a resumption included."""

    def __init__(self, earlier_s: float = 0.0) -> None:
        self._start = time.monotonic() - earlier_s

    def elapsed_s(self) -> float:
        """Since the run began."""
        return time.monotonic() - self._start
