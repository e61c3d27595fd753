"""A picture of a run: how latencies are distributed, what happened over time.

Top: cumulative distributions with their percentiles. Bottom: throughput and open requests over
time; then either every request as a bar (waiting light, answering dark), or, of a soak run, the
time per token over time. matplotlib is imported late: only `--plot` needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving.load import Recording, RequestRecord
from serving.report import Summary, percentile

INK, SOFT, GRID = "#1f2933", "#7b8794", "#e4e7eb"
BLUE, PALE_BLUE, ORANGE, GREEN, RED = "#2f6fde", "#b9d2f8", "#e8762d", "#2a9d76", "#d64545"
MARKS = ((50, GREEN), (90, ORANGE), (99, RED))
MAX_BARS = 400
NUM_BINS = 120
MIN_BIN_S = 0.1

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
}


def draw(path: Path, recording: Recording, summary: Summary, title: str, soak: bool) -> None:
    """Write the picture to `path` (PNG or any format that its suffix names).

    Raises SystemExit with advice where matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as exc:
        raise SystemExit("--plot needs matplotlib: pip install 'sglang-hispec[bench]'") from exc
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure = pyplot.figure(figsize=(13, 7.8), dpi=140, facecolor="white")
        grid = figure.add_gridspec(
            2, 6, left=0.055, right=0.945, top=0.83, bottom=0.075, hspace=0.36, wspace=1.1
        )
        _head(figure, summary, title)
        good = [r for r in recording.records if r.outcome == "ok" and r.event_times]
        panels: tuple[tuple[str, list[float]], ...] = (
            ("Time to first token", [r.ttft_s for r in good]),
            ("Time between tokens", [gap for r in good for gap in r.gaps_s]),
            ("End to end", [r.e2e_s for r in good]),
        )
        for place, (name, values) in enumerate(panels):
            axes = figure.add_subplot(grid[0, 2 * place : 2 * place + 2])
            _draw_cdf(axes, name, [1000 * value for value in values])
        _draw_throughput(figure.add_subplot(grid[1, :3]), recording)
        axes = figure.add_subplot(grid[1, 3:])
        if soak:
            _draw_token_times(axes, recording)
        else:
            _draw_requests(axes, recording.records)
        figure.savefig(path)
        pyplot.close(figure)


def _head(figure: Any, summary: Summary, title: str) -> None:
    figure.text(0.055, 0.945, title, fontsize=15, fontweight="bold", color=INK)
    ok, total = summary.outcomes.get("ok", 0), sum(summary.outcomes.values())
    parts = [
        f"{ok} of {total} requests finished",
        f"{summary.output_rate:,.0f} tokens/s out",
        f"{summary.input_rate:,.0f} tokens/s in",
        f"{summary.request_rate:,.1f} requests/s",
        f"{summary.wall_s:,.1f} s",
    ]
    if summary.cached_tokens is not None and summary.input_tokens:
        parts.append(f"{summary.cached_tokens / summary.input_tokens:.0%} of prompts cached")
    failed = summary.outcomes.get("error", 0)
    figure.text(0.055, 0.912, "   ·   ".join(parts), fontsize=10, color=SOFT)
    if failed:
        note = f"{failed} requests failed"
        figure.text(0.945, 0.945, note, fontsize=11, color=RED, ha="right", fontweight="bold")


def _draw_cdf(axes: Any, name: str, values_ms: list[float]) -> None:
    axes.set_title(name)
    axes.set_ylim(0, 1.03)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("ms")
    if not values_ms:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=SOFT)
        return
    ordered = sorted(values_ms)
    end = ordered[-1] * 1.04 or 1.0
    moments = [ordered[0], *ordered, end]
    shares = [0.0, *((place + 1) / len(ordered) for place in range(len(ordered))), 1.0]
    axes.step(moments, shares, where="post", color=BLUE, linewidth=2)
    axes.fill_between(moments, shares, step="post", color=PALE_BLUE, alpha=0.35, linewidth=0)
    marks = [(share, color, percentile(ordered, share)) for share, color in MARKS]
    if ordered[0] > 0 and ordered[-1] > 20 * max(ordered[len(ordered) // 2], 1e-9):
        axes.set_xscale("log")
        axes.set_xlim(max(ordered[0], marks[0][2] / 20), end)
        _plain_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, end)
    for row, (share, color, value) in enumerate(marks):
        axes.plot([value], [share / 100], "o", color=color, markersize=6, zorder=5, clip_on=False)
        height = 0.23 - 0.085 * row
        axes.text(
            0.97,
            height,
            f"p{share}  {_figures(value)} ms",
            transform=axes.transAxes,
            ha="right",
            color=color,
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5},
        )


def _figures(value: float) -> str:
    """Three significant digits, without an exponent."""
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(decimals, 3)}f}"


def _bin_s(wall_s: float) -> float:
    return max(MIN_BIN_S, wall_s / NUM_BINS)


