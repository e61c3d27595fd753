"""What the hierarchical cache costs and saves, on a real server: times, rates, flush.

    python benchmark/bench_hicache.py --model benchmark/shapes/llama-3.1-8b       # one GPU
    python benchmark/bench_hicache.py --device cpu --small                        # a self-test

Starts its own servers (dummy weights where the folder holds none). One client, one request at a
time for the times to first token; every figure is a median. Each hit is proved by the server's own
counters (`cached_tokens_details`): a run whose prompt did not come from the tier it should have
come from is an error, not a fast time. Prompts are random token ids, new ones for each cold run.

* L1: the same prompt again. L2: after as many other prompts as the device pool holds.
  L3: after a flush that waited until everything was written.
* flush: `/flush_cache` right after an answer, its storage writes still pending.
* storage: L3 hits while other requests decode. Bytes and seconds are the server's own counters of
  what its backend read; beside it a plain read of the same files by as many threads.
* throughput with tiers and no hit ÷ without tiers: two servers at once, runs in the order A B B A.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import requests

from arguments import model_path, output_file, parse_small, require_device
from sglang.test.small_server import SmallServer, serve, sum_series

PARTS = ("ttft", "flush", "storage", "throughput")
SMALL = {
    **{"device": "cpu", "lengths": [256], "page_size": 16, "pool_tokens": 2048},
    **{"rounds": 1, "flush_cycles": 3, "pairs": 1},
    **{"num_requests": 4, "input_len": 32, "output_len": 8},
}
DETAILS = {"L1": "device", "L2": "host", "L3": "storage"}


class Client:
    """One server and the prompts that it is asked."""

    def __init__(self, server: SmallServer, vocab_size: int, seed: int) -> None:
        self.server = server
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def prompt(self, length: int) -> list[int]:
        """Random token ids that nobody has asked before."""
        return [self._random.randrange(3, self._vocab_size) for _ in range(length)]

    def first_token(self, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
        """(seconds to the only token, meta_info)."""
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
        }
        start = time.perf_counter()
        reply = self.server.post("/generate", json=body)
        elapsed = time.perf_counter() - start
        reply.raise_for_status()
        return elapsed, reply.json()["meta_info"]

    def flush(self, timeout_s: float = 0.0) -> float:
        """Seconds of a flush; with a timeout it waits for storage."""
        start = time.perf_counter()
        reply = self.server.post(f"/flush_cache?timeout={timeout_s}")
        elapsed = time.perf_counter() - start
        if reply.status_code != 200:
            raise RuntimeError(f"flush_cache: {reply.status_code} {reply.text}")
        return elapsed


def check_source(tier: str, meta: dict[str, Any], least: int) -> None:
    """Raise RuntimeError unless the prompt came from this tier."""
    found = (meta["cached_tokens_details"] or {}).get(DETAILS[tier], 0)
    if found < least:
        raise RuntimeError(f"{tier} hit: only {found} of {least} tokens, {meta}")


def time_to_first_token(
    client: Client,
    length: int,
    page_size: int,
    pool_tokens: int,
    rounds: int,
    has_storage: bool = True,
) -> dict[str, dict[str, float]]:
    """Medians by tier, milliseconds; `share`: of the cold time."""
    tiers = ("cold", "L1", "L2", "L3") if has_storage else ("cold", "L1", "L2")
    times: dict[str, list[float]] = {name: [] for name in tiers}
    least = length - 2 * page_size
    for _ in range(rounds):
        prompt = client.prompt(length)
        elapsed, meta = client.first_token(prompt)
        if meta["cached_tokens"] != 0:
            raise RuntimeError(f"a new prompt was cached: {meta}")
        times["cold"].append(elapsed)
        elapsed, meta = client.first_token(prompt)
        check_source("L1", meta, least)
        times["L1"].append(elapsed)
        for _ in range(pool_tokens // length + 1):
            client.first_token(client.prompt(length))
        elapsed, meta = client.first_token(prompt)
        check_source("L2", meta, least)
        times["L2"].append(elapsed)
        client.flush(timeout_s=120)
        if has_storage:
            elapsed, meta = client.first_token(prompt)
            check_source("L3", meta, least)
            times["L3"].append(elapsed)
    cold = statistics.median(times["cold"])
    return {
        name: {
            "ms": statistics.median(values) * 1e3,
            "share": statistics.median(values) / cold,
            "best_ms": min(values) * 1e3,
            "worst_ms": max(values) * 1e3,
        }
        for name, values in times.items()
    }


def flush_times(client: Client, length: int, cycles: int) -> dict[str, float]:
    """Milliseconds of flushes right after an answer, with its backups pending."""
    times = []
    for _ in range(cycles):
        client.first_token(client.prompt(length))
        times.append(client.flush() * 1e3)
    return {
        "median_ms": statistics.median(times),
        "worst_ms": max(times),
        "cycles": float(cycles),
    }


@contextmanager
def decoding(client: Client, num_requests: int, output_len: int) -> Iterator[None]:
    """So many requests decode meanwhile."""
    bodies = [
        {
            "input_ids": client.prompt(16),
            "sampling_params": {"max_new_tokens": output_len, "ignore_eos": True},
        }
        for _ in range(num_requests)
    ]

    def ask(body: dict[str, Any]) -> None:
        reply = requests.post(client.server.url + "/generate", json=body, timeout=600)
        if reply.status_code != 200:
            raise RuntimeError(f"load: {reply.status_code} {reply.text}")

    with ThreadPoolExecutor(num_requests) as threads:
        asked = [threads.submit(ask, body) for body in bodies]
        try:
            while client.server.num_requests() < num_requests:
                for future in asked:
                    if future.done():
                        future.result()
                        raise RuntimeError("a request of the load has ended already")
                time.sleep(0.01)
            yield
        finally:
            client.server.post("/abort_request", json={"abort_all": True})


def plain_read(paths: Sequence[Path], num_threads: int) -> float:
    """GB/s of reading the files whole."""

    def read(part: Sequence[Path]) -> int:
        buffer = bytearray(max(path.stat().st_size for path in paths))
        num_bytes = 0
        for path in part:
            with path.open("rb", buffering=0) as file:
                num_bytes += file.readinto(buffer)
        return num_bytes

    with ThreadPoolExecutor(num_threads) as threads:
        start = time.perf_counter()
        num_bytes = sum(threads.map(read, [paths[i::num_threads] for i in range(num_threads)]))
        return num_bytes / (time.perf_counter() - start) / 1e9


def storage_under_load(
    client: Client,
    folder: Path,
    length: int,
    page_size: int,
    rounds: int,
    num_threads: int,
    load: tuple[int, int],
) -> dict[str, Any]:
    """Medians of GB/s, the server's and plain; `load`: requests that decode, tokens of each."""
    files = [set(folder.rglob("*"))]
    prompts = [client.prompt(length) for _ in range(rounds)]
    for prompt in prompts:
        client.first_token(prompt)
        client.flush(timeout_s=120)
        files.append({path for path in folder.rglob("*") if path.is_file()})

    def read_so_far() -> tuple[float, float]:
        text = client.server.get("/metrics").text
        return tuple(  # type: ignore[return-value]
            sum_series(text, f"sglang:storage_read_{what}_total") for what in ("bytes", "seconds")
        )

    rows = []
    with decoding(client, *load):
        for number, prompt in enumerate(prompts):
            paths = sorted(files[number + 1] - files[number])
            plain = [] if number % 2 else [plain_read(paths, num_threads)]
            before = read_so_far()
            elapsed, meta = client.first_token(prompt)
            check_source("L3", meta, length - 2 * page_size)
            num_bytes, seconds = (b - a for a, b in zip(before, read_so_far()))
            plain = plain or [plain_read(paths, num_threads)]
            rows.append((num_bytes / seconds / 1e9, plain[0], elapsed))
    return {
        "read_gb_s": statistics.median(row[0] for row in rows),
        "plain_gb_s": statistics.median(row[1] for row in rows),
        "ratio": statistics.median(row[0] / row[1] for row in rows),
        "ratios": [row[0] / row[1] for row in rows],
        "ttft_ms": statistics.median(row[2] for row in rows) * 1e3,
    }


