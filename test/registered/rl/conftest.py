"""One server for all tests of weight updates over HTTP: draft, host tier, slow storage in files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from sglang.srt.utils import MultiprocessingSerializer
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.slow_file_store import extra_config
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.rl_trainers import NUM_NEW_TOKENS, PROMPTS
from sglang.test.small_server import SmallServer, serve

PAGE = 8
GREEDY = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
STORED_PROMPT = [(13 * i + 1) % 250 for i in range(6 * PAGE + 3)]


@dataclass(frozen=True)
class Models:
    """Two sets of weights of one architecture, a draft for both, and fresh engines' answers."""

    folders: dict[str, Path]
    draft: Path
    expected: dict[str, list[list[int]]]  # by weights: greedy outputs of PROMPTS


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: make_tiny_checkpoint(root / name, seed=seed, num_hidden_layers=6)
        for seed, name in enumerate(("old", "new"))
    }
    expected = {}
    for name, folder in folders.items():
        with ServedScheduler(folder, "--max-total-tokens", 1024) as fresh:
            expected[name] = [fresh.answer(p, NUM_NEW_TOKENS).tokens for p in PROMPTS]
    assert all(a != b for a, b in zip(expected["old"], expected["new"]))
    return Models(folders, make_tiny_draft(root / "draft"), expected)


@pytest.fixture(scope="session")
def running(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    config = extra_config(tmp_path_factory.mktemp("l3"), 0.2, prefetch_threshold=PAGE)
    with serve(
        str(models.folders["old"]),
        *("--page-size", PAGE, "--enable-memory-saver", "--enable-draft-weights-cpu-backup"),
        *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", 3),
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 4),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", config),
    ) as server:
        yield server


@pytest.fixture
def server(running: SmallServer, models: Models) -> Iterator[SmallServer]:
    """With the old weights at the begin and the end, alive, its processes the same."""
    use_weights(running, models.folders["old"])
    children = running.children()
    yield running
    # After a failure: nothing may stay released or paused, or every later test would wait.
    running.post("/resume_memory_occupation")
    running.post("/continue_generation")
    use_weights(running, models.folders["old"])
    assert running.get("/health_generate").status_code == 200
    assert running.children() == children


def use_weights(server: SmallServer, folder: Path) -> None:
    reply = server.post(
        "/update_weights_from_disk", json={"model_path": str(folder), "weight_version": "0"}
    )
    assert reply.status_code == 200, reply.text


def named_tensors(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model.safetensors"))


def serialized(payload: Any) -> list[str]:
    return [MultiprocessingSerializer.serialize(payload, output_str=True)]
