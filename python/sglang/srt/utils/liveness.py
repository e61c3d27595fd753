"""Shared-memory heartbeat of the scheduler processes.

One file of 64-bit counters, one a scheduler rank, mapped by every process of the server. Each
rank increments its own counter once a loop (one writer a slot, so no lock); the front and the
watchdog read them. A counter that stands still means that the loop is stuck, whatever sockets
and queues look like.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

_SLOT = struct.Struct("<Q")
# One cache line a counter, so that ranks do not disturb each other.
_STRIDE_BYTES = 64
_BEAT_PERIOD_S = 1.0


class LivenessCounter:
    """A map of the file; open it with an `index` to increment, with any index to read."""

    def __init__(self, path: str, index: int = 0) -> None:
        """Map an existing file. Raises OSError when missing, ValueError on a wrong index."""
        with open(path, "r+b") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), size_bytes)
        self.num_counters = size_bytes // _STRIDE_BYTES
        if not 0 <= index < self.num_counters:
            raise ValueError(f"liveness index {index} is not in [0, {self.num_counters})")
        self._offset = index * _STRIDE_BYTES
        self._value = self.read(index)

    @staticmethod
    def create(path: str, num_counters: int) -> None:
        """Create the file with all counters 0. Called once by the launcher."""
        with open(path, "wb") as file:
            file.write(bytes(num_counters * _STRIDE_BYTES))

    def increment(self) -> None:
        """Tell that the loop is alive. Only the process that owns the index calls this."""
        self._value += 1
        _SLOT.pack_into(self._map, self._offset, self._value)

    def read(self, index: int) -> int:
        """The current count of one rank."""
        return int(_SLOT.unpack_from(self._map, index * _STRIDE_BYTES)[0])

    def read_all(self) -> list[int]:
        """The counts of all ranks, replica-major: index = dp_rank * tp_size + tp_rank."""
        return [self.read(index) for index in range(self.num_counters)]

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> LivenessCounter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def keep_beating(beat: Callable[[], None], limit_s: float) -> Iterator[None]:
    """Call `beat` from a thread while a block keeps its own thread, at most `limit_s` seconds.

    For waits that end by themselves within a known time: what outlives it counts as stuck.
    """
    done = threading.Event()

    def run() -> None:
        deadline = time.monotonic() + limit_s
        while not done.wait(_BEAT_PERIOD_S) and time.monotonic() < deadline:
            beat()

    thread = threading.Thread(target=run, name="keep-beating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
