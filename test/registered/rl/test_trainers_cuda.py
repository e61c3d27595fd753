"""Trainers whose tensors are on a GPU: handles within one, NCCL from a second one.

The server keeps its KV in two tiers and replays captured steps. Tokens after an update are those of
a fresh server with the new weights, graphs and caches included.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.rl_trainers import NUM_NEW_TOKENS, PROMPTS, run_trainer
from sglang.test.small_server import SmallServer, serve
from sglang.test.test_utils import get_gpu_count

register_cuda_ci(est_time=120, suite="rl")

pytestmark = pytest.mark.cuda
needs_two_gpus = pytest.mark.skipif(
    get_gpu_count() < 2, reason="needs a second GPU for the trainer"
)

RECEIVE_S = 6
# Both sides must agree on how NCCL shares memory; multicast stays off.
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
FLAGS: tuple[str | int | float, ...] = (
    *("--dtype", "float32", "--page-size", 16, "--max-total-tokens", 2048),
    *("--mem-fraction-static", 0.8, "--cuda-graph-bs", 1, 2, 4),
    *("--skip-server-warmup", "--log-level", "warning"),
)
GREEDY = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
Tokens = list[list[int]]


@dataclass(frozen=True)
class Weights:
    folders: dict[str, Path]
    expected: dict[str, Tokens]


def answers(server: SmallServer) -> Tokens:
    """Greedy tokens of the prompts, one after the other."""
    return [
        server.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"]
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    root = tmp_path_factory.mktemp("weights")
    folders = {
        name: make_tiny_checkpoint(root / name, seed=seed, head_dim=16)
        for seed, name in enumerate(("old", "new"))
    }
    expected = {}
    for name, folder in folders.items():
        with serve(str(folder), *FLAGS) as fresh:
            expected[name] = answers(fresh)
    assert all(old != new for old, new in zip(expected["old"], expected["new"]))
    return Weights(folders, expected)


@pytest.fixture(scope="module")
def running(weights: Weights) -> Iterator[SmallServer]:
    tiers = ("--enable-hierarchical-cache", "--hicache-ratio", 2, "--enable-memory-saver")
    env = {**NCCL, "SGLANG_WEIGHT_RECEIVE_TIMEOUT": str(RECEIVE_S)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NCCL.items():
            patch.setenv(name, value)  # the trainers inherit it
        with serve(str(weights.folders["old"]), *FLAGS, *tiers, env=env) as server:
            yield server


@pytest.fixture
def server(running: SmallServer, weights: Weights) -> Iterator[SmallServer]:
    """With the old weights at the begin and the end, its processes the same."""
    children = running.children()
    yield running
    running.post("/resume_memory_occupation")
    running.post("/continue_generation")
    old = {"model_path": str(weights.folders["old"]), "weight_version": "0"}
    assert running.post("/update_weights_from_disk", json=old).status_code == 200
    assert answers(running) == weights.expected["old"]
    assert running.get("/health_generate").status_code == 200
    assert running.children() == children


def check_push(name: str, server: SmallServer, weights: Weights, device: str) -> None:
    seen = run_trainer(name, server.url, weights.folders["new"], f"{name}-1", device)
    assert [answer["output_ids"] for answer in seen["before"]] == weights.expected["old"]
    assert [answer["output_ids"] for answer in seen["after"]] == weights.expected["new"]
    for answer in seen["after"]:
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == 0, meta["cached_tokens_details"]
        assert meta["weight_version"] == f"{name}-1"


@pytest.mark.parametrize(
    "name", ["slime_colocated", "verl", "nemo_rl", "roll", "checkpoint_engine"]
)
def test_a_trainer_shares_memory_of_the_same_gpu(
    name: str, server: SmallServer, weights: Weights
) -> None:
    check_push(name, server, weights, "cuda:0")


@needs_two_gpus
@pytest.mark.parametrize("name", ["slime_nccl", "miles", "areal"])
def test_a_trainer_broadcasts_from_another_gpu(
    name: str, server: SmallServer, weights: Weights
) -> None:
    check_push(name, server, weights, "cuda:1")


@needs_two_gpus
def test_a_trainer_on_another_gpu_dies_in_the_middle_of_a_broadcast(
    server: SmallServer, weights: Weights
) -> None:
    folder = weights.folders["new"]
    command = [sys.executable, "-m", "sglang.test.rl_trainers", "dying", "--url", server.url]
    command += ["--weights", str(folder), "--device", "cuda:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ)
    assert done.returncode == 9, done.stderr[-2000:]
    start = time.monotonic()
    reply = broadcast_of_one(server, "doomed")
    assert time.monotonic() - start < RECEIVE_S + 20
    assert reply.status_code == 400, reply.text
    assert "init_weights_update_group" in reply.json()["message"]
    assert answers(server) == weights.expected["old"]
    # Another trainer finds the server as if nothing had been.
    check_push("slime_nccl", server, weights, "cuda:1")


def broadcast_of_one(server: SmallServer, group: str) -> requests.Response:
    body: dict[str, Any] = {
        "names": ["model.norm.weight"],
        "dtypes": ["float32"],
        "shapes": [[60]],
        "group_name": group,
    }
    return server.post("/update_weights_from_distributed", json=body)
