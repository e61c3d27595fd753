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

import functools
import itertools
import json
import logging
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch.nn import functional

from arguments import count, output_file, parser_of, require_device
from bench_attention import Action, seconds_per_call
from sglang.srt.layers.triton_ops.device import launch_early
from sglang.srt.layers.triton_ops.gemv import GemvConfig, choose_config, gemv

logger = logging.getLogger("bench_gemv")

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
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
CHAIN_LAYERS = 30
ROTATED_BYTES = 1 << 30
COMPILERS = 12


def sweep_configs(rows: int) -> list[GemvConfig]:
    """The block sizes that `--sweep` tries for so many rows."""
    sizes = [
        *((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4)),
        *((4, 2048, 8), (8, 2048, 8), (8, 512, 4), (2, 1024, 2), (4, 512, 2), (1, 1024, 2)),
        *((2, 1024, 1), (4, 1024, 2)),
    ]
    early = launch_early(DEVICE, 1)
    return [
        GemvConfig(block_out=out, block_in=block_in, num_warps=warps, rows=group, early=early)
        for out, block_in, warps in sizes
        for group in (1, 2, 4)
        if group <= rows
    ]


def compile_one(width: int, config: GemvConfig) -> None:
    """Leave the kernel in Triton's cache on disk."""
    weight = torch.zeros(16, width, device=DEVICE, dtype=DTYPE)
    gemv(weight[: config.rows], weight, None, config=config)


def read_bandwidth() -> float:
    words = torch.zeros(1 << 29, dtype=torch.int32, device=DEVICE)
    return words.nbytes / seconds_per_call([lambda: words.max()] * 2, 10)


def bench_shape(
    name: str, shape: tuple[int, int], rows: int, configs: list[GemvConfig], bandwidth: float
) -> list[tuple[float, str, GemvConfig | None]]:
    """(share of the bandwidth, line of the table, configuration or None for PyTorch's), sorted."""
    num_out, width = shape
    copies = max(2, ROTATED_BYTES // (num_out * width * DTYPE.itemsize))
    weights = torch.randn(copies, num_out, width, device=DEVICE, dtype=DTYPE)
    x = torch.randn(rows, width, device=DEVICE, dtype=DTYPE)
    lines = []
    own = choose_config(rows, num_out, width, DEVICE)
    variants: list[GemvConfig | None] = [None, own, *configs]
    for config in variants:
        actions: list[Action] = [
            functools.partial(functional.linear, x, weight)
            if config is None
            else functools.partial(gemv, x, weight, None, config=config)
            for weight in weights
        ]
        seconds = seconds_per_call(actions, 20)
        share = weights[0].nbytes / seconds / bandwidth
        line = f"{name:8} {rows} {seconds * 1e6:8.2f} us  {share:.3f}  {config or 'PyTorch'}"
        lines.append((share, line, config))
    return sorted(lines, key=lambda line: -line[0])


def bench_chain(rows: int) -> tuple[float, float]:
    """Microseconds of the products of a small model's layers, PyTorch's and ours."""
    weights = [
        [torch.randn(*shape, device=DEVICE, dtype=DTYPE) for shape in SHAPES["small"].values()]
        for _ in range(CHAIN_LAYERS)
    ]
    x = torch.zeros(rows, 576, device=DEVICE, dtype=DTYPE)

    def run(product: Callable[..., torch.Tensor]) -> None:
        hidden = x
        for qkv, o, gate_up, down in weights:
            attended = product(hidden, qkv, None)[:, :576]
            hidden = product(
                product(product(attended, o, None), gate_up, None)[:, :1536], down, None
            )

    theirs, ours = (
        seconds_per_call([functools.partial(run, product)], 20) * 1e6
        for product in (functional.linear, gemv)
    )
    return theirs, ours


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=count, nargs="+", default=[1, 2, 4], help="tokens")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="of models"
    )
    parser.add_argument("--sweep", action="store_true", help="try other block sizes too")
    parser.add_argument("--json", type=output_file, help="where to write the JSON")
    args = parser.parse_args()
    require_device("cuda", "its kernels have no form for the CPU")
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
            theirs, ours = bench_chain(rows)
            logger.info("chain    %d %8.2f us, PyTorch %.2f us", rows, ours, theirs)
            report.append({"shape": "chain", "rows": rows, "us": ours, "us_pytorch": theirs})
    if args.json is not None:
        figures = {"read_bytes_per_s": bandwidth, "rows": report}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
