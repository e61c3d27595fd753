"""How close the CPU kernels come to the memory: table and JSON.

    python benchmark/bench_cpu_ops.py [--threads 2] [--repeats 10] [--json out.json] [--small]

Shapes are those of SmolLM2-135M with random weights; no model is needed. Every figure is the
minimum over the repeats, and the things compared take turns, so that other load on the machine
hits them alike. Weights are walked through in sets larger than the last-level cache.

The bandwidth is that of reading a large array once with all threads (its own kernel). "of read"
is bytes that an operation has to read, over its time, over that bandwidth; in the decode-step
table the bytes are always those of the float32 weights, so compressed formats can exceed 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional

from arguments import output_file
from machine_limits import cpu_read_bandwidth
from sglang.srt.layers.cpu import native, ops, reference
from sglang.srt.layers.cpu.layer_stack import (
    DecoderLayer,
    DecodeRows,
    LayerStack,
    Product,
    StackConfig,
)
from sglang.srt.platforms import init_platform

logger = logging.getLogger("bench_cpu_ops")

Action = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Model shape and how much memory to walk through."""

    layers: int = 30
    hidden: int = 576
    inter: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    walk_bytes: int = 600 << 20
    context: int = 1024
    prefill: int = 1024

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def products(self) -> dict[str, tuple[int, int]]:
        """Name -> (rows, columns) of every weight matrix of a layer, and the output product."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
            "lm_head": (self.vocab, self.hidden),
        }

    def weight_bytes(self) -> int:
        """Float32 bytes that one decode step reads."""
        per_layer = sum(m * k for name, (m, k) in self.products().items() if name != "lm_head")
        return 4 * (self.layers * per_layer + self.vocab * self.hidden)


SMALL = Sizes(
    layers=2,
    hidden=64,
    inter=96,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=256,
    walk_bytes=1 << 20,
    context=150,
    prefill=40,
)


def best_times(actions: list[Action], repeats: int) -> list[float]:
    """Shortest time of each action in seconds; the actions take turns."""
    best = [float("inf")] * len(actions)
    for _ in range(repeats):
        for index, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - start)
    return best


def bench_products(sizes: Sizes, bandwidth: float, repeats: int) -> list[dict[str, object]]:
    """Every weight shape and format against torch's product, for 1 to 32 rows."""
    rows: list[dict[str, object]] = []
    for name, (m, k) in sizes.products().items():
        count = min(100, max(1, sizes.walk_bytes // (4 * m * k)))
        weights = [torch.randn(m, k) for _ in range(count)]
        stored = {
            weight_format: weights
            if weight_format == "fp32"
            else [ops.CompressedWeight(w, weight_format) for w in weights]
            for weight_format in ops.WEIGHT_FORMATS
        }
        for n in (1, 8, 32):
            x = torch.randn(n, k)
            actions: list[Action] = [lambda: [functional.linear(x, w) for w in weights]]  # noqa: B023
            for each in stored.values():
                actions.append(lambda each=each: [native.linear(x, w) for w in each])  # type: ignore[misc]  # noqa: B023
            torch_s, *own_s = (seconds / count for seconds in best_times(actions, repeats))
            row: dict[str, object] = {"op": name, "rows": n, "torch_us": torch_s * 1e6}
            row |= {f"{f}_us": s * 1e6 for f, s in zip(stored, own_s)}
            row |= {"fp32_vs_torch": torch_s / own_s[0]}
            row |= {"fp32_of_read": 4 * m * k / own_s[0] / bandwidth}
            rows.append(row)
    return rows


def make_stack(
    sizes: Sizes, weight_format: ops.WeightFormat, batch: int
) -> tuple[LayerStack, Product]:
    """A model with random weights and a filled KV pool; (layers, output product)."""

    def product(name: str) -> Product:
        weight = torch.randn(sizes.products()[name]) * 0.03
        if weight_format == "fp32":
            return Product(weight=weight)
        return Product(weight=ops.CompressedWeight(weight, weight_format))

    kv_shape = (batch * sizes.context, sizes.kv_heads, sizes.head_dim)
    layers = [
        DecoderLayer(
            qkv=product("qkv"),
            o=product("o"),
            gate_up=product("gate_up"),
            down=product("down"),
            input_norm=torch.ones(sizes.hidden),
            post_norm=torch.ones(sizes.hidden),
            k_buffer=torch.randn(kv_shape),
            v_buffer=torch.randn(kv_shape),
        )
        for _ in range(sizes.layers)
    ]
    config = StackConfig(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        eps=1e-5,
        scaling=sizes.head_dim**-0.5,
    )
    table = torch.arange(batch * sizes.context, dtype=torch.int32).view(batch, sizes.context)
    stack = LayerStack(
        layers,
        config,
        final_norm=torch.ones(sizes.hidden),
        cos_sin=torch.rand(sizes.context, sizes.head_dim),
        req_to_token=table,
    )
    return stack, product("lm_head")


def bench_decode_step(sizes: Sizes, repeats: int) -> list[dict[str, object]]:
    """All layers and the output product: one call, single calls, against the read bandwidth."""
    rows: list[dict[str, object]] = []
    data = torch.ones(sizes.weight_bytes() // 4)
    for weight_format in ops.WEIGHT_FORMATS:
        stack, head = make_stack(sizes, weight_format, 8)
        for batch, length in ((1, 64), (1, sizes.context), (8, 64)):
            hidden = torch.randn(batch, sizes.hidden)
            lengths = torch.full((batch,), length)
            step = DecodeRows(
                positions=lengths - 1,
                slots=torch.arange(batch) * sizes.context + length - 1,
                req_pool_indices=torch.arange(batch),
                seq_lens=lengths,
            )
            actions: list[Action] = [
                lambda: native.read_all(data),
                lambda: ops.linear(stack.run(hidden, step), head.weight),  # noqa: B023
                lambda: ops.linear(stack.run_single_ops(hidden, step), head.weight),  # noqa: B023
            ]
            read_s, stack_s, single_s = best_times(actions, repeats)
            rows.append(
                {
                    "weights": weight_format,
                    "batch": batch,
                    "context": length,
                    "read_gb_s": sizes.weight_bytes() / read_s / 1e9,
                    "one_call_ms": stack_s * 1e3,
                    "single_ms": single_s * 1e3,
                    "one_call_of_read": read_s / stack_s,
                    "single_of_read": read_s / single_s,
                }
            )
    return rows


def bench_prefill(sizes: Sizes, repeats: int) -> list[dict[str, object]]:
    """The operations around torch's products for one long prompt, against torch's."""
    n, kv_shape = sizes.prefill, (sizes.prefill, sizes.kv_heads, sizes.head_dim)
    x, residual = torch.randn(n, sizes.hidden), torch.randn(n, sizes.hidden)
    weight, gate_up = torch.ones(sizes.hidden), torch.randn(n, 2 * sizes.inter)
    keys, values = torch.randn(kv_shape), torch.randn(kv_shape)
    q = torch.randn(n, sizes.heads, sizes.head_dim)
    positions, cos_sin = torch.arange(n), torch.rand(n, sizes.head_dim)
    table, zero = torch.randperm(n).int()[None], torch.tensor([0])
    lengths, scaling = torch.tensor([n]), sizes.head_dim**-0.5

    def torch_attention() -> torch.Tensor:
        slots = table[0].long()
        return functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )

    pairs: dict[str, tuple[Action, Action]] = {
        "rmsnorm + add": (
            lambda: reference.rmsnorm(x, weight, 1e-5, residual),
            lambda: ops.rmsnorm(x, weight, 1e-5, residual),
        ),
        "silu_and_mul": (
            lambda: reference.silu_and_mul(gate_up),
            lambda: ops.silu_and_mul(gate_up),
        ),
        "rotary": (
            lambda: reference.rotary(positions, q, keys, cos_sin, sizes.head_dim),
            lambda: ops.rotary(positions, q, keys, cos_sin, sizes.head_dim),
        ),
        "attention": (
            torch_attention,
            lambda: ops.extend_attention(q, keys, values, table, zero, zero, lengths, scaling),
        ),
    }
    rows: list[dict[str, object]] = []
    for name, (torch_action, own_action) in pairs.items():
        torch_s, own_s = best_times([torch_action, own_action], repeats)
        rows.append(
            {"op": name, "torch_us": torch_s * 1e6, "own_us": own_s * 1e6, "ratio": torch_s / own_s}
        )
    return rows


def format_table(rows: list[dict[str, object]]) -> str:
    """Aligned text; floats with three significant digits or whole from 100 on."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
        return str(value)

    lines = [list(rows[0]), *([cell(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths)) for line in lines)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=output_file, help="also write the figures to this file")
    parser.add_argument("--small", action="store_true", help="tiny shapes: checks that it runs")
    return parser.parse_args(arguments)


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    """Measure and report; returns the exit status (1 where the kernels are not available)."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = parse_arguments(arguments)
    if not ops.available():
        logger.error("the CPU kernels could not be built here: nothing to measure")
        return 1
    init_platform("cpu").configure_process(options.threads)
    sizes, repeats = (SMALL, 1) if options.small else (Sizes(), options.repeats)
    bandwidth = cpu_read_bandwidth(sizes.walk_bytes, repeats)
    report: dict[str, object] = {
        "threads": options.threads,
        "sizes": asdict(sizes),
        "read_gb_s": bandwidth / 1e9,
    }
    logger.info("read bandwidth, %d threads: %.1f GB/s", options.threads, bandwidth / 1e9)
    for title, rows in (
        ("decode step", bench_decode_step(sizes, repeats)),
        ("prefill", bench_prefill(sizes, repeats)),
        ("products", bench_products(sizes, bandwidth, repeats)),
    ):
        report[title] = rows
        logger.info("\n%s\n%s", title, format_table(rows))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
