"""The Mooncake backend over a real master and node: pages, faults, and the draft's KV between two
servers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, StorageError
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.storage import mooncake_options as mooncake_options_module
from sglang.srt.mem_cache.storage.mooncake_options import mooncake_options
from sglang.srt.mem_cache.storage.mooncake_rehearsal import rehearse
from sglang.srt.mem_cache.storage.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.srt.utils.network import is_port_available
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.host_pages import get, make_host_pool, page_hash, put
from sglang.test.fakes.store_servers import (
    MooncakeServers,
    put_raw_record,
    raw_record,
    record_name,
    why_no_mooncake,
)
from sglang.test.shared_draft_suite import SharedDraftSuite
from sglang.test.shared_store_suite import BACK_S, SharedServingSuite, SharedStoreSuite, wait_until

register_cpu_ci(est_time=220, suite="hicache")

pytestmark = pytest.mark.skipif(
    why_no_mooncake() is not None and not os.environ.get("CI"), reason=str(why_no_mooncake())
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServers]:
    servers = MooncakeServers(tmp_path_factory.mktemp("mooncake"))
    servers.start()
    yield servers
    servers.close()


class TestMooncakeStore(SharedStoreSuite):
    def test_the_store_keeps_the_first_value_of_a_key(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        """What the names of records rest on; other bytes get other names."""
        store = make_store(make_host_pool())
        assert isinstance(store, MooncakeStore)
        name = record_name(store, page_hash("once"))
        assert store._client.put(name, b"first") == 0
        assert store._client.put(name, b"second") == 0
        assert raw_record(store, name) == b"first"
        put_raw_record(store, name, b"third")
        assert raw_record(store, name) == b"third", "tests do tamper"

    @pytest.mark.parametrize("layout", ["page_first", "layer_first"])
    def test_pages_go_straight_to_the_pool_where_they_are_in_one_piece(
        self, make_store: Callable[..., SharedPageStore], layout: str
    ) -> None:
        pool = make_host_pool(layout=layout)
        store = make_store(pool)
        assert isinstance(store, MooncakeStore)
        put(store, pool, [1, 2])
        get(store, pool, [1, 2])
        assert store._reading.has_staging == (layout == "layer_first")

    def test_the_node_is_killed_and_back(
        self, servers: MooncakeServers, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        put(store, pool, [1, 2])
        servers.node.kill()
        start = time.monotonic()
        assert get(store, pool, [1, 2])[0] is False
        assert put(store, pool, [3]) == [False]
        assert time.monotonic() - start < 10
        assert store.availability.is_up, "the other nodes of a store are there"
        servers.node.start()
        # The master notices after its time to live that what the node had is gone.
        wait_until(lambda: put(store, pool, [1, 2]) == [True] * 2 == get(store, pool, [1, 2]), 40)


def make(servers: MooncakeServers, pool: HostKVCache, **options: Any) -> MooncakeStore:
    config = HiCacheStorageConfig(model_name="m", extra_config=servers.extra_config(**options))
    store = MooncakeStore(config)
    store.register_mem_host_pool_v2(pool, PoolName.KV)
    return store


def test_full(tmp_path: Path) -> None:
    servers = MooncakeServers(tmp_path, num_bytes=16 << 20)
    servers.start()
    pool = make_host_pool(64, layer_num=16, head_dim=256)  # 128 KiB a page
    store = make(servers, pool)
    try:
        # More than three times what there is room for: old pages go, or new ones are dropped.
        verdicts = [put(store, pool, range(first, first + 32)) for first in range(0, 416, 32)]
        assert sum(map(sum, verdicts)) > 64
        found = [get(store, pool, range(first, first + 32)) for first in range(0, 416, 32)]
        assert 32 < sum(map(sum, found)) < 128, "pages that are there are right, others miss"
        assert store.availability.is_up, "a full store is not away"
        # Room comes back: what was read a while ago may go.
        wait_until(lambda: put(store, pool, [1000]) == [True] == get(store, pool, [1000]), 20)
    finally:
        store.close()
        servers.close()


def test_memory_of_the_serving_process(tmp_path: Path) -> None:
    """Without a node: two servers lend their own memory; pages go with the one that holds them."""
    servers = MooncakeServers(tmp_path)
    servers.master.start()
    pools = [make_host_pool(), make_host_pool()]
    stores = [make(servers, pool, global_segment_size="32MiB") for pool in pools]
    try:
        assert put(stores[0], pools[0], range(12)) == [True] * 12
        assert get(stores[1], pools[1], range(12)) == [True] * 12
        stores[0].close()
        assert sum(get(stores[1], pools[1], range(12))) < 12
        wait_until(lambda: put(stores[1], pools[1], range(12)) == [True] * 12, BACK_S)
        assert get(stores[1], pools[1], range(12)) == [True] * 12
    finally:
        for store in stores:
            store.close()
        servers.close()


def test_options_come_from_the_extra_config_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MOONCAKE_MASTER", "MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="MOONCAKE_MASTER"):
        mooncake_options({})
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:1")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "3gb")
    # Without RDMA hardware the client would quietly move pages some other way.
    monkeypatch.setattr(mooncake_options_module, "_RDMA_DEVICES", tmp_path / "infiniband")
    with pytest.raises(ValueError, match=r"MOONCAKE_PROTOCOL.*devices of this host are: none"):
        mooncake_options({})
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_1").mkdir()
    options = mooncake_options({})
    assert (options.master, options.protocol) == ("127.0.0.1:1", "rdma")
    assert (options.segment_bytes, options.local_hostname) == (3 * 10**9, "127.0.0.1")
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "127.0.0.1:2", "protocol": "tcp"}))
    monkeypatch.setenv("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", str(path))
    options = mooncake_options({})
    assert (options.master, options.protocol) == ("127.0.0.1:2", "tcp")
    options = mooncake_options({"protocol": "rdma", "device_name": "mlx5_1"})
    assert (options.protocol, options.devices) == ("rdma", "mlx5_1")
    with pytest.raises(ValueError, match=r"mlx5_2.*devices of this host are: mlx5_0, mlx5_1"):
        mooncake_options({"protocol": "rdma", "device_name": "mlx5_1, mlx5_2"})
    for bad in (
        {"protocol": "carrier pigeon"},
        {"master_server_address": "nowhere"},
        {"global_segment_size": "much"},
        {"global_segment_size": "1MiB"},
        {"global_segment_size": "1000TB"},
        {"device_name": "mlx5_1"},  # of RDMA, and the protocol is TCP
        {"replica_num": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            mooncake_options(bad)
    path.write_text("not json")
    with pytest.raises(ValueError, match="mooncake.json"):
        mooncake_options({})


def test_a_master_that_does_not_answer_stops_nobody() -> None:
    """The client's own call would hold the interpreter for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        options = mooncake_options({"master_server_address": address, "global_segment_size": 0})
        gaps, last = [0.0], time.monotonic()
        with ThreadPoolExecutor() as pool:
            rehearsal = pool.submit(rehearse, options, timeout_s=2.0)
            while not rehearsal.done():
                time.sleep(0.005)
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
        assert max(gaps) < 1
        with pytest.raises(StorageError, match=f"{address} did not answer within 2 s"):
            rehearsal.result()


