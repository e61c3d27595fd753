"""How close the product of one token with a weight comes to the read bandwidth: a table.

    python benchmark/bench_gemv.py [--sweep] [--json FILE]

Shapes are those of Llama-3.1-8B. Launches are captured and replayed over as many copies of the
weight as it takes to leave the cache; the share is of the read bandwidth (the maximum of 2 GiB of
integers, measured in the same process). `--sweep` tries other block sizes, compiled in parallel.
Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch.nn import functional

from bench_attention import Action, seconds_per_call
from sglang.srt.layers.triton_ops.device import launch_early
from sglang.srt.layers.triton_ops.gemv import GemvConfig, choose_config, gemv

logger = logging.getLogger("bench_gemv")

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
ROTATED_BYTES = 1 << 30
COMPILERS = 12


def sweep_configs() -> list[GemvConfig]:
    """The block sizes that `--sweep` tries."""
    sizes = [
        *((1, 2048, 4), (2, 2048, 4), (4, 2048, 4), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4)),
        *((4, 2048, 8), (8, 2048, 8), (8, 512, 4), (2, 1024, 2), (4, 512, 2), (1, 1024, 2)),
    ]
    early = launch_early(DEVICE, 1)
    return [
        GemvConfig(block_out=out, block_in=block_in, num_warps=warps, early=early)
        for out, block_in, warps in sizes
    ]


def compile_one(width: int, config: GemvConfig) -> None:
    """Leave the kernel in Triton's cache on disk."""
    weight = torch.zeros(16, width, device=DEVICE, dtype=DTYPE)
    gemv(weight[:1], weight, None, config=config)


def read_bandwidth() -> float:
    words = torch.zeros(1 << 29, dtype=torch.int32, device=DEVICE)
    return words.nbytes / seconds_per_call([lambda: words.max()] * 2, 10)


def bench_shape(
    name: str, configs: list[GemvConfig], bandwidth: float
) -> list[tuple[float, str, GemvConfig | None]]:
    """(share of the bandwidth, line of the table, configuration or None for PyTorch's), sorted."""
    num_out, width = SHAPES[name]
    copies = max(2, ROTATED_BYTES // (num_out * width * DTYPE.itemsize))
    weights = torch.randn(copies, num_out, width, device=DEVICE, dtype=DTYPE)
    x = torch.randn(1, width, device=DEVICE, dtype=DTYPE)
    rows = []
    variants: list[GemvConfig | None] = [None, choose_config(num_out, width, DEVICE), *configs]
    for config in variants:
        actions: list[Action] = [
            functools.partial(functional.linear, x, weight)
            if config is None
            else functools.partial(gemv, x, weight, None, config=config)
            for weight in weights
        ]
        seconds = seconds_per_call(actions, 20)
        share = weights[0].nbytes / seconds / bandwidth
        line = f"{name:8} {seconds * 1e6:8.2f} us  {share:.3f}  {config or 'PyTorch'}"
        rows.append((share, line, config))
    return sorted(rows, key=lambda row: -row[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="try other block sizes too")
    parser.add_argument("--json", type=Path, default=None, help="where to write the JSON")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    configs = sweep_configs() if args.sweep else []
    widths = {width for _, width in SHAPES.values()}
    jobs = list(itertools.product(widths, configs))
    if jobs:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(COMPILERS, mp_context=context) as pool:
            list(pool.map(compile_one, *zip(*jobs)))
    bandwidth = read_bandwidth()
    logger.info("read bandwidth %.0f GB/s", bandwidth / 1e9)
    rows = []
    for name in SHAPES:
        for share, line, config in bench_shape(name, configs, bandwidth):
            logger.info("%s", line)
            rows.append({"shape": name, "share": share, "config": str(config or "PyTorch")})
    if args.json is not None:
        report = {"read_bytes_per_s": bandwidth, "rows": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
