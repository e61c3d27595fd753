"""Attention and elementwise kernels on random inputs; on a CPU in Triton's interpreter."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from kernel_timing.replay import HAS_CUDA, Action, seconds_per_call
from sglang.test.triton_interpreter import use_interpreter

if not HAS_CUDA:
    use_interpreter()

from sglang.srt.layers.attention.triton_ops import dense_prefill  # noqa: E402
from sglang.srt.layers.attention.triton_ops.paged_attention import (  # noqa: E402
    LaunchConfig,
    PagedAttentionInputs,
    Workspace,
    choose_config,
    paged_attention,
)
from sglang.srt.layers.dispatch import KVDestination, TorchOps  # noqa: E402
from sglang.srt.layers.triton_ops.argmax import argmax_rows  # noqa: E402
from sglang.srt.layers.triton_ops.cuda_ops import CudaOps  # noqa: E402

logger = logging.getLogger(__name__)

DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPE = torch.bfloat16 if HAS_CUDA else torch.float16
CACHE_BYTES = 200 << 20  # several times the last-level cache
HEADS, KV_HEADS, HEAD_DIM = (32, 8, 128) if HAS_CUDA else (4, 2, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A batch: `batch` requests with `new` tokens each over `prefix` cached ones."""

    kind: str
    batch: int
    new: int
    prefix: int

    @property
    def kv_bytes(self) -> int:
        return self.batch * (self.prefix + self.new) * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        pairs = self.new * self.prefix + self.new * (self.new + 1) // 2
        return 4 * self.batch * pairs * HEADS * HEAD_DIM

    def read(self, variant: str, seconds: float, bandwidth: float, where: str = "") -> Result:
        """The line of a launch that took so long, bound by reading keys and values."""
        rate = self.kv_bytes / seconds
        return self._result(variant, seconds, rate / 1e9, rate / bandwidth, where)

    def multiplied(self, variant: str, seconds: float, ceiling: float) -> Result:
        """The line of a launch that took so long, bound by the matrix unit."""
        rate = self.flops / seconds
        return self._result(variant, seconds, rate / 1e12, rate / ceiling)

    def _result(
        self, variant: str, seconds: float, rate: float, share: float, where: str = ""
    ) -> Result:
        return Result(
            kind=self.kind + where,
            variant=variant,
            batch=self.batch,
            new=self.new,
            prefix=self.prefix,
            microseconds=seconds * 1e6,
            rate=rate,
            share=share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table. `rate` is GB/s or TFLOP/s, `share` that over the ceiling."""

    kind: str
    variant: str
    batch: int
    new: int
    prefix: int
    microseconds: float
    rate: float
    share: float


LOADS = [
    *(
        Load(kind="decode", batch=batch, new=1, prefix=context + 16)
        for batch, context in (
            (1, 512),
            (1, 8192),
            (1, 32768),
            (1, 131072),
            (8, 512),
            (8, 8192),
            (40, 4096),
            (64, 512),
            (64, 8192),
            (256, 512),
            (256, 2048),
        )
    ),
    Load(kind="verify", batch=1, new=8, prefix=529),
    Load(kind="verify", batch=1, new=8, prefix=32785),
    Load(kind="verify", batch=64, new=8, prefix=2065),
    Load(kind="extend", batch=1, new=8192, prefix=0),
    Load(kind="extend", batch=16, new=2048, prefix=0),
    Load(kind="extend", batch=1, new=2048, prefix=30720),
    Load(kind="extend", batch=1, new=256, prefix=30720),
    Load(kind="extend", batch=32, new=128, prefix=1024),
]
SMALL_LOADS = [
    Load(kind="decode", batch=3, new=1, prefix=30),
    Load(kind="verify", batch=1, new=4, prefix=20),
    Load(kind="extend", batch=2, new=10, prefix=7),
]


def measure_ceilings(small: bool) -> tuple[float, float]:
    """(bytes/s of a device copy, flop/s of a bf16 product)."""
    source = torch.randn((1 << 16) if small else (1 << 30), device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds_per_call([lambda: target.copy_(source)], 20, captured=False)
    size = 128 if small else 8192
    a, b = torch.randn(2, size, size, device=DEVICE).to(DTYPE)
    product = 2 * size**3 / seconds_per_call([lambda: torch.mm(a, b)] * 3, 20)
    return copy, product


class Batch:
    """Inputs of a load over several layers, at random slots."""

    def __init__(self, load: Load) -> None:
        seq_len = load.prefix + load.new
        num_slots = load.batch * seq_len + 1
        layers = max(2, min(32, CACHE_BYTES // load.kv_bytes)) if HAS_CUDA else 1
        self.load = load
        self.queries = self._randn(load.batch * load.new, HEADS)
        self.pools = [
            (self._randn(num_slots, KV_HEADS), self._randn(num_slots, KV_HEADS))
            for _ in range(layers)
        ]
        slots = torch.randperm(num_slots - 1, device=DEVICE).to(torch.int32) + 1
        rows = torch.randperm(load.batch, device=DEVICE)
        tree_mask = None
        if load.kind == "verify":
            tree = torch.rand(load.new, load.new, device=DEVICE) < 0.5
            tree = tree.tril() | torch.eye(load.new, dtype=torch.bool, device=DEVICE)
            tree_mask = tree.repeat(load.batch, 1, 1)
        self.inputs = PagedAttentionInputs(
            queries=self.queries,
            keys=self.pools[0][0],
            values=self.pools[0][1],
            table=slots.view(load.batch, seq_len),
            table_rows=rows,
            seq_lens=torch.full((load.batch,), seq_len, device=DEVICE),
            query_lens=torch.full((load.batch,), load.new, device=DEVICE)
            if load.kind == "extend"
            else None,
            tree_mask=tree_mask,
            scaling=HEAD_DIM**-0.5,
            window=None,
        )
        self.workspace = Workspace(DEVICE)

    @staticmethod
    def _randn(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)

    def actions(self, config: LaunchConfig | None) -> list[Action]:
        def one(keys: torch.Tensor, values: torch.Tensor) -> Action:
            inputs = replace(self.inputs, keys=keys, values=values)
            return lambda: paged_attention(inputs, self.workspace, config)

        return [one(keys, values) for keys, values in self.pools]

    def dense_actions(self) -> list[Action]:
        """What the backend does with long prompts without prefix."""
        keys, values = self.pools[0]
        new = self.load.new

        def all_prompts() -> None:
            for start in range(0, self.load.batch * new, new):
                rows = slice(start, start + new)
                slots = slice(start + 1, start + 1 + new)
                dense_prefill.dense_causal_attention(
                    self.queries[rows], keys[slots], values[slots], self.inputs.scaling
                )

        return [all_prompts] * 2

    def torch_variants(self) -> dict[str, list[Action]]:
        """PyTorch's kernels over contiguous keys; what gathering them costs is not counted."""
        load = self.load
        seq_len = load.prefix + load.new
        variants: dict[str, list[Action]] = {}
        lengths = torch.arange(load.batch + 1, device=DEVICE, dtype=torch.int32)

        def flash() -> torch.Tensor:
            out: torch.Tensor = torch.ops.aten._flash_attention_forward(
                self.queries,
                self.pools[0][0][1:],
                self.pools[0][1][1:],
                lengths * load.new,
                lengths * seq_len,
                load.new,
                seq_len,
                0.0,
                True,
                False,
            )[0]
            return out

        variants["torch varlen flash"] = [flash] * 2
        return variants


def sweep_configs(load: Load, chosen: LaunchConfig) -> list[LaunchConfig]:
    """Neighbours of the chosen configuration."""
    if load.kind == "extend" and load.new >= 2048:
        sizes = [(128, 64, 8, 5), (128, 128, 8, 3)]
    elif load.kind == "extend":
        sizes = [(128, 64, 8, 5), (64, 64, 4, 5), (128, 128, 8, 3)]
    elif load.kind == "verify":
        sizes = [(32, 64, 4, 5), (32, 128, 8, 5), (32, 128, 4, 5), (32, 64, 4, 3)]
    else:
        sizes = [(16, 64, 4, 3), (16, 64, 4, 5), (16, 32, 4, 5), (16, 64, 2, 5), (16, 128, 4, 5)]
    if chosen.share_target == 0:
        targets = [0]
    elif load.batch == 1:
        targets = [16, 33, 66]
    else:
        targets = [16, 33, 49]
    return [
        LaunchConfig(
            block_m=m,
            block_n=n,
            num_warps=warps,
            num_stages=stages,
            share_target=target,
            early=chosen.early,
            early_next=chosen.early_next,
            one_loop=one_loop,
        )
        for one_loop in ((False,) if load.kind == "extend" else (True, False))
        for m, n, warps, stages in sizes
        for target in targets
    ]


def bench_load(load: Load, ceilings: tuple[float, float], sweep: bool) -> list[Result]:
    batch = Batch(load)
    results = []

    def add(variant: str, actions: list[Action]) -> None:
        seconds = seconds_per_call(actions, 20)
        if load.kind == "extend":
            results.append(load.multiplied(variant, seconds, ceilings[1]))
        else:
            results.append(load.read(variant, seconds, ceilings[0]))

    chosen = choose_config(batch.inputs)
    add("chosen", batch.actions(None))
    if HAS_CUDA and load.prefix == 0 and load.new % dense_prefill.DENSE_UNIT == 0:
        add("chosen, dense", batch.dense_actions())
    if sweep:
        for config in sweep_configs(load, chosen):
            sizes = (config.block_m, config.block_n, config.num_warps, config.num_stages)
            loops = "" if config.one_loop else " two loops"
            try:
                add(f"{sizes} /{config.share_target}{loops}", batch.actions(config))
            except Exception as error:  # a configuration that does not fit is a result as well
                logger.warning("%s %s: %s", load, config, str(error)[:100])
        if load.kind == "extend":
            for name, actions in batch.torch_variants().items():
                try:
                    add(name, actions)
                except RuntimeError as error:
                    logger.warning("%s %s: %s", load, name, str(error)[:100])
    return results


def op_pairs(rows: int, small: bool) -> dict[str, tuple[int, Action, Action]]:
    """Name -> (bytes to read and write, our operation, PyTorch's)."""
    hidden, inter, vocab = (64, 96, 300) if small else (4096, 14336, 128256)
    ours, reference = CudaOps(), TorchOps()
    x, residual = torch.randn(2, rows, hidden, device=DEVICE).to(DTYPE)
    weight = torch.ones(hidden, device=DEVICE, dtype=DTYPE)
    gate_up = torch.randn(rows, 2 * inter, device=DEVICE).to(DTYPE)
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    qkv = torch.randn(rows, sum(sizes), device=DEVICE).to(DTYPE)
    q, k, v = qkv.split(sizes, dim=-1)
    positions = torch.arange(rows, device=DEVICE)
    table = torch.randn(rows, HEAD_DIM, device=DEVICE)
    buffers = torch.zeros(2, rows + 1, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    to = KVDestination(slots=positions + 1, key_buffer=buffers[0], value_buffer=buffers[1])
    logits = torch.randn(min(rows, 256), vocab, device=DEVICE)

    def reference_rope() -> None:
        rotated = reference.apply_rope(q, k, positions, table, HEAD_DIM)[1]
        to.key_buffer[to.slots] = rotated.unflatten(-1, (-1, HEAD_DIM))
        to.value_buffer[to.slots] = v.unflatten(-1, (-1, HEAD_DIM))

    return {
        "add_rms_norm": (
            4 * x.nbytes,
            lambda: ours.add_rms_norm(x, residual, weight, 1e-5),
            lambda: reference.add_rms_norm(x, residual, weight, 1e-5),
        ),
        "silu_and_mul": (
            gate_up.nbytes * 3 // 2,
            lambda: ours.silu_and_mul(gate_up),
            lambda: reference.silu_and_mul(gate_up),
        ),
        "rope_and_store": (
            2 * qkv.nbytes,
            lambda: ours.rope_and_store(q, k, v, positions, table, HEAD_DIM, to),
            reference_rope,
        ),
        "argmax": (logits.nbytes, lambda: argmax_rows(logits), lambda: logits.argmax(-1)),
    }


def bench_ops(small: bool) -> list[Result]:
    """Elementwise operations: `rate` is GB/s, `share` our time over PyTorch's."""
    results = []
    for rows in (1, 3) if small else (1, 64, 8192):
        for name, (num_bytes, own, reference) in op_pairs(rows, small).items():
            own_s = seconds_per_call([own] * 5, 10)
            reference_s = seconds_per_call([reference] * 5, 10)
            results.append(
                Result(
                    kind=name,
                    variant=f"PyTorch: {reference_s * 1e6:.1f} us",
                    batch=rows,
                    new=1,
                    prefix=0,
                    microseconds=own_s * 1e6,
                    rate=num_bytes / own_s / 1e9,
                    share=own_s / reference_s,
                )
            )
    return results
