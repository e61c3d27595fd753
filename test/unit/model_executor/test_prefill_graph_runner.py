"""Captured prefill steps against the same steps uncaptured; graphs are stand-ins."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.srt.model_executor.prefill_graph_runner import (
    MAX_REQUESTS,
    PrefillGraphRunner,
    PrefillStep,
    capture_token_counts,
)
from sglang.srt.models import llama
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PAGE = 4
COUNTS = [8, 32, 96]
NEW_TOKENS = 7


@pytest.fixture(autouse=True)
def _graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_eager_graphs(monkeypatch)


def make_runner(folder: Path, family: str = "llama", **changes: Any) -> ModelRunner:
    config = RunnerConfig(
        load_format="auto",
        attention_backend="torch_native",
        page_size=PAGE,
        mem_fraction_static=None,
        max_total_tokens=1024,
        max_running_requests=12,
        kv_cache_dtype="auto",
        random_seed=0,
    )
    model_config = ModelConfig.from_path(str(make_tiny_checkpoint(folder, family)))
    return ModelRunner(model_config, dataclasses.replace(config, **changes))


@pytest.fixture(params=["llama", "gemma3", "qwen3_moe"])
def runner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    yield make_runner(tmp_path, request.param)


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first + 11 * i + i * i // 7) % 150 for i in range(length)]


class Served:
    """A scheduler over a runner; `counts` says how many of its steps were replays."""

    def __init__(self, runner: ModelRunner, **options: Any) -> None:
        self._runner = runner
        self._num_requests = 0
        self.harness = SchedulerHarness(
            worker=TpModelWorker(runner),
            page_size=PAGE,
            max_requests=12,
            context_len=runner.model_config.context_len,
            vocab_size=runner.model_config.vocab_size,
            **options,
        )

    def tokens(self, prompts: list[list[int]], **wishes: Any) -> list[list[int]]:
        """Serve these prompts together."""
        rids = [f"r{self._num_requests + index}" for index in range(len(prompts))]
        self._num_requests += len(prompts)
        for rid, ids in zip(rids, prompts):
            self.harness.generate(rid, ids, NEW_TOKENS, ignore_eos=True, **wishes)
        self.harness.run_until_idle()
        return [self.harness.tokens(rid) for rid in rids]


def several_rounds(runner: ModelRunner, **options: Any) -> list[list[int]]:
    """Cold prompts, hits, one alone and many together; the cache is empty again afterwards."""
    served = Served(runner, **options)
    first = [prompt(5 + 6 * i, i) for i in range(5)]
    answers = served.tokens(first)
    # A page and more of each is known by now; one token at least is left.
    longer = [ids + answer + prompt(3, 77) for ids, answer in zip(first, answers)]
    answers += served.tokens(first) + served.tokens(longer[:1]) + served.tokens(longer)
    answers += served.tokens([prompt(6, 40 + i) for i in range(MAX_REQUESTS + 2)])
    answers += served.tokens([prompt(60, 50), prompt(21, 60)])
    answers += served.tokens([prompt(150, 90)])
    assert served.harness.scheduler.flush_cache()
    return answers


def capture(runner: ModelRunner, **options: Any) -> PrefillGraphRunner:
    graphs = PrefillGraphRunner(runner, COUNTS, **options)
    runner.prefill_runner = graphs
    return graphs


def replays(graphs: PrefillGraphRunner) -> dict[int, int]:
    found = {
        size: step.graph.graphs[0].num_replays  # type: ignore[attr-defined]
        for size, step in graphs._graphs.items()
    }
    assert sum(found.values()) == graphs.num_steps
    return found


@pytest.mark.parametrize("chunk_size", [None, 16], ids=["whole", "chunked"])
def test_tokens_are_those_of_uncaptured_steps(runner: ModelRunner, chunk_size: int | None) -> None:
    """With and without overlap, both as in uncaptured steps without it."""
    expected = several_rounds(runner, overlap=False, chunk_size=chunk_size)
    graphs = capture(runner)
    before = dict.fromkeys(COUNTS, 0)
    for overlap in (True, False):
        assert several_rounds(runner, overlap=overlap, chunk_size=chunk_size) == expected
        total = replays(graphs)
        counts = {size: total[size] - before[size] for size in COUNTS}
        before = total
        if chunk_size is None:
            assert all(count > 0 for count in counts.values()), counts
        else:
            assert counts[8] > 0 and counts[32] > 10 and counts[96] == 0, counts
    # Padding lives in a row that stays as it is, and in the dummy slot.
    padding_row = runner.req_to_token_pool.padding_row
    assert not runner.req_to_token_pool.req_to_token[padding_row].any()


def test_the_last_layer_goes_on_with_one_row_a_request(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number in every captured step, and the tokens of a model that computes all rows."""
    with monkeypatch.context() as patch:
        patch.setattr(llama, "rows_to_keep", lambda batch, all_captured: None)
        expected = Served(runner, disable_cache=True).tokens([prompt(20), prompt(60, 50)])
    graphs = capture(runner)
    seen: list[int] = []
    mlp = runner.model.get_submodule(
        f"model.layers.{runner.model_config.num_hidden_layers - 1}.mlp"
    )
    mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert Served(runner, disable_cache=True).tokens([prompt(20), prompt(60, 50)]) == expected
    assert graphs.num_steps == 1 and replays(graphs)[96] == 1
    # A captured step reads as many rows as it may have requests; decode steps have two.
    assert seen.count(MAX_REQUESTS) == 1 and set(seen) <= {MAX_REQUESTS, 2}


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0.9, "sampling_seed": 5},
        {"frequency_penalty": 0.8},
        {"logit_bias": {"40": 9.0}},
    ],
    ids=["sampled", "penalties", "bias"],
)
def test_wishes_count_as_in_uncaptured_steps(tmp_path: Path, wishes: dict[str, Any]) -> None:
    runner = make_runner(tmp_path)
    prompts = [prompt(5 + 6 * i, i) for i in range(5)]
    expected = Served(runner, overlap=True, disable_cache=True).tokens(prompts, **wishes)
    graphs = capture(runner)
    assert Served(runner, overlap=True, disable_cache=True).tokens(prompts, **wishes) == expected
    assert graphs.num_steps > 0


