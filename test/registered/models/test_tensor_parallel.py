"""Two gloo processes compute what one process computes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.communication import all_reduce_min, barrier, broadcast_bytes
from sglang.srt.distributed.parallel_state import (
    destroy_distributed,
    get_tp_group,
    init_distributed,
    tp_cpu_group,
)
from sglang.srt.model_executor.forward_batch_info import LogprobRequest
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PROMPT = [(7 * i + 3) % 250 for i in range(21)]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gemma3": ("gemma3", {}),
    "qwen3_next": ("qwen3_next", {}),
    "deepseek_v2_plain_q": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", {}),
}


def run_model(folder: str, load_format: str) -> dict[str, Any]:
    """Logits of a prompt, its logprobs, and a greedy continuation."""
    model = load_model(ModelConfig.from_path(folder), load_format, show_progress=False)
    runner = MiniRunner(model, page_size=4)
    wish = LogprobRequest(
        enabled=[True],
        top_nums=[2],
        token_ids=[[1, 262]],
        start_lens=[0],
        target_ids=[[*PROMPT[1:], -1]],
    )
    output = runner.extend([runner.new_request()], [PROMPT], logprobs=wish)
    assert output.input_token_logprobs is not None and output.input_token_ids_logprobs_val
    (rows,) = runner.kv_pool.buffers()[:1]
    return {
        "fingerprint": WeightsFingerprint(tp_cpu_group(), portable=True).full(model),
        "rows": rows[:, 1:].clone(),
        "logits": output.next_token_logits,
        "logprobs": output.input_token_logprobs[0],
        "ids": output.input_token_ids_logprobs_val[0],
        "greedy": runner.greedy([PROMPT, PROMPT[:4]], 16),
        "shard": model.get_weights_by_name("model.layers.1.self_attn.k_proj.weight", 3),
    }


def rank_main(rank: int, folders: list[tuple[str, str]], work: str) -> None:
    """Body of one rank: run every case and save what it computed."""
    torch.set_num_threads(1)
    init_distributed(2, rank, f"file://{work}/init", "gloo", timeout_s=60)
    group = tp_cpu_group()
    assert broadcast_bytes(b"from zero" if rank == 0 else b"", 0, group) == b"from zero"
    assert broadcast_bytes(b"", 1, group) == b""
    lowest = all_reduce_min(torch.tensor([rank, 5 - rank]), group)
    assert lowest.tolist() == [0, 4]
    results = [run_model(folder, load_format) for folder, load_format in folders]
    torch.save(results, f"{work}/out.{rank}")
    barrier(group)
    destroy_distributed()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    made = []
    for name, (family, overrides) in CASES.items():
        folder = make_tiny_checkpoint(tmp_path_factory.mktemp(name), family, **overrides)
        made.append((str(folder), "auto"))
    return [*made, (made[0][0], "dummy")]


@pytest.fixture(scope="module")
def rank_results(
    folders: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[dict[str, Any]]]:
    work = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), json.dumps(folders), str(work)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    return [torch.load(work / f"out.{rank}", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("index", range(len(CASES) + 1), ids=[*CASES, "dummy_weights"])
def test_two_ranks_equal_one(
    folders: list[tuple[str, str]], rank_results: list[list[dict[str, Any]]], index: int
) -> None:
    expected = run_model(*folders[index])
    for results in rank_results:
        got = results[index]
        for name in ("logits", "logprobs", "ids"):
            torch.testing.assert_close(got[name], expected[name], atol=1e-4, rtol=0)
        assert got["greedy"] == expected["greedy"]


@pytest.mark.parametrize("family", ["deepseek_v2_plain_q", "deepseek_v3"])
def test_latent_rows_and_their_identity_do_not_depend_on_the_ranks(
    folders: list[tuple[str, str]], rank_results: list[list[dict[str, Any]]], family: str
) -> None:
    index = list(CASES).index(family)
    alone = run_model(*folders[index])
    first, second = (results[index] for results in rank_results)
    assert torch.equal(first["rows"], second["rows"])
    torch.testing.assert_close(first["rows"], alone["rows"], atol=1e-4, rtol=0)
    assert first["fingerprint"] == second["fingerprint"] == alone["fingerprint"]


def test_weights_are_split_not_copied(rank_results: list[list[dict[str, Any]]]) -> None:
    first, second = rank_results[0][0]["shard"], rank_results[1][0]["shard"]
    assert first != second
    one_head = list(CASES).index("llama_one_kv_head")
    assert rank_results[0][one_head]["shard"] == rank_results[1][one_head]["shard"]


def test_one_rank_has_no_process_group() -> None:
    assert init_distributed(1, 0).cpu_group is None
    assert get_tp_group().size == 1
    assert broadcast_bytes(b"x", 0, tp_cpu_group()) == b"x"
    assert not torch.distributed.is_initialized()


def test_bad_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2"):
        init_distributed(2, 2)


def test_sizes_that_do_not_divide_are_refused_by_name(tmp_path: Path) -> None:
    config = ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path)))
    with pytest.raises(ValueError, match="6 attention heads"):
        config.get_num_attention_heads(4)
    assert config.get_num_kv_heads(4) == 1
    with pytest.raises(ValueError, match="2 KV heads"):
        config.get_num_kv_heads(3)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
