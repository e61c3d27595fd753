"""Servers whose ranks report at their end what they did, several started at once.

`python -m sglang.test.probed_server FLAGS` is `sglang serve FLAGS` with the schedulers of
`fakes/probed_scheduler.py`. `serve_probed` starts such servers side by side, in this process's own
process group, with their output in files; `ProbedServer.reports` holds the reports after the block.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from sglang.srt.utils.common import kill_process_tree
from sglang.srt.utils.network import get_free_port
from sglang.test.small_server import SmallServer

_PROBED = "sglang.test.fakes.probed_scheduler:run_probed_scheduler"
_POLL_S = 0.2
_LEAVE_S = 30.0
# An idle rank takes in the end of its copies within this time.
_QUIET_S = 0.5
_TAIL_LINES = 25

Flag = str | int | float


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """What to start."""

    name: str
    model: str
    flags: Sequence[Flag] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ProbedServer(SmallServer):
    """A running server. `reports`: one a rank, once it has ended."""

    name: str
    folder: Path
    reports: list[dict[str, Any]] = field(default_factory=list)

    def tail(self) -> str:
        """The last lines of its output."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(f"  {self.name}: {line}" for line in lines[-_TAIL_LINES:])


@contextmanager
def serve_probed(
    specs: Sequence[ServerSpec], folder: Path, *, start_timeout_s: float = 120.0
) -> Iterator[list[ProbedServer]]:
    """All servers, healthy. Raises RuntimeError, with the end of its output, where one fails."""
    started: list[tuple[ProbedServer, subprocess.Popen[bytes]]] = []
    try:
        for spec in specs:
            started.append(_start(spec, folder / spec.name))
        deadline = time.monotonic() + start_timeout_s
        for server, process in started:
            _wait_healthy(server, process, deadline)
        yield [server for server, _ in started]
        time.sleep(_QUIET_S)
        for _, process in started:
            process.terminate()
        for server, process in started:
            _collect(server, process)
    finally:
        for _, process in started:
            kill_process_tree(process.pid)
            process.wait()


def _start(spec: ServerSpec, folder: Path) -> tuple[ProbedServer, subprocess.Popen[bytes]]:
    folder.mkdir(parents=True)
    port = get_free_port()
    command = [sys.executable, "-m", "sglang.test.probed_server", "--model-path", spec.model]
    command += ["--host", "127.0.0.1", "--port", str(port), *map(str, spec.flags)]
    env = {**os.environ, **spec.env, "HISPEC_PROBE": str(folder)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
    url = f"http://127.0.0.1:{port}"
    return ProbedServer(url=url, pid=process.pid, name=spec.name, folder=folder), process


def _wait_healthy(server: ProbedServer, process: subprocess.Popen[bytes], deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{server.name} ended early:\n{server.tail()}")
        try:
            if server.get("/health_generate", timeout=5).status_code == 200:
                return
        except requests.exceptions.RequestException:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise RuntimeError(f"{server.name} did not become healthy:\n{server.tail()}")


def _collect(server: ProbedServer, process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_LEAVE_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{server.name} does not leave:\n{server.tail()}") from error
    paths = sorted(server.folder.glob("rank*.json"))
    server.reports.extend(json.loads(path.read_text()) for path in paths)
    if not server.reports or process.returncode != 0:
        raise RuntimeError(
            f"{server.name} left with code {process.returncode} and {len(paths)} reports:\n"
            + server.tail()
        )


def main() -> int:
    """Serve with probed schedulers."""
    from sglang import launch_server
    from sglang.srt.entrypoints import launch

    launch.SCHEDULER_TARGET = _PROBED
    return launch_server.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
