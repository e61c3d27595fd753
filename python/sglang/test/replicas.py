"""Several servers of one model behind the router, for tests and benchmarks.

Owns: starting replicas side by side, killing and starting one again at its old address, the
router's process and its counters. Does not own: load (tests and `benchmark/bench_replicas.py`).
The router is `smg`; `router_is_installed` tells whether this environment has it. Threads: replicas
start in a thread each; everything else is the caller's thread.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang.srt.utils.network import get_free_ports
from sglang.test.small_server import SmallServer, sum_series
from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

Flags = Sequence[str | int | float]

_START_TIMEOUT_S = 120
_ROUTER_TIMEOUT_S = 30
_POLL_S = 0.1
# Short times, so that a test sees a death and a return within seconds. `scripts/serve_replicas.sh`
# has the figures for service.
ROUTER_FLAGS: Flags = (
    *("--policy", "cache_aware", "--enable-rl", "--log-level", "error"),
    *("--disable-worker-overload-protection", "--shutdown-grace-period-secs", 1),
    *("--worker-startup-check-interval", 1, "--load-monitor-interval", 1),
    *("--health-check-interval-secs", 1, "--health-check-timeout-secs", 2),
    *("--health-failure-threshold", 2, "--health-success-threshold", 1),
    *("--cb-failure-threshold", 3, "--cb-success-threshold", 1, "--cb-timeout-duration-secs", 2),
)


def router_is_installed() -> bool:
    return importlib.util.find_spec("smg") is not None


def shared_storage(folder: Path, page_size: int) -> Flags:
    """Flags of replicas that keep their pages in one folder and wait for what it has."""
    config = {"file_storage_path": str(folder), "prefetch_threshold": page_size}
    return (
        *("--page-size", page_size, "--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    )


@dataclass(frozen=True)
class Replica(SmallServer):
    """A running server that knows its process."""

    process: subprocess.Popen[Any]


class Fleet:
    """Replicas of one model at fixed addresses. Not thread-safe, but for the calls to servers."""

    def __init__(self, model: str, count: int, flags: Flags = (), device: str = "cpu") -> None:
        self._model = model
        self._flags: Flags = ("--max-total-tokens", 4096, "--num-threads", 1, *flags)
        self._device = device
        self.urls = [f"http://127.0.0.1:{port}" for port in get_free_ports(count)]
        self.replicas: list[Replica | None] = [None] * count

    def __getitem__(self, index: int) -> Replica:
        replica = self.replicas[index]
        if replica is None:
            raise LookupError(f"replica {index} is not running")
        return replica

    def running(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica is not None]

    def start_all(self) -> None:
        """Start all that do not run. Raises what the first failing start raises."""
        missing = [i for i, replica in enumerate(self.replicas) if replica is None]
        with ThreadPoolExecutor(len(missing) or 1) as pool:
            list(pool.map(self.start, missing))

    def start(self, index: int, *more: str | int | float) -> Replica:
        """Start one, with more flags than the others if wanted, and wait until it generates."""
        url = self.urls[index]
        process = popen_launch_server(
            self._model,
            url,
            _START_TIMEOUT_S,
            other_args=(*self._flags, *more),
            device=self._device,
        )
        replica = Replica(url, process.pid, process)
        self.replicas[index] = replica
        return replica

    def kill(self, index: int) -> None:
        """End a replica without warning: SIGKILL to all of its processes."""
        replica = self[index]
        family = [psutil.Process(replica.pid), *psutil.Process(replica.pid).children(True)]
        for member in family:
            # Children end with their parent, maybe before their turn.
            with suppress(psutil.NoSuchProcess):
                member.kill()
        replica.process.wait()
        self.replicas[index] = None

    def stop(self, index: int) -> None:
        """End a replica as a service manager does: SIGTERM, then wait."""
        terminate_and_kill_process_tree(self[index].process, terminate_timeout=20)
        self.replicas[index] = None

    def stop_all(self) -> None:
        for index, replica in enumerate(self.replicas):
            if replica is not None:
                self.stop(index)


@dataclass(frozen=True)
class Router(Replica):
    """A running router. What clients ask goes to its address, as to a server's."""

    metrics_url: str

    def counter(self, name: str, **labels: str) -> float:
        """A metric of the router, summed over the label sets with `labels`."""
        return sum_series(requests.get(self.metrics_url, timeout=10).text, name, **labels)

    def num_retries(self) -> int:
        """Requests sent again to another replica."""
        return int(self.counter("smg_worker_retries_total"))

    def num_healthy(self) -> int:
        reply = requests.get(self.url + "/readiness", timeout=10)
        return int(reply.json().get("healthy_workers", 0))

    def wait_healthy(self, count: int, timeout_s: float = _ROUTER_TIMEOUT_S) -> None:
        """Wait until the router counts so many healthy replicas. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.num_healthy() == count:
                    return
            except requests.exceptions.RequestException:
                pass  # not listening yet
            if self.process.poll() is not None:
                raise RuntimeError(f"the router ended with code {self.process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the router does not count {count} healthy replicas")
            time.sleep(_POLL_S)


@contextmanager
def route(urls: Sequence[str], *flags: str | int | float) -> Iterator[Router]:
    """A router over servers that run already. Flags come after `ROUTER_FLAGS`."""
    port, metrics_port = get_free_ports(2)
    words = [
        *("launch", "--worker-urls", *urls, "--host", "127.0.0.1", "--port", port),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", metrics_port),
        *(*ROUTER_FLAGS, *flags),
    ]
    command = [sys.executable, "-m", "smg", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # a banner of twenty lines
    metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
    router = Router(f"http://127.0.0.1:{port}", process.pid, process, metrics_url)
    try:
        router.wait_healthy(len(urls))
        yield router
    finally:
        terminate_and_kill_process_tree(process, terminate_timeout=10)


@contextmanager
def serve_fleet(model: str, count: int, *flags: str | int | float) -> Iterator[Fleet]:
    """Serve a model folder `count` times; what still runs at the end is ended."""
    fleet = Fleet(model, count, flags)
    try:
        fleet.start_all()
        yield fleet
    finally:
        fleet.stop_all()
