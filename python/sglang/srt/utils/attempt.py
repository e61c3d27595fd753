"""Something that may take long to make, being made in a thread of its own.

`Attempt` owns one try: its thread, its deadline and, until it is handed out, what was made. Whoever
starts it polls `state`, then takes the result or gives it up, and never waits. Where several ranks
try the same, the least of their states is that of all; agreeing on it is the callers'. Threads are
daemons and never joined: a library cannot be interrupted while it connects, and a process that
stops must not wait for it.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class AttemptState(enum.IntEnum):
    """Ordered: of several ranks the least counts."""

    FAILED = -1
    PENDING = 0
    DONE = 1


class AttemptError(RuntimeError):
    """There is nothing to take; the text says why, the cause is what the making raised."""


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    value: T


class Attempt(Generic[T]):
    """One try, at work once it is constructed; see the module docstring.

    Subclasses set what their `make` reads before they call this constructor.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], T],
        close: Callable[[T], None],
        *,
        timeout_s: float,
        grace_s: float = 0.0,
        late: str | None = None,
    ) -> None:
        """`make()` runs in the thread, which is called `name`, and may raise anything.

        `close(result)` is called once for a result that nobody wants: by `give_up`, whose caller
        must not have to wait for it, or in the thread where the result comes after that. An attempt
        that has not ended `timeout_s` + `grace_s` from now counts as failed, for the reason `late`.
        """
        self._name = name
        self._make = make
        self._close = close
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._late = late or f"{name} has not ended for {timeout_s:g} s"
        self._deadline = time.monotonic() + timeout_s
        self._given_up = threading.Event()
        self._lock = threading.Lock()  # over setting the event, and over what follows
        self._outcome: _Made[T] | Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    # -- whoever started it -----------------------------------------------------------------------

    @property
    def state(self) -> AttemptState:
        """How far it is. One that is late, taken or given up is FAILED; late ones may end yet."""
        return self._state_of(self._outcome)

    @property
    def failure(self) -> str | None:
        """Why it has failed, where it has."""
        outcome = self._outcome
        return self._reason(outcome) if self._state_of(outcome) is AttemptState.FAILED else None

    def take(self) -> T:
        """Return the result, the caller's from now on. Raises AttemptError where there is none."""
        with self._lock:
            outcome = self._outcome
            if isinstance(outcome, _Made):
                self._outcome = AttemptError(f"{self._name}: the result was taken")
                return outcome.value
        raise AttemptError(self._reason(outcome)) from outcome

    def give_up(self) -> None:
        """Want no result any more: one that is there, or comes, is closed. Returns at once."""
        with self._lock:
            self._given_up.set()
            outcome = self._outcome
            if not isinstance(outcome, Exception):
                self._outcome = AttemptError(f"{self._name} was given up")
        if isinstance(outcome, _Made):
            self._close_unwanted(outcome.value)

    def _state_of(self, outcome: _Made[T] | Exception | None) -> AttemptState:
        if isinstance(outcome, _Made):
            return AttemptState.DONE
        is_late = time.monotonic() > self._deadline + self._grace_s
        return AttemptState.FAILED if outcome is not None or is_late else AttemptState.PENDING

    def _reason(self, outcome: _Made[T] | Exception | None) -> str:
        return str(outcome) or repr(outcome) if isinstance(outcome, Exception) else self._late

    # -- what `make` may ask ----------------------------------------------------------------------

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set()

    def wait_until_given_up(self, timeout_s: float) -> bool:
        """Sleep, but not on when nobody wants the result any more; whether that is so."""
        return self._given_up.wait(timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative once it is over."""
        return self._deadline - time.monotonic()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        outcome: _Made[T] | Exception
        try:
            outcome = _Made(self._make())
        except Exception as error:  # noqa: BLE001 - whoever takes the result is told
            outcome = error
        except BaseException as error:  # noqa: BLE001 - a panic of an extension, say
            outcome = RuntimeError(repr(error))
        with self._lock:
            is_wanted = not self.is_given_up
            if is_wanted:
                self._outcome = outcome
        if not is_wanted and isinstance(outcome, _Made):
            self._close_unwanted(outcome.value)

    def _close_unwanted(self, value: T) -> None:
        try:
            self._close(value)
        except Exception as error:  # noqa: BLE001 - last words change nothing for those who go on
            logger.warning("Closing the result of %s failed: %r", self._name, error)
