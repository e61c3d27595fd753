"""How close the `triton` attention backend comes to the device: table and JSON.

    python benchmark/bench_attention.py [--json out.json] [--sweep] [--small]

Decode and verification are bound by reading keys and values: GB/s, over the bandwidth of a device
copy (bytes read and written). Extend is bound by the matrix unit: TFLOP/s, over that of a bf16
matrix product of 8192^3. Both ceilings are measured in the same process. Heads are those of
Llama-3.1-8B (32 query heads, 8 KV heads, head size 128); slots are random.

Launches are captured and replayed, over as many layers as it takes to leave the cache, and the
median of the replays is taken. *In layers* is what decode and verification add to a layer whose
other operations are there too: the block sizes for few requests were chosen by that. `--sweep` also
tries other block sizes and PyTorch's own kernels (on contiguous keys). `--small` is a check that
runs anywhere, on a CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from arguments import count, output_file, parser_of, require_device, require_triton

if TYPE_CHECKING:
    from kernel_timing.attention import Result

logger = logging.getLogger("bench_attention")

KINDS = ["decode", "verify", "extend", "layers", "ops"]


def show(results: list[Result]) -> None:
    for r in sorted(results, key=lambda r: (r.kind, r.batch, r.prefix, r.new, r.microseconds)):
        logger.info(
            "%-16s %4d x %5d over %6d  %-28s %9.1f us %8.1f  %5.2f",
            *(r.kind, r.batch, r.new, r.prefix, r.variant, r.microseconds, r.rate, r.share),
        )


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    parser.add_argument(
        "--sweep", action="store_true", help="other block sizes and PyTorch's kernels as well"
    )
    parser.add_argument(
        "--small", action="store_true", help="a few small loads: a self-test, on a CPU as well"
    )
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="of measurements; default: all")
    parser.add_argument("--batches", nargs="*", type=count, help="batch sizes; default: all")
    args = parser.parse_args()
    if not args.small:
        require_device("cuda", "--small is the form for the CPU")
    require_triton()
    return args


def main() -> int:
    args = parse_arguments()
    # Late: the command line is read, and its help shown, without Triton too.
    from kernel_timing.attention import (
        LOADS,
        SMALL_LOADS,
        bench_load,
        bench_ops,
        measure_ceilings,
    )
    from kernel_timing.layers import LOADS as STEPS
    from kernel_timing.layers import SMALL_LOADS as SMALL_STEPS
    from kernel_timing.layers import bench_in_layers

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    ceilings = measure_ceilings(args.small)
    logger.info(
        "device copy %.1f GB/s, matrix product %.1f TFLOP/s", ceilings[0] / 1e9, ceilings[1] / 1e12
    )
    results: list[Result] = []
    for load in SMALL_LOADS if args.small else LOADS:
        if load.batch not in (args.batches or [load.batch]):
            continue
        if not args.kinds or load.kind in args.kinds:
            results += bench_load(load, ceilings, args.sweep)
    for load in SMALL_STEPS if args.small else STEPS:
        if load.batch in (args.batches or [load.batch]) and "layers" in (args.kinds or KINDS):
            results += bench_in_layers(load, ceilings[0], args.sweep)
    if not args.kinds or "ops" in args.kinds:
        results += bench_ops(args.small)
    show(results)
    if args.json:
        report = {"copy": ceilings[0], "product": ceilings[1]}
        args.json.write_text(json.dumps({**report, "results": [asdict(r) for r in results]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
