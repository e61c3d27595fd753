"""Processes that write page files, and what must hold whatever happens to them.

    python -m sglang.test.fakes.page_writer kill FOLDER --cycles 1000
    python -m sglang.test.fakes.page_writer quota FOLDER --writers 2

``kill``: forks a writer, kills it with SIGKILL at a random moment, checks the folder, again and
again. ``quota``: several writers at once while the sum of the folder is measured under its lock.
Prints one JSON object; exit status 1 when something did not hold. No torch: starts fast.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.mem_cache.page_key import PageHash
from sglang.srt.mem_cache.storage.folder_quota import (
    FolderQuota,
    QuotaLimits,
    is_temporary,
    scan_folder,
)
from sglang.srt.mem_cache.storage.page_file import (
    Expected,
    PageOwner,
    PageStatus,
    file_name,
    verify_file,
    write_page,
)

OWNER = PageOwner(model="org-model")
NAMESPACE = bytes(range(32))


def write_one(quota: FolderQuota, name: int, payload: bytes) -> bool:
    """Write one page the way the backend does; False when there is no room."""
    key = PageHash(hashlib.sha256(str(name).encode()).hexdigest())
    reservation = quota.reserve(512 + len(payload))
    if reservation is None:
        return False
    expected = Expected(key=key, owner=OWNER)
    write_page(reservation.fd, [memoryview(payload)], expected, NAMESPACE, time.time_ns())
    quota.commit(reservation, os.path.join(quota.folder, file_name(key, OWNER)))
    return True


def write_forever(folder: Path, limits: QuotaLimits, seed: int, num_pages: int) -> None:
    """Write pages of random content and sizes; the names recur, so that pages are replaced."""
    rng = random.Random(seed)
    quota = FolderQuota(folder, limits)
    for _ in range(num_pages):
        write_one(quota, rng.randrange(200), rng.randbytes(rng.randrange(1, 30_000)))
    quota.close()


def faults_of(folder: Path, max_bytes: int) -> list[str]:
    """Return what is wrong with a folder that nobody writes to, after a start of the quota."""
    quota = FolderQuota(folder, QuotaLimits(max_bytes=max_bytes))
    quota.start()
    scan = scan_folder(str(folder))
    faults = [f"unfinished {name}" for name in os.listdir(folder) if is_temporary(name)]
    for _, _, path in scan.pages:
        status, _ = verify_file(Path(path))
        if status is not PageStatus.OK:
            faults.append(f"{path} is {status.value}")
    if quota.last_used_bytes != scan.used_bytes:
        faults.append(f"{quota.last_used_bytes} bytes counted, {scan.used_bytes} there")
    if scan.used_bytes > max_bytes:
        faults.append(f"{scan.used_bytes} bytes are more than {max_bytes}")
    quota.close()
    return faults


def run_kill_loop(folder: Path, *, cycles: int, max_bytes: int, seed: int) -> dict[str, object]:
    """Kill a writer ``cycles`` times; the folder must be right every time."""
    rng = random.Random(seed)
    faults: list[str] = []
    strays = 0
    for cycle in range(cycles):
        child = _fork_writer(folder, QuotaLimits(max_bytes=max_bytes), seed + cycle, 1_000_000)
        time.sleep(rng.uniform(0.002, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        strays += sum(is_temporary(name) for name in os.listdir(folder))
        faults += faults_of(folder, max_bytes)
    pages = len(scan_folder(str(folder)).pages)
    return {"cycles": cycles, "strays": strays, "pages": pages, "faults": faults}


def run_quota(
    folder: Path, *, writers: int, num_pages: int, max_bytes: int, obeys: bool
) -> dict[str, object]:
    """Let several processes write; the folder's sum, under its lock, must never pass the limit."""
    limits = QuotaLimits(max_bytes=max_bytes if obeys else None)
    children = [_fork_writer(folder, limits, seed, num_pages) for seed in range(writers)]
    watcher = FolderQuota(folder, QuotaLimits(max_bytes=max_bytes))
    greatest = samples = 0
    faults: list[str] = []
    while children:
        with watcher._locked():
            used = scan_folder(str(folder)).used_bytes
            counted = watcher._read_ledger()[0]
        samples += 1
        greatest = max(greatest, used)
        # The count lags behind by nothing: it changes under the same lock as the folder.
        if samples > 1 and counted != used and counted:
            faults.append(f"{counted} bytes counted, {used} there")
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            children.remove(pid)
            if status:
                faults.append(f"writer {pid} ended with {status}")
        time.sleep(0.002)
    watcher.close()
    if greatest > max_bytes:
        faults.append(f"{greatest} bytes were there at once, the limit is {max_bytes}")
    faults += faults_of(folder, max(max_bytes, greatest))
    return {"samples": samples, "greatest": greatest, "limit": max_bytes, "faults": faults}


def _fork_writer(folder: Path, limits: QuotaLimits, seed: int, num_pages: int) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            write_forever(folder, limits, seed, num_pages)
            status = 0
        finally:
            os._exit(status)
    return child


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two; see the module docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("mode", choices=("kill", "quota"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--pages", type=int, default=300)
    parser.add_argument("--max-bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disobey", action="store_true", help="quota: writers ignore the limit")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.mode == "kill":
        result = run_kill_loop(
            options.folder, cycles=options.cycles, max_bytes=options.max_bytes, seed=options.seed
        )
    else:
        result = run_quota(
            options.folder,
            writers=options.writers,
            num_pages=options.pages,
            max_bytes=options.max_bytes,
            obeys=not options.disobey,
        )
    sys.stdout.write(json.dumps(result) + "\n")
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
