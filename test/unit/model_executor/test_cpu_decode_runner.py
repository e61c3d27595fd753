"""Decode steps in one native call: the same tokens as module by module, for every dense family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.cpu import ops
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cpu_decode_runner import CpuDecodeRunner
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PROMPTS = [[3 + (i * 11 + j) % 150 for j in range(4 + 5 * i)] for i in range(5)]

pytestmark = pytest.mark.skipif(not ops.available(), reason="the CPU kernels could not be built")


def _runner(path: Path, weight_format: str = "auto", page_size: int = 4) -> ModelRunner:
    config = ModelConfig.from_path(str(path))
    return ModelRunner(
        config,
        RunnerConfig(
            load_format="auto",
            attention_backend="torch_native",
            page_size=page_size,
            mem_fraction_static=None,
            max_total_tokens=512,
            max_running_requests=8,
            kv_cache_dtype="auto",
            random_seed=0,
            cpu_weight_format=weight_format,
        ),
    )


def _tokens(runner: ModelRunner) -> list[list[int]]:
    harness = SchedulerHarness(
        worker=TpModelWorker(runner),
        page_size=runner.config.page_size,
        max_requests=8,
        context_len=runner.model_config.context_len,
        vocab_size=runner.model_config.vocab_size,
    )
    for index, prompt in enumerate(PROMPTS):
        harness.generate(f"r{index}", prompt, 24, ignore_eos=True)
    harness.run_until_idle()
    # The pools outlive this scheduler.
    assert harness.scheduler.flush_cache()
    return [harness.tokens(f"r{index}") for index in range(len(PROMPTS))]


def _fast(runner: ModelRunner) -> CpuDecodeRunner:
    assert isinstance(runner.decode_runner, CpuDecodeRunner)
    return runner.decode_runner


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_same_tokens_as_module_by_module(tmp_path, family):
    runner = _runner(make_tiny_checkpoint(tmp_path, family))
    fast = _tokens(runner)
    assert _fast(runner).num_steps > 0
    runner.decode_runner = None
    assert _tokens(runner) == fast


def test_a_model_with_experts_goes_module_by_module(tmp_path):
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    assert _runner(path).decode_runner is None
    with pytest.raises(ValueError, match="experts"):
        _runner(path, "int8")


def test_auto_compresses_what_loses_nothing(tmp_path):
    exact = _runner(make_tiny_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16))
    assert len(_fast(exact)._compressed) > 0
    plain = _runner(tmp_path / "bf16", "fp32")
    assert _fast(plain)._compressed == []
    assert _tokens(exact) == _tokens(plain)
    inexact = _runner(make_tiny_checkpoint(tmp_path / "fp32"))
    assert _fast(inexact)._compressed == []


def test_auto_gives_up_a_format_that_new_weights_do_not_fit(tmp_path):
    bf16 = make_tiny_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16)
    auto, plain = _runner(bf16), _runner(bf16, "fp32")
    assert _fast(auto)._compressed
    for runner in (auto, plain):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in runner.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        _fast(runner).weights_changed()
    assert _fast(auto)._compressed == []
    assert _tokens(auto) == _tokens(plain)


def test_copies_follow_the_weights(tmp_path):
    runner = _runner(make_tiny_checkpoint(tmp_path), "fp16")
    before = _tokens(runner)
    with torch.no_grad():
        for parameter in runner.model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.5)
    stale = _tokens(runner)
    _fast(runner).weights_changed()
    fresh = _tokens(runner)
    # Negative control: without the call the copies are those of the old weights.
    assert fresh != stale and fresh != before


def test_a_target_with_layers_to_capture_keeps_the_shortcut(tmp_path):
    runner = _runner(make_tiny_checkpoint(tmp_path, num_hidden_layers=4))
    expected = _tokens(runner)
    runner.model.set_eagle3_layers_to_capture()
    steps_before = _fast(runner).num_steps
    assert _tokens(runner) == expected
    assert _fast(runner).num_steps == 2 * steps_before
