"""Requests whose grammar is being compiled, kept out of the waiting queue meanwhile.

Owns that queue; compiling and caching are the backend's. Scheduler thread only, never blocks on
rank 0. With several ranks, rank 0 decides: `poll_ready` (rank 0 only) names the entries that are
settled, the scheduler hands these names to every rank, and `take` yields the same requests with
the same verdicts everywhere; a rank that is slower waits there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    GrammarError,
    GrammarMatcher,
)
from sglang.srt.sampling.sampling_params import SamplingParams

# Hostile grammars are stopped by the engine's own limits long before; this is the last resort.
DEFAULT_COMPILE_TIMEOUT_S = 30.0
# Beyond this a rank that still compiles what rank 0 has finished is broken, not slow.
RANK_WAIT_S = 120.0
_TIMED_OUT = "timeout:"


class GrammarReq(Protocol):
    """What this module reads and sets of a request."""

    grammar: GrammarMatcher | None  # set by `take`

    @property
    def rid(self) -> str: ...

    @property
    def sampling_params(self) -> SamplingParams: ...


R = TypeVar("R", bound=GrammarReq)


@dataclass(slots=True)
class _Entry(Generic[R]):
    req: R
    future: Future[GrammarMatcher]
    deadline: float  # time.monotonic(); only rank 0's counts


class GrammarManager(Generic[R]):
    """The grammar queue of one rank."""

    def __init__(
        self,
        backend: BaseGrammarBackend | None,
        compile_timeout_s: float = DEFAULT_COMPILE_TIMEOUT_S,
    ) -> None:
        """`backend` None: constrained requests fail with a sentence that says so."""
        self._backend = backend
        self._compile_timeout_s = compile_timeout_s
        # Keyed by a running number, the same on every rank, because a request id can come again
        # while an aborted request of that id is still being compiled.
        self._entries: dict[int, _Entry[R]] = {}
        self._next_key = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, req: R) -> None:
        """Start compiling the grammar of `req`; `take` gives it back."""
        grammar = req.sampling_params.grammar
        if grammar is None:
            raise RuntimeError(f"request {req.rid} has no grammar to compile")
        if self._backend is None:
            future: Future[GrammarMatcher] = Future()
            future.set_exception(
                GrammarError(f"{grammar[0]} is not available: the grammar backend is off.")
            )
        else:
            future = self._backend.compile_async(*grammar)
        deadline = time.monotonic() + self._compile_timeout_s
        self._entries[self._next_key] = _Entry(req, future, deadline)
        self._next_key += 1

    def poll_ready(self) -> list[str]:
        """Names, for `take`, of the entries that are compiled, have failed or took too long."""
        if not self._entries:
            return []
        now = time.monotonic()
        names = []
        for key, entry in self._entries.items():
            if entry.future.done():
                names.append(str(key))
            elif now >= entry.deadline:
                names.append(f"{_TIMED_OUT}{key}")
        return names

    def take(self, names: Sequence[str]) -> tuple[list[R], list[tuple[R, str]]]:
        """(requests whose `grammar` is now set, (request, reason) of those that failed).

        `names` come from rank 0's `poll_ready`, in its order; those of requests that were removed
        since are skipped.
        """
        ready: list[R] = []
        failed: list[tuple[R, str]] = []
        for name in names:
            entry = self._entries.pop(int(name.removeprefix(_TIMED_OUT)), None)
            if entry is None:
                continue
            if name.startswith(_TIMED_OUT):
                self._forget(entry.req)
                failed.append((entry.req, "Compiling the grammar took too long."))
                continue
            try:
                entry.req.grammar = entry.future.result(timeout=RANK_WAIT_S).copy()
            except GrammarError as exc:
                failed.append((entry.req, str(exc)))
            else:
                ready.append(entry.req)
        return ready, failed

    def remove(self, matches: Callable[[R], bool]) -> list[R]:
        """Take out the requests that match (an abort); what they compile stays in the cache."""
        keys = [key for key, entry in self._entries.items() if matches(entry.req)]
        return [self._entries.pop(key).req for key in keys]

    def pending(self) -> list[R]:
        """The requests in the queue, oldest first."""
        return [entry.req for entry in self._entries.values()]

    def reset(self) -> None:
        """Empty the cache of compiled grammars (part of a cache flush)."""
        if self._backend is not None:
            self._backend.reset()

    def shutdown(self) -> None:
        """Stop the compiling threads."""
        if self._backend is not None:
            self._backend.shutdown()

    def _forget(self, req: R) -> None:
        grammar = req.sampling_params.grammar
        if self._backend is not None and grammar is not None:
            self._backend.forget(*grammar)
