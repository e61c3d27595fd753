"""Compile the C++ kernels with the system's compiler and load them.

Owns the cache folder of built libraries. Knows nothing about tensors: `native` declares the entry
points. Called once per process, at import of `native`'s user; several processes that start at the
same time compile once (file lock), and a half-written library is never visible (rename).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from sglang.srt.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# "off" selects the torch implementations; anything else builds the kernels where possible.
SWITCH = "HISPEC_CPU_KERNELS"

_SOURCE_DIR = Path(__file__).parent
_SOURCE = _SOURCE_DIR / "kernels.cpp"
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-fno-math-errno")
_COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernel library, built if need be; None where it is switched off or cannot be built.

    Call it after torch is imported: the library must share torch's OpenMP runtime, not bring a
    second pool of threads. Logs one warning when it returns None for want of a compiler.
    """
    if os.environ.get(SWITCH, "").lower() == "off":
        logger.info("CPU kernels are switched off by %s; using torch operations", SWITCH)
        return None
    try:
        return ctypes.CDLL(str(_built_library()))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels are not available, using slower torch operations: %s", error)
        return None


def cache_dir() -> Path:
    """Folder of built libraries."""
    return cache_folder() / "kernels"


def _built_library() -> Path:
    compiler = _find_compiler()
    runtime = _openmp_runtime()
    folder = cache_dir() / _fingerprint(compiler, runtime)
    library = folder / "kernels.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            logger.info("compiling CPU kernels into %s (once, some ten seconds)", folder)
            _compile(compiler, runtime, library)
    return library


def _find_compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in (chosen, "g++", "c++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        if chosen and name != chosen:
            logger.warning("CXX=%s is no program that can be run; %s is used", chosen, path)
        return path
    raise BuildError("no C++ compiler found (looked for $CXX, g++, c++)")


def _openmp_runtime() -> Path | None:
    """The OpenMP library that torch has loaded into this process, if any."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    match = re.search(r"(/.*/lib(?:gomp|iomp5|omp)\b[^/]*)$", maps, re.MULTILINE)
    return Path(match.group(1)) if match else None


def _fingerprint(compiler: str, runtime: Path | None) -> str:
    """Hash of all that the binary depends on: source, flags, compiler, CPU and OpenMP runtime."""
    version = _run([compiler, "--version"])
    parts = [version, " ".join(_FLAGS), platform.machine(), _cpu_features(), str(runtime)]
    digest = hashlib.sha256("\0".join(parts).encode())
    for path in sorted([_SOURCE, *_SOURCE_DIR.glob("*.h")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """What -march=native depends on. Cache folders may be shared by machines of several kinds."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", info, re.MULTILINE)
    return "\n".join(sorted(set(lines)))


def _compile(compiler: str, runtime: Path | None, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        built, obj = Path(work, "kernels.so"), Path(work, "kernels.o")
        _run([compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(obj)])
        # Linking to the very file torch uses makes the loader find it already loaded.
        openmp = str(runtime) if runtime else "-fopenmp"
        _run([compiler, "-shared", str(obj), openmp, "-o", str(built)])
        built.rename(library)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
    if done.returncode:
        tail = done.stderr.strip()[-2000:]
        raise BuildError(f"{command[0]} exited with {done.returncode}: {tail}")
    return done.stdout
