"""A storage backend being made in a thread of its own, while the scheduler serves.

`BackendOpening` owns one attempt on one rank: connecting to a store may take as long as the store
likes. Trees start, take and give up attempts on the scheduler thread; that all ranks come to the
same end is theirs. Threads are daemons: a library cannot be interrupted while it connects, and a
server that stops must not wait for it.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, StorageError

logger = logging.getLogger(__name__)

# Longer than any backend of ours takes to connect or to give up.
OPENING_TIMEOUT_S = 60.0


class OpeningState(enum.IntEnum):
    """When all ranks have ended, the least of their states is the server's."""

    FAILED = -1
    OPENING = 0
    OPEN = 1


class BackendOpening:
    """One attempt, at work once it is made; see the module docstring.

    ``make()`` runs in the thread and may raise anything. The backend is the attempt's until
    ``take`` hands it out.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], HiCacheStorage],
        timeout_s: float = OPENING_TIMEOUT_S,
    ) -> None:
        self._name = name
        self._make = make
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._lock = threading.Lock()  # over what follows
        self._outcome: HiCacheStorage | Exception | None = None
        self._is_given_up = False
        threading.Thread(target=self._run, name=f"open-{name}", daemon=True).start()

    @property
    def state(self) -> OpeningState:
        """How far this rank is; late counts as failed."""
        outcome = self._outcome
        if isinstance(outcome, Exception):
            return OpeningState.FAILED
        if outcome is not None:
            return OpeningState.OPEN
        is_late = time.monotonic() > self._deadline
        return OpeningState.FAILED if is_late else OpeningState.OPENING

    @property
    def failure(self) -> str | None:
        """Why this rank has failed, where it has."""
        if self.state is not OpeningState.FAILED:
            return None
        outcome = self._outcome
        return self._too_late if outcome is None else str(outcome) or repr(outcome)

    @property
    def _too_late(self) -> str:
        return f"{self._name} has not answered for {self._timeout_s:g} s"

    def take(self) -> HiCacheStorage:
        """Return the backend, the caller's from now on.

        Raises what the making raised, StorageError where it has not ended.
        """
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                raise StorageError(self._too_late)
            if isinstance(outcome, Exception):
                raise outcome
            self._outcome = StorageError(f"{self._name} was taken")
            return outcome

    def give_up(self) -> None:
        """Want no backend any more: one that is there, or comes, is closed. Returns at once."""
        with self._lock:
            self._is_given_up = True
            outcome = self._outcome
            if outcome is None or isinstance(outcome, Exception):
                return
            self._outcome = StorageError(f"{self._name} was given up")
        # Its last words may take long.
        name = f"close-{self._name}"
        threading.Thread(target=self._close, args=[outcome], name=name, daemon=True).start()

    def _run(self) -> None:
        outcome: HiCacheStorage | Exception
        try:
            outcome = self._make()
        except Exception as error:  # noqa: BLE001 - whoever takes the backend gets it
            outcome = error
        with self._lock:
            is_wanted = not self._is_given_up
            if is_wanted:
                self._outcome = outcome
        if not is_wanted and not isinstance(outcome, Exception):
            self._close(outcome)

    def _close(self, backend: HiCacheStorage) -> None:
        try:
            backend.close()
        except Exception as error:  # noqa: BLE001 - a backend's last words change nothing
            logger.warning("Closing storage backend %s failed: %r", self._name, error)
