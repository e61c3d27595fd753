"""Captured prefill steps over the `triton` backend: padded against plain.

Without a GPU in Triton's interpreter, with a stand-in for graphs; with one the graphs are real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt import platforms
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import logits_processor
from sglang.srt.layers.attention.triton_ops import paged_attention as launcher
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor import prefill_graph_runner
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.srt.model_executor.prefill_graph_runner import (
    PrefillGraphRunner,
    PrefillStep,
    _GraphsOfLayers,
)
from sglang.srt.models import llama
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 4
COUNTS = [8, 24, 96]
SLOTS_EACH = 100
NULL, FULL = CaptureHiddenMode.NULL, CaptureHiddenMode.FULL


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)
    platforms.init_platform(DEVICE).configure_process(1)
    if DEVICE == "cpu":
        use_eager_graphs(monkeypatch)
        # As where reading the device is not free.
        monkeypatch.setattr(prefill_graph_runner, "lens_on_host", lambda lens: None)


def make_runner(folder: Path, family: str, num_layers: int = 2) -> ModelRunner:
    config = RunnerConfig(
        load_format="auto",
        attention_backend="triton",
        page_size=PAGE,
        mem_fraction_static=0.9 if DEVICE == "cuda" else None,
        max_total_tokens=512,
        max_running_requests=4,
        kv_cache_dtype="auto",
        random_seed=0,
        use_decode_runner=False,
    )
    model = make_tiny_checkpoint(folder, family, num_hidden_layers=num_layers)
    return ModelRunner(ModelConfig.from_path(str(model), dtype="float32", device=DEVICE), config)


def batch_of(
    runner: ModelRunner, step: PrefillStep, mode: CaptureHiddenMode = FULL
) -> ForwardBatch:
    """The step, uncaptured."""

    def tensor(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=runner.device)

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(step.seq_lens),
        input_ids=tensor(step.input_ids),
        positions=tensor(step.positions),
        req_pool_indices=tensor(step.req_pool_indices),
        seq_lens=tensor(step.seq_lens),
        seq_lens_cpu=step.seq_lens.tolist(),
        out_cache_loc=tensor(step.out_cache_loc),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        extend_seq_lens=tensor(step.extend_lens),
        extend_prefix_lens=tensor(step.prefix_lens),
        extend_seq_lens_cpu=step.extend_lens.tolist(),
        extend_prefix_lens_cpu=step.prefix_lens.tolist(),
        capture_hidden_mode=mode,
    )


def staged_batch(runner: ModelRunner, graphs: PrefillGraphRunner, step: PrefillStep) -> Any:
    staged = graphs.stage(step, graphs.hidden_mode)
    assert staged is not None
    batch = batch_of(runner, step, graphs.hidden_mode)
    batch.is_staged = True
    batch.input_ids, batch.out_cache_loc = staged.input_ids, staged.out_cache_loc
    batch.req_pool_indices, batch.seq_lens = staged.req_pool_indices, staged.seq_lens
    return batch


def steps_of(runner: ModelRunner) -> list[PrefillStep]:
    """Two prompts; then more of them, and a third one; a long one, whose keys are shared out.

    Slots are the requests' own pages.
    """
    lens = [
        [(0, 0, 9), (1, 0, 2)],
        [(0, 9, 3), (1, 2, 14), (2, 0, 5)],
        [(2, 5, 1)],
        [(3, 0, 90)],
        [(3, 90, 3), (2, 6, 2)],
    ]
    steps = []
    for requests in lens:
        rows, prefix, extend = (np.array(part, dtype=np.int64) for part in zip(*requests))
        positions = np.concatenate([p + np.arange(n) for _, p, n in requests])
        owners = np.repeat(rows, extend)
        slots = PAGE + owners * SLOTS_EACH + positions
        for row, start, count in requests:
            columns = PAGE + row * SLOTS_EACH + torch.arange(start, start + count)
            runner.req_to_token_pool.write(row, start, columns)
        steps.append(
            PrefillStep(
                req_pool_indices=rows,
                seq_lens=prefix + extend,
                prefix_lens=prefix,
                extend_lens=extend,
                input_ids=3 + (7 * positions + 31 * owners) % 150,
                positions=positions,
                out_cache_loc=slots,
            )
        )
    return steps


@torch.inference_mode()
def forward(runner: ModelRunner, batch: ForwardBatch) -> LogitsProcessorOutput:
    return runner.forward(batch)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_extend_equals_the_plain_one(tmp_path: Path, family: str) -> None:
    """Logits, states of all tokens and what is in the cache."""
    runner = make_runner(tmp_path, family)
    graphs = PrefillGraphRunner(runner, COUNTS, hidden_mode=FULL)
    found = []
    for is_captured in (False, True):
        parts = []
        runner.prefill_runner = graphs
        for step in steps_of(runner):
            if is_captured:
                output = forward(runner, staged_batch(runner, graphs, step))
                assert output.greedy_token_ids is not None
                expected_ids = output.next_token_logits.argmax(-1)
                assert torch.equal(output.greedy_token_ids, expected_ids)
                rows = torch.from_numpy(step.req_pool_indices).to(runner.device)
                assert torch.equal(runner.last_token_ids[rows], expected_ids)
            else:
                output = forward(runner, batch_of(runner, step))
            assert output.hidden_states is not None
            parts += [output.next_token_logits.clone(), output.hidden_states.clone()]
        for layer in range(2):
            # Without the dummy page.
            key, value = runner.token_to_kv_pool.get_kv_buffer(layer)
            parts += [key[PAGE:].clone(), value[PAGE:].clone()]
            key.zero_()
            value.zero_()
        found.append(parts)
    assert graphs.num_steps == 5
    for plain, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain, atol=1e-4, rtol=1e-4)
        assert plain.any()


def test_logits_are_the_same_where_only_their_rows_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last layer's attention; captured or not, on a device where so few are dropped."""
    monkeypatch.setattr(logits_processor, "MIN_DROPPED_ROWS", 1)
    runner = make_runner(tmp_path, "llama")
    steps = steps_of(runner)
    mlp = runner.model.get_submodule("model.layers.1.mlp")
    seen: list[int] = []
    mlp.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with monkeypatch.context() as patch:
        patch.setattr(llama, "rows_to_keep", lambda batch, all_captured: None)
        whole = [forward(runner, batch_of(runner, step, NULL)) for step in steps]
    assert seen == [len(step.input_ids) for step in steps]
    seen.clear()
    plain = [forward(runner, batch_of(runner, step, NULL)) for step in steps]
    assert seen == [len(step.seq_lens) for step in steps]
    seen.clear()
    graphs = runner.prefill_runner = PrefillGraphRunner(runner, COUNTS)
    captured = []
    for step in steps:
        output = forward(runner, staged_batch(runner, graphs, step))
        captured.append(output.next_token_logits.clone())
    assert graphs.num_steps == len(steps) and set(seen) == {prefill_graph_runner.MAX_REQUESTS}
    for wanted, uncaptured, replayed in zip(whole, plain, captured):
        logits = wanted.next_token_logits
        assert logits.any()
        torch.testing.assert_close(uncaptured.next_token_logits, logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(replayed, logits, atol=1e-4, rtol=1e-4)


class LateLoad:
    """KV of all layers on its way from the host, by a stream that takes its time for each."""

    def __init__(self, pool: KVCache, rows: slice) -> None:
        self._pool, self._rows = pool, rows
        self._kept = [buffer[:, rows].clone() for buffer in pool.buffers()]
        self._done = [torch.cuda.Event() for _ in range(pool.layer_num)]
        self._stream = torch.cuda.Stream()
        self.is_waited_for = True

    def begin(self) -> None:
        for buffer in self._pool.buffers():
            buffer[:, self._rows] = 0
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layer, done in enumerate(self._done):
                torch.cuda._sleep(10_000_000)  # cycles, some 5 ms
                for buffer, kept in zip(self._pool.buffers(), self._kept, strict=True):
                    buffer[layer, self._rows] = kept[layer]
                done.record()

    def wait_until(self, layer_idx: int) -> None:
        if self.is_waited_for:
            torch.cuda.current_stream().wait_event(self._done[layer_idx])

    def is_over(self) -> bool:
        return self._done[-1].query()


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_step_waits_for_the_layers_of_each_of_its_graphs(tmp_path: Path) -> None:
    """And for no others: it has begun when the last layer is still on its way."""
    runner = make_runner(tmp_path, "llama", num_layers=10)
    graphs = PrefillGraphRunner(runner, COUNTS, hidden_mode=FULL)
    pieces = graphs._graphs[8].graph
    assert isinstance(pieces, _GraphsOfLayers)
    assert pieces.last_layers == [3, 7, 9] and len(pieces.graphs) == 3
    runner.prefill_runner = graphs
    steps = steps_of(runner)
    forward(runner, batch_of(runner, steps[0]))
    load = LateLoad(runner.token_to_kv_pool, slice(PAGE, PAGE + 4 * SLOTS_EACH))
    expected = forward(runner, batch_of(runner, steps[1])).next_token_logits.clone()
    runner.token_to_kv_pool.register_layer_transfer_counter(load)
    for is_waited_for in (True, False):
        load.is_waited_for = is_waited_for
        torch.cuda.synchronize()
        load.begin()
        output = forward(runner, staged_batch(runner, graphs, steps[1]))
        assert not load.is_over(), "nobody waits on the host"
        logits = output.next_token_logits.clone()
        torch.cuda.current_stream().synchronize()
        is_equal = torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)
        assert is_equal == load.is_over() == is_waited_for
    torch.cuda.synchronize()


