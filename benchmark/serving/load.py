"""Sends requests when they are due and records what comes back and when.

Owns: pacing, the requests in flight, their records, the watch over the client itself. Does not
own: statistics (`report`). One event loop, one thread; a `LoadGenerator` serves one run after the
other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from serving.backends import Answer, Backend, StreamError
from serving.http_stream import Endpoint, HttpError, fetch_json, stream_events
from serving.workloads import PromptSpec

# "cut off": still open some time after the run was told to stop.
Outcome = Literal["ok", "aborted", "disconnected", "cut off", "error"]

STOP_GRACE_S = 10.0
_LAG_PERIOD_S = 0.01
_DONE = b"[DONE]"


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds since the run began."""

    kind: str
    fate: str
    wanted_tokens: int
    due_s: float
    sent_s: float
    end_s: float = 0.0
    outcome: Outcome = "error"
    error: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    num_retractions: int | None = None
    event_times: list[float] = field(default_factory=list)  # of events that brought output
    event_tokens: list[float] = field(default_factory=list)  # and how many tokens each brought

    @property
    def ttft_s(self) -> float:
        """From sending to the first output; needs at least one event."""
        return self.event_times[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first event; None for a single one."""
        tokens = sum(self.event_tokens[1:])
        return (self.event_times[-1] - self.event_times[0]) / tokens if tokens else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive events."""
        return [later - earlier for earlier, later in itertools.pairwise(self.event_times)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """When requests are sent. Both limits may hold: arrivals wait for a free place then."""

    arrivals_s: Iterable[float]
    has_schedule: bool = False  # the arrivals are spread over time
    concurrency: int | None = None
    duration_s: float | None = None  # no request is sent after that
    timeout_s: float = 600.0  # of one request
    grace_s: float = STOP_GRACE_S  # after `stop`, for what is still open


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole run."""

    records: list[RequestRecord]
    sending_s: float  # requests were sent so long; the rest was waiting for their ends
    wall_s: float
    lags_s: list[float]  # how late the client's own event loop woke up
    client_cpu_share: float  # CPU time of this process ÷ wall time
    has_schedule: bool  # arrival times were planned, so being late means something


class LoadGenerator:
    """Runs a list of requests against one server."""

    def __init__(self, endpoint: Endpoint, backend: Backend) -> None:
        self._endpoint = endpoint
        self._backend = backend
        self._start = 0.0
        self._run_id = ""
        self._stopping = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        self._sending_s = 0.0

    def stop(self) -> None:
        """Send no further request of this run; those in flight have `grace_s` to end."""
        self._stopping.set()
        self._sending_s = self._sending_s or self._now()

    async def run(
        self,
        specs: Iterable[PromptSpec],
        pacing: Pacing,
        on_done: Callable[[RequestRecord], None] = lambda record: None,
    ) -> Recording:
        """Send all requests, wait for their ends. Failures are recorded, never raised."""
        self._run_id = uuid.uuid4().hex[:12]
        self._stopping.clear()
        self._sending_s = 0.0
        lags: list[float] = []
        cpu = time.process_time()
        self._start = time.perf_counter()
        async with _beside(_watch_lag(lags)), _beside(self._cut_off(pacing.grace_s)):
            records = await self._send_all(specs, pacing, on_done)
        wall_s = self._now()
        share = (time.process_time() - cpu) / wall_s
        return Recording(
            records=records,
            sending_s=self._sending_s,
            wall_s=wall_s,
            lags_s=lags,
            client_cpu_share=share,
            has_schedule=pacing.has_schedule,
        )

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _send_all(
        self,
        specs: Iterable[PromptSpec],
        pacing: Pacing,
        on_done: Callable[[RequestRecord], None],
    ) -> list[RequestRecord]:
        places = asyncio.Semaphore(pacing.concurrency) if pacing.concurrency else None
        records: list[RequestRecord] = []
        async with asyncio.TaskGroup() as tasks:
            for number, (spec, due_s) in enumerate(zip(specs, pacing.arrivals_s, strict=False)):
                if pacing.duration_s is not None and due_s > pacing.duration_s:
                    break
                if (delay_s := due_s - self._now()) > 0:
                    await self._sleep(delay_s)
                if places:
                    await places.acquire()
                if self._stopping.is_set():
                    break
                if pacing.duration_s is not None and self._now() > pacing.duration_s:
                    break
                record = RequestRecord(spec.kind, spec.fate, spec.output_len, due_s, self._now())
                records.append(record)
                task = tasks.create_task(self._run_one(spec, number, record, pacing.timeout_s))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
                if places:
                    task.add_done_callback(lambda _: places.release())
                task.add_done_callback(partial(_report, on_done, record))
            self._sending_s = self._sending_s or self._now()
        return records

    async def _sleep(self, delay_s: float) -> None:
        """Return after that time, or at once when the run is to stop."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _cut_off(self, grace_s: float) -> None:
        """Once the run is to stop, cancel what is open after that time."""
        await self._stopping.wait()
        await asyncio.sleep(grace_s)
        for task in self._open:
            task.cancel()

    async def _run_one(
        self, spec: PromptSpec, number: int, record: RequestRecord, timeout_s: float
    ) -> None:
        # All of one length: an abort ends every request whose id begins with the one it names.
        answer, rid = Answer(), f"{self._run_id}-{number:08d}"
        leaves_by_clock = spec.fate == "disconnect" and spec.leave_after_s is not None
        limit_s = spec.leave_after_s if leaves_by_clock else timeout_s
        record.sent_s = self._now()
        try:
            async with asyncio.timeout(limit_s):
                record.outcome = await self._listen(spec, rid, record, answer)
        except TimeoutError:
            record.outcome = "disconnected" if leaves_by_clock else "error"
            record.error = "" if leaves_by_clock else f"no end within {timeout_s:g} s"
        except asyncio.CancelledError:
            record.outcome = "cut off"
            raise
        except (OSError, HttpError, StreamError, ValueError, KeyError) as exc:
            record.error = f"{type(exc).__name__}: {exc}"
        finally:
            record.end_s = self._now()
            _take_over(record, answer)

    async def _listen(
        self, spec: PromptSpec, rid: str, record: RequestRecord, answer: Answer
    ) -> Outcome:
        """Read events until the end or until it is time to leave."""
        body = self._backend.encode(spec, rid)
        events = stream_events(self._endpoint, self._backend.path, body)
        async with contextlib.aclosing(events), self._abort_task(spec, rid) as leave:
            async for payload in events:
                now = self._now()
                if payload == _DONE:
                    return _outcome(spec, answer)
                before = answer.num_tokens
                if self._backend.read_event(payload, answer):
                    record.event_times.append(now)
                    record.event_tokens.append(max(1, answer.num_tokens - before))
                if spec.fate != "finish" and answer.num_events >= spec.leave_after_tokens:
                    if spec.fate == "disconnect":
                        return "disconnected"
                    leave.set()
        raise StreamError("the stream ended without [DONE]")

    @contextlib.asynccontextmanager
    async def _abort_task(self, spec: PromptSpec, rid: str) -> AsyncIterator[asyncio.Event]:
        """Yield an event; a request meant to be aborted is, once that is set or its time came."""
        leave = asyncio.Event()
        if spec.fate != "abort":
            yield leave
            return
        task = asyncio.create_task(self._abort(leave, rid, spec.leave_after_s))
        try:
            yield leave
            if leave.is_set() or task.done():
                await task  # raises what went wrong
        finally:
            task.cancel()

    async def _abort(self, leave: asyncio.Event, rid: str, after_s: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leave.wait(), after_s)
        await fetch_json(self._endpoint, "POST", "/abort_request", {"rid": rid})


def _report(
    on_done: Callable[[RequestRecord], None], record: RequestRecord, task: asyncio.Task[Any]
) -> None:
    on_done(record)


def _outcome(spec: PromptSpec, answer: Answer) -> Outcome:
    if answer.finish != "abort":
        return "ok"
    if spec.fate != "abort":
        raise StreamError("aborted by the server")
    return "aborted"


def _take_over(record: RequestRecord, answer: Answer) -> None:
    """Copy the counts. Where tokens were only told at the end, events share them equally."""
    record.finish = answer.finish
    record.prompt_tokens = answer.prompt_tokens or 0
    record.cached_tokens = answer.cached_tokens
    record.num_retractions = answer.num_retractions
    record.output_tokens = answer.num_tokens or answer.num_events
    told = sum(record.event_tokens)
    if told and record.outcome == "ok" and told != record.output_tokens:
        share = record.output_tokens / len(record.event_tokens)
        record.event_tokens = [share] * len(record.event_tokens)


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the context lasts, and end it then."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch_lag(lags: list[float]) -> None:
    """Append how much later than asked each short sleep ends: what other work delayed it."""
    while True:
        due = time.perf_counter() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lags.append(max(0.0, time.perf_counter() - due))
