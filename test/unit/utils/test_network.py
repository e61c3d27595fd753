"""Addresses and ports."""

from __future__ import annotations

import socket
import time

import pytest

from sglang.srt.utils.network import (
    NetworkAddress,
    check_host,
    get_free_port,
    get_free_ports,
    get_local_ip,
    get_open_port,
    is_port_available,
    wait_port_available,
)


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, "127.0.0.1:80"),
        ("tcp://host:5000", "host", 5000, "host:5000"),
        ("[::1]:30000", "::1", 30000, "[::1]:30000"),
    ],
)
def test_addresses_are_read_and_written(text: str, host: str, port: int, shown: str) -> None:
    address = NetworkAddress.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, shown)
    assert address.to_url() == f"http://{shown}" and address.to_tcp() == f"tcp://{shown}"
    assert NetworkAddress.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:x", "host:99999", "::1:80"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        NetworkAddress.parse(text)


def test_a_listening_port_is_not_available() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not is_port_available(port, "127.0.0.1")
        start = time.monotonic()
        assert not wait_port_available(port, "127.0.0.1", 0.3)
        assert 0.2 < time.monotonic() - start < 3
    assert wait_port_available(port, "127.0.0.1", 5)
    assert not is_port_available(0) and not is_port_available(70000)


def test_free_ports_are_different_and_free() -> None:
    ports = get_free_ports(20)
    assert len(set(ports)) == 20
    assert is_port_available(get_free_port(), "127.0.0.1") and is_port_available(get_open_port())


def test_the_local_address_is_one() -> None:
    assert NetworkAddress(get_local_ip(), 1).to_host_port_str()


@pytest.mark.parametrize(
    "host", ["300.1.1.1", "1.2.3.4.5", "127.0.0.1:80", "::g", "no.such.invalid", "a b", "x" * 300]
)
def test_hosts_that_nothing_can_listen_on_are_named(host: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        check_host(host)
    assert f"{host} is no address and no name" in str(caught.value)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "0", "localhost", "::1", "::"])
def test_hosts_to_listen_on(host: str) -> None:
    check_host(host)
