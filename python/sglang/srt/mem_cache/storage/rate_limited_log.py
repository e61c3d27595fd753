"""Warnings of a backend that may fail on every page: the first of a kind, then one an interval.

Owns when each kind was logged last and how many were held back since. Called by backends, any
thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time

WARN_INTERVAL_S = 60.0


class RateLimitedLog:
    """Logs warnings to ``logger``, of each kind at most one in ``interval_s`` seconds.

    The next one that is logged says how many were held back; ``flush`` says it at the end.
    """

    def __init__(self, logger: logging.Logger, interval_s: float = WARN_INTERVAL_S) -> None:
        self.interval_s = interval_s
        self._logger = logger
        self._lock = threading.Lock()
        self._logged_at: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """Log a message of a kind, or count it."""
        now = time.monotonic()
        with self._lock:
            if now - self._logged_at.get(kind, -math.inf) < self.interval_s:
                self._held_back[kind] = self._held_back.get(kind, 0) + 1
                return
            self._logged_at[kind] = now
            num_more = self._held_back.pop(kind, 0)
        if num_more:
            message += " (and %d times more since this was last said)"
            args = (*args, num_more)
        self._logger.warning(message, *args)

    def flush(self) -> None:
        """Say how many are held back still."""
        with self._lock:
            held_back, self._held_back = self._held_back, {}
        for kind, num_more in held_back.items():
            self._logger.warning("%d more warnings of the kind %r were not shown", num_more, kind)
