"""What attention costs between the products of a step, which is not what it costs alone.

In a captured step a kernel overlaps with those before and behind it: weights are on their way while
attention runs, and programs that come early take room on the multiprocessors. So block sizes that
are best alone may be among the slowest here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from kernel_timing.attention import (
    DEVICE,
    DTYPE,
    HAS_CUDA,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Load,
    Result,
)
from kernel_timing.replay import seconds_per_call
from sglang.srt.layers.attention.triton_ops.paged_attention import (
    LaunchConfig,
    NewTokens,
    PagedAttentionInputs,
    Workspace,
    choose_config,
    paged_attention,
)
from sglang.srt.layers.dispatch import Ops
from sglang.srt.layers.triton_ops.cuda_ops import CudaOps
from sglang.srt.model_executor.graph_capture import products_of

# Of Llama-3.1-8B; enough layers that no weight stays in the cache.
HIDDEN, INTERMEDIATE, LAYERS = (4096, 14336, 8) if HAS_CUDA else (HEADS * HEAD_DIM, 96, 1)
POSITIONS = 1 << 17
SWEPT_SIZES = [(16, 32, 1, 3), (16, 64, 2, 3), (16, 64, 2, 4), (16, 64, 4, 3), (16, 128, 4, 5)]
LOADS = [
    *(Load(kind="decode", batch=1, new=1, prefix=n) for n in (639, 8191, 65535)),
    *(Load(kind="decode", batch=n, new=1, prefix=639) for n in (2, 8)),
    *(Load(kind="verify", batch=1, new=4, prefix=n) for n in (636, 32764)),
    Load(kind="verify", batch=8, new=4, prefix=636),
]
SMALL_LOADS = [Load(kind="decode", batch=1, new=1, prefix=20)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Step:
    """The layers of a captured step, with attention or without."""

    def __init__(self, load: Load) -> None:
        seq_len, rows = load.prefix + load.new, load.batch * load.new
        self._ops: Ops = CudaOps()
        self._workspace = Workspace(DEVICE)
        self._layers = [_make_layer(load.batch * seq_len + 1) for _ in range(LAYERS)]
        self._norm = _random(HIDDEN)
        self._x, self._residual = _random(rows, HIDDEN), _random(rows, HIDDEN)
        slots = torch.randperm(load.batch * seq_len, device=DEVICE).to(torch.int32) + 1
        self._table = slots.view(load.batch, seq_len)
        self._table_rows = torch.arange(load.batch, device=DEVICE)
        self._seq_lens = torch.full((load.batch,), seq_len, device=DEVICE)
        new = torch.arange(seq_len - load.new, seq_len, device=DEVICE)
        self._positions = new.repeat(load.batch)
        self._new_slots = self._table[:, new].reshape(-1).to(torch.int64)
        self._cos_sin = torch.randn(POSITIONS if HAS_CUDA else seq_len, HEAD_DIM, device=DEVICE)

    def run(self, config: LaunchConfig | None, with_attention: bool = True) -> torch.Tensor:
        """Without attention the output product takes the queries."""
        ops, x, residual = self._ops, self._x, self._residual
        for layer in self._layers:
            normed, residual = ops.add_rms_norm(x, residual, self._norm, 1e-5)
            qkv = ops.linear(normed, layer.qkv, None)
            attended = qkv[:, : HEADS * HEAD_DIM]
            if with_attention:
                inputs = self.inputs_of(qkv, layer)
                attended = paged_attention(inputs, self._workspace, config).flatten(1)
            x = ops.linear(attended, layer.output, None)
            normed, residual = ops.add_rms_norm(x, residual, self._norm, 1e-5)
            x = ops.linear(ops.silu_linear(normed, layer.gate_up, None), layer.down, None)
        return x

    def chosen(self) -> LaunchConfig:
        """What the backend would take."""
        qkv = _random(len(self._x), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        return choose_config(self.inputs_of(qkv, self._layers[0]))

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        """Of one layer."""
        with products_of(len(self._x)) if HAS_CUDA else nullcontext():
            return seconds_per_call([run], 20) / LAYERS

    def inputs_of(self, qkv: torch.Tensor, layer: _Layer) -> PagedAttentionInputs:
        """Arguments of attention behind the product `qkv`."""
        q, k, v = qkv.unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        return PagedAttentionInputs(
            queries=q,
            keys=layer.keys,
            values=layer.values,
            table=self._table,
            table_rows=self._table_rows,
            seq_lens=self._seq_lens,
            query_lens=None,
            tree_mask=None,
            scaling=HEAD_DIM**-0.5,
            window=None,
            new=NewTokens(
                keys=k,
                values=v,
                positions=self._positions,
                cos_sin=self._cos_sin,
                slots=self._new_slots,
            ),
        )


def bench_in_layers(load: Load, bandwidth: float, sweep: bool) -> list[Result]:
    """Time that attention adds to a layer, with the chosen launch; `sweep`: with others too."""
    step = Step(load)
    without = step.seconds(partial(step.run, None, with_attention=False))
    chosen = step.chosen()
    configs = {"chosen": chosen}
    if sweep:
        configs |= dict(_others(chosen))
    results = []
    for name, config in configs.items():
        seconds = step.seconds(partial(step.run, config)) - without
        results.append(load.read(name, seconds, bandwidth, " in layers"))
    return results


def _others(chosen: LaunchConfig) -> list[tuple[str, LaunchConfig]]:
    """Other block sizes, and each with every way to overlap with its neighbours."""
    ways = {"apart": (False, False), "early next": (False, True), "early": (True, True)}
    configs = []
    for block_m, block_n, num_warps, num_stages in SWEPT_SIZES:
        for way, (early, early_next) in ways.items():
            target = 16 if block_n == 128 else 33
            config = replace(
                chosen,
                block_m=block_m,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=num_stages,
                share_target=target,
                early=early and HAS_CUDA,
                early_next=early_next and HAS_CUDA,
            )
            sizes = (block_m, block_n, num_warps, num_stages)
            configs.append((f"{sizes} /{target} {way}", config))
    return configs


def _make_layer(num_slots: int) -> _Layer:
    heads = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return _Layer(
        qkv=_random(heads, HIDDEN) * 0.02,
        output=_random(HIDDEN, HEADS * HEAD_DIM) * 0.02,
        gate_up=_random(2 * INTERMEDIATE, HIDDEN) * 0.02,
        down=_random(HIDDEN, INTERMEDIATE) * 0.02,
        keys=_random(num_slots, KV_HEADS, HEAD_DIM),
        values=_random(num_slots, KV_HEADS, HEAD_DIM),
    )


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)
