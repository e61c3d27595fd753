"""What must hold after a soak run: nothing left on the server, nothing slower, nothing failed."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from serving.http_stream import Endpoint, HttpError, fetch_json
from serving.load import Recording

IDLE_WAIT_S = 20.0
# The load is not yet mixed at the start: all places fill at once.
RAMP_SHARE = 0.05
GROSS_RATIO = 2.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One verdict in words."""

    name: str
    passed: bool
    detail: str


async def check_idle(endpoint: Endpoint, wait_s: float = IDLE_WAIT_S) -> Check:
    """Wait until the server reports no requests and no tokens in use, on all replicas."""
    deadline = time.monotonic() + wait_s
    detail = ""
    while True:
        try:
            loads = (await fetch_json(endpoint, "GET", "/v1/loads?include=core"))["loads"]
            busy = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
            used = sum(load["num_used_tokens"] for load in loads)
            detail = f"{busy} requests, {used} tokens in use"
            if busy == used == 0:
                return Check(name="server idle", passed=True, detail=detail)
        except (OSError, HttpError, KeyError, ValueError, TypeError) as exc:
            detail = f"{type(exc).__name__}: {exc}"
        if time.monotonic() > deadline:
            return Check(name="server idle", passed=False, detail=detail)
        await asyncio.sleep(_POLL_S)


def token_intervals(recording: Recording, begin_s: float, end_s: float) -> list[float]:
    """Return seconds per token of every event that came within a part of the run."""
    return [
        (times[place] - times[place - 1]) / tokens[place]
        for record in recording.records
        for times, tokens in [(record.event_times, record.event_tokens)]
        for place in range(1, len(times))
        if begin_s <= times[place] < end_s
    ]


def check_drift(recording: Recording, duration_s: float, tolerance: float) -> Check:
    """Compare the median time per token of the first and the last quarter under full load.

    The last may be slower by `tolerance`. A median of a quarter ignores what disturbs the machine
    for a moment; a server that has become grossly slower just before the end shows in the last
    tenth, GROSS_RATIO times the first quarter. The ramp and what came after `duration_s` are left
    out: fewer requests share the server then.
    """
    begin_s = RAMP_SHARE * duration_s
    span_s = duration_s - begin_s
    parts = [
        token_intervals(recording, begin_s + low * span_s, begin_s + high * span_s)
        for low, high in ((0.0, 0.25), (0.75, 1.0), (0.9, 1.0))
    ]
    if not all(parts):
        return Check(name="no drift", passed=False, detail="too few tokens to tell")
    first, last, end = (statistics.median(part) for part in parts)
    detail = (
        f"last quarter ÷ first quarter = {last / first:.3f} (limit {1 + tolerance:.2f}), "
        f"last tenth ÷ first quarter = {end / first:.3f} (limit {GROSS_RATIO:.0f}); "
        f"median {first * 1e3:.3g} ms a token"
    )
    passed = last / first <= 1 + tolerance and end / first < max(1 + tolerance, GROSS_RATIO)
    return Check(name="no drift", passed=passed, detail=detail)


def check_errors(recording: Recording) -> Check:
    """Every request must have ended as it was meant to, or finished before it was left.

    One that was open when the run was told to stop is no failure.
    """
    failed = [record.error for record in recording.records if record.outcome == "error"]
    left = sum(record.outcome in ("aborted", "disconnected") for record in recording.records)
    cut_off = sum(record.outcome == "cut off" for record in recording.records)
    detail = f"{len(recording.records)} requests, {left} left early, {len(failed)} failed"
    if cut_off:
        detail += f", {cut_off} cut off by SIGTERM"
    if failed:
        detail += f", the first with: {failed[0]}"
    return Check(name="no failures", passed=not failed and bool(recording.records), detail=detail)
