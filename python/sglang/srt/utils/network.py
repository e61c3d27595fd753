"""Ports and addresses: find free ones, test them, write them down (IPv6 included).

No project imports beside the base layer; used by the launcher, the argument parser and trainers
(`NetworkAddress`, `is_port_available`, `get_open_port` are documented import names).
"""

from __future__ import annotations

import functools
import ipaddress
import random
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_FIRST_FREE_PORT = 20000


@dataclass(frozen=True, slots=True)
class NetworkAddress:
    """A host (name, IPv4 or IPv6 without brackets) and a port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> NetworkAddress:
        """Read `host:port`, `[v6]:port` or `tcp://host:port`. Raises ValueError."""
        address = text.split("://", 1)[-1]
        host, separator, port = address.rpartition(":")
        if not separator or not port.isdecimal() or not 0 <= int(port) <= 65535:
            raise ValueError(f"{text!r} is not an address of the form host:port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ValueError(f"{text!r}: write an IPv6 host in brackets, as in [::1]:30000")
        if not host:
            raise ValueError(f"{text!r} has no host")
        return cls(host, int(port))

    @property
    def is_ipv6(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).version == 6
        except ValueError:
            return False

    def to_host_port_str(self) -> str:
        """`host:port`, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    def to_url(self, scheme: str = "http") -> str:
        return f"{scheme}://{self.to_host_port_str()}"

    def to_tcp(self) -> str:
        return self.to_url("tcp")

    def __str__(self) -> str:
        return self.to_host_port_str()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_host(host: str) -> None:
    """Raises ValueError for what is neither an address nor a known name; "" is all interfaces."""
    # The resolver takes what looks like an address but is none for a name, and asks the network.
    is_numeric = ":" in host or not host.strip("0123456789.")
    flags = socket.AI_NUMERICHOST if is_numeric else 0
    try:
        socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host} is no address and no name that is known here: {error}") from error


def is_port_available(port: int, host: str = "") -> bool:
    """Whether a TCP server could listen on this port now ("" is every IPv4 interface)."""
    if not 0 < port < 65536:
        return False
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def get_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now; somebody else may still take it before it is used."""
    return get_free_ports(1, host)[0]


def get_free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different free ports: all are held until the last one is found.

    From below those that the system gives to outgoing connections, which would take them at any
    moment before they are used.
    """
    probes = [socket.socket(_family(host), socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            _bind_anywhere(probe, host)
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _bind_anywhere(probe: socket.socket, host: str) -> None:
    end = _first_ephemeral_port()
    if end > _FIRST_FREE_PORT:
        ports = range(_FIRST_FREE_PORT, end)
        # Not by the process's generator: others may have been seeded alike.
        for port in random.SystemRandom().sample(ports, k=min(50, len(ports))):
            try:
                probe.bind((host, port))
                return
            except OSError:
                continue
    probe.bind((host, 0))


@functools.cache
def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def get_open_port() -> int:
    """A free port on this host. (A documented import name.)"""
    return get_free_port("")


def wait_port_available(port: int, host: str, timeout_s: float) -> bool:
    """Wait until the port can be listened on; False when it stays busy for `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_port_available(port, host):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)
    return True


def get_local_ip() -> str:
    """The address by which other hosts reach this one; 127.0.0.1 on a host without a network."""
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Connecting a datagram socket sends nothing; it only selects the interface.
                probe.connect((target, 80))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"
