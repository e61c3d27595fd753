"""The limits of `bench_one_batch`: weights that no token of a step chooses are left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.cpu import ops
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.srt.models.registry import resolve_model_class
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config
from step_cost import idle_elements, step_bytes

register_cpu_ci(est_time=4, suite="benchmarks")


@pytest.mark.parametrize(
    ("family", "num_moe_layers", "chosen"),
    [("llama", 0, 0), ("qwen3_moe", 2, 2), ("deepseek_v2", 1, 3)],
)
def test_experts_that_nobody_chooses(family: str, num_moe_layers: int, chosen: int) -> None:
    config: dict[str, Any] = tiny_config(family)
    model_config = ModelConfig.from_dict(config)
    with torch.device("cpu"):
        model = resolve_model_class(model_config.architectures)(model_config)
    runner = cast(ModelRunner, SimpleNamespace(model=model, model_config=model_config))
    expert = 3 * config["hidden_size"] * config.get("moe_intermediate_size", 0)
    for num_tokens, share in ((1, 1 - chosen / 8), (2, (1 - chosen / 8) ** 2)):
        expected = num_moe_layers * 8 * expert * share
        assert idle_elements(runner, num_tokens) == pytest.approx(expected)


@pytest.mark.skipif(not ops.available(), reason="the CPU kernels could not be built")
def test_a_step_reads_the_compressed_copies(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)

    def bytes_of(weight_format: str, batch: int) -> float:
        config = RunnerConfig(
            load_format="auto",
            attention_backend="torch_native",
            page_size=1,
            mem_fraction_static=None,
            max_total_tokens=512,
            max_running_requests=8,
            kv_cache_dtype="auto",
            random_seed=0,
            cpu_weight_format=weight_format,
        )
        runner = ModelRunner(ModelConfig.from_path(str(folder), device="cpu"), config)
        return step_bytes(runner, batch, 0)

    assert 0.4 < bytes_of("bf16", 1) / bytes_of("fp32", 1) < 0.6
    assert 0.2 < bytes_of("int8", 1) / bytes_of("fp32", 1) < 0.4
    many = ops.small_rows() + 1  # more than the products that read the copies take
    assert bytes_of("bf16", many) == bytes_of("fp32", many)
