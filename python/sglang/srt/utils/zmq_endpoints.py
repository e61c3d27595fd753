"""Which ZeroMQ addresses are of this machine, and what to bind for them.

ZeroMQ binds numbers, not names, replaces whatever file stands in a socket file's place, and leaves
that file behind. No project imports beside the base layer.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from sglang.srt.utils.network import NetworkAddress

# Every interface of this machine, in an address.
WILDCARD_HOSTS = ("*", "0.0.0.0", "::")
_IPC = "ipc://"


def bindable(endpoint: str) -> str | None:
    """The address as ZeroMQ can bind it; None for a host that is not this one, or not known.

    ``tcp://HOST:PORT`` or ``ipc://PATH``. May ask a name server.
    """
    if endpoint.startswith(_IPC):
        return endpoint
    address = NetworkAddress.parse(endpoint)
    if address.host in WILDCARD_HOSTS:
        return endpoint
    try:
        found = socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, place in found:
        with socket.socket(family, kind) as probe, suppress(OSError):
            probe.bind((place[0], 0, *place[2:]))  # works for own addresses only
            return NetworkAddress(str(place[0]), address.port).to_tcp()
    return None


def check_socket_file(endpoint: str) -> None:
    """Raise OSError where binding a socket file would take it from another process or destroy it.

    Nothing to check for TCP, where the system does.
    """
    path = endpoint.removeprefix(_IPC)
    if path == endpoint or not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise OSError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # nobody listens: left behind
    raise OSError("another process listens there")


def remove_socket_file(endpoint: str | None) -> None:
    """Remove the file of an address that nobody listens at any more; harmless elsewhere."""
    if endpoint is None or not endpoint.startswith(_IPC):
        return
    with suppress(OSError):
        check_socket_file(endpoint)
        os.unlink(endpoint.removeprefix(_IPC))
