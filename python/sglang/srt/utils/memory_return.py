"""Gives memory that was freed back to the system after exceptional use.

The C allocator keeps what was freed for later; after one request of many megabytes the process
would stay that large for good. `MemoryReturner` asks it to let go, off the event loop and not more
often than every few seconds. Without glibc it does nothing. Event loop thread only.
"""

from __future__ import annotations

import asyncio
import ctypes
import ctypes.util
import gc
import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MIN_INTERVAL_S = 5.0
# The last references to a request go a moment after its answer was sent.
_DELAY_S = 0.5


def _find_malloc_trim() -> Callable[[int], int] | None:
    name = ctypes.util.find_library("c")
    try:
        return ctypes.CDLL(name).malloc_trim if name else None
    except (OSError, AttributeError):  # not glibc
        return None


class MemoryReturner:
    """One a process."""

    def __init__(
        self, trim: Callable[[int], int] | None = None, min_interval_s: float = _MIN_INTERVAL_S
    ) -> None:
        self._trim = trim or _find_malloc_trim()
        self._min_interval_s = min_interval_s
        self._last_time = -min_interval_s  # monotonic
        self._is_scheduled = False

    def request(self) -> None:
        """Give memory back soon; calls that come before that count as one."""
        if self._trim is None or self._is_scheduled:
            return
        self._is_scheduled = True
        wait_s = self._last_time + self._min_interval_s - time.monotonic()
        asyncio.get_running_loop().call_later(max(_DELAY_S, wait_s), self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        self._last_time = time.monotonic()
        assert self._trim is not None
        # Refused requests leave their bodies in cycles of exceptions and frames.
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, self._trim, 0)
