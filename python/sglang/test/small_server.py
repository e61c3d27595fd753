"""A served small model for registered tests: started once a test module, ended after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import requests

from sglang.srt.utils.network import get_free_port
from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

_START_TIMEOUT_S = 300
_REPLY_TIMEOUT_S = 120


@dataclass(frozen=True)
class SmallServer:
    """A running server."""

    url: str
    pid: int

    def request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", _REPLY_TIMEOUT_S)
        return requests.request(method, self.url + path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> requests.Response:
        return self.request("POST", path, **kwargs)

    def generate(self, **body: Any) -> Any:
        """One `/generate` call that must succeed."""
        reply = self.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def num_requests(self) -> int:
        """Requests that run or wait, over all replicas."""
        loads = self.get("/v1/loads?include=core").json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def children(self) -> list[int]:
        """Process ids below the server; they stay the same as long as nothing crashed."""
        return sorted(child.pid for child in psutil.Process(self.pid).children(recursive=True))


def sum_series(text: str, name: str, **labels: str) -> float:
    """A metric of a Prometheus page, summed over the label sets with `labels`; 0: not there."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(label in series for label in wanted):
            total += float(value)
    return total


def metric(server: SmallServer, name: str, **labels: str) -> float:
    """The value of a server's metric, as `sum_series`."""
    return sum_series(server.get("/metrics").text, name, **labels)


@contextmanager
def serve(
    model: str, *flags: str | int | float, env: Mapping[str, str] | None = None
) -> Iterator[SmallServer]:
    """Serve a model folder on a free port. `env` is laid over this process's environment."""
    args: Sequence[str | int | float] = ("--max-total-tokens", 8192, "--num-threads", 1, *flags)
    url = f"http://127.0.0.1:{get_free_port()}"
    process = popen_launch_server(model, url, _START_TIMEOUT_S, other_args=args, env=env)
    try:
        yield SmallServer(url, process.pid)
    finally:
        terminate_and_kill_process_tree(process, terminate_timeout=20)
