"""`--kv-events-config`: keys, addresses of replicas, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.configs.kv_events_config import KVEventsConfig, rank_endpoint
from sglang.srt.server_args import ServerArgs


def config_of(**keys: Any) -> KVEventsConfig:
    return KVEventsConfig.from_cli(json.dumps(keys))


def test_defaults_publish_where_the_server_listens() -> None:
    config = config_of()
    assert config.is_enabled
    assert config.publish_endpoint("127.0.0.1") == "tcp://127.0.0.1:5557"
    assert config.publish_endpoint("::1") == "tcp://[::1]:5557"
    assert config_of(endpoint="tcp://*:7000").publish_endpoint("127.0.0.1") == "tcp://*:7000"


@pytest.mark.parametrize("off", [{"publisher": "null"}, {"enable_kv_cache_events": False}])
def test_events_can_be_off(off: dict[str, Any]) -> None:
    assert not config_of(**off).is_enabled


def test_each_replica_has_an_address_of_its_own() -> None:
    assert rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert rank_endpoint("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert rank_endpoint("tcp://127.0.0.1:0", 1) == "tcp://127.0.0.1:0"
    assert rank_endpoint("ipc:///run/kv", 0) == "ipc:///run/kv"
    assert rank_endpoint("ipc:///run/kv", 2) == "ipc:///run/kv_dp2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        ('{"publisher": "kafka"}', "kafka"),
        ('{"port": 5557}', "port"),
        ('{"hwm": 0}', "hwm"),
        ('{"buffer_steps": "many"}', "buffer_steps"),
        ('{"max_queue_size": true}', "max_queue_size"),
        ('{"topic": 7}', "topic"),
        (r'{"topic": "\ud800"}', "encode"),
    ],
)
def test_bad_values_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^--kv-events-config") as caught:
        KVEventsConfig.from_cli(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"endpoint": "udp://*:1"}, "endpoint must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": "inproc://x"}, "endpoint must be"),
        ({"endpoint": "ipc://"}, "endpoint must be"),
        ({"endpoint": "ipc://*"}, "endpoint must be"),
        ({"endpoint": "ipc:///run/a\0b"}, "endpoint must be"),
        ({"endpoint": ""}, "endpoint must be"),
        ({"endpoint": "tcp://*"}, "host:port"),
        ({"endpoint": "tcp://*:70000"}, "host:port"),
        ({"replay_endpoint": "tcp://*:x"}, "replay_endpoint"),
        ({"endpoint": "tcp://*:65535"}, "replica 1 would be port 65536"),
        ({"endpoint": "tcp://*:30000"}, "the HTTP server"),
        ({"endpoint": "tcp://*:29999"}, "replica 1 and the HTTP server"),
        ({"endpoint": "tcp://*:7000", "replay_endpoint": "tcp://*:7001"}, "share tcp://*:7001"),
        ({"endpoint": "ipc:///a", "replay_endpoint": "ipc:///a"}, "share ipc:///a"),
    ],
)
def test_addresses_that_cannot_be(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^--kv-events-config: ") as caught:
        config_of(**keys).check(host="127.0.0.1", port=30000, dp_size=2)
    assert said in str(caught.value)


def test_free_ports_share_nothing() -> None:
    config = config_of(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")
    config.check(host="127.0.0.1", port=30000, dp_size=4)


def test_other_hosts_share_nothing() -> None:
    config = config_of(endpoint="tcp://10.9.9.9:30000", replay_endpoint="tcp://127.0.0.1:30001")
    config.check(host="127.0.0.1", port=30000, dp_size=1)


def test_server_args_check_it() -> None:
    ServerArgs(model_path="m", device="cpu", kv_events_config="{}")
    with pytest.raises(ValueError, match="--kv-events-config: "):
        ServerArgs(model_path="m", device="cpu", kv_events_config='{"hwm": -1}')
    with pytest.raises(ValueError, match="--disable-radix-cache exclude"):
        ServerArgs(model_path="m", device="cpu", kv_events_config="{}", disable_radix_cache=True)
