"""The product of a few tokens with a weight, ours and PyTorch's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

from kernel_timing.replay import Action, seconds_per_call
from sglang.srt.layers.triton_ops.device import launch_early
from sglang.srt.layers.triton_ops.gemv import GemvConfig, choose_config, gemv

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
CHAIN_LAYERS = 30
ROTATED_BYTES = 1 << 30


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


def bench_chain(rows: int, shapes: Iterable[tuple[int, int]]) -> tuple[float, float]:
    """Microseconds of the products of a small model's layers, PyTorch's and ours."""
    weights = [
        [torch.randn(*shape, device=DEVICE, dtype=DTYPE) for shape in shapes]
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