def throughput(client: Client, num_requests: int, input_len: int, output_len: int) -> float:
    """Output tokens a second of so many new prompts at once.

    Answers have a half to one and a half times `output_len`: to end all in one step is a load of
    its own. The same lengths in all runs.
    """
    prompts = [client.prompt(input_len) for _ in range(num_requests)]
    all_lengths = range(output_len // 2, output_len * 3 // 2 + 1)
    lengths = random.Random(0).choices(all_lengths, k=num_requests)

    def ask(prompt: list[int], length: int) -> int:
        reply = requests.post(
            client.server.url + "/generate",
            json={
                "input_ids": prompt,
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": length,
                    "ignore_eos": True,
                },
            },
            timeout=600,
        )
        reply.raise_for_status()
        return int(reply.json()["meta_info"]["completion_tokens"])

    start = time.perf_counter()
    with ThreadPoolExecutor(num_requests) as threads:
        num_tokens = sum(threads.map(ask, prompts, lengths))
    return num_tokens / (time.perf_counter() - start)


def compare_throughput(
    on: Client, off: Client, load: Callable[[Client], float], pairs: int
) -> dict[str, Any]:
    """Ratio on ÷ off of runs in the order A B B A, median over the pairs."""
    ratios, all_on, all_off = [], [], []
    for client in (on, off):
        load(client)
    for pair in range(pairs):
        order = (on, off) if pair % 2 == 0 else (off, on)
        results = {id(client): load(client) for client in order}
        all_on.append(results[id(on)])
        all_off.append(results[id(off)])
        ratios.append(results[id(on)] / results[id(off)])
    return {
        "on_tokens_per_s": statistics.median(all_on),
        "off_tokens_per_s": statistics.median(all_off),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=model_path, help="folder of a model or of a shape (config.json alone)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny random model, a self-test")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--no-storage", action="store_true", help="two tiers, without files")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--pool-tokens", type=int, default=57344, help="device pool")
    parser.add_argument("--hicache-size", type=int, default=32, help="host pool, GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flush-cycles", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5, help="of throughput runs")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--storage-dir", help="default: a temporary folder")
    parser.add_argument("--storage-size", default="100GB", help="most bytes in it")
    parser.add_argument("--read-threads", type=int, default=4, help="of the file backend")
    parser.add_argument("--flags", default="", help="further flags of the servers")
    parser.add_argument("--json", type=output_file, help="file for the figures")
    args = parse_small(parser, SMALL, needs_model=True)
    require_device(args.device)
    return args


