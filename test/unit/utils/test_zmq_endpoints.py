"""Addresses of this machine and of others, and socket files in the way."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from sglang.srt.utils.zmq_endpoints import bindable, check_socket_file, remove_socket_file


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("tcp://*:1", "tcp://*:1"),
        ("tcp://0.0.0.0:1", "tcp://0.0.0.0:1"),
        ("tcp://[::]:1", "tcp://[::]:1"),
        ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1"),
        ("tcp://127.9.8.7:1", "tcp://127.9.8.7:1"),
        ("tcp://LOCALHOST:1", "tcp://127.0.0.1:1"),
        ("tcp://[0:0:0:0:0:0:0:1]:1", "tcp://[::1]:1"),
        ("ipc:///run/kv", "ipc:///run/kv"),
        ("tcp://192.0.2.77:1", None),
        ("tcp://nosuchhost.invalid:1", None),
    ],
)
def test_what_can_be_bound(endpoint: str, place: str | None) -> None:
    found = bindable(endpoint)
    if "LOCALHOST" in endpoint:
        assert found in (place, "tcp://[::1]:1")
    else:
        assert found == place


def test_the_name_of_this_machine_is_its_own() -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip("the machine's name has no address")
    assert bindable(f"tcp://{name}:5") is not None


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("data")
    with pytest.raises(OSError, match="no socket"):
        check_socket_file(f"ipc://{precious}")
    remove_socket_file(f"ipc://{precious}")
    link = tmp_path / "link"
    link.symlink_to(precious)
    with pytest.raises(OSError, match="no socket"):
        check_socket_file(f"ipc://{link}")
    assert precious.read_text() == "data"


def test_socket_files_of_others_and_of_the_dead(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    check_socket_file(endpoint)
    with zmq.Context() as context, context.socket(zmq.PUB) as held:
        held.bind(endpoint)
        with pytest.raises(OSError, match="listens"):
            check_socket_file(endpoint)
        remove_socket_file(endpoint)
        assert (tmp_path / "events").exists()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        (tmp_path / "events").unlink(missing_ok=True)
        left.bind(f"{tmp_path}/events")
    check_socket_file(endpoint)
    remove_socket_file(endpoint)
    remove_socket_file(endpoint)
    remove_socket_file(None)
    remove_socket_file("tcp://127.0.0.1:1")
    assert not (tmp_path / "events").exists()
