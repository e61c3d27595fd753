"""How long the scheduler waits for the radix cache and the slot allocators.

Builds a tree of many nodes, then times match + insert of a long prompt in it, eviction, locks, and
the allocators' batch calls. Prints a table and writes JSON. CPU only, one thread.

    python benchmark/bench_radix_cache.py --json radix.json
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from arguments import output_file
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    create_token_to_kv_pool_allocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheInitParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

VOCAB = 32_000
FLOOR_MS, AIM_MS = 0.5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured operation; times in microseconds."""

    name: str
    page_size: int
    median_us: float
    p90_us: float
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is built and how often each operation is timed."""

    num_nodes: int
    prompt_len: int
    batch: int
    repeats: int


def row_of(name: str, page_size: int, times_us: list[float]) -> Row:
    times_us = sorted(times_us)
    return Row(
        name=name,
        page_size=page_size,
        median_us=round(times_us[len(times_us) // 2], 1),
        p90_us=round(times_us[int(len(times_us) * 0.9)], 1),
        repeats=len(times_us),
    )


def time_us(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e6


def random_tokens(rng: random.Random, num_tokens: int) -> array[int]:
    return array("i", rng.choices(range(VOCAB), k=num_tokens))


def build_tree(
    sizes: Sizes, page_size: int, rng: random.Random
) -> tuple[UnifiedRadixCache, BaseTokenToKVPoolAllocator]:
    """Fill a tree with ``num_nodes`` nodes: families of prompts that share a beginning."""
    size = (sizes.num_nodes + 8 * sizes.repeats * sizes.prompt_len // page_size) * page_size * 2
    allocator = create_token_to_kv_pool_allocator(size, page_size)
    tree = UnifiedRadixCache(
        CacheInitParams(
            req_to_token_pool=ReqToTokenPool(1, 1, "cpu"),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
        )
    )
    family_size = 100
    for start in range(0, sizes.num_nodes, family_size):
        stem = random_tokens(rng, page_size)
        for _ in range(min(family_size, sizes.num_nodes - start)):
            insert(tree, allocator, stem + random_tokens(rng, page_size), page_size)
    return tree, allocator


def insert(
    tree: UnifiedRadixCache,
    allocator: BaseTokenToKVPoolAllocator,
    tokens: array[int],
    page_size: int,
) -> None:
    """Insert a prompt with fresh slots and free what the tree had."""
    slots = allocator.alloc(len(tokens) // page_size * page_size)
    if slots is None:
        raise RuntimeError("the pool of the benchmark is too small")
    result = tree.insert(InsertParams(key=tree.make_key(tokens), value=slots))
    allocator.free(slots[: result.prefix_len])


def bench_tree(sizes: Sizes, page_size: int) -> tuple[list[Row], int]:
    """Time the tree's operations; also returns how many nodes the tree had."""
    rng = random.Random(0)
    tree, allocator = build_tree(sizes, page_size, rng)
    num_nodes = sum(1 for _ in tree.iter_nodes())
    half = sizes.prompt_len // 2 // page_size * page_size
    shared = [random_tokens(rng, half) for _ in range(sizes.repeats)]
    prompts = [stem + random_tokens(rng, sizes.prompt_len - half) for stem in shared]
    new = [random_tokens(rng, sizes.prompt_len) for _ in range(sizes.repeats)]
    for stem in shared:
        insert(tree, allocator, stem + random_tokens(rng, half), page_size)
    aligned = sizes.prompt_len // page_size * page_size
    fresh = [allocator.alloc(aligned) for _ in range(2 * sizes.repeats)]

    def match_and_insert(tokens: array[int], slots: torch.Tensor | None) -> None:
        if slots is None:
            raise RuntimeError("the pool of the benchmark is too small")
        tree.match_prefix(MatchPrefixParams(key=tree.make_key(tokens[:-1])))
        tree.insert(InsertParams(key=tree.make_key(tokens), value=slots))

    def lock_and_unlock(i: int) -> None:
        node = found[i].last_device_node
        tree.inc_lock_ref(node)
        tree.dec_lock_ref(node)

    def of(name: str, action: Callable[[int], object]) -> Row:
        times_us = [time_us(partial(action, i)) for i in range(sizes.repeats)]
        return row_of(name, page_size, times_us)

    def match(tokens: array[int]) -> MatchResult:
        return tree.match_prefix(MatchPrefixParams(key=tree.make_key(tokens)))

    deep = random_tokens(rng, sizes.prompt_len)
    num_deep = aligned // page_size  # as many nodes as the prompt has pages, at most 256
    for i in range(1, min(num_deep, 256) + 1):
        insert(tree, allocator, deep[: i * aligned // min(num_deep, 256)], page_size)
    gc.disable()
    rows = [
        of("match+insert, half known (split)", lambda i: match_and_insert(prompts[i], fresh[i])),
        of("match+insert, all new", lambda i: match_and_insert(new[i], fresh[i + sizes.repeats])),
        of("match, all known", lambda i: match(prompts[i])),
        of(f"match, {min(num_deep, 256)} nodes deep", lambda i: match(deep)),
    ]
    found = [match(tokens) for tokens in prompts]
    rows.append(of("lock + unlock", lock_and_unlock))
    rows.append(of("evict one leaf", lambda i: tree.evict(1)))
    gc.enable()
    return rows, num_nodes


def bench_allocator(sizes: Sizes, page_size: int) -> list[Row]:
    """Time one decode step's slots for a batch, their free, and a prompt's extend."""
    size = (sizes.batch + sizes.prompt_len) * 4 * page_size
    allocator = create_token_to_kv_pool_allocator(size, page_size)
    # Each request begins a page: the worst case of a paged decode step.
    seq_lens = [page_size + 1] * sizes.batch
    last_locs = [2 * page_size - 1] * sizes.batch
    taken: list[torch.Tensor] = []

    def keep(slots: torch.Tensor | None) -> None:
        if slots is None:
            raise RuntimeError("the pool of the benchmark is too small")
        taken.append(slots)

    actions: dict[str, Callable[[], object]] = {
        f"alloc_decode, {sizes.batch} requests": lambda: keep(
            allocator.alloc_decode(seq_lens, last_locs)
        ),
        f"free, {sizes.batch} slots": lambda: allocator.free(taken.pop()),
        f"alloc_extend, {sizes.prompt_len} tokens": lambda: keep(
            allocator.alloc_extend([0], [sizes.prompt_len], [-1])
        ),
        f"free, {sizes.prompt_len} slots": lambda: allocator.free(taken.pop()),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(sizes.repeats * 4):
        for name, action in actions.items():
            times[name].append(time_us(action))
    return [row_of(name, page_size, times_us) for name, times_us in times.items()]


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="a tiny tree, for a quick check")
    parser.add_argument("--json", type=output_file, help="where to write the JSON")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (
        Sizes(num_nodes=500, prompt_len=256, batch=16, repeats=5)
        if args.small
        else Sizes(num_nodes=100_000, prompt_len=4096, batch=256, repeats=50)
    )
    rows: list[Row] = []
    num_nodes: dict[int, int] = {}
    for page_size in args.page_sizes:
        tree_rows, num_nodes[page_size] = bench_tree(sizes, page_size)
        rows += tree_rows + bench_allocator(sizes, page_size)
    worst_ms = max(row.median_us for row in rows if row.name.startswith("match+insert")) / 1000
    report = {
        "question": "match + insert of a 4k prompt in a tree of 100k nodes",
        "sizes": asdict(sizes),
        "nodes": num_nodes,
        "worst_match_insert_ms": worst_ms,
        "floor_ms": FLOOR_MS,
        "aim_ms": AIM_MS,
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
    }
    lines = [f"{'page':>5} {'operation':<36} {'median us':>10} {'p90 us':>10}"]
    lines += [f"{r.page_size:>5} {r.name:<36} {r.median_us:>10} {r.p90_us:>10}" for r in rows]
    lines.append(f"match + insert at worst {worst_ms:.3f} ms (floor {FLOOR_MS}, aim {AIM_MS})")
    sys.stdout.write("\n".join(lines) + "\n")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
