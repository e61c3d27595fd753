"""Waiting and locks for asyncio that are not bound to a loop; a reader/writer lock, writers first.

asyncio's own belong for good to the first loop on which somebody had to wait. An engine's caller
may use one loop after the other. Loops take turns: one of them runs at a time.

Generation requests are readers for as long as they live, weight updates are writers: an update
waits for the requests in flight, and requests that come later wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Waiters:
    """Tasks, of any loops, that wait for something to change."""

    def __init__(self) -> None:
        self._futures: dict[asyncio.Future[None], None] = {}  # in the order of their coming

    async def wait(self) -> None:
        """Return after the next `wake_all`; what has changed, the caller looks at itself."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[future] = None
        try:
            await future
        finally:
            self._futures.pop(future, None)

    def wake_all(self) -> None:
        """Wake whoever waits now, without awaiting, so that a cancelled task can do it too."""
        futures, self._futures = self._futures, {}
        for future in futures:
            with suppress(RuntimeError):  # its loop was closed, and nobody waits any more
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Mutex:
    """`async with`: one task at a time. Not re-entrant."""

    def __init__(self) -> None:
        self._is_held = False
        self._left = Waiters()

    async def __aenter__(self) -> None:
        while self._is_held:
            await self._left.wait()
        self._is_held = True

    async def __aexit__(self, *error: object) -> None:
        self._is_held = False
        self._left.wake_all()


class RWLock:
    """Many readers, `num_readers` now, or one writer. Not re-entrant."""

    def __init__(self) -> None:
        self.num_readers = 0
        self._has_writer = False
        self._num_waiting_writers = 0
        self._changed = Waiters()

    async def acquire_reader(self) -> None:
        """Take the shared side; waits while a writer is active or waiting."""
        while self._has_writer or self._num_waiting_writers:
            await self._changed.wait()
        self.num_readers += 1

    def release_reader(self) -> None:
        """Give the shared side back."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self._changed.wake_all()

    @asynccontextmanager
    async def writer_lock(self) -> AsyncIterator[None]:
        """Hold the exclusive side; waits for every reader."""
        self._num_waiting_writers += 1
        try:
            while self._has_writer or self.num_readers:
                await self._changed.wait()
            self._has_writer = True
        finally:
            self._num_waiting_writers -= 1
            if not self._has_writer:  # cancelled while waiting: readers may go on
                self._changed.wake_all()
        try:
            yield
        finally:
            self._has_writer = False
            self._changed.wake_all()
