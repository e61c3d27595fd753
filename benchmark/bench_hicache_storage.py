"""How fast storage backends move pages from and to host memory, against the plain way.

`--backend file`: GB/s of `batch_get_v2` (verified, counted in the backend)
divided by GB/s of `preadv` of the same files into the same memory by as many threads. The two
alternate (A-B-B-A). With `--busy` a third thread runs Python for one millisecond of five, as a
scheduler does whose device decodes; with a real one beside it: `bench_hicache.py`. Pages are read
from the page cache unless `--cold` drops them before each round.

`--backend mooncake` and `redis`: MB/s against the store's own batch calls, reads and writes; see
`hicache_shared_stores.py`.

    python benchmark/bench_hicache_storage.py --threads 1 2 --json storage.json
    python benchmark/bench_hicache_storage.py --backend mooncake --page-mib 0.7 4
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import hicache_shared_stores as shared
from arguments import output_file
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_key import CacheIdentity, PageHash, RadixKey
from sglang.srt.mem_cache.storage import page_file

FLOOR, AIM = 0.70, 0.90
# Of a step of the busy thread.
_PYTHON_S, _DEVICE_S = 0.001, 0.004


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting. GB are 10**9 bytes; ``ratio`` is the median of the rounds' own ratios."""

    layout: str
    page_mib: float
    threads: int
    busy: bool
    read_gb_s: float
    plain_gb_s: float
    ratio: float
    write_gb_s: float
    exists_us_per_page: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """``page_bytes`` is a multiple of 64 KiB; ``num_pages`` pages are read per round."""

    page_bytes: int
    num_pages: int
    rounds: int
    is_cold: bool


class Bench:
    """A pool, its pages in files, and the two ways to read them."""

    def __init__(self, folder: Path, layout: str, sizes: Sizes, threads: int) -> None:
        self.sizes = sizes
        self.threads = threads
        page_size, layer_num = 16, 16
        head_dim = sizes.page_bytes // (2 * 4 * page_size * layer_num)
        device_pool = MHATokenToKVPool(
            size=page_size,
            page_size=page_size,
            dtype=torch.float32,
            head_num=1,
            head_dim=head_dim,
            layer_num=layer_num,
            device="cpu",
        )
        num_tokens = sizes.num_pages * page_size
        self.pool = MHATokenToKVPoolHost(device_pool, num_tokens, layout)
        identity = CacheIdentity(
            model="bench",
            weights_fingerprint="none",
            kv_dtype="float32",
            page_size=page_size,
            layout=layout,
        )
        self.keys: list[PageHash] = RadixKey(list(range(num_tokens))).page_hashes(
            page_size, identity.digest()
        )
        extra: dict[str, object] = {"file_storage_path": str(folder), "max_size": 0}
        extra |= {"min_free_space": 0, "read_threads": threads, "write_threads": threads}
        self.store = HiCacheFile(HiCacheStorageConfig(model_name="bench", extra_config=extra))
        self.store.register_mem_host_pool_v2(self.pool, PoolName.KV)
        slots = torch.arange(num_tokens, dtype=torch.int64)
        self.transfer = PoolTransfer(name=PoolName.KV, host_indices=slots, keys=list(self.keys))
        self.paths = [
            os.path.join(folder, page_file.file_name(key, self.store._rank_owner))
            for key in self.keys
        ]
        self.buffers = [self.pool.page_buffers(slot) for slot in range(0, num_tokens, page_size)]
        self._threads = ThreadPoolExecutor(threads)

    def write(self) -> float:
        """Write all pages, random content; returns GB/s."""
        for number, buffers in enumerate(self.buffers):
            for buffer in buffers:
                data = torch.frombuffer(buffer, dtype=torch.int32)
                data.copy_(torch.arange(number, number + len(data)) * 2_654_435_761)
        started = time.perf_counter()
        verdicts = self.store.batch_set_v2([self.transfer])[PoolName.KV]
        seconds = time.perf_counter() - started
        if not all(verdicts):
            raise RuntimeError(f"{verdicts.count(False)} pages were not written")
        return self.store.get_stats()["bytes_written"] / seconds / 1e9

    def read(self) -> float:
        """Read all pages through the backend; returns GB/s of the bytes that it counted."""
        before = self.store.get_stats()["bytes_read"]
        started = time.perf_counter()
        self.store.batch_get_v2([self.transfer])
        seconds = time.perf_counter() - started
        num_bytes = self.store.get_stats()["bytes_read"] - before
        if num_bytes != self.sizes.num_pages * self.pool.bytes_per_page:
            raise RuntimeError(f"{num_bytes:.0f} bytes were read")
        return num_bytes / seconds / 1e9

    def plain(self) -> float:
        """Read the same files into the same memory, nothing else; returns GB/s."""
        counter = itertools.count()

        def work() -> None:
            while (number := next(counter)) < len(self.paths):
                fd = os.open(self.paths[number], os.O_RDONLY)
                os.preadv(fd, self.buffers[number], page_file.HEADER_BYTES)
                os.close(fd)

        started = time.perf_counter()
        for done in [self._threads.submit(work) for _ in range(self.threads)]:
            done.result()
        seconds = time.perf_counter() - started
        return self.sizes.num_pages * self.pool.bytes_per_page / seconds / 1e9

    def exists_us(self) -> float:
        """Return microseconds a page of a look at all pages that were looked at before."""
        self.store.batch_exists(self.keys)
        started = time.perf_counter()
        if self.store.batch_exists(self.keys) != len(self.keys):
            raise RuntimeError("pages are missing")
        return (time.perf_counter() - started) / len(self.keys) * 1e6

    def drop_from_page_cache(self) -> None:
        """Make the next read come from the disk."""
        for path in self.paths:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
        self.store.close()