def step_of(extend_lens: list[int], prefix_len: int = 0) -> PrefillStep:
    extend = np.array(extend_lens, dtype=np.int64)
    num_tokens = int(extend.sum())
    return PrefillStep(
        req_pool_indices=np.arange(len(extend)),
        seq_lens=extend + prefix_len,
        prefix_lens=np.full(len(extend), prefix_len),
        extend_lens=extend,
        input_ids=np.arange(num_tokens),
        positions=np.concatenate([prefix_len + np.arange(n) for n in extend_lens]),
        out_cache_loc=100 + np.arange(num_tokens),
    )


NULL, FULL, LAST = CaptureHiddenMode.NULL, CaptureHiddenMode.FULL, CaptureHiddenMode.LAST


def test_what_no_graph_holds_is_left_alone(tmp_path: Path) -> None:
    runner = make_runner(tmp_path)
    assert runner.stage_prefill(step_of([3]), NULL) is None
    graphs = capture(runner)
    assert runner.stage_prefill(step_of([96]), NULL) is not None
    assert runner.stage_prefill(step_of([97]), NULL) is None
    assert runner.stage_prefill(step_of([2] * MAX_REQUESTS), NULL) is not None
    assert runner.stage_prefill(step_of([2] * (MAX_REQUESTS + 1)), NULL) is None
    assert runner.stage_prefill(step_of([3]), FULL) is None
    assert graphs.num_steps == 0
    exact = capture(runner, pad=False, hidden_mode=FULL)
    assert exact.stage(step_of([31]), FULL) is None
    assert exact.stage(step_of([30, 2]), LAST) is None
    assert exact.stage(step_of([30, 2]), FULL) is not None


def test_a_step_comes_with_its_padding(tmp_path: Path) -> None:
    graphs = capture(make_runner(tmp_path))
    for lens, prefix_len in (([20, 20], 0), ([9, 5], 4)):  # the first must not be seen again
        staged = graphs.stage(step_of(lens, prefix_len=prefix_len), NULL)
        graphs._step(graphs._size_of[sum(lens)])
        graphs._exchange.end(MAX_REQUESTS)
    assert staged is not None
    assert staged.req_pool_indices.tolist() == [0, 1]
    assert staged.seq_lens.tolist() == [13, 9]
    assert staged.extend_prefix_lens.tolist() == [4, 4]
    assert staged.extend_seq_lens.tolist() == [9, 5]
    assert staged.input_ids.tolist() == list(range(14))
    assert staged.positions.tolist() == [*range(4, 13), *range(4, 9)]
    assert staged.out_cache_loc.tolist() == list(range(100, 114))
    batch = graphs._static_batch(32)
    padding = graphs._runner.req_to_token_pool.padding_row
    assert batch.extend_seq_lens is not None and batch.extend_prefix_lens is not None
    assert batch.logits_rows is not None
    assert batch.req_pool_indices.tolist() == [0, 1, *[padding] * 6]
    assert batch.extend_seq_lens.tolist() == [9, 5, 0, 0, 0, 0, 0, 18]
    assert batch.extend_prefix_lens.tolist() == [4, 4, 0, 0, 0, 0, 0, 0]
    assert batch.seq_lens.tolist() == [13, 9, 0, 0, 0, 0, 0, 18]
    assert batch.logits_rows.tolist() == [8, 13, 0, 0, 0, 0, 0]
    assert batch.input_ids[14:].tolist() == [0] * 18
    assert batch.positions[14:].tolist() == list(range(18))
    assert batch.out_cache_loc[14:].tolist() == [0] * 18


