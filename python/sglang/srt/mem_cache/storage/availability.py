"""Whether a remote store answers, so that one that does not costs one call and not every call.

Owns the verdict and the thread that asks again while a store is away. Knows no store: the backend
says what failed and how to ask. Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_PROBE_S = 0.25
LAST_PROBE_S = 5.0  # between two probes of a store that is away for long


class Availability:
    """Up until a failure is reported, up again when ``probe()`` says so.

    ``probe`` runs in a thread of its own, which exists only while the store is away; it may block,
    and whatever it raises means that the store is still away.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], bool],
        *,
        first_probe_s: float = FIRST_PROBE_S,
        last_probe_s: float = LAST_PROBE_S,
    ) -> None:
        self._name = name
        self._probe = probe
        self._first_probe_s = first_probe_s
        self._last_probe_s = last_probe_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_outages = 0

    @property
    def is_up(self) -> bool:
        """Whether calls are worth a try."""
        return self._thread is None and not self._closed.is_set()

    def report_failure(self, reason: object) -> None:
        """The store did not answer: no calls until a probe succeeds."""
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            self.num_outages += 1
            self._thread = threading.Thread(
                target=self._wait_for_return, name=f"hicache-{self._name}-probe", daemon=True
            )
            logger.warning(
                "%s does not answer (%s): reads miss and writes are dropped until it does",
                self._name,
                reason,
            )
            self._thread.start()

    def close(self) -> None:
        """Never up again; does not wait for a probe under way. Lets go of whoever probes."""
        self._closed.set()
        self._probe = _is_closed

    def _wait_for_return(self) -> None:
        started = time.monotonic()
        delay_s = self._first_probe_s
        while not self._closed.wait(delay_s):
            delay_s = min(2 * delay_s, self._last_probe_s)
            if self._answers():
                logger.info("%s answers again, %.1f s", self._name, time.monotonic() - started)
                break
        with self._lock:
            self._thread = None

    def _answers(self) -> bool:
        try:
            return self._probe()
        except Exception as error:  # noqa: BLE001 - a client library's failures: still away
            logger.debug("probe of %s failed: %r", self._name, error)
            return False


def _is_closed() -> bool:
    return False