@contextmanager
def busy_python(is_busy: bool) -> Iterator[None]:
    """A thread of this process that runs Python for a while and then waits for its device."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            end = time.perf_counter() + _PYTHON_S
            while time.perf_counter() < end:
                pass
            time.sleep(_DEVICE_S)

    thread = threading.Thread(target=spin)
    if is_busy:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if is_busy:
            thread.join()


def measure(folder: Path, layout: str, sizes: Sizes, threads: int, busy: bool) -> Row:
    """Write once, then alternate the two ways of reading."""
    bench = Bench(folder, layout, sizes, threads)
    write_gb_s = bench.write()
    reads: list[float] = []
    plains: list[float] = []
    for ways in ((bench.read, reads), (bench.plain, plains)):
        ways[0]()  # warm-up: files in the page cache, memory mapped
    with busy_python(busy):
        for round_ in range(sizes.rounds):
            order = [(bench.read, reads), (bench.plain, plains)]
            for way, rates in order if round_ % 2 == 0 else order[::-1]:
                if sizes.is_cold:
                    bench.drop_from_page_cache()
                rates.append(way())
        exists_us = bench.exists_us()
    bench.close()
    ratios = [read / plain for read, plain in zip(reads, plains)]
    return Row(
        layout=layout,
        page_mib=bench.pool.bytes_per_page / 2**20,
        threads=threads,
        busy=busy,
        read_gb_s=round(statistics.median(reads), 3),
        plain_gb_s=round(statistics.median(plains), 3),
        ratio=round(statistics.median(ratios), 3),
        write_gb_s=round(write_gb_s, 3),
        exists_us_per_page=round(exists_us, 2),
    )


def format_rows(rows: Sequence[Row]) -> str:
    """Return the table."""
    lines = [
        f"{'layout':<18} {'page MiB':>8} {'threads':>7} {'busy':>5} {'read':>7} {'plain':>7} "
        f"{'ratio':>6} {'write':>7} {'exists us':>9}   (GB/s)"
    ]
    lines += [
        f"{r.layout:<18} {r.page_mib:>8.2f} {r.threads:>7} {r.busy!s:>5} {r.read_gb_s:>7.2f} "
        f"{r.plain_gb_s:>7.2f} {r.ratio:>6.2f} {r.write_gb_s:>7.2f} {r.exists_us_per_page:>9.2f}"
        for r in rows
    ]
    return "\n".join(lines)


def _file_report(args: argparse.Namespace) -> dict[str, object]:
    rows: list[Row] = []
    page_mib = [0.0625] if args.small else args.page_mib
    total_mib, rounds = (1, 2) if args.small else (args.total_mib, args.rounds)
    settings = itertools.product(
        args.layouts, page_mib, args.threads, [False, True] if args.busy else [False]
    )
    for layout, page, threads, busy in settings:
        page_bytes = int(page * 2**20)
        sizes = Sizes(
            page_bytes=page_bytes,
            num_pages=max(total_mib * 2**20 // page_bytes, 1),
            rounds=rounds,
            is_cold=args.cold,
        )
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            rows.append(measure(Path(folder), layout, sizes, threads, busy))
    worst = min(row.ratio for row in rows)
    sys.stdout.write(format_rows(rows) + "\n")
    sys.stdout.write(f"read / plain at worst {worst:.2f} (floor {FLOOR}, aim {AIM})\n")
    return {
        "question": "L3 file read against a plain read of the same files",
        "worst_ratio": worst,
        "floor": FLOOR,
        "aim": AIM,
        "cold": args.cold,
        "rows": [asdict(row) for row in rows],
    }


def _shared_report(args: argparse.Namespace) -> dict[str, object]:
    page_mib = [0.0625] if args.small else args.page_mib
    total_mib, rounds = (1, 2) if args.small else (min(args.total_mib, 128), args.rounds)
    rows = [
        shared.measure_shared(
            args.backend,
            layout,
            int(page * 2**20),
            max(int(total_mib / page), 1),
            rounds,
        )
        for layout, page in itertools.product(args.layouts, page_mib)
    ]
    worst = min(min(row.read_ratio, row.write_ratio) for row in rows)
    sys.stdout.write(shared.format_shared(rows) + "\n")
    sys.stdout.write(f"ours / the store's own calls at worst {worst:.2f} (floor {shared.FLOOR})\n")
    return {
        "question": f"L3 in {args.backend} against the store's own batch calls",
        "worst_ratio": worst,
        "floor": shared.FLOOR,
        "rows": [asdict(row) for row in rows],
    }


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", choices=["file", "mooncake", "redis"], default="file")
    parser.add_argument("--small", action="store_true", help="a few small pages, a quick check")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the storage folder")
    parser.add_argument("--layouts", nargs="+", default=None)
    parser.add_argument("--page-mib", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="file only")
    parser.add_argument(
        "--total-mib", type=int, default=384, help="moved per round; of shared stores at most 128"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--busy", action="store_true", help="file: beside a busy thread as well")
    parser.add_argument("--cold", action="store_true", help="file: from the disk, not its cache")
    parser.add_argument("--json", type=output_file, help="where to write the JSON")
    args = parser.parse_args()
    if args.layouts is None:
        # Servers with a shared store keep pages in one piece.
        args.layouts = ["page_first", "layer_first"][: 2 if args.backend == "file" else 1]
    torch.set_num_threads(1)
    report = _file_report(args) if args.backend == "file" else _shared_report(args)
    report |= {
        "fast_checksum": page_file.HAS_FAST_CHECKSUM,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
