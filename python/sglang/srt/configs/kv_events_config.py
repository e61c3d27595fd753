"""`--kv-events-config`: where a server publishes what its KV cache holds.

Owns the keys, their checks and the address of each replica's sockets. Opens none. Key names and
the port of a replica (base + data-parallel rank) are those of SGLang and vLLM, so that a router's
configuration fits; see docs/kv_events.md for the differences in defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from sglang.srt.utils.common import parse_json_object
from sglang.srt.utils.network import NetworkAddress
from sglang.srt.utils.zmq_endpoints import WILDCARD_HOSTS

_FLAG = "--kv-events-config"
_DEFAULT_PORT = 5557
_TCP, _IPC = "tcp://", "ipc://"
_MOST_PORT = 65535

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of the flag.

    ``publisher``: "null" records and sends nothing; ``endpoint``: a ZeroMQ address, None for port
    5557 of the host that the HTTP server listens on; ``replay_endpoint``: answers questions for
    batches sent before, None for no such socket; ``buffer_steps``: batches kept for it; ``hwm``:
    batches that wait for one slow subscriber before it loses some; ``max_queue_size``: batches on
    their way from the scheduler to the sockets; ``topic``: first frame of every message.
    """

    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str | None = None
    replay_endpoint: str | None = None
    buffer_steps: _Count = 10_000
    hwm: _Count = 10_000
    max_queue_size: _Count = 100_000
    topic: str = ""
    enable_kv_cache_events: bool = True

    @classmethod
    def from_cli(cls, text: str) -> KVEventsConfig:
        """Read the flag's value. Raises ValueError that names the flag and the key."""
        values = parse_json_object(text, _FLAG)
        try:
            config = msgspec.convert(values, cls)
            config.topic.encode()
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise ValueError(f"{_FLAG}: {error}") from None
        return config

    @property
    def is_enabled(self) -> bool:
        """Whether anything is to be recorded and sent."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def check(self, *, host: str, port: int, dp_size: int) -> None:
        """Refuse addresses that cannot be, or that two sockets would share.

        ``host``, ``port``: of the HTTP server. Raises ValueError.
        """
        taken = {NetworkAddress(host, port).to_tcp(): "the HTTP server"}
        for key, base in (
            ("endpoint", self.publish_endpoint(host)),
            ("replay_endpoint", self.replay_endpoint),
        ):
            for dp_rank in range(dp_size if base is not None else 0):
                address = rank_endpoint(str(base), dp_rank, key)
                owner = f"{key} of replica {dp_rank}"
                for other, other_owner in taken.items():
                    if _are_one_place(address, other):
                        raise ValueError(
                            f"{_FLAG}: {owner} and {other_owner} would share {address}."
                        )
                taken[address] = owner

    def publish_endpoint(self, host: str) -> str:
        """The address of replica 0, before its port is known where that is 0."""
        if self.endpoint is not None:
            return self.endpoint
        return NetworkAddress(host or "127.0.0.1", _DEFAULT_PORT).to_tcp()


def rank_endpoint(base: str, dp_rank: int, key: str = "endpoint") -> str:
    """The address of a replica: TCP ports count up from the base (0: any free one, for each).

    Raises ValueError for what is no ``tcp://HOST:PORT`` or ``ipc://PATH``.
    """
    if base.startswith(_IPC) and len(base) > len(_IPC) and not set(base) & {"*", "\0"}:
        return base if dp_rank == 0 else f"{base}_dp{dp_rank}"
    if not base.startswith(_TCP):
        raise ValueError(f"{_FLAG}: {key} must be tcp://HOST:PORT or ipc://PATH, not {base!r}.")
    try:
        address = NetworkAddress.parse(base)
    except ValueError as error:
        raise ValueError(f"{_FLAG}: {key}: {error}") from None
    port = address.port + dp_rank if address.port else 0
    if port > _MOST_PORT:
        raise ValueError(f"{_FLAG}: {key} of replica {dp_rank} would be port {port}.")
    return NetworkAddress(address.host, port).to_tcp()


def _are_one_place(address: str, other: str) -> bool:
    """Whether two sockets cannot both have these; a port that is still to be found is no place."""
    if address.startswith(_IPC) or other.startswith(_IPC):
        return address == other
    one, two = NetworkAddress.parse(address), NetworkAddress.parse(other)
    is_same_host = one.host == two.host or bool({one.host, two.host} & set(WILDCARD_HOSTS))
    return is_same_host and one.port == two.port and one.port != 0
