"""The offline engine's methods about weights and memory, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import sglang
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.rl_trainers import NUM_NEW_TOKENS, PROMPTS

from .conftest import GREEDY, Models, named_tensors

register_cpu_ci(est_time=20, suite="rl")


@pytest.fixture(scope="module")
def engine(models: Models) -> Iterator[Engine]:
    with sglang.Engine(
        model_path=str(models.folders["old"]),
        device="cpu",
        max_total_tokens=65536,
        num_threads=1,
        enable_memory_saver=True,
        enable_weights_cpu_backup=True,
    ) as running:
        yield running


def answers(engine: Engine) -> list[list[int]]:
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert isinstance(replies, list)
    return [reply["output_ids"] for reply in replies]


def scheduler_memory(engine: Engine) -> int:
    pids = engine.tokenizer_manager.engine_pids
    return max(psutil.Process(pid).memory_info().rss for pid in pids)


def test_updates_in_every_form(engine: Engine, models: Models) -> None:
    new = list(named_tensors(models.folders["new"]).items())
    old = list(named_tensors(models.folders["old"]).items())
    first = engine.get_weights_checksum()
    assert answers(engine) == models.expected["old"]
    success, message = engine.update_weights_from_tensor(new)
    assert success, message
    assert answers(engine) == models.expected["new"]
    assert engine.get_weights_checksum() != first
    bucket = FlattenedTensorBucket(named_tensors=old)
    payload = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    serialized = [MultiprocessingSerializer.serialize(payload, output_str=True)]
    assert engine.update_weights_from_tensor(serialized, load_format="flattened_bucket")[0]
    assert answers(engine) == models.expected["old"]
    assert engine.get_weights_checksum() == first
    result: Any = engine.update_weights_from_disk(str(models.folders["new"]))
    assert result[0] is True and len(result) == 3
    assert answers(engine) == models.expected["new"]
    assert engine.get_model_info()["model_path"] == str(models.folders["new"])
    assert engine.update_weights_from_disk("/nowhere")[0] is False
    assert engine.begin_weight_update()[0] and engine.end_weight_update()[0]
    assert engine.destroy_weights_update_group("none")[0] is False
    dtypes = [torch.float32]
    assert engine.update_weights_from_distributed(["a"], dtypes, [[1]], "none")[0] is False
    rows = engine.get_weights_by_name("model.norm.weight", truncate_size=2)
    assert rows == pytest.approx(dict(new)["model.norm.weight"][:2].tolist())


def test_memory_is_really_given_back(engine: Engine, models: Models) -> None:
    """64k slots of 6 layers of 2 heads: about 60 MB of KV that requests have touched."""
    prompts = [[(i * 7 + n) % 250 for i in range(400)] for n in range(100)]
    engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1})
    before, expected = scheduler_memory(engine), answers(engine)
    engine.release_memory_occupation(["kv_cache"])
    assert before - scheduler_memory(engine) > 20 << 20
    with pytest.raises(RuntimeError, match="already released"):
        engine.release_memory_occupation(["kv_cache"])
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation()
    assert answers(engine) == expected


def test_resuming_what_is_there_is_an_error(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="not currently released"):
        engine.resume_memory_occupation(["weights"])
    assert len(answers(engine)[0]) == NUM_NEW_TOKENS
