"""Helpers of the process layer: devices, process trees, limits, metrics set-up.

The names here are documented import names of trainers and tests (`kill_process_tree`,
`get_device`, `set_ulimit`, …). Nothing heavy is imported: the front processes use this module
and must not load torch, so devices are found without it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from sglang.srt.utils.logging import suppress_noisy_warnings

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

__all__ = [
    "add_prometheus_middleware",
    "assert_pkg_version",
    "available_cpu_count",
    "get_device",
    "get_exception_traceback",
    "gpu_memory_gb",
    "host_memory_gb",
    "is_cuda",
    "is_hip",
    "is_npu",
    "kill_process_tree",
    "num_cuda_devices",
    "parse_json_object",
    "set_prometheus_multiproc_dir",
    "set_ulimit",
    "suppress_noisy_warnings",
]

# ------------------------------------------------------------------------------------------------
# Devices, without torch
# ------------------------------------------------------------------------------------------------


def _torch_build_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, read from its version file, not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version_file = Path(spec.origin).with_name("version.py")
    if not version_file.exists():
        return "+cpu" not in importlib.metadata.version("torch")
    for line in version_file.read_text().splitlines():
        if line.startswith("cuda"):
            return line.partition("=")[2].strip() != "None"
    return False


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """The driver's management library, initialised; None on a host without one."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def num_cuda_devices() -> int:
    """How many CUDA devices this process may use (CUDA_VISIBLE_DEVICES is obeyed)."""
    if not _torch_build_has_cuda():
        return 0
    library = _nvml()
    if library is None:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    names = [name.strip() for name in visible.split(",")]
    usable = 0
    for name in names:
        # The CUDA runtime stops at the first entry that names no device.
        if not name or name == "-1" or (name.isdecimal() and int(name) >= count.value):
            break
        usable += 1
    return usable


def gpu_memory_gb(index: int = 0) -> float | None:
    """Total memory in GB of one physical CUDA device, or None when it cannot be asked."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    library = _nvml()
    if library is None:
        return None
    handle = ctypes.c_void_p()
    memory = Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return float(memory.total) / (1 << 30)


def is_cuda() -> bool:
    """Whether a CUDA device can be used. (A documented import name.)"""
    return num_cuda_devices() > 0


def is_hip() -> bool:
    """Always false: ROCm is not supported. (A documented import name.)"""
    return False


def is_npu() -> bool:
    """Always false: Ascend is not supported. (A documented import name.)"""
    return False


def get_device(device_id: int | None = None) -> str:
    """ "cuda" (or "cuda:N") where a CUDA device can be used, else "cpu"."""
    if not is_cuda():
        return "cpu"
    return "cuda" if device_id is None else f"cuda:{device_id}"


def available_cpu_count() -> int:
    """CPU cores that this process may run on: affinity and container quota, at least 1."""
    count = len(os.sched_getaffinity(0))
    quota_file = Path("/sys/fs/cgroup/cpu.max")
    if quota_file.exists():
        quota, period = quota_file.read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    return max(1, count)


def host_memory_gb() -> tuple[float, float]:
    """(total, available) memory of the host in GB."""
    memory = psutil.virtual_memory()
    return memory.total / (1 << 30), memory.available / (1 << 30)


# ------------------------------------------------------------------------------------------------
# Processes and limits
# ------------------------------------------------------------------------------------------------


def _is_gone(process: psutil.Process) -> bool:
    """Ended, whether or not its parent has collected the exit status yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def kill_process_tree(
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    wait_timeout: float = 60,
) -> None:
    """Kill every descendant of a process, then (unless told otherwise) the process itself.

    `parent_pid` None means the caller's children only. `skip_pid` and this process are spared
    while killing descendants; when the parent is this process itself, it dies last, at once.
    Raises RuntimeError when a killed process is still there after `wait_timeout` seconds.
    """
    own_pid = os.getpid()
    if parent_pid is None:
        parent_pid, include_parent = own_pid, False
    try:
        parent = psutil.Process(parent_pid)
        victims = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    victims = [victim for victim in victims if victim.pid not in (skip_pid, own_pid)]
    if include_parent and parent_pid not in (skip_pid, own_pid):
        victims.append(parent)
    for victim in victims:
        _kill(victim)
    deadline = time.monotonic() + wait_timeout
    while left := [victim for victim in victims if not _is_gone(victim)]:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"processes {[victim.pid for victim in left]} did not end within {wait_timeout} s"
            )
        time.sleep(0.02)
    if include_parent and parent_pid == own_pid:
        os.kill(own_pid, signal.SIGKILL)


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the limit of open files and of the stack; keep going (with a warning) if refused."""
    wanted = (
        (resource.RLIMIT_NOFILE, target_soft_limit, "open files"),
        (resource.RLIMIT_STACK, 10240 * 1024, "stack size"),
    )
    for kind, target, name in wanted:
        soft, hard = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or soft >= target:
            continue
        limit = target if hard == resource.RLIM_INFINITY else min(target, hard)
        try:
            resource.setrlimit(kind, (limit, hard))
        except (ValueError, OSError) as error:
            logger.warning(
                "Cannot raise the limit of %s from %d to %d: %s", name, soft, limit, error
            )


def get_exception_traceback() -> str:
    """The traceback of the exception being handled, as text."""
    return traceback.format_exc()


def assert_pkg_version(package: str, min_version: str, message: str) -> None:
    """Raise RuntimeError (with `message` in it) unless `package` is at least `min_version`."""
    from packaging.version import parse

    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(f"{package} >= {min_version} is not installed. {message}") from error
    if parse(installed) < parse(min_version):
        raise RuntimeError(f"{package} is {installed}, {min_version} is needed. {message}")


def parse_json_object(text: str, name: str) -> dict[str, object]:
    """Read a JSON object given as text (a flag's value). Raises ValueError naming the flag."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, not {type(value).__name__}")
    return value


# ------------------------------------------------------------------------------------------------
# Metrics set-up
# ------------------------------------------------------------------------------------------------


def set_prometheus_multiproc_dir() -> str:
    """Give the processes of this server one directory for their metrics; return its path.

    Must run before the first import of `prometheus_client` and before children are started: the
    client library looks at the variable once. A directory named by the user is emptied of the
    files of former runs, because their counters would be added to ours.
    """
    named = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if named:
        Path(named).mkdir(parents=True, exist_ok=True)
        for stale in Path(named).glob("*.db"):
            stale.unlink(missing_ok=True)
        return named
    path = tempfile.mkdtemp(prefix="sglang-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = path
    return path


def add_prometheus_middleware(
    app: FastAPI, before_scrape: Callable[[], None] | None = None
) -> None:
    """Serve `/metrics` of all processes on the application. Needs the multiprocess directory.

    `before_scrape` sets what is known when it is asked for; on the event loop.
    """
    from prometheus_client import CollectorRegistry, multiprocess
    from prometheus_client.exposition import choose_encoder
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import Response

    def collect(accept: str) -> Response:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), headers={"content-type": content_type})

    async def metrics(request: Request) -> Response:
        if before_scrape is not None:
            before_scrape()
        # Reads files of all processes.
        return await run_in_threadpool(collect, request.headers.get("accept", ""))

    app.add_route("/metrics", metrics)