def tiny_model(args: argparse.Namespace, folder: Path) -> int:
    """Make a tiny model; returns its vocabulary size."""
    from sglang.test.fakes.tiny_models import make_tiny_checkpoint

    longest = max(2048, max(args.lengths) + 64, args.input_len + 2 * args.output_len)
    args.model = str(
        make_tiny_checkpoint(folder / "model", "llama", max_position_embeddings=longest)
    )
    return vocab_size(args.model)


def vocab_size(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def check_pool(args: argparse.Namespace) -> None:
    """Raise SystemExit where the prompts of `throughput` do not fit into the device pool at once.

    Some would wait or be retracted then, others in every run, and the ratio would be chance.
    """
    longest = args.input_len + args.output_len * 3 // 2
    pages = -(-longest // args.page_size) * args.num_requests
    if "throughput" in args.only and pages * args.page_size > args.pool_tokens:
        raise SystemExit(
            f"{args.num_requests} requests of up to {longest} tokens need --pool-tokens "
            f"{pages * args.page_size} or more, not {args.pool_tokens}"
        )


def server_flags(args: argparse.Namespace) -> list[str | int | float]:
    flags: list[str | int | float] = [
        "--device",
        args.device,
        "--page-size",
        args.page_size,
        "--max-total-tokens",
        args.pool_tokens,
        "--skip-tokenizer-init",
        "--enable-metrics",
        *args.flags.split(),
    ]
    if not any(Path(args.model).glob("*.safetensors")):
        flags += ["--load-format", "dummy"]
    return flags


def tier_flags(args: argparse.Namespace, storage: str) -> list[str | int | float]:
    size: list[str | int | float] = ["--hicache-size", args.hicache_size]
    if args.small:
        size = ["--hicache-ratio", 8]
    tiers: list[str | int | float] = ["--enable-hierarchical-cache", *size]
    if args.no_storage:
        return tiers
    config = {"file_storage_path": storage, "prefetch_threshold": args.page_size}
    config["read_threads"] = args.read_threads
    if not args.small:
        config["max_size"] = args.storage_size
    return [
        *tiers,
        "--hicache-storage-backend",
        "file",
        "--hicache-storage-prefetch-policy",
        "wait_complete",
        "--hicache-storage-backend-extra-config",
        json.dumps(config),
    ]


def show(results: dict[str, Any]) -> None:
    if "ttft" in results:
        columns = f"{'ms':>9} {'share of cold':>14} {'best':>9} {'worst':>9}"
        print(f"\n{'tokens':>7} {'tier':>5} {columns}")
        for length, tiers in results["ttft"].items():
            for name, row in tiers.items():
                print(
                    f"{length:>7} {name:>5} {row['ms']:9.1f} {row['share']:14.3f} "
                    f"{row['best_ms']:9.1f} {row['worst_ms']:9.1f}"
                )
    if "flush" in results:
        flush = results["flush"]
        print(
            f"flush right after an answer: {flush['median_ms']:.1f} ms, "
            f"worst {flush['worst_ms']:.1f}"
        )
    if "storage" in results:
        row = results["storage"]
        print(
            f"files while others decode: {row['read_gb_s']:.2f} GB/s, "
            f"plain {row['plain_gb_s']:.2f}, ratio {row['ratio']:.2f}; "
            f"time to first token {row['ttft_ms']:.0f} ms"
        )
    if "throughput" in results:
        both = results["throughput"]
        print(
            f"throughput without hits: {both['on_tokens_per_s']:.0f} tok/s with tiers, "
            f"{both['off_tokens_per_s']:.0f} without, ratio {both['ratio']:.3f} "
            f"({min(both['ratios']):.3f} to {max(both['ratios']):.3f})"
        )


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        words = tiny_model(args, Path(temporary)) if args.small else vocab_size(args.model)
        check_pool(args)
        storage = args.storage_dir or str(Path(temporary) / "l3")
        flags = server_flags(args)
        on = Client(
            stack.enter_context(serve(args.model, *flags, *tier_flags(args, storage))), words, 1
        )
        results: dict[str, Any] = {"arguments": vars(args)}
        if "ttft" in args.only:
            results["ttft"] = {
                length: time_to_first_token(
                    on, length, args.page_size, args.pool_tokens, args.rounds, not args.no_storage
                )
                for length in args.lengths
            }
        if "flush" in args.only:
            results["flush"] = flush_times(on, args.lengths[0], args.flush_cycles)
            on.flush(timeout_s=120)
        if "storage" in args.only and not args.no_storage:
            results["storage"] = storage_under_load(
                on,
                Path(storage),
                args.lengths[0],
                args.page_size,
                args.rounds,
                args.read_threads,
                (2, 500) if args.small else (8, 2000),
            )
            on.flush(timeout_s=120)
        if "throughput" in args.only:
            off = Client(stack.enter_context(serve(args.model, *flags)), words, 2)
            results["throughput"] = compare_throughput(
                on,
                off,
                lambda client: throughput(
                    client, args.num_requests, args.input_len, args.output_len
                ),
                args.pairs,
            )
    show(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2, default=str))


if __name__ == "__main__":
    main()
