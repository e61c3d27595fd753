"""The engine on a GPU: captured decode and prefill steps, NCCL inside them, 8-bit caches, warm-up.

Everything here needs a CUDA device; tiny models, so that it takes seconds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang.srt import platforms
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.parallel_state import TPGroup
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.graph_capture import GraphMemory, capture
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.srt.utils.network import get_free_port
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[3 + (i * 11 + j) % 150 for j in range(4 + 5 * i)] for i in range(5)]
NUM_TOKENS = 24


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)


def make_runner(path: Path, dtype: str, device: str = "cuda", **changes: Any) -> ModelRunner:
    # Both kinds in one process, one after the other.
    platforms._current = None
    platforms.init_platform(device).configure_process(None)
    config = RunnerConfig(
        load_format="auto",
        attention_backend=platforms.current_platform().default_attention_backend,
        page_size=4,
        mem_fraction_static=0.9,
        max_total_tokens=4096,
        max_running_requests=8,
        kv_cache_dtype="auto",
        random_seed=0,
    )
    model_config = ModelConfig.from_path(str(path), dtype=dtype, device=device)
    return ModelRunner(model_config, dataclasses.replace(config, **changes))


def tokens_of(
    runner: ModelRunner, prompts: list[list[int]] | None = None, **options: Any
) -> list[list[int]]:
    """Served together, then flushed. `options`: of the harness."""
    prompts = PROMPTS if prompts is None else prompts
    harness = make_harness(runner, **options)
    for index, prompt in enumerate(prompts):
        harness.generate(f"r{index}", prompt, NUM_TOKENS, ignore_eos=True)
    harness.run_until_idle()
    assert harness.scheduler.flush_cache()
    return [harness.tokens(f"r{index}") for index in range(len(prompts))]


def make_harness(runner: ModelRunner, **options: Any) -> SchedulerHarness:
    return SchedulerHarness(
        worker=TpModelWorker(runner),
        page_size=runner.config.page_size,
        max_requests=8,
        context_len=runner.model_config.context_len,
        vocab_size=runner.model_config.vocab_size,
        overlap=True,
        **options,
    )


def graphs_of(runner: ModelRunner) -> CudaGraphRunner:
    assert isinstance(runner.decode_runner, CudaGraphRunner)
    return runner.decode_runner


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_captured_steps_give_the_tokens_of_the_cpu(tmp_path: Path, family: str) -> None:
    path = make_tiny_checkpoint(tmp_path, family)
    runner = make_runner(path, "float32")
    on_cuda = tokens_of(runner)
    assert graphs_of(runner).num_steps >= NUM_TOKENS - 1
    assert on_cuda == tokens_of(make_runner(path, "float32", "cpu"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_captured_steps_in_half_precision(tmp_path: Path, family: str) -> None:
    """Against the same steps uncaptured: at least half of the answers to their ends."""
    path = make_tiny_checkpoint(tmp_path, family)
    captured = tokens_of(make_runner(path, "float16"))
    plain = tokens_of(make_runner(path, "float16", disable_cuda_graph=True))
    assert [answer[0] for answer in captured] == [answer[0] for answer in plain]
    assert 2 * sum(a == b for a, b in zip(captured, plain)) >= len(PROMPTS)


def test_without_padding_other_sizes_are_not_replayed(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    runner = make_runner(path, "float16", cuda_graph_bs=[4], disable_cuda_graph_padding=True)
    tokens_of(runner, PROMPTS[:3])
    assert graphs_of(runner).num_steps == 0
    tokens_of(runner, PROMPTS[:4])
    assert graphs_of(runner).num_steps > 0


def turns_of(runner: ModelRunner, **options: Any) -> list[list[int]]:
    """Cold prompts, the same again, and the next turn of each alone: hits with little left."""
    harness = make_harness(runner, **options)
    for again in ("", "-again"):
        for index, prompt in enumerate(PROMPTS):
            harness.generate(f"r{index}{again}", prompt, NUM_TOKENS, ignore_eos=True)
        harness.run_until_idle()
    for index, prompt in enumerate(PROMPTS):
        turn = prompt + harness.tokens(f"r{index}") + prompt[: 3 + index]
        harness.generate(f"r{index}-turn", turn, NUM_TOKENS, ignore_eos=True)
        harness.run_until_idle()
    assert harness.scheduler.flush_cache()
    return [harness.tokens(rid) for rid in sorted(harness.outputs)]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 8}], ids=["whole", "chunked"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3"])
def test_captured_prefill_gives_the_tokens_of_uncaptured_steps(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path = make_tiny_checkpoint(tmp_path, family)
    expected = turns_of(make_runner(path, "float32"), **options)
    runner = make_runner(path, "float32", prefill_graph_tokens=(8, 32, 96))
    assert runner.prefill_runner is not None
    steps_before = runner.prefill_runner.num_steps
    assert steps_before == 0
    assert turns_of(runner, **options) == expected
    # Of cold prompts one step, of hits one, of each turn one; more in chunks. And decode as ever.
    assert runner.prefill_runner.num_steps >= 2 + len(PROMPTS)
    assert graphs_of(runner).num_steps >= 3 * (NUM_TOKENS - 1)


def test_captured_prefill_in_half_precision(tmp_path: Path) -> None:
    """Against the same steps uncaptured: at least half of the answers to their ends."""
    path = make_tiny_checkpoint(tmp_path)
    runner = make_runner(path, "float16", prefill_graph_tokens=(32, 96))
    captured, plain = turns_of(runner), turns_of(make_runner(path, "float16"))
    assert runner.prefill_runner is not None and runner.prefill_runner.num_steps > 0
    assert 2 * sum(a == b for a, b in zip(captured, plain)) >= len(plain)


def test_what_is_not_captured_runs_uncaptured(tmp_path: Path) -> None:
    """Too many requests, too many tokens, and models whose steps cannot be captured."""
    path = make_tiny_checkpoint(tmp_path / "small")
    runner = make_runner(path, "float32", prefill_graph_tokens=(16,))
    plain = make_runner(path, "float32")
    prompts = [[5, 6 + index] for index in range(8)]
    for chosen, count in ((prompts, 0), ([PROMPTS[3] * 2], 0), ([PROMPTS[0]], 1)):
        assert runner.prefill_runner is not None
        before = runner.prefill_runner.num_steps
        assert tokens_of(runner, chosen) == tokens_of(plain, chosen)
        assert runner.prefill_runner.num_steps == before + count
    for family in ("qwen3_next", "deepseek_v3"):
        folder = make_tiny_checkpoint(tmp_path / family, family)
        assert make_runner(folder, "float32", prefill_graph_tokens=(16,)).prefill_runner is None


def test_prefill_graphs_without_decode_graphs(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path)
    alone: dict[str, Any] = {"disable_cuda_graph": True, "prefill_graph_tokens": (16, 96)}
    runner = make_runner(path, "float32", **alone)
    assert runner.decode_runner is None and runner.prefill_runner is not None
    assert tokens_of(runner) == tokens_of(make_runner(path, "float32"))
    assert runner.prefill_runner.num_steps == 1
    assert runner.graph_bytes > 0


def test_captured_steps_use_the_memory_of_larger_ones() -> None:
    memory, num_bytes = GraphMemory(torch.device("cuda", 0)), 64 << 20

    def step(size: int) -> torch.Tensor:
        scratch = torch.full((size,), 3, dtype=torch.uint8, device="cuda")
        return scratch[:2] + 1

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    found = [capture(functools.partial(step, num_bytes // n), memory) for n in range(1, 9)]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 1.5 * num_bytes
    for graph, output in found:
        graph.replay()
        assert output.tolist() == [4, 4]


def test_warm_up_leaves_no_trace(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, max_position_embeddings=4096)
    runner = make_runner(path, "float16", warm_up_tokens=3000)
    allocator = runner.token_to_kv_pool_allocator
    assert allocator.available_size() == runner.max_total_num_tokens
    assert not runner.req_to_token_pool.req_to_token.any()
    assert not runner.token_to_kv_pool.get_key_buffer(0)[runner.config.page_size :].any()
    assert tokens_of(runner) == tokens_of(make_runner(path, "float16"))


@torch.inference_mode()
def last_logits(runner: ModelRunner, prompt: list[int], prefix_len: int) -> torch.Tensor:
    """Logits after the prompt, its first tokens read back from the cache: float32 [V]."""
    slots = torch.arange(4, 4 + len(prompt))
    runner.req_to_token_pool.write(1, 0, slots)
    for start, end in ((0, prefix_len), (prefix_len, len(prompt))):
        device = runner.device

        def tensor(values: list[int], device: torch.device = device) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        output = runner.forward(
            ForwardBatch(
                forward_mode=ForwardMode.EXTEND,
                batch_size=1,
                input_ids=tensor(prompt[start:end]),
                positions=tensor(list(range(start, end))),
                req_pool_indices=tensor([1]),
                seq_lens=tensor([end]),
                seq_lens_cpu=[end],
                out_cache_loc=slots[start:end].to(device),
                req_to_token_pool=runner.req_to_token_pool,
                token_to_kv_pool=runner.token_to_kv_pool,
                extend_seq_lens=tensor([end - start]),
                extend_prefix_lens=tensor([start]),
                extend_seq_lens_cpu=[end - start],
                extend_prefix_lens_cpu=[start],
            )
        )
    return output.next_token_logits[0].float().cpu()


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [("fp8_e4m3", torch.float8_e4m3fn, 0.1), ("fp8_e5m2", torch.float8_e5m2, 0.2)],
)
def test_an_8_bit_cache_rounds_and_halves_the_memory(
    tmp_path: Path, name: str, dtype: torch.dtype, most: float
) -> None:
    path = make_tiny_checkpoint(tmp_path)
    exact, narrow = (make_runner(path, "bfloat16", kv_cache_dtype=d) for d in ("auto", name))
    assert narrow.token_to_kv_pool.dtype == dtype
    assert 2 * narrow.kv_cache_bytes == exact.kv_cache_bytes
    expected = last_logits(exact, PROMPTS[4], 20)
    got = last_logits(narrow, PROMPTS[4], 20)
    error = float((got - expected).norm() / expected.norm())
    # Something must have been rounded, by the steps of the type.
    assert 1e-4 < error < most
    tokens = tokens_of(narrow)
    assert graphs_of(narrow).num_steps > 0
    assert [len(answer) for answer in tokens] == [NUM_TOKENS] * len(PROMPTS)


@pytest.fixture
def nccl_group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only rank of a real NCCL group."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{get_free_port()}",
        world_size=1,
        rank=0,
        device_id=torch.device("cuda", 0),
    )
    group = TPGroup(size=1, rank=0, device_group=dist.group.WORLD)
    monkeypatch.setattr(parallel_state, "_tp_group", group)
    yield
    monkeypatch.undo()
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_collectives_are_captured_with_the_step(
    tmp_path: Path,
    family: str,
    nccl_group_of_one: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All-reduces of the layers and the gathered logits, by NCCL, in replayed steps."""
    path = make_tiny_checkpoint(tmp_path, family)
    calls = {"all_reduce": 0, "all_gather": 0}
    captured = dict(calls)

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            captured[name] += torch.cuda.is_current_stream_capturing()
            return original(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(dist, name, counted(name))
    runner = make_runner(path, "float32", cuda_graph_bs=[5], prefill_graph_tokens=(96,))
    num_layers = runner.model_config.num_hidden_layers
    # Of a decode step and of a prefill step.
    assert captured == {"all_reduce": 4 * num_layers, "all_gather": 2}
    before = dict(calls)
    tokens = tokens_of(runner)
    assert graphs_of(runner).num_steps > 0
    assert runner.prefill_runner is not None and runner.prefill_runner.num_steps > 0
    # Replays did not call them, they hold them.
    assert calls == before
    monkeypatch.setattr(parallel_state, "_tp_group", TPGroup(size=1, rank=0))
    assert tokens == tokens_of(make_runner(path, "float32"))


def test_a_captured_all_reduce_sees_new_values(nccl_group_of_one: None) -> None:
    values = torch.ones(1000, device="cuda")
    dist.all_reduce(values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = values * 2
        dist.all_reduce(total)
        result = total + 1
    for number in range(3):
        values.fill_(number)
        graph.replay()
        assert result.eq(2 * number + 1).all()