def test_one_long_request_is_divided_as_without_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into blocks of as many tokens: each block reads all keys before it."""
    chosen: list[launcher.LaunchConfig] = []
    choose = launcher.choose_config

    def noting(inputs: launcher.PagedAttentionInputs) -> launcher.LaunchConfig:
        chosen.append(choose(inputs))
        return chosen[-1]

    monkeypatch.setattr(launcher, "choose_config", noting)
    runner = make_runner(tmp_path, "llama")
    graphs = PrefillGraphRunner(runner, [64])
    row, slots = np.zeros(1, dtype=np.int64), np.arange(PAGE, PAGE + 64)
    runner.req_to_token_pool.write(0, 0, torch.from_numpy(slots))
    step = PrefillStep(
        req_pool_indices=row,
        seq_lens=row + 64,
        prefix_lens=row,
        extend_lens=row + 64,
        input_ids=slots,
        positions=slots - PAGE,
        out_cache_loc=slots,
    )
    chosen.clear()
    forward(runner, batch_of(runner, step))
    plain = chosen[-1]
    assert graphs.stage(step, CaptureHiddenMode.NULL) is not None
    chosen.clear()
    forward(runner, graphs._static_batch(64))
    assert set(chosen) == {plain}
    assert plain.block_m > launcher.MIN_ROWS


@pytest.mark.parametrize("num_tokens", [8, 40, 200])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_requests_that_are_none_do_not_change_the_division(
    num_tokens: int, num_kv_heads: int
) -> None:
    def config(batch_size: int, likely_requests: int | None) -> launcher.LaunchConfig:
        lens = torch.zeros(batch_size, dtype=torch.int64, device=DEVICE)
        keys = torch.zeros((1, num_kv_heads, 64), device=DEVICE)
        return launcher.choose_config(
            launcher.PagedAttentionInputs(
                queries=torch.zeros((num_tokens, num_kv_heads, 64), device=DEVICE).half(),
                keys=keys,
                values=keys,
                table=torch.zeros((1, 1), dtype=torch.int32, device=DEVICE),
                table_rows=lens,
                seq_lens=lens,
                query_lens=lens,
                tree_mask=None,
                scaling=1.0,
                window=None,
                likely_requests=likely_requests,
            )
        )

    assert config(8, 1) == config(1, None)


def test_served_tokens_are_those_of_uncaptured_steps(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "llama")
    prompts = [[3 + (5 * i + 11 * j) % 150 for j in range(3 + 4 * i)] for i in range(3)]

    def tokens() -> list[list[int]]:
        harness = SchedulerHarness(
            worker=TpModelWorker(runner),
            page_size=PAGE,
            max_requests=4,
            context_len=runner.model_config.context_len,
            vocab_size=runner.model_config.vocab_size,
            overlap=True,
        )
        for again in ("", "again"):
            for index, ids in enumerate(prompts):
                harness.generate(f"r{index}{again}", ids, 3, ignore_eos=True)
            harness.run_until_idle()
        assert harness.scheduler.flush_cache()
        return [harness.tokens(rid) for rid in sorted(harness.outputs)]

    expected = tokens()
    runner.prefill_runner = PrefillGraphRunner(runner, COUNTS)
    assert tokens() == expected
    assert runner.prefill_runner.num_steps == 2
