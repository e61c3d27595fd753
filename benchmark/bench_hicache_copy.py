"""How close copies between device and host pools come to the bus: table and JSON.

    python benchmark/bench_hicache_copy.py [--device cuda|cpu] [--small] [--json out.json]

Backup (all layers at once) and load (layer by layer) of 8k and 32k tokens in the KV shape of
Llama-3.1-8B, through `HostPoolGroup`, for every layout of the host pool and both copy backends.
Pages lie at random places in both pools ("scattered", what a cache looks like after a while) or in
a row. `share` is the rate over that of one large copy of pinned memory in the same process;
`submit` is how long the calling thread is busy. Every transfer is compared byte by byte once.

Then, for small pages, which of the kernel and the copy engine is faster; what it costs to carry the
KV of a one-layer draft model along; and how long it takes to pin memory. `--small` is a tiny form
for `--device cpu`: there both pools are host memory and the share is that of a plain copy.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from arguments import output_file, parser_of, require_device
from sglang.srt.mem_cache import host_copy
from sglang.srt.mem_cache.host_memory import HostMemory
from sglang.srt.mem_cache.host_pool_sizing import host_memory_info
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    LAYOUTS,
    HostKVCache,
    HostPoolGroup,
    MHATokenToKVPoolHost,
    PoolEntry,
)
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.platforms import init_platform

logger = logging.getLogger("bench_hicache_copy")

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """KV of one model and how much of it is copied."""

    layers: int
    heads: int
    head_dim: int
    page_size: int
    tokens: tuple[int, ...]
    sweep_page_sizes: tuple[int, ...]
    ceiling_bytes: int
    repeats: int

    @property
    def pool_tokens(self) -> int:
        return max(self.tokens) * 5 // 4

    def token_bytes(self, dtype: torch.dtype) -> int:
        """KV of one token, that of a one-layer draft included."""
        return 2 * (self.layers + 1) * self.heads * self.head_dim * dtype.itemsize


LLAMA_8B = Shape(
    layers=32,
    heads=8,
    head_dim=128,
    page_size=64,
    tokens=(8192, 32768),
    sweep_page_sizes=(1, 8, 16, 32, 64, 128),
    ceiling_bytes=GIB,
    repeats=7,
)
SMALL = Shape(
    layers=3,
    heads=2,
    head_dim=16,
    page_size=8,
    tokens=(64, 128),
    sweep_page_sizes=(1, 4),
    ceiling_bytes=1 << 16,
    repeats=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line of the table. ``share``: ``gb_per_s`` over the plain copy's in this direction."""

    what: str
    layout: str
    io_backend: str
    tokens: int
    page_size: int
    pages: str
    milliseconds: float
    gb_per_s: float
    share: float
    submit_ms: float


