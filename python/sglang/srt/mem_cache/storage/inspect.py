"""Command line over a folder of the file backend: list, verify, prune.

    python -m sglang.srt.mem_cache.storage.inspect FOLDER [--verify] [--prune ...] [--json]

Safe beside running servers: pages are deleted under the folder's lock, and a page that goes away
while it is looked at is no error. Files are opened as a server opens them: a link, a pipe or a
device under a page's name is damaged and never read. Exit status: 0 all well, 1 damaged pages are
left, 2 the folder cannot be read, pages could not be removed or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from sglang.srt.environ import parse_bytes
from sglang.srt.mem_cache.storage.folder_quota import (
    FolderQuota,
    QuotaLimits,
    is_temporary,
    scan_folder,
)
from sglang.srt.mem_cache.storage.page_file import (
    HEADER_BYTES,
    SHARED_RANK,
    PageMeta,
    PageStatus,
    parse_file_name,
    read_meta,
    verify_file,
)

OK, DAMAGE_LEFT, FAILED = 0, 1, 2

_EPILOG = """examples:
  %(prog)s /var/cache/hicache
  %(prog)s /var/cache/hicache --verify --remove-damaged
  %(prog)s /var/cache/hicache --prune --max-size 20GB --older-than 7d
  %(prog)s /var/cache/hicache --json | jq .groups

exit status: 0 all well; 1 damaged pages are left in the folder; 2 the folder cannot be read,
pages could not be removed, or the arguments are wrong"""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Pages that belong together. Ages in seconds since the last use (modification time)."""

    namespace: str  # first 16 hex digits of the digest
    model: str
    rank: str
    pool: str
    pages: int
    bytes: int
    newest_age_s: float
    oldest_age_s: float


@dataclass(slots=True, kw_only=True)
class Report:
    """What is printed. ``damaged`` and ``foreign`` are file names; found by header, or by content
    with ``--verify``. ``left``: those of them that are still there at the end; ``not_removed``:
    what should have been deleted and is still there."""

    folder: str
    pages: int = 0
    bytes: int = 0
    groups: list[Group] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    verified: bool = False
    removed: int = 0
    removed_bytes: int = 0
    left: list[str] = field(default_factory=list)
    not_removed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One file as found. ``meta``: None when its header is damaged."""

    name: str
    path: str
    size: int
    inode: int
    mtime_s: float
    pool: str
    meta: PageMeta | None
    status: PageStatus


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parse_arguments(arguments)
    folder: Path = options.folder
    try:
        report = _make_report(folder, options)
    except OSError as error:
        sys.stderr.write(f"{folder}: {error}\n")
        return FAILED
    text = json.dumps(asdict(report), indent=2) if options.json else _format(report)
    sys.stdout.write(text + "\n")
    if report.not_removed:
        return FAILED
    return DAMAGE_LEFT if report.left else OK


def _parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sglang.srt.mem_cache.storage.inspect",
        description="A folder of cached pages: what is in it, is it whole, make it smaller.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="the storage folder")
    parser.add_argument("--verify", action="store_true", help="read every page and check its bytes")
    parser.add_argument(
        "--remove-damaged",
        action="store_true",
        help="delete pages that are damaged or not what their name says; content counts "
        "with --verify only",
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="delete pages, the least recently used first, by --max-size and --older-than",
    )
    parser.add_argument(
        "--max-size", type=_size, help="with --prune: most bytes to keep, e.g. 20GB"
    )
    parser.add_argument(
        "--older-than",
        type=_age,
        help="with --prune: delete pages unused for so long, e.g. 12h, 7d",
    )
    parser.add_argument("--threads", type=int, default=4, help="readers of --verify (default 4)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    has_rule = options.max_size is not None or options.older_than is not None
    if options.prune != has_rule:
        parser.error("--prune goes together with --max-size or --older-than")
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    return options


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number with s, m, h, d or w")
    return float(match[1]) * _SECONDS[match[2]]


def _make_report(folder: Path, options: argparse.Namespace) -> Report:
    report = Report(folder=str(folder), verified=options.verify)
    entries = _look(folder, verifies=options.verify, threads=options.threads)
    bad = [entry for entry in entries if entry.status is not PageStatus.OK]
    report.damaged = sorted(e.name for e in bad if e.status is PageStatus.DAMAGED)
    report.foreign = sorted(e.name for e in bad if e.status is PageStatus.FOREIGN)
    report.unfinished = sorted(name for name in os.listdir(folder) if is_temporary(name))
    if options.remove_damaged or options.prune:
        entries = _delete(folder, entries, options, report)
    report.left = sorted(e.name for e in entries if e.status is not PageStatus.OK)
    report.pages = len(entries)
    report.bytes = sum(entry.size for entry in entries)
    report.groups = _group(entries, time.time())
    return report


def _look(folder: Path, *, verifies: bool, threads: int) -> list[_Entry]:
    paths = [Path(path) for _, _, path in scan_folder(str(folder)).pages]
    look = _look_of(verifies=verifies)
    with ThreadPoolExecutor(threads) as pool:
        found = tqdm(
            pool.map(look, paths),
            total=len(paths),
            unit="page",
            desc="verify" if verifies else "list",
            disable=not sys.stderr.isatty(),
        )
        return [entry for entry in found if entry is not None]


def _look_of(*, verifies: bool) -> Callable[[Path], _Entry | None]:
    """Return what looks at one file: an entry, None when it is gone. Raises OSError."""

    def look(path: Path) -> _Entry | None:
        try:
            info = path.lstat()
            if not stat.S_ISREG(info.st_mode):
                return _entry(path, info, None, PageStatus.DAMAGED)
            status, meta = verify_file(path) if verifies else _by_header(path, info)
        except FileNotFoundError:
            return None
        return _entry(path, info, meta, status)

    return look


def _by_header(path: Path, info: os.stat_result) -> tuple[PageStatus, PageMeta | None]:
    meta = read_meta(path)
    is_whole = meta is not None and info.st_size == HEADER_BYTES + meta.payload_bytes
    return (PageStatus.OK if is_whole else PageStatus.DAMAGED), meta


def _entry(path: Path, info: os.stat_result, meta: PageMeta | None, status: PageStatus) -> _Entry:
    name = parse_file_name(path.name)
    return _Entry(
        name=path.name,
        path=str(path),
        size=info.st_size,
        inode=info.st_ino,
        mtime_s=info.st_mtime,
        pool=name.pool if name else "?",
        meta=meta,
        status=status,
    )


def _delete(
    folder: Path, entries: list[_Entry], options: argparse.Namespace, report: Report
) -> list[_Entry]:
    """Delete what the options name; returns what is left."""
    now = time.time()
    doomed = {
        entry.path: entry
        for entry in entries
        if (options.remove_damaged and entry.status is not PageStatus.OK)
        or (options.older_than is not None and now - entry.mtime_s > options.older_than)
    }
    if options.max_size is not None:
        kept = sorted((e for e in entries if e.path not in doomed), key=lambda e: e.mtime_s)
        excess = sum(entry.size for entry in kept) - options.max_size
        for entry in kept:
            if excess <= 0:
                break
            doomed[entry.path] = entry
            excess -= entry.size
    look = _look_of(verifies=options.verify)
    stays: set[str] = set()
    quota = FolderQuota(folder.absolute(), QuotaLimits(max_bytes=None))
    try:
        for entry in tqdm(doomed.values(), unit="page", disable=not sys.stderr.isatty()):
            if _removed(quota, entry):
                report.removed += 1
                report.removed_bytes += entry.size
            elif (there := look(Path(entry.path))) and _is_same(entry, there):
                stays.add(entry.path)
    finally:
        quota.close()
    report.not_removed = sorted(entry.name for entry in doomed.values() if entry.path in stays)
    return [entry for entry in entries if entry.path not in doomed or entry.path in stays]


def _removed(quota: FolderQuota, entry: _Entry) -> bool:
    """Delete a file. Raises TimeoutError when the folder's lock is kept: nor could the next."""
    try:
        return quota.remove(entry.path, entry.inode)
    except TimeoutError:
        raise
    except OSError as error:
        sys.stderr.write(f"{entry.path} cannot be removed: {error.strerror or error}\n")
        return False


