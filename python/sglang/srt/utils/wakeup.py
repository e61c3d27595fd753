"""A flag that other threads raise to end a thread's sleep on a socket.

The sleeper polls ``fileno()`` beside its sockets. Any number of threads may call ``set``; one
thread sleeps and clears.
"""

from __future__ import annotations

import os


class Wakeup:
    """An event with a file descriptor, readable while it is set."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._fd

    def set(self) -> None:
        """End the present or the next sleep. Any thread."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:
            # The counter is full: it is set more than enough.
            return

    def clear(self) -> None:
        """Forget what was set so far."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Release the descriptor; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
