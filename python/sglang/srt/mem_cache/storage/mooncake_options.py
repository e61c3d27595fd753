"""Options of the Mooncake backend: extra config before file before environment before default.

Owns their names, types and defaults. Called once when the backend is made. The names are those of
Mooncake's own documentation for this use.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sglang.srt.environ import envs
from sglang.srt.mem_cache.storage.backend_options import BackendOptions, shown
from sglang.srt.mem_cache.storage.shared_store import DEFAULT_PREFIX, check_prefix

_ENVIRONMENT = {
    "master_server_address": "MOONCAKE_MASTER",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
}
OPTION_NAMES = frozenset(_ENVIRONMENT) | {
    "local_buffer_size",
    "replica_num",
    "key_prefix",
    "transfer_timeout",
    "rpc_timeout",
}
DEFAULT_SEGMENT_BYTES = 4 << 30
DEFAULT_BUFFER_BYTES = 16 << 20
LEAST_SEGMENT_BYTES = 16 << 20  # the store's unit; measured
_MOST_REPLICAS = 1000
_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """What the user chose.

    ``segment_bytes``: memory that this process adds to the store, 0: none. ``transfer_timeout_s``:
    without any byte moving; ``rpc_timeout_s``: of a question to the master.
    """

    master: str
    metadata_server: str
    local_hostname: str
    segment_bytes: int
    buffer_bytes: int
    protocol: str
    devices: str
    num_replicas: int
    key_prefix: str
    transfer_timeout_s: float
    rpc_timeout_s: float


def mooncake_options(extra: Mapping[str, Any]) -> MooncakeOptions:
    """Resolve the options. Raises ValueError naming the key or the file."""
    environment = {
        key: os.environ[name] for key, name in _ENVIRONMENT.items() if os.environ.get(name)
    }
    options = BackendOptions("mooncake", [extra, _config_file(), environment], _ENVIRONMENT)
    options.check_known(OPTION_NAMES)
    master = options.text("master_server_address", "")
    if not master:
        raise ValueError(
            "the mooncake backend needs master_server_address in the extra config or in the file "
            "that SGLANG_HICACHE_MOONCAKE_CONFIG_PATH names, or MOONCAKE_MASTER in the environment"
        )
    _check_master(options.name("master_server_address"), master)
    segment_bytes = options.size("global_segment_size", DEFAULT_SEGMENT_BYTES)
    _check_segment(options.name("global_segment_size"), segment_bytes)
    protocol = options.text("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ValueError(f"{options.name('protocol')} must be tcp or rdma, not {protocol!r}")
    devices = options.text("device_name", "")
    _check_devices(options, protocol, devices)
    return MooncakeOptions(
        master=master,
        metadata_server=options.text("metadata_server", "P2PHANDSHAKE"),
        local_hostname=options.text("local_hostname", "") or address_towards(master),
        segment_bytes=segment_bytes,
        buffer_bytes=options.size(
            "local_buffer_size", DEFAULT_BUFFER_BYTES, most=psutil.virtual_memory().total
        ),
        protocol=protocol,
        devices=devices,
        num_replicas=options.integer("replica_num", 1, least=1, most=_MOST_REPLICAS),
        key_prefix=check_prefix(options.text("key_prefix", DEFAULT_PREFIX)),
        transfer_timeout_s=options.number("transfer_timeout", 5.0, least=1.0),
        rpc_timeout_s=options.number("rpc_timeout", 2.0, least=0.1),
    )


def _check_master(name: str, master: str) -> None:
    """Raise ValueError unless it is ``host:port``; the client would take a port modulo 65536."""
    host, _, port = master.rpartition(":")
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and 1 <= int(port) <= 65535
    if not host or not is_port:
        raise ValueError(f"{name} must be host:port, with a port to 65535, not {shown(master)}")


def _check_segment(name: str, num_bytes: int) -> None:
    total = psutil.virtual_memory().total
    if num_bytes and not LEAST_SEGMENT_BYTES <= num_bytes <= total:
        raise ValueError(
            f"{name} must be 0 (lend nothing) or from {LEAST_SEGMENT_BYTES >> 20}MiB "
            f"to this host's memory, {total} bytes, not {num_bytes}"
        )


def _check_devices(options: BackendOptions, protocol: str, devices: str) -> None:
    """Raise ValueError where the client would quietly use something else."""
    name = options.name("device_name")
    if protocol == "tcp":
        if devices:
            raise ValueError(f"{name} names RDMA devices ({devices}), and protocol is tcp")
        return
    there = {path.name for path in _RDMA_DEVICES.iterdir()} if _RDMA_DEVICES.is_dir() else set()
    missing = {name.strip() for name in devices.split(",") if name.strip()} - there
    if missing or not there:
        wanted = f"{name}={devices!r}" if devices else f"{options.name('protocol')}='rdma'"
        found = ", ".join(sorted(there)) or "none"
        raise ValueError(f"{wanted} cannot be used: the RDMA devices of this host are: {found}")


def address_towards(master: str) -> str:
    """Return our own address on the way to the master: the one that other nodes can use.

    Raises ValueError when ``master`` is no ``host:port`` or its host is unknown.
    """
    _check_master("master_server_address", master)
    host, _, port = master.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        # Connecting a datagram socket sends nothing; it only chooses the interface.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"there is no way to master_server_address {master!r}: {error}") from error


def _config_file() -> dict[str, Any]:
    path = envs.SGLANG_HICACHE_MOONCAKE_CONFIG_PATH.get()
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{path} cannot be read as JSON: it is nested too deep") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be an object with names as keys")
    return content