def _draw_throughput(axes: Any, recording: Recording) -> None:
    """Output tokens per second as an area, prefilled prompts as ticks, open requests as a line."""
    width_s = _bin_s(recording.wall_s)
    count = math.ceil(recording.wall_s / width_s) + 1
    tokens = [0.0] * count
    for record in recording.records:
        for moment, number in zip(record.event_times, record.event_tokens, strict=True):
            tokens[min(count - 1, int(moment / width_s))] += number
    edges = [place * width_s for place in range(count + 1)]
    rates = [number / width_s for number in tokens]
    axes.stairs(rates, edges, fill=True, color=PALE_BLUE, alpha=0.8)
    axes.stairs(rates, edges, color=BLUE, linewidth=1.4)
    axes.set_title("Output throughput and open requests", color=INK)
    axes.set_ylabel("output tokens/s", color=BLUE)
    axes.set_xlabel("seconds since the first request")
    axes.set_xlim(0, recording.wall_s)
    axes.set_ylim(0, max(rates) * 1.12 or 1.0)
    levels = _mean_open(recording.records, width_s, count)
    middles = [(place + 0.5) * width_s for place in range(count)]
    twin = axes.twinx()
    full = max(1, count - 2)  # the last bins end after the run
    twin.plot(middles[:full], levels[:full], color=ORANGE, linewidth=1.8)
    twin.set_ylabel("open requests", color=ORANGE)
    twin.set_ylim(0, max(levels) * 1.12 or 1.0)
    twin.spines["right"].set_visible(False)
    twin.grid(False)


def _mean_open(records: Sequence[RequestRecord], width_s: float, count: int) -> list[float]:
    """Return how many requests were open on average in each bin."""
    open_s = [0.0] * count
    for record in records:
        first, last = (min(count - 1, int(t / width_s)) for t in (record.sent_s, record.end_s))
        for place in range(first, last + 1):
            begin_s = max(record.sent_s, place * width_s)
            open_s[place] += max(0.0, min(record.end_s, (place + 1) * width_s) - begin_s)
    return [value / width_s for value in open_s]


def _plain_ticks(axis: Any) -> None:
    """Write the ticks of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _draw_requests(axes: Any, records: Sequence[RequestRecord]) -> None:
    """One bar for each request, from sending to its end."""
    step = math.ceil(len(records) / MAX_BARS) or 1
    shown = records[::step]
    title = "Each request" if step == 1 else f"Every {step}th request"
    axes.set_title(title)
    waits: list[tuple[int, float, float]] = []
    answers: list[tuple[int, float, float]] = []
    failures: list[tuple[int, float, float]] = []
    for row, record in enumerate(shown):
        first_s = record.event_times[0] if record.event_times else record.end_s
        waits.append((row, record.sent_s, first_s))
        (failures if record.outcome == "error" else answers).append((row, first_s, record.end_s))
    thickness = max(0.6, min(6.0, 150 / max(1, len(shown))))
    groups = ((waits, ORANGE, "waiting"), (answers, BLUE, "answering"), (failures, RED, "failed"))
    for bars, color, label in groups:
        if bars:
            rows, begins, ends = zip(*bars)
            axes.hlines(rows, begins, ends, color=color, linewidth=thickness)
            axes.plot([], [], color=color, linewidth=5, label=label)
    # Above the panel, where no bar can lie below it.
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.1)
    axes.set_ylim(len(shown), -1)
    axes.set_xlim(0, max((record.end_s for record in records), default=1.0))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("seconds since the first request")
    axes.set_ylabel("request, in order of sending")
    axes.grid(axis="y", visible=False)


def _draw_token_times(axes: Any, recording: Recording) -> None:
    """Median and p99 of the time per token in slices of the run."""
    width_s = max(_bin_s(recording.wall_s), recording.wall_s / 60)
    slices: dict[int, list[float]] = {}
    for record in recording.records:
        times, tokens = record.event_times, record.event_tokens
        for place in range(1, len(times)):
            value_ms = 1000 * (times[place] - times[place - 1]) / tokens[place]
            slices.setdefault(int(times[place] / width_s), []).append(value_ms)
    moments = [(place + 0.5) * width_s for place in sorted(slices)]
    ordered = [sorted(slices[place]) for place in sorted(slices)]
    medians = [percentile(values, 50) for values in ordered]
    tails = [percentile(values, 99) for values in ordered]
    axes.fill_between(moments, medians, tails, color=PALE_BLUE, alpha=0.35, linewidth=0)
    axes.plot(moments, tails, color=RED, linewidth=1.2, label="p99")
    axes.plot(moments, medians, color=BLUE, linewidth=2, label="median")
    axes.set_title("Time per token over the run")
    axes.set_xlabel("seconds since the first request")
    axes.set_ylabel("ms per token")
    axes.set_xlim(0, recording.wall_s)
    if tails and min(medians) > 0 and max(tails) > 20 * min(medians):
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.1)
