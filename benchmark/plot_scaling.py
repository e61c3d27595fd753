"""Draw and print what docs/scaling.md says about capacity.

    python benchmark/plot_scaling.py --png docs/scaling.png

The formulas and their figures are in `benchmark/serving/scaling.py`; only the picture needs
matplotlib (`pip install 'sglang-hispec[bench]'`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import output_file
from serving.plot import BLUE, GREEN, ORANGE, SOFT, STYLE
from serving.scaling import (
    GB,
    REPLICA_COUNTS,
    SPEC_8B,
    SPECS,
    Hardware,
    Load,
    ReplicaSpec,
    Workload,
    break_even_hit_rate,
    compute_seconds,
    device_tokens,
    estimate,
    host_tokens,
    replicas_carried,
    restore_seconds,
    without_storage,
)

TIER_COLORS = {"device": BLUE, "host": GREEN, "storage": ORANGE}
GAPS_S = (30.0, 120.0, 600.0)
STORAGE_SIZES = (10 * GB, 100 * GB, 1000 * GB)
RESTORED_TOKENS = 8192
COSTS = (0.02, 0.05, 0.1, 0.2)  # of a tier, as shares of a replica's price


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replica_rows(hardware: Hardware) -> list[list[str]]:
    rows = []
    for spec in SPECS:
        host_s = restore_seconds(spec, hardware.host_bandwidth, RESTORED_TOKENS)
        storage_s = restore_seconds(spec, hardware.storage_bandwidth, RESTORED_TOKENS)
        rows.append(
            [
                spec.name,
                f"{spec.kv_bytes / 1024:.0f} KiB",
                f"{spec.prefill_rate:,.0f}",
                f"{spec.break_even_bandwidth / GB:.1f} GB/s",
                f"{device_tokens(spec, hardware) / 1e6:.2f} M",
                f"{host_tokens(spec, hardware) / 1e6:.2f} M",
                f"{compute_seconds(spec, RESTORED_TOKENS) * 1e3:.0f} ms",
                f"{host_s * 1e3:.0f} ms",
                f"{storage_s * 1e3:.0f} ms",
            ]
        )
    return rows


REPLICA_HEADER = (
    "replica",
    "a token",
    "prefill tok/s",
    "break-even",
    "device holds",
    "host holds",
    "compute 8k",
    "from host",
    "from storage",
)


def load_row(spec: ReplicaSpec, load: Load, without: Load) -> list[str]:
    return [
        spec.name.split(",")[0],
        f"{load.num_replicas:,}",
        f"{load.requests_per_s:,.0f}",
        " / ".join(f"{share:.2f}" for share in load.shares.values()),
        f"{load.gain:.1f} ({without.gain:.1f})",
        f"{load.host_bandwidth_per_gpu / GB:.1f}",
        f"{load.storage_read / GB:,.0f}",
        f"{load.storage_write / GB:,.0f}",
        f"{load.storage_bytes / 1e12:,.0f}",
    ]


LOAD_HEADER = (
    "model",
    "replicas",
    "requests/s",
    "device / host / storage",
    "gain (no storage)",
    "host GB/s a GPU",
    "read GB/s",
    "written GB/s",
    "TB stored",
)


def load_rows(hardware: Hardware, work: Workload) -> list[list[str]]:
    rows = []
    for spec in SPECS:
        for count in REPLICA_COUNTS:
            load = estimate(spec, count, hardware, work)
            without = estimate(spec, count, hardware, without_storage(work))
            rows.append(load_row(spec, load, without))
    return rows


def carried_rows(hardware: Hardware, work: Workload) -> list[list[str]]:
    """Replicas that a storage service carries, with and without a cache-aware router."""
    rows = []
    for spec in SPECS:
        for affinity, name in ((1.0, "cache-aware"), (0.0, "any replica")):
            load = estimate(spec, 64, hardware, replace(work, affinity=affinity))
            carried = [f"{replicas_carried(load, size):,.0f}" for size in STORAGE_SIZES]
            rows.append([spec.name.split(",")[0], name, *carried])
    return rows


CARRIED_HEADER = ("model", "router", "10 GB/s", "100 GB/s", "1 TB/s")


def cost_rows(work: Workload) -> list[list[str]]:
    """By the price of a tier, the hit rate from which it pays."""
    return [
        [f"{cost:.0%}", *(f"{break_even_hit_rate(spec, work, cost):.1%}" for spec in SPECS)]
        for cost in COSTS
    ]


COST_HEADER = ("price", *(spec.name.split(",")[0] for spec in SPECS))


def document_tables(hardware: Hardware, work: Workload) -> list[str]:
    """The tables of docs/scaling.md, in its order."""
    return [
        table(REPLICA_HEADER, replica_rows(hardware)),
        table(LOAD_HEADER, load_rows(hardware, work)),
        table(CARRIED_HEADER, carried_rows(hardware, work)),
        table(COST_HEADER, cost_rows(work)),
    ]


def print_tables(hardware: Hardware, work: Workload) -> None:
    """Those of the document, then the loads of other routers and gaps."""
    for text in document_tables(hardware, work):
        print(text, end="\n\n")
    for affinity in (1.0, 0.0):
        for gap_s in GAPS_S:
            print(f"affinity {affinity:g}, mean gap {gap_s:g} s")
            chosen = replace(work, affinity=affinity, mean_gap_s=gap_s)
            print(table(LOAD_HEADER, load_rows(hardware, chosen)), end="\n\n")


# ------------------------------------------------------------------------------------------------
# Picture
# ------------------------------------------------------------------------------------------------


def draw(path: Path, hardware: Hardware, work: Workload) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6), layout="constrained")
        draw_times(axes[0][0], hardware)
        draw_gaps(axes[0][1], hardware, work)
        draw_storage(axes[1][0], hardware, work)
        draw_costs(axes[1][1], work)
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def draw_times(axis: Any, hardware: Hardware) -> None:
    """Bars: 8,192 tokens computed, from the host, from storage."""
    ways = (
        ("computed", SOFT, lambda spec: compute_seconds(spec, RESTORED_TOKENS)),
        (
            "from host",
            GREEN,
            lambda spec: restore_seconds(spec, hardware.host_bandwidth, RESTORED_TOKENS),
        ),
        (
            "from storage",
            ORANGE,
            lambda spec: restore_seconds(spec, hardware.storage_bandwidth, RESTORED_TOKENS),
        ),
    )
    for place, (name, color, seconds) in enumerate(ways):
        bars = axis.bar(
            [index + 0.27 * (place - 1) for index in range(len(SPECS))],
            [seconds(spec) * 1e3 for spec in SPECS],
            width=0.25,
            color=color,
            label=name,
        )
        axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axis.set_xticks(range(len(SPECS)), [spec.name for spec in SPECS])
    axis.set_ylabel("ms")
    axis.set_title("Time until 8,192 tokens are there")
    axis.legend()


def draw_gaps(axis: Any, hardware: Hardware, work: Workload) -> None:
    """Stacked: where an 8B replica finds its prompts, by how long users think."""
    gaps = [10 * 1.15**step for step in range(40)]
    loads = [estimate(SPEC_8B, 64, hardware, replace(work, mean_gap_s=gap)) for gap in gaps]
    axis.stackplot(
        gaps,
        *([load.shares[tier] for load in loads] for tier in TIER_COLORS),
        labels=list(TIER_COLORS),
        colors=list(TIER_COLORS.values()),
        alpha=0.85,
    )
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    axis.set_xlabel("mean time between a prompt and its continuation, s")
    axis.set_ylabel("share of prompt tokens")
    axis.set_title("8B: the tier that answers")
    axis.legend(loc="lower left")


def draw_storage(axis: Any, hardware: Hardware, work: Workload) -> None:
    """What storage reads and writes in all, by the number of replicas."""
    counts = [2**power for power in range(11)]
    for spec, style in zip(SPECS, ("-", "--"), strict=True):
        for affinity, color, name in ((1.0, BLUE, "cache-aware"), (0.0, ORANGE, "any replica")):
            chosen = replace(work, affinity=affinity)
            loads = [estimate(spec, count, hardware, chosen) for count in counts]
            model = spec.name.split(",")[0]
            axis.plot(
                counts,
                [load.storage_read / GB for load in loads],
                style,
                color=color,
                label=f"{model} read, {name}",
            )
        written = [load.storage_write / GB for load in loads]
        axis.plot(counts, written, style, color=SOFT, label=f"{model} written", lw=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(REPLICA_COUNTS, [f"{count:,}" for count in REPLICA_COUNTS])
    axis.set_xlabel("replicas")
    axis.set_ylabel("GB/s")
    axis.set_title(f"Storage traffic, mean gap {work.mean_gap_s:g} s")
    axis.legend(fontsize=8)


def draw_costs(axis: Any, work: Workload) -> None:
    """The hit rate that a tier must add, by its price and the length of prompts."""
    costs = [step / 200 for step in range(61)]
    for spec, style in zip(SPECS, ("-", "--"), strict=True):
        for prompt_len, color in ((1024, ORANGE), (4096, BLUE), (16384, GREEN)):
            chosen = replace(work, prompt_len=prompt_len)
            axis.plot(
                [100 * cost for cost in costs],
                [100 * break_even_hit_rate(spec, chosen, cost) for cost in costs],
                style,
                color=color,
                label=f"{spec.name.split(',')[0]}, {prompt_len:,} tokens in",
            )
    axis.set_xlabel("price of the tier, % of the replica's")
    axis.set_ylabel("hit rate to add, % of prompt tokens")
    axis.set_title(f"When a tier pays ({work.output_len} tokens out)")
    axis.legend(fontsize=8)


def at_least(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """A parser of numbers within bounds."""

    def parse(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            bounds = f"at least {least:g}" if most == float("inf") else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {bounds}")
        return value

    return parse


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--png", type=output_file, help="file for the picture")
    parser.add_argument("--prompt-len", type=at_least(1), default=Workload().prompt_len)
    parser.add_argument("--output-len", type=at_least(0), default=Workload().output_len)
    parser.add_argument("--reusable", type=at_least(0, 1), default=Workload().reusable)
    gap = Workload().mean_gap_s
    parser.add_argument("--mean-gap", type=at_least(0.001), default=gap, help="seconds")
    args = parser.parse_args(arguments)
    work = Workload(
        prompt_len=round(args.prompt_len),
        output_len=round(args.output_len),
        reusable=args.reusable,
        mean_gap_s=args.mean_gap,
    )
    print_tables(Hardware(), work)
    if args.png:
        draw(args.png, Hardware(), work)


if __name__ == "__main__":
    main()
