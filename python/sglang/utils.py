"""Helpers for programs that start a server and talk to it over HTTP.

Owns: waiting for readiness, starting and ending a server process, small request and shell helpers;
the names are those that client scripts and tests import. Does not own: anything inside the server.
Imports neither torch nor transformers. Threads: no shared state.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import requests

from sglang.srt.utils import kill_process_tree

_POLL_INTERVAL_S = 1.0


def normalize_base_url(url: str) -> str:
    """Return ``url`` with a scheme and without a trailing slash; ``host:port`` becomes http."""
    url = url.strip().rstrip("/")
    return url if "://" in url else f"http://{url}"


def wait_for_http_ready(
    url: str,
    timeout: float | None = None,
    process: subprocess.Popen[Any] | None = None,
    headers: Mapping[str, str] | None = None,
    request_timeout: float = 5,
) -> None:
    """Ask ``url`` once a second until it answers 200.

    ``timeout`` and ``request_timeout`` are in seconds, None waits for ever. Raises RuntimeError
    when ``process`` has ended, TimeoutError when time is up.
    """

    def is_ready() -> bool:
        try:
            reply = requests.get(url, headers=dict(headers or {}), timeout=request_timeout)
        except requests.exceptions.RequestException:
            return False
        return reply.status_code == 200

    _poll_until(is_ready, url, timeout, process)


def wait_for_server(
    base_url: str,
    timeout: float | None = None,
    process: subprocess.Popen[Any] | None = None,
) -> None:
    """Wait until the server at ``base_url`` lists its models; raises as wait_for_http_ready."""
    url = normalize_base_url(base_url) + "/v1/models"
    wait_for_http_ready(url, timeout, process, headers={"Authorization": "Bearer None"})


def _poll_until(
    is_ready: Callable[[], bool],
    what: str,
    timeout_s: float | None,
    process: subprocess.Popen[Any] | None,
) -> None:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        if process is not None and (code := process.poll()) is not None:
            raise RuntimeError(f"Server process exited with code {code} before {what} was ready.")
        if is_ready():
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"{what} was not ready within {timeout_s} seconds.")
        time.sleep(_POLL_INTERVAL_S)


def http_request(
    url: str,
    json: Any = None,
    stream: bool = False,
    api_key: str | None = None,
    verify: bool | str | None = None,
    method: str | None = None,
    timeout: float | None = None,
) -> requests.Response:
    """Send a request and return the reply, whatever its status.

    ``method`` defaults to POST with a body and GET without one; ``api_key`` is sent as a bearer
    token. Raises ``requests.exceptions.RequestException`` when there is no reply.
    """
    return requests.request(
        method or ("GET" if json is None else "POST"),
        url,
        json=json,
        stream=stream,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        verify=True if verify is None else verify,
        timeout=timeout,
    )


def execute_shell_command(command: str) -> subprocess.Popen[str]:
    """Start ``command`` without a shell and return its process; output goes to ours.

    A backslash at a line's end continues the command on the next line, as in a shell. ``python``
    means the running interpreter.
    """
    words = shlex.split(command.replace("\\\n", " "))
    if words and words[0] in ("python", "python3"):
        words[0] = sys.executable
    return subprocess.Popen(words, text=True)


def launch_server_cmd(
    command: str, host: str = "0.0.0.0", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Start a server by ``command`` with ``--host`` and ``--port`` added.

    Without ``port`` a free one is taken. Returns the process and the port; it does not wait.
    """
    if port is None:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
    return execute_shell_command(f"{command} --host {host} --port {port}"), port


def terminate_process(process: subprocess.Popen[Any]) -> None:
    """End ``process`` and everything that it started."""
    if process.poll() is None:
        kill_process_tree(process.pid)
    process.wait()


def print_highlight(content: str) -> None:
    """Print ``content`` in bold where the output is a terminal."""
    print(f"\033[1m{content}\033[0m" if sys.stdout.isatty() else content, flush=True)
