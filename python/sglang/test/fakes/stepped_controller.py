"""A cache controller without threads: every copy and every storage operation moves when told to.

So a test chooses, from a seed, what is finished when; waiting for something makes it happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_transfer import CopyEngine
from sglang.srt.mem_cache.storage_threads import JOIN_TIMEOUT_S, StorageThreads
from sglang.srt.platforms.base import Event


class SteppedEvent:
    """Passed when its engine has got that far; whoever waits for it makes the engine work."""

    def __init__(self, engine: SteppedEngine) -> None:
        self._engine = engine
        self._is_passed = False

    def record(self, stream: object = None) -> None:
        self._is_passed = True

    def query(self) -> bool:
        return self._is_passed

    def synchronize(self) -> None:
        while not self._is_passed:
            assert self._engine.step(), "waiting for a copy that was never started"

    def wait(self, stream: object = None) -> None:
        self.synchronize()


class SteppedEngine:
    """Copies in order, one a step."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def event(self) -> Event:
        return SteppedEvent(self)

    def submit(self, job: Callable[[], None], fence: Event, events: Sequence[Event]) -> None:
        self._jobs.append(job)

    def step(self) -> bool:
        """Do the oldest copy; False when there is none."""
        if self._jobs:
            self._jobs.pop(0)()
            return True
        return False

    def close(self) -> None:
        self._jobs.clear()


class _NoThreads(StorageThreads):
    """Loops that run only when called; a stop answers all that is queued, as threads do."""

    def __init__(self) -> None:
        super().__init__()
        self._loops: list[tuple[Callable[[], None], Queue[Any]]] = []

    def start(self, loops: Mapping[str, tuple[Callable[[], None], Queue[Any]]]) -> None:
        self.stop_event.clear()
        self._loops = list(loops.values())

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> list[str]:
        self.stop_event.set()
        for loop, source in self._loops:
            source.put(None)
            loop()
        self._loops = []
        return []


class SteppedController(HiCacheController):
    """``step_*`` does one thing of its kind and says whether there was any."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.write_engine = SteppedEngine()
        self.load_engine = SteppedEngine()
        super().__init__(*args, **kwargs)
        self._threads = _NoThreads()

    def _make_engine(self, name: str) -> CopyEngine:
        return self.write_engine if name == "hicache-write" else self.load_engine

    def step_query(self) -> bool:
        return _run_one(self.prefetch_queue, self.prefetch_thread_func)

    def step_read(self) -> bool:
        return _run_one(self.prefetch_buffer, self.prefetch_io_aux_func)

    def step_backup(self) -> bool:
        return _run_one(self.backup_queue, self.backup_thread_func)

    def step_all(self) -> None:
        """Do everything that is queued."""
        steps = (
            self.write_engine.step,
            self.load_engine.step,
            self.step_query,
            self.step_read,
            self.step_backup,
        )
        for step in steps:
            while step():
                pass

    def discard_queued_backups(self) -> int:
        pending = [op for op in self._backups.held() if not op.is_acked]
        dropped = sum([op.discard() for op in pending])
        while self.step_backup():
            pass
        super().discard_queued_backups()
        return dropped


def _run_one(source: Queue[Any], loop: Callable[[], None]) -> bool:
    items = []
    while source.qsize():
        items.append(source.get_nowait())
    if items:
        source.put(items[0])
        source.put(None)
        loop()
    for item in items[1:]:
        source.put(item)
    return bool(items)