class Timer:
    """Times work that is queued on the current stream (CUDA) or done at once (CPU)."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.is_cuda = device.type == "cuda"
        self.repeats = repeats

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, action: Callable[[], object]) -> tuple[float, float]:
        """Median (time until it is done, time until the call returns) after one run to warm up."""
        action()
        times, calls = [], []
        for _ in range(self.repeats):
            self.synchronize()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * self.is_cuda)]
            start = time.perf_counter()
            for event in events[:1]:
                event.record()
            action()
            for event in events[1:]:
                event.record()
            calls.append(time.perf_counter() - start)
            self.synchronize()
            times.append(events[0].elapsed_time(events[1]) / 1e3 if events else calls[-1])
        return statistics.median(times), statistics.median(calls)


def actions_of(
    group: HostPoolGroup, on_host: torch.Tensor, on_device: torch.Tensor
) -> dict[str, Callable[[], None]]:
    """Both directions of a transfer."""

    def backup() -> None:
        group.backup(on_host, on_device)

    def load() -> None:
        for layer in range(group.num_layers):
            group.load_layer(layer, on_host, on_device)

    return {"backup": backup, "load": load}


class Bench:
    """The device pool, the plain copies to compare with, and the results so far."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.timer = Timer(device, shape.repeats)
        self.results: list[Result] = []
        self.notes: dict[str, float] = {}
        self.h2d, self.d2h = self._ceilings()
        self.generator = torch.Generator().manual_seed(0)

    def _ceilings(self) -> tuple[float, float]:
        num_bytes = self.shape.ceiling_bytes
        start = time.perf_counter()
        memory = HostMemory(num_bytes, pinned=self.device.type == "cuda")
        self.notes["pin_s_per_gb"] = (time.perf_counter() - start) * 1e9 / num_bytes
        on_device = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=self.device)
        d2h = self.timer.seconds(lambda: memory.tensor.copy_(on_device, non_blocking=True))[0]
        h2d = self.timer.seconds(lambda: on_device.copy_(memory.tensor, non_blocking=True))[0]
        memory.close()
        self.notes["h2d_gb_per_s"] = num_bytes / h2d / 1e9
        self.notes["d2h_gb_per_s"] = num_bytes / d2h / 1e9
        return num_bytes / h2d, num_bytes / d2h

    def device_pool(self, page_size: int, layers: int) -> MHATokenToKVPool:
        pool = MHATokenToKVPool(
            size=self.shape.pool_tokens // page_size * page_size,
            page_size=page_size,
            dtype=self.dtype,
            head_num=self.shape.heads,
            head_dim=self.shape.head_dim,
            layer_num=layers,
            device=self.device,
        )
        for data in (pool.k_data, pool.v_data):
            data.view(torch.uint8).random_(0, 256)
        return pool

    def slots(self, size: int, first: int, page_size: int, tokens: int, pages: str) -> torch.Tensor:
        """Slots of whole pages among ``size`` slots from ``first`` on."""
        count = size // page_size
        chosen = (
            torch.randperm(count, generator=self.generator)
            if pages == "scattered"
            else torch.arange(count)
        )[: tokens // page_size]
        within = torch.arange(page_size)
        return (first + chosen[:, None] * page_size + within).reshape(-1)

    def measure(self, group: HostPoolGroup, tokens: int, pages: str, label: str = "") -> None:
        """Add a backup and a load of ``tokens`` tokens."""
        host, device = group.anchor.host_pool, group.anchor.device_pool
        on_host = self.slots(host.size, 0, host.page_size, tokens, pages)
        on_device = self.slots(device.size, host.page_size, host.page_size, tokens, pages)

        actions = actions_of(group, on_host, on_device)
        backup = self.timer.seconds(actions["backup"])
        before = [self._content(entry, on_device) for entry in group.entries]
        for entry in group.entries:
            for data in self._buffers(entry):
                data.view(torch.uint8).fill_(0x55)
        loaded = self.timer.seconds(actions["load"])
        self.timer.synchronize()
        for entry, expected in zip(group.entries, before):
            if not all(map(torch.equal, self._content(entry, on_device), expected)):
                raise RuntimeError(f"{label} {entry.name}: the bytes that came back differ")
        for what, (seconds, submit) in (("backup", backup), ("load", loaded)):
            num_bytes = tokens * group.bytes_per_token
            self._add(
                what + label, host, group.io_backend, tokens, pages, seconds, submit, num_bytes
            )

    def _add(
        self,
        what: str,
        pool: HostKVCache,
        io_backend: str,
        tokens: int,
        pages: str,
        seconds: float,
        submit: float,
        num_bytes: int | None = None,
    ) -> None:
        rate = (num_bytes or tokens * pool.bytes_per_token) / seconds
        ceiling = self.d2h if what.startswith("backup") else self.h2d
        self.results.append(
            Result(
                what=what,
                layout=pool.layout,
                io_backend=io_backend,
                tokens=tokens,
                page_size=pool.page_size,
                pages=pages,
                milliseconds=seconds * 1e3,
                gb_per_s=rate / 1e9,
                share=rate / ceiling,
                submit_ms=submit * 1e3,
            )
        )
        show(self.results[-1])

    @staticmethod
    def _buffers(entry: PoolEntry) -> tuple[torch.Tensor, torch.Tensor]:
        pool = entry.device_pool
        assert isinstance(pool, MHATokenToKVPool)
        return pool.k_data, pool.v_data

    def _content(self, entry: PoolEntry, slots: torch.Tensor) -> list[torch.Tensor]:
        rows = slots.to(self.device)
        return [data.view(torch.uint8)[:, rows] for data in self._buffers(entry)]

    def layouts(self) -> None:
        """Every layout and copy backend."""
        page_size = self.shape.page_size
        device_pool = self.device_pool(page_size, self.shape.layers)
        for layout in LAYOUTS:
            host_pool = MHATokenToKVPoolHost(device_pool, device_pool.size, layout)
            entry = PoolEntry(name=PoolName.KV, host_pool=host_pool, device_pool=device_pool)
            for io_backend in host_copy.IO_BACKENDS:
                for tokens in self.shape.tokens:
                    for pages in ("scattered", "in a row"):
                        self.measure(HostPoolGroup(entry, io_backend), tokens, pages)
            host_pool.destroy()

    def draft(self) -> None:
        """A one-layer draft that shares the slots: its extra time over its share of the bytes."""
        page_size, tokens = self.shape.page_size, self.shape.tokens[0]
        pools = [self.device_pool(page_size, layers) for layers in (self.shape.layers, 1)]
        hosts = [MHATokenToKVPoolHost(pool, pool.size, "page_first") for pool in pools]
        target, draft = (
            PoolEntry(name=name, host_pool=host, device_pool=pool)
            for name, host, pool in zip((PoolName.KV, PoolName.DRAFT), hosts, pools)
        )
        group = HostPoolGroup(target, "kernel")
        self.measure(group, tokens, "scattered", " target")
        group.add(draft)
        self.measure(group, tokens, "scattered", " +draft")
        for plain, both in zip(self.results[-4:-2], self.results[-2:]):
            extra_time = both.milliseconds / plain.milliseconds - 1
            name = f"{plain.what.split()[0]}_draft_extra_time_over_extra_bytes"
            self.notes[name] = extra_time * self.shape.layers
        group.destroy()

    def page_sizes(self) -> None:
        """The kernel against the copy engine, by the size of a piece (K of a page and layer)."""
        tokens = self.shape.tokens[0]
        for page_size in self.shape.sweep_page_sizes:
            device_pool = self.device_pool(page_size, self.shape.layers)
            host_pool = MHATokenToKVPoolHost(device_pool, device_pool.size, "page_first")
            sides = host_pool.sides(device_pool)
            for pages in ("scattered", "in a row"):
                on_host = self.slots(host_pool.size, 0, page_size, tokens, pages)
                on_device = self.slots(device_pool.size, page_size, page_size, tokens, pages)
                page_map = host_copy.PageMap(on_host, on_device, page_size)
                for to_host in (True, False):
                    self._kernel_and_engine(host_pool, sides, page_map, to_host, pages)
            host_pool.destroy()

    def _kernel_and_engine(
        self,
        pool: MHATokenToKVPoolHost,
        sides: list[host_copy.Side],
        page_map: host_copy.PageMap,
        to_host: bool,
        pages: str,
    ) -> None:
        if not self.timer.is_cuda:
            return
        copiers: dict[str, host_copy.Copier] = {
            "kernel": host_copy.KernelCopier(sides, page_map, to_host)
        }
        if pool.page_size > 1 or pages == "in a row":  # else: half a million submissions
            copiers["engine"] = host_copy.EngineCopier(sides, page_map, to_host)
        layers = pool.layer_num
        steps = [range(layers)] if to_host else [range(n, n + 1) for n in range(layers)]
        for name, copier in copiers.items():

            def copy(copier: host_copy.Copier = copier) -> None:
                for step in steps:
                    copier.copy(step)

            seconds, submit = self.timer.seconds(copy)
            what = f"{'backup' if to_host else 'load'} by {name}"
            self._add(what, pool, name, self.shape.tokens[0], pages, seconds, submit)

    def beside_computation(self) -> None:
        """How much slower matrix products and device copies are while pages are copied."""
        device_pool = self.device_pool(self.shape.page_size, self.shape.layers)
        host_pool = MHATokenToKVPoolHost(device_pool, device_pool.size, "page_first")
        entry = PoolEntry(name=PoolName.KV, host_pool=host_pool, device_pool=device_pool)
        tokens = self.shape.tokens[0]
        on_host = self.slots(host_pool.size, 0, self.shape.page_size, tokens, "scattered")
        on_device = on_host + self.shape.page_size
        a, b = torch.randn(2, 4096, 4096, device=self.device, dtype=self.dtype)
        data = torch.empty(GIB // 2, dtype=torch.uint8, device=self.device)
        work = {
            "products": lambda: [torch.mm(a, b) for _ in range(100)],
            "device_copies": lambda: [data[: GIB // 4].copy_(data[GIB // 4 :]) for _ in range(200)],
        }
        for io_backend in host_copy.IO_BACKENDS:
            copies = actions_of(HostPoolGroup(entry, io_backend), on_host, on_device)
            for what, copy in copies.items():
                for name, action in work.items():
                    share = self._time_beside(action, copy) / self._time_beside(action, None)
                    self.notes[f"{name}_time_beside_{what}_{io_backend}"] = share
        host_pool.destroy()

    def _time_beside(
        self, action: Callable[[], object], copy: Callable[[], object] | None
    ) -> float:
        """Median milliseconds of ``action`` while copies, already queued, go on beside it."""
        side_stream = torch.cuda.Stream()
        times = []
        for _ in range(self.timer.repeats):
            torch.cuda.synchronize()
            if copy is not None:
                with torch.cuda.stream(side_stream):
                    for _ in range(4):  # the CPU is busy for less time than two of them take
                        copy()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            action()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return statistics.median(times)

    def run(self) -> None:
        self.layouts()
        self.draft()
        self.page_sizes()
        if self.timer.is_cuda:
            self.beside_computation()


def show(result: Result) -> None:
    logger.info(
        "%-17s %-17s %-6s %6d tokens, pages of %3d %-9s %8.3f ms %7.2f GB/s %6.3f  submit %.3f ms",
        *(result.what, result.layout, result.io_backend, result.tokens, result.page_size),
        *(result.pages, result.milliseconds, result.gb_per_s, result.share, result.submit_ms),
    )


def check_memory(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Say how large the pools are. Raises SystemExit where the host has too little memory free.

    On the CPU the device pool lies there as well, and so do the two copies of the transferred bytes
    that are compared.
    """
    pool_bytes = shape.pool_tokens * shape.token_bytes(dtype)
    host_bytes = pool_bytes
    if device.type == "cpu":
        host_bytes += pool_bytes + 2 * max(shape.tokens) * shape.token_bytes(dtype)
    host_bytes = max(host_bytes, shape.ceiling_bytes)
    free_bytes = host_memory_info().free_bytes
    sizes = f"pools of {pool_bytes / GIB:.2f} GiB each, {host_bytes / GIB:.2f} GiB of host memory"
    if host_bytes > free_bytes:
        raise SystemExit(
            f"bench_hicache_copy.py: {sizes}, and {free_bytes / GIB:.2f} GiB are free; "
            "--small is the small form"
        )
    logger.info("%s", sizes)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where it runs")
    parser.add_argument("--small", action="store_true", help="a tiny shape")
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    args = parser.parse_args()
    require_device(args.device)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    platform = init_platform(args.device)
    shape = SMALL if args.small else LLAMA_8B
    check_memory(shape, platform.device, platform.default_dtype)
    bench = Bench(shape, platform.device, platform.default_dtype)
    # A stream of its own, as in the server: the driver takes no batches on the default one.
    with platform.use_stream(platform.stream()):
        bench.run()
    for key, value in bench.notes.items():
        logger.info("%-45s %8.3f", key, value)
    if args.json is not None:
        report = {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
            "torch": torch.__version__,
            "shape": asdict(bench.shape),
            "notes": bench.notes,
            "results": [asdict(result) for result in bench.results],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
