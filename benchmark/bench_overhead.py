"""What the engine adds to the device's own work in a decode step: table and JSON.

    python benchmark/bench_overhead.py                       # CUDA: 8B, 1B and tiny shapes
    python benchmark/bench_overhead.py --shapes tiny --batch 1 64
    python benchmark/bench_overhead.py --device cpu          # a tiny model, in seconds

* *busy*: device time of the steps (events around each) ÷ wall time; what is missing is time in
  which the device waits for the host. Wanted: 0.97, better 0.99, of an 8B model; 0.90, better 0.97,
  of a 1B one.
* *step / replay*: time of a step in the engine (scheduler, overlap loop, sampler) ÷ that of the
  bare captured graph of the same step, replayed in a loop. Steps grow with the context, and the
  last one is replayed: so the step is *ms/last*, the median of the last 16 of a run, which are
  some 12 tokens shorter, and not *ms/step*, the mean of all. Measured in runs of their own, since
  the events of the others take the host some 10 us a step. Wanted: 1.25, better 1.10, of a tiny
  model at batch sizes up to 64, where a step is hardly more than launches.

On the CPU there is no graph: the bare step is the model's forward, and busy is the share of the
time that is spent in forward and sampler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import count, output_file, parser_of, require_device, whole_number
from bench_one_batch import LEAST_OUTPUT_LEN, SMALL, make_bench, make_parser, use_tiny_model
from sglang.srt.platforms import current_platform, init_platform

SHAPES = Path(__file__).parent / "shapes"
DEFAULT_SHAPES = ["llama-3.1-8b", "llama-3.2-1b", "tiny"]


def bench_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """Options of `bench_one_batch` for one model, KV pool no larger than the load needs."""
    options = make_parser().parse_args(["--device", args.device])
    options.batch, options.repeats = args.batch, args.repeats
    options.input_len, options.output_len = args.input_len, args.output_len
    options.load_format, options.prefill = "dummy", []
    options.max_total_tokens = 2 * max(args.batch) * (args.input_len + args.output_len)
    options.attention_backend = init_platform(args.device).default_attention_backend
    return options


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each batch size: the medians of the busy share and, of runs without events, of the step."""
    bench = make_bench(options)
    rows = []
    for batch in options.batch:
        timed, plain = (
            [
                bench.decode(batch, options.input_len, options.output_len, events=events)
                for _ in range(options.repeats)
            ]
            for events in (True, False)
        )
        row: dict[str, Any] = sorted(plain, key=lambda r: r["ms_per_step"])[len(plain) // 2]
        row["busy_share"] = statistics.median(run["busy_share"] for run in timed)
        row["shape"] = name
        row["replay_ms"] = bench.bare_replay_ms(batch)
        row["last_ms_per_step"] = statistics.median(run["last_ms_per_step"] for run in plain)
        row["step_over_replay"] = row["last_ms_per_step"] / row["replay_ms"]
        rows.append(row)
        times = [row[key] for key in ("ms_per_step", "last_ms_per_step", "replay_ms")]
        sys.stdout.write(
            f"{name:<14} {batch:>5} {''.join(f'{ms:>11.3f}' for ms in times)[1:]} "
            f"{row['busy_share']:>8.3f} {row['step_over_replay']:>15.3f}\n"
        )
        sys.stdout.flush()
    return rows


def parse_arguments() -> argparse.Namespace:
    """Read the command line; the CPU has other defaults, and one model only."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu: the small form, a self-test"
    )
    names = sorted(path.name for path in SHAPES.iterdir())
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"of {', '.join(names)}; default: {' '.join(DEFAULT_SHAPES)}",
    )
    parser.add_argument(
        "--batch", type=count, nargs="+", default=[1, 8, 64], help="requests that decode"
    )
    parser.add_argument("--input-len", type=count, default=128, help="tokens before decode")
    parser.add_argument(
        "--output-len", type=whole_number(LEAST_OUTPUT_LEN), default=256, help="tokens of decode"
    )
    parser.add_argument("--repeats", type=count, default=3, help="runs of each figure; median")
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    args = parser.parse_args()
    if args.device == "cpu":
        if args.shapes:
            parser.error("--device cpu has a tiny model only: leave out --shapes")
        parser.set_defaults(**SMALL)
        args = parser.parse_args()
    require_device(args.device, "--device cpu is the small form")
    return args


def main() -> None:
    args = parse_arguments()
    options = bench_arguments(args)
    rows: list[dict[str, Any]] = []
    sys.stdout.write(
        "shape          batch    ms/step    ms/last  ms/replay     busy   step / replay\n"
    )
    if args.device == "cpu":
        with tempfile.TemporaryDirectory() as folder:
            use_tiny_model(options, folder)
            rows += measure("tiny, random", options)
    else:
        for name in args.shapes or DEFAULT_SHAPES:
            options.model = str(SHAPES / name)
            options.context_length = 4096
            rows += measure(name, options)
            current_platform().empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