def _is_same(entry: _Entry, there: _Entry) -> bool:
    """Whether a file is still what it was, or bad again; else a server has written it anew."""
    return there.inode == entry.inode or there.status is not PageStatus.OK


def _group(entries: list[_Entry], now: float) -> list[Group]:
    by_owner: dict[tuple[str, str, str, str], list[_Entry]] = {}
    for entry in entries:
        if entry.meta is None:
            key = ("?", "?", "?", entry.pool)
        else:
            owner = entry.meta.owner
            rank = "all" if owner.tp_rank == SHARED_RANK else f"{owner.tp_rank}/{owner.tp_size}"
            if owner.pp_size > 1:
                rank += f" pp {owner.pp_rank}/{owner.pp_size}"
            key = (entry.meta.namespace.hex()[:16], owner.model, rank, entry.pool)
        by_owner.setdefault(key, []).append(entry)
    return [
        Group(
            namespace=namespace,
            model=model,
            rank=rank,
            pool=pool,
            pages=len(group),
            bytes=sum(entry.size for entry in group),
            newest_age_s=round(now - max(entry.mtime_s for entry in group), 1),
            oldest_age_s=round(now - min(entry.mtime_s for entry in group), 1),
        )
        for (namespace, model, rank, pool), group in sorted(by_owner.items())
    ]


def _format(report: Report) -> str:
    lines = [f"{report.folder}: {report.pages} pages, {_human(report.bytes)}"]
    if report.groups:
        row = "{:<16}  {:<32}  {:<8}  {:<6}  {:>8}  {:>9}  {:>8}  {:>8}"
        lines.append(row.format(*"namespace model rank pool pages bytes newest oldest".split()))
        lines += [
            row.format(
                group.namespace,
                group.model[:32],
                group.rank,
                group.pool,
                group.pages,
                _human(group.bytes),
                _human_age(group.newest_age_s),
                _human_age(group.oldest_age_s),
            )
            for group in report.groups
        ]
    for title, names in (
        ("damaged", report.damaged),
        ("not what the name says", report.foreign),
        ("unfinished", report.unfinished),
        ("left that could not be removed", report.not_removed),
    ):
        if names:
            lines += [f"{len(names)} {title}:", *(f"  {name}" for name in names)]
    if report.removed:
        lines.append(f"removed {report.removed} pages, {_human(report.removed_bytes)}")
    if report.verified and not (report.damaged or report.foreign):
        lines.append("every page is whole")
    return "\n".join(lines)


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _human_age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"


if __name__ == "__main__":
    sys.exit(main())