def test_a_wrong_metadata_server_is_named(servers: MooncakeServers) -> None:
    config = servers.extra_config(metadata_server="nonsense", global_segment_size=0)
    with pytest.raises(StorageError, match="metadata_server 'nonsense'"):
        rehearse(mooncake_options(config))


class TestMooncakeDrafts(SharedDraftSuite):
    """See the suite."""


class TestMooncakeServing(SharedServingSuite):
    """See the suite."""


def test_the_local_store_of_the_scripts(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "scripts" / "mooncake_local.sh"
    ports = iter(range(21000, 31000, 3))
    port = next(p for p in ports if all(is_port_available(p + i, "127.0.0.1") for i in range(3)))
    command = ["bash", str(script), "--port", str(port), "--memory", "64MB", "--check"]
    environment = {**os.environ, "HISPEC_VENV": sys.prefix}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "a page was written and read" in result.stderr
    assert is_port_available(port, "127.0.0.1"), "the store goes on"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--memory", "lots"), "--memory"),
        (("--memory", "1kB"), "16MiB"),
        (("--memory", "5000TB"), "memory"),
        (("--port", "99999999"), "--port"),
        (("--port", "65534"), "65535"),
    ],
)
def test_the_local_store_refuses(arguments: tuple[str, ...], reason: str) -> None:
    result = run_script(*arguments)
    assert result.returncode == 1 and reason in result.stderr, result.stderr
    assert "in use" not in result.stderr


def test_the_local_store_wants_its_ports_for_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_script("--port", str(port - 2))
    assert result.returncode == 1
    assert f"port {port} is in use" in result.stderr


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[3] / "scripts" / "mooncake_local.sh"
    environment = {**os.environ, "HISPEC_VENV": sys.prefix}
    command = ["bash", str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_benchmark_measures_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmark" / "bench_hicache_storage.py"
    out = tmp_path / "figures.json"
    command = [sys.executable, str(script), "--backend", "mooncake", "--small", "--json", str(out)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["read_ratio"] > 0 and row["write_ratio"] > 0
