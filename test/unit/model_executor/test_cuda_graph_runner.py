"""The graph runner around its graphs, which here are replaced by the steps that they would hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PROMPTS = [[3 + (i * 11 + j) % 150 for j in range(4 + 5 * i)] for i in range(5)]


@pytest.fixture(params=["llama", "qwen3_next", "gemma3"])
def runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[ModelRunner]:
    use_eager_graphs(monkeypatch)
    made = ModelRunner(
        ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path, request.param))),
        RunnerConfig(
            load_format="auto",
            attention_backend="torch_native",
            page_size=4,
            mem_fraction_static=None,
            max_total_tokens=512,
            max_running_requests=8,
            kv_cache_dtype="auto",
            random_seed=0,
        ),
    )
    made.decode_runner = None
    yield made


def tokens_of(runner: ModelRunner, num_prompts: int = 5, **wishes: object) -> list[list[int]]:
    harness = SchedulerHarness(
        worker=TpModelWorker(runner),
        page_size=4,
        max_requests=8,
        context_len=runner.model_config.context_len,
        vocab_size=runner.model_config.vocab_size,
        overlap=True,
    )
    for index, prompt in enumerate(PROMPTS[:num_prompts]):
        # Different ends, so that batches shrink and padding follows.
        harness.generate(f"r{index}", prompt, 6 + 4 * index, ignore_eos=True, **wishes)
    harness.run_until_idle()
    assert harness.scheduler.flush_cache()
    return [harness.tokens(f"r{index}") for index in range(num_prompts)]


@pytest.mark.parametrize("wishes", [{}, {"frequency_penalty": 0.8}])
def test_padded_replays_give_the_same_tokens(runner: ModelRunner, wishes: dict) -> None:
    expected = tokens_of(runner, **wishes)
    runner.decode_runner = CudaGraphRunner(runner, [1, 2, 4, 8], show_progress=False)
    assert tokens_of(runner, **wishes) == expected
    replays = {
        size: cast(Any, entry.graph).num_replays
        for size, entry in runner.decode_runner._graphs.items()
    }
    assert sum(replays.values()) == runner.decode_runner.num_steps > 15
    assert replays[8] > 0, "no batch was padded"


def test_without_padding_only_exact_sizes_are_replayed(runner: ModelRunner) -> None:
    expected = tokens_of(runner)
    graphs = CudaGraphRunner(runner, [2, 8], show_progress=False, pad=False)
    runner.decode_runner = graphs
    assert tokens_of(runner) == expected
    assert cast(Any, graphs._graphs[8].graph).num_replays == 0
    assert cast(Any, graphs._graphs[2].graph).num_replays == graphs.num_steps > 0


def test_a_batch_that_is_too_large_is_left_alone(runner: ModelRunner) -> None:
    expected = tokens_of(runner)
    graphs = CudaGraphRunner(runner, [1, 2], show_progress=False)
    runner.decode_runner = graphs
    assert tokens_of(runner) == expected
    assert 0 < graphs.num_steps < 20


def test_bare_replays_repeat_the_last_step_and_leave_the_count_alone(runner: ModelRunner) -> None:
    expected = tokens_of(runner)
    graphs = runner.decode_runner = CudaGraphRunner(runner, [1, 2, 4, 8], show_progress=False)
    assert tokens_of(runner) == expected
    inputs = graphs._inputs.exchange.on_device
    last = inputs[:3].tolist()  # the longest request ended alone
    with graphs.bare_replays(1) as replay:
        for _ in range(7):
            replay()
            assert inputs[:3].tolist() == last
    with pytest.raises(ValueError, match="the last step had size 1, not 4"):
        with graphs.bare_replays(4):
            pass
    assert tokens_of(runner) == expected
