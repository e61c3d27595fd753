"""Schedulers over one storage folder that are killed while they write; what the next one finds.

    python -m sglang.test.fakes.killed_scheduler MODEL FOLDER [--cycles 100] [--max-bytes N]

Each cycle lets a whole scheduler serve prompts until it is killed without warning, then starts
another one that asks for every prompt and checks tokens, pages, quota and pools. Prints one JSON
object; `faults` lists everything that was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.storage.folder_quota import is_temporary
from sglang.test.fakes.page_writer import faults_of
from sglang.test.fakes.served_scheduler import ServedScheduler

NUM_PROMPTS = 12
PROMPT_TOKENS = 130
NEW_TOKENS = 4


def prompt(number: int) -> list[int]:
    """One of the prompts, all different from the first token on."""
    return [3 + (number * 37 + 7 * i + i * i // 9) % 190 for i in range(PROMPT_TOKENS)]


def serve(model: Path, folder: Path, max_bytes: int) -> ServedScheduler:
    """A scheduler with tiers over the folder."""
    config = {"file_storage_path": str(folder), "prefetch_threshold": 8, "max_size": max_bytes}
    return ServedScheduler(
        model,
        *("--max-total-tokens", 512, "--page-size", 8, "--hicache-ratio", 2),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    )


def in_child(body: Callable[[], Any]) -> int:
    """Run `body` in a forked process; its exit code is 0 unless it raises. Returns the pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException:  # the process ends here, whatever it is
        traceback.print_exc()
    finally:
        os._exit(code)


def reference(model: Path, path: Path) -> list[list[int]]:
    """Tokens of a scheduler without a cache."""

    def compute() -> None:
        with ServedScheduler(model, "--max-total-tokens", 512, "--disable-radix-cache") as served:
            tokens = [served.answer(prompt(n), NEW_TOKENS).tokens for n in range(NUM_PROMPTS)]
        path.write_text(json.dumps(tokens))

    pid = in_child(compute)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError("the reference could not be computed")
    tokens: list[list[int]] = json.loads(path.read_text())
    return tokens


def serve_until_killed(served: ServedScheduler, expected: list[list[int]], seed: int) -> None:
    """Ask for prompts at random, with flushes in between so that storage is read, too."""
    rng = random.Random(seed)
    while True:
        number = rng.randrange(NUM_PROMPTS)
        check_tokens(served, number, expected)
        if rng.random() < 0.2:
            served.scheduler.flush_cache()


def check_tokens(served: ServedScheduler, number: int, expected: list[list[int]]) -> int:
    """Serve a prompt; the tokens that came from storage. Raises AssertionError."""
    answer = served.answer(prompt(number), NEW_TOKENS)
    if answer.tokens != expected[number]:
        raise AssertionError(f"prompt {number}: {answer.tokens}, not {expected[number]}")
    return int(answer.sources.get("storage", 0))


def check_restart(
    model: Path, folder: Path, max_bytes: int, expected: list[list[int]], result: Path
) -> None:
    """Serve everything after a kill. Raises AssertionError on anything that is not right."""
    before = faults_of(folder, max_bytes)
    if before:
        raise AssertionError(f"after the kill: {before}")
    with serve(model, folder, max_bytes) as served:
        if strays := [name for name in os.listdir(folder) if is_temporary(name)]:
            raise AssertionError(f"unfinished pages are left: {strays}")
        hits = sum(check_tokens(served, n, expected) for n in range(NUM_PROMPTS))
        served.settle()
        store = served.tree.cache_controller.storage_backend
        assert isinstance(store, HiCacheFile)
        stats = store.get_stats()
        if stats["corrupt"] or stats["foreign"] or stats["used_bytes"] > max_bytes:
            raise AssertionError(f"damage or too much: {stats}")
    result.write_text(str(hits))


def run(model: Path, folder: Path, *, cycles: int, max_bytes: int, seed: int) -> dict[str, Any]:
    """Kill and restart; see the module docstring."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder.with_name(folder.name + ".note")
    expected = reference(model, note)
    faults: list[str] = []
    hits = strays = 0
    for cycle in range(cycles):

        def write(number: int = cycle) -> None:
            served = serve(model, folder, max_bytes)
            serve_until_killed(served, expected, seed + number)

        writer = in_child(write)
        time.sleep(rng.uniform(0.1, 0.5))
        os.kill(writer, signal.SIGKILL)
        status = os.waitpid(writer, 0)[1]
        if not os.WIFSIGNALED(status):
            faults.append(f"cycle {cycle}: the scheduler failed before it was killed")
        strays += sum(is_temporary(name) for name in os.listdir(folder))
        note.write_text("0")
        checker = in_child(lambda: check_restart(model, folder, max_bytes, expected, note))
        if os.waitpid(checker, 0)[1]:
            faults.append(f"cycle {cycle}: the restart was not clean")
        hits += int(note.read_text())
    note.unlink(missing_ok=True)
    return {"cycles": cycles, "storage_tokens": hits, "strays": strays, "faults": faults}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 when there were faults."""
    parser = argparse.ArgumentParser(description="Kill schedulers while they write to storage.")
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--max-bytes", type=int, default=600_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    outcome = run(
        args.model, args.folder, cycles=args.cycles, max_bytes=args.max_bytes, seed=args.seed
    )
    sys.stdout.write(json.dumps(outcome) + "\n")
    return 1 if outcome["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
