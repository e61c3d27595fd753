"""A reader/writer lock for one asyncio loop, writers first.

Generation requests are readers for as long as they live, weight updates are writers: an update
waits for the requests in flight, and requests that come later wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RWLock:
    """Many readers or one writer. Not re-entrant. Use on one event loop only."""

    def __init__(self) -> None:
        self._num_readers = 0
        self._has_writer = False
        self._num_waiting_writers = 0
        self._changed = asyncio.Condition()
        self._notifiers: set[asyncio.Task[None]] = set()  # keeps running tasks referenced

    async def acquire_reader(self) -> None:
        """Take the shared side; waits while a writer is active or waiting."""
        if self._has_writer or self._num_waiting_writers:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self._has_writer and not self._num_waiting_writers
                )
                self._num_readers += 1
        else:
            self._num_readers += 1

    def release_reader(self) -> None:
        """Give the shared side back. Must be called on the loop's thread."""
        self._num_readers -= 1
        if self._num_readers == 0 and self._num_waiting_writers:
            self._wake_soon()

    @asynccontextmanager
    async def reader_lock(self) -> AsyncIterator[None]:
        """`acquire_reader` … `release_reader` around a block."""
        await self.acquire_reader()
        try:
            yield
        finally:
            self.release_reader()

    @asynccontextmanager
    async def writer_lock(self) -> AsyncIterator[None]:
        """Hold the exclusive side; waits for every reader."""
        self._num_waiting_writers += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._has_writer and not self._num_readers)
                self._has_writer = True
        finally:
            self._num_waiting_writers -= 1
            if not self._has_writer:  # cancelled while waiting: readers may go on
                self._wake_soon()
        try:
            yield
        finally:
            self._has_writer = False
            self._wake_soon()

    def _wake_soon(self) -> None:
        """Notify waiters without awaiting, so that a cancelled task can release too."""
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notifiers.add(task)
        task.add_done_callback(self._notifiers.discard)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
