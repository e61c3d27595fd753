"""How close the product of a few tokens with a weight comes to the read bandwidth: a table.

    python benchmark/bench_gemv.py [--rows 1 2 4] [--shapes 8b small] [--sweep] [--json FILE]

Shapes are those of Llama-3.1-8B and, `small`, of SmolLM2-135M, where a launch takes as long as the
reading. Each is a product alone; for small ones there is a chain of 30 layers' products as well, in
which a launch overlaps with the one before. Launches are captured and replayed over as many copies
of the weight as it takes to leave the cache; the share is of the read bandwidth (the maximum of 2
GiB of integers, measured in the same process). `--sweep` tries other block sizes, compiled in
parallel. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from arguments import count, output_file, parser_of, require_device, require_triton

logger = logging.getLogger("bench_gemv")

SHAPES = {
    "8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    },
    "small": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
}
COMPILERS = 12


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 2, 4], help="tokens")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of models"
    )
    parser.add_argument("--sweep", action="store_true", help="try other block sizes too")
    parser.add_argument("--json", type=output_file, help="where to write the JSON")
    args = parser.parse_args()
    require_device("cuda", "its kernels have no form for the CPU")
    require_triton()
    return args


def main() -> None:
    args = parse_arguments()
    # Late: the command line is read, and its help shown, without Triton too.
    from kernel_timing.gemv import (
        bench_chain,
        bench_shape,
        compile_one,
        read_bandwidth,
        sweep_configs,
    )

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    configs = {rows: sweep_configs(rows) if args.sweep else [] for rows in args.rows}
    shapes = {(model, name): s for model in args.shapes for name, s in SHAPES[model].items()}
    widths = {width for _, width in shapes.values()}
    jobs = list(itertools.product(widths, configs[max(args.rows)]))
    if jobs:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
            list(pool.map(compile_one, *zip(*jobs)))
    bandwidth = read_bandwidth()
    logger.info("read bandwidth %.0f GB/s", bandwidth / 1e9)
    report: list[dict[str, Any]] = []
    for rows in args.rows:
        for (model, name), shape in shapes.items():
            for share, line, config in bench_shape(name, shape, rows, configs[rows], bandwidth):
                logger.info("%s", line)
                report.append(
                    {"model": model, "shape": name, "rows": rows, "share": share}
                    | {"config": str(config or "PyTorch")}
                )
        if "small" in args.shapes:
            theirs, ours = bench_chain(rows, SHAPES["small"].values())
            logger.info("chain    %d %8.2f us, PyTorch %.2f us", rows, ours, theirs)
            report.append({"shape": "chain", "rows": rows, "us": ours, "us_pytorch": theirs})
    if args.json is not None:
        figures = {"read_bytes_per_s": bandwidth, "rows": report}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