def test_input_logprobs_are_computed_uncaptured(tmp_path: Path) -> None:
    """Output logprobs come from captured steps, and are the same."""
    runner = make_runner(tmp_path)

    def logprobs(start: int) -> tuple[list[float | None], list[float]]:
        served = Served(runner, overlap=True, disable_cache=True)
        served.harness.generate(
            "r", prompt(9), 3, return_logprob=True, logprob_start_len=start, top_logprobs_num=2
        )
        served.harness.run_until_idle()
        parts = [output.logprobs for output in served.harness.outputs["r"]]
        return (
            [value for part in parts if part for value in part.input_val or []],
            [value for part in parts if part for value in part.output_val],
        )

    expected = [logprobs(start) for start in (2, -1)]
    graphs = capture(runner)
    before = graphs.num_steps
    inputs, outputs = logprobs(2)
    assert graphs.num_steps == before
    assert (inputs, outputs) == expected[0] and len(inputs) > 3
    inputs, outputs = logprobs(-1)
    assert graphs.num_steps == before + 1
    assert inputs == expected[1][0] and len(outputs) == 3
    assert outputs == pytest.approx(expected[1][1], abs=1e-5)


def test_requests_may_wish_for_hidden_states(tmp_path: Path) -> None:
    """Such steps are not captured."""
    runner = make_runner(tmp_path)
    graphs = capture(runner)
    served = Served(runner, disable_cache=True)
    served.harness.generate("r", prompt(9), 2, return_hidden_states=True)
    served.harness.run_until_idle()
    assert graphs.num_steps == 0
    served.tokens([prompt(9)])
    assert graphs.num_steps == 1


@pytest.mark.parametrize("max_tokens", [1, 20, 32, 100, 512, 700, 2048])
def test_the_ladder_ends_with_the_greatest_step(max_tokens: int) -> None:
    counts = capture_token_counts(max_tokens)
    assert counts == sorted(set(counts)) and counts[-1] == max_tokens
    for smaller, larger in zip(counts, counts[1:]):
        assert larger <= 2 * smaller and larger - smaller <= 128


def test_a_users_list_wins_within_the_limit() -> None:
    assert capture_token_counts(0) == capture_token_counts(0, [4]) == []
    assert capture_token_counts(64, [128, 8, 64, 8, 0]) == [8, 64]
    assert capture_token_counts(64, [128]) == [64]


def test_capturing_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tmp_path)
    runner.capture_prefill(NULL)
    assert runner.prefill_runner is None
    monkeypatch.setattr(CpuPlatform, "graph_capture_supported", True)
    runner.capture_prefill(NULL)
    assert runner.prefill_runner is None
    runner.config = dataclasses.replace(runner.config, prefill_graph_tokens=(8, 16))
    runner.capture_prefill(FULL)
    assert runner.prefill_runner is not None
    assert runner.prefill_runner.token_counts == [8, 16]
    assert runner.prefill_runner.hidden_mode is FULL


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3_next", {}, "recurrent states"),
        ("llama", {"attention_backend": "torch_reference"}, "plans prefill steps on the host"),
    ],
)
def test_models_that_are_not_covered_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    runner = make_runner(tmp_path, family, **changes, prefill_graph_tokens=(8,))
    if changes:
        monkeypatch.setattr(type(runner.attn_backend), "captures_prefill", False)
    monkeypatch.setattr(CpuPlatform, "graph_capture_supported", True)
    with caplog.at_level(logging.INFO):
        runner.capture_prefill(NULL)
    assert runner.prefill_runner is None
    assert any(reason in record.getMessage() for record in caplog.records)
