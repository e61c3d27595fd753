"""Tensor parallel, replicas and two nodes: the same tokens as one rank, one port, clean ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang.srt.utils.common import kill_process_tree
from sglang.srt.utils.network import get_free_port
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

register_cpu_ci(est_time=60, suite="parallel")

PROMPTS = [[3 + (i * 7 + j) % 190 for j in range(5 + 9 * i)] for i in range(6)]
COMMON: list[str | float] = ["--max-total-tokens", 1024, "--random-seed", 1, "--num-threads", 1]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def _generate(url: str, **fields: Any) -> list[list[int]]:
    body: dict[str, Any] = {
        "input_ids": PROMPTS,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
        **fields,
    }
    reply = requests.post(f"{url}/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return [item["output_ids"] for item in reply.json()]


@pytest.fixture(scope="module")
def reference(model) -> list[list[int]]:
    url = f"http://127.0.0.1:{get_free_port()}"
    process = popen_launch_server(str(model), url, 120, other_args=COMMON)
    try:
        return _generate(url)
    finally:
        terminate_and_kill_process_tree(process)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("overlap", ["0", "1"])
def test_two_ranks_give_the_same_tokens(model, reference, overlap):
    url = f"http://127.0.0.1:{get_free_port()}"
    args: list[str | float] = [*COMMON, "--tp", 2, "--chunked-prefill-size", 16]
    env = {"SGLANG_ENABLE_OVERLAP_ON_CPU": overlap}
    process = popen_launch_server(str(model), url, 120, other_args=args, env=env)
    try:
        assert _generate(url) == reference
        assert requests.get(f"{url}/server_info", timeout=30).json()["tp_size"] == 2
        assert requests.post(f"{url}/flush_cache", timeout=30).status_code == 200
        assert _generate(url) == reference
        sampled = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
        _generate(url, sampling_params=sampled)  # ranks that drew differently would hang here
        schema = {"temperature": 0.7, "max_new_tokens": 12, "regex": "[ab]{3}"}
        _generate(url, sampling_params=schema)
        # Two clocks, one decision: a rank that went on alone would hang here.
        slow = {"max_new_tokens": 100, "ignore_eos": True, "stop_regex": r"(.|\n|.\n|..)+[0]{9}"}
        body: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": slow}
        assert requests.post(f"{url}/generate", json=body, timeout=120).status_code in (200, 400)
        assert _generate(url) == reference
    finally:
        terminate_and_kill_process_tree(process)


@pytest.mark.timeout(240)
def test_replicas_share_one_port(model, reference):
    url = f"http://127.0.0.1:{get_free_port()}"
    process = popen_launch_server(str(model), url, 120, other_args=[*COMMON, "--dp", 2])
    try:
        assert _generate(url) == reference
        for rank in (0, 1):
            assert _generate(url, routed_dp_rank=rank) == reference
        body: dict[str, Any] = {"input_ids": [5, 6], "routed_dp_rank": 2}
        assert requests.post(f"{url}/generate", json=body, timeout=30).status_code == 400
        loads = requests.get(f"{url}/v1/loads", timeout=30).json()["loads"]
        assert sorted(load["dp_rank"] for load in loads) == [0, 1]
        seen = {
            requests.post(f"{url}/generate", json={"input_ids": [5, 6, i]}, timeout=60).json()[
                "meta_info"
            ]["dp_rank"]
            for i in range(8)
        }
        assert seen == {0, 1}
        states = requests.get(f"{url}/server_info", timeout=30).json()["internal_states"]
        assert len(states) == 2
        assert requests.post(f"{url}/flush_cache", timeout=30).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    finally:
        terminate_and_kill_process_tree(process)


@pytest.mark.timeout(240)
def test_two_nodes_on_loopback(model, reference):
    url = f"http://127.0.0.1:{get_free_port()}"
    address = f"127.0.0.1:{get_free_port()}"
    nodes: list[str | float] = [*COMMON, "--tp", 2, "--nnodes", 2, "--dist-init-addr", address]
    command = [sys.executable, "-m", "sglang.cli", "serve", "--model-path", str(model)]
    port_of_second = get_free_port()
    command += [*map(str, nodes), "--node-rank", "1", "--port", str(port_of_second)]
    second = subprocess.Popen(command, env=os.environ.copy())
    try:
        first = popen_launch_server(str(model), url, 120, other_args=[*nodes, "--node-rank", 0])
        try:
            assert _generate(url) == reference
            with pytest.raises(requests.ConnectionError):
                requests.get(f"http://127.0.0.1:{port_of_second}/health", timeout=5)
            first.send_signal(signal.SIGTERM)
            assert first.wait(15) == 0
        finally:
            terminate_and_kill_process_tree(first)
        # The other node has lost its peer: it must not stay behind.
        assert second.wait(timeout=15) == 0
    finally:
        kill_process_tree(second.pid)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["scheduler", "detokenizer", "parent"])
def test_a_dead_process_ends_the_server(model, victim):
    url = f"http://127.0.0.1:{get_free_port()}"
    process = popen_launch_server(str(model), url, 120, other_args=[*COMMON, "--tp", 2])
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    try:
        target = process.pid if victim == "parent" else _child_named(tree, victim)
        os.kill(target, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and _is_healthy(url):
            time.sleep(0.2)
        assert not _is_healthy(url)
        assert process.wait(timeout=15) != 0
        psutil.wait_procs(tree, timeout=3)
        left = [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert left == []
    finally:
        kill_process_tree(process.pid)


def _child_named(tree: list[psutil.Process], role: str) -> int:
    """Pid of the first child whose process title names this role."""
    for child in tree[1:]:
        if any(part.startswith(f"sglang::{role}") for part in child.cmdline()):
            return child.pid
    raise AssertionError(f"no {role} among {[p.cmdline() for p in tree]}")


def _is_healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=4).status_code == 200
    except requests.RequestException:
        return False
