"""The limits of `bench_one_batch`: weights that no token of a step chooses are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import resolve_model_class
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import tiny_config
from step_cost import idle_elements

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
