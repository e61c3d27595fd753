"""Figures of a run: percentiles, rates, what to doubt; as a table and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from serving.load import Recording, RequestRecord

PERCENTILES = (50, 90, 99)
# Above these the client's own delays are no longer small against what it measures.
LAG_LIMIT_S = 0.010
CPU_LIMIT = 0.8
# A chat template is a prefix that all prompts share; whole prompts sent twice hit far more.
RANDOM_CACHE_LIMIT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of a quantity in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution | None:
        """Summarise; None without samples."""
        if not seconds:
            return None
        ordered = sorted(1000 * value for value in seconds)
        p50, p90, p99 = (percentile(ordered, share) for share in PERCENTILES)
        mean = math.fsum(ordered) / len(ordered)
        return cls(count=len(ordered), mean=mean, p50=p50, p90=p90, p99=p99, max=ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values, interpolated between neighbours."""
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All figures of a run. Rates are per second of wall time, first request to last answer."""

    wall_s: float
    outcomes: dict[str, int]
    errors: dict[str, int]
    short_answers: int  # ended "ok" with fewer tokens than asked for
    request_rate: float
    input_rate: float
    output_rate: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None where the server does not report it
    retractions: int | None  # likewise
    peak_in_flight: int
    latencies_ms: dict[str, Distribution]  # of requests that ended "ok"
    ttft_by_kind_ms: dict[str, Distribution]
    client_lag_ms: Distribution | None
    client_cpu_share: float
    warnings: list[str]


def summarize(recording: Recording) -> Summary:
    """Compute all figures; latencies count only requests that ran to their end."""
    records = recording.records
    good = [record for record in records if record.outcome == "ok" and record.event_times]
    wall_s = recording.wall_s
    told = [record.cached_tokens for record in records if record.cached_tokens is not None]
    times = [record.num_retractions for record in records if record.num_retractions is not None]
    summary = Summary(
        wall_s=wall_s,
        outcomes=dict(Counter(record.outcome for record in records)),
        errors=dict(Counter(record.error for record in records if record.error).most_common(10)),
        short_answers=sum(record.output_tokens < record.wanted_tokens for record in good),
        request_rate=len(good) / wall_s,
        input_rate=sum(record.prompt_tokens for record in records) / wall_s,
        output_rate=sum(record.output_tokens for record in records) / wall_s,
        input_tokens=sum(record.prompt_tokens for record in records),
        output_tokens=sum(record.output_tokens for record in records),
        cached_tokens=sum(told) if told else None,
        retractions=sum(times) if times else None,
        peak_in_flight=peak_in_flight(records),
        latencies_ms=_latencies(good, recording),
        ttft_by_kind_ms=_ttft_by_kind(good),
        client_lag_ms=Distribution.of(recording.lags_s),
        client_cpu_share=recording.client_cpu_share,
        warnings=[],
    )
    summary.warnings.extend(_warnings(summary, records))
    return summary


def _latencies(good: list[RequestRecord], recording: Recording) -> dict[str, Distribution]:
    samples = {
        "time to first token": [record.ttft_s for record in good],
        "between tokens": [gap for record in good for gap in record.gaps_s],
        "per output token": [tpot for record in good if (tpot := record.tpot_s) is not None],
        "end to end": [record.e2e_s for record in good],
    }
    if recording.has_schedule:
        samples["sent after due"] = [record.sent_s - record.due_s for record in recording.records]
    found = {name: Distribution.of(values) for name, values in samples.items()}
    return {name: values for name, values in found.items() if values is not None}


def _ttft_by_kind(good: list[RequestRecord]) -> dict[str, Distribution]:
    kinds: dict[str, list[float]] = {}
    for record in good:
        kinds.setdefault(record.kind, []).append(record.ttft_s)
    found = {kind: Distribution.of(values) for kind, values in sorted(kinds.items())}
    return {kind: values for kind, values in found.items() if values is not None}


def peak_in_flight(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were open at once."""
    steps = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    level = peak = 0
    for _, step in steps:
        level += step
        peak = max(peak, level)
    return peak


def _warnings(summary: Summary, records: list[RequestRecord]) -> list[str]:
    found = []
    lag = summary.client_lag_ms
    if lag and lag.p99 > 1000 * LAG_LIMIT_S:
        found.append(f"the client's event loop lagged by {lag.p99:.1f} ms (p99)")
    if summary.client_cpu_share > CPU_LIMIT:
        found.append(
            f"the client used {summary.client_cpu_share:.0%} of a core: it may be the limit"
        )
    if summary.errors:
        found.append(f"{sum(summary.errors.values())} of {len(records)} requests failed")
    if summary.short_answers:
        found.append(f"{summary.short_answers} answers ended before their length")
    random_ones = [record for record in records if record.kind == "random"]
    cached = sum(record.cached_tokens or 0 for record in random_ones)
    if cached > RANDOM_CACHE_LIMIT * sum(record.prompt_tokens for record in random_ones):
        found.append("random prompts hit the prefix cache: was the same --seed used before?")
    return found


def format_table(summary: Summary) -> str:
    """Return the figures as text for a terminal."""
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.items())
    lines = [f"{'':<28}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}   ms"]
    groups = [("", summary.latencies_ms)]
    if len(summary.ttft_by_kind_ms) > 1:
        groups.append(("first token, ", summary.ttft_by_kind_ms))
    for prefix, group in groups:
        lines += [_row(prefix + name, values) for name, values in group.items()]
    if summary.client_lag_ms:
        lines.append(_row("client's event-loop lag", summary.client_lag_ms))
    lines += [
        "",
        f"{'requests':<28}{outcomes}; at most {summary.peak_in_flight} at once",
        f"{'wall time':<28}{summary.wall_s:.2f} s",
        f"{'throughput':<28}{summary.request_rate:.2f} requests/s, "
        f"{summary.input_rate:.1f} tokens/s in, {summary.output_rate:.1f} tokens/s out",
        f"{'cached prompt tokens':<28}{_cached(summary)}",
        f"{'retractions':<28}{_or_unknown(summary.retractions)}",
        f"{'client':<28}{summary.client_cpu_share:.0%} of a core",
    ]
    lines += [f"error: {count} x {text}" for text, count in summary.errors.items()]
    lines += [f"WARNING: {text}" for text in summary.warnings]
    return "\n".join(lines) + "\n"


def _row(name: str, values: Distribution) -> str:
    cells = (values.mean, values.p50, values.p90, values.p99, values.max)
    return f"{name:<28}" + "".join(f"{cell:>10.2f}" for cell in cells)


def _or_unknown(count: int | None) -> str:
    return "not reported" if count is None else str(count)


def _cached(summary: Summary) -> str:
    if summary.cached_tokens is None:
        return "not reported"
    share = summary.cached_tokens / summary.input_tokens if summary.input_tokens else 0.0
    return f"{summary.cached_tokens} of {summary.input_tokens} ({share:.1%})"


def to_json(summary: Summary, recording: Recording) -> dict[str, Any]:
    """Return everything for a JSON file: the figures and a line for each request."""
    requests = [
        {
            "kind": record.kind,
            "outcome": record.outcome,
            "finish": record.finish,
            "error": record.error,
            "due_s": record.due_s,
            "sent_s": record.sent_s,
            "ttft_s": record.ttft_s if record.event_times else None,
            "tpot_s": record.tpot_s if record.event_times else None,
            "e2e_s": record.e2e_s,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "num_retractions": record.num_retractions,
        }
        for record in recording.records
    ]
    return {"summary": asdict(summary), "requests": requests}
