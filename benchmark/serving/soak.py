"""What must hold after a soak run: nothing left on the server, nothing slower, nothing failed."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass

from serving.http_stream import Endpoint, HttpError, fetch_json
from serving.load import Recording

IDLE_WAIT_S = 20.0
# The load is not yet mixed at the start: all places fill at once.
RAMP_SHARE = 0.05
NUM_PARTS = 10
# Of the 45 pairs of tenths, how many more must rise than fall: one run in ten does by chance.
MIN_TREND = 15
MIN_CHANGE = 1.02  # two tenths closer than that are equal
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
    """Compare the median time per token of the first and the last tenth under full load.

    Other work on the machine moves single tenths, a server that slows down moves them all: above
    the tolerance the run fails if later tenths tend to be slower than earlier ones, and whatever
    the others say if the last is GROSS_RATIO times the first. What came after `duration_s` is left
    out: fewer requests share the server then.
    """
    begin_s = RAMP_SHARE * duration_s
    span_s = (duration_s - begin_s) / NUM_PARTS
    parts = [
        token_intervals(recording, begin_s + part * span_s, begin_s + (part + 1) * span_s)
        for part in range(NUM_PARTS)
    ]
    if not all(parts):
        return Check(name="no drift", passed=False, detail="too few tokens to tell")
    medians = [statistics.median(part) for part in parts]
    ratio = medians[-1] / medians[0]
    pairs = list(itertools.combinations(medians, 2))
    trend = sum((late > early * MIN_CHANGE) - (early > late * MIN_CHANGE) for early, late in pairs)
    rises = trend >= MIN_TREND
    limit = 1 + tolerance
    detail = (
        f"last tenth ÷ first tenth = {ratio:.3f} (limit {limit:.2f}), "
        f"trend over the tenths {trend:+d} of {len(pairs)} (limit {MIN_TREND})"
    )
    passed = ratio <= limit or (not rises and ratio < max(limit, GROSS_RATIO))
    return Check(name="no drift", passed=passed, detail=detail)


def check_errors(recording: Recording) -> Check:
    """Every request must have ended as it was meant to, or finished before it was left."""
    failed = [record.error for record in recording.records if record.outcome == "error"]
    left = sum(record.outcome in ("aborted", "disconnected") for record in recording.records)
    detail = f"{len(recording.records)} requests, {left} left early, {len(failed)} failed"
    if failed:
        detail += f", the first with: {failed[0]}"
    return Check(name="no failures", passed=not failed and bool(recording.records), detail=detail)
