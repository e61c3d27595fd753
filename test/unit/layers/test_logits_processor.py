"""Which rows get logits, and prompt logprobs in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import logits_processor
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardMode,
    LogprobRequest,
)
from sglang.srt.model_loader.loader import load_model
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PROMPTS = [[(7 * i + 3) % 250 for i in range(n)] for n in (6, 11, 4)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> MiniRunner:
    folder: Path = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    model = load_model(ModelConfig.from_path(str(folder)), show_progress=False)
    return MiniRunner(model, max_requests=64)


def extend(runner: MiniRunner, prompts: list[list[int]], **kwargs: Any) -> LogitsProcessorOutput:
    rows = [runner.new_request() for _ in prompts]
    return runner.extend(rows, prompts, **kwargs)


def row_logprobs(runner: MiniRunner, prompt: list[int]) -> torch.Tensor:
    """float32 [len(prompt), V], from the verify mode, which gives logits of every row."""
    output = extend(runner, [prompt], mode=ForwardMode.TARGET_VERIFY)
    return torch.log_softmax(output.next_token_logits, dim=-1)


def test_extend_takes_last_rows_and_verify_takes_all(runner: MiniRunner) -> None:
    last = extend(runner, PROMPTS).next_token_logits
    assert last.shape == (3, 263) and last.dtype == torch.float32
    rows = extend(runner, PROMPTS, mode=ForwardMode.TARGET_VERIFY).next_token_logits
    assert rows.shape == (21, 263)
    torch.testing.assert_close(last, rows[[5, 16, 20]], atol=1e-5, rtol=0)


@pytest.mark.parametrize("block_rows", [512, 3])
def test_input_logprobs_of_every_kind(
    runner: MiniRunner, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(logits_processor, "LOGPROB_BLOCK_ROWS", block_rows)
    wish = LogprobRequest(
        enabled=[True, False, True],
        top_nums=[2, 0, 0],
        token_ids=[None, None, [5, 200]],
        start_lens=[1, 11, 0],
        # The first is a middle chunk (its next prompt token, 9, is known), the last ends a prompt.
        target_ids=[[*PROMPTS[0][2:], 9], [], [*PROMPTS[2][1:], -1]],
    )
    output = extend(runner, PROMPTS, logprobs=wish)
    tokens, top_val = output.input_token_logprobs, output.input_top_logprobs_val
    top_idx, ids_val = output.input_top_logprobs_idx, output.input_token_ids_logprobs_val
    assert tokens and top_val and top_idx and ids_val
    first, last = row_logprobs(runner, PROMPTS[0])[1:], row_logprobs(runner, PROMPTS[2])[:3]
    wanted = first.gather(1, torch.tensor(wish.target_ids[0])[:, None])[:, 0]
    torch.testing.assert_close(tokens[0], wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(top_val[0], first.topk(2).values, atol=1e-5, rtol=0)
    assert top_idx[0] is not None and torch.equal(top_idx[0], first.topk(2).indices)
    wanted = last.gather(1, torch.tensor(PROMPTS[2][1:])[:, None])[:, 0]
    torch.testing.assert_close(tokens[2], wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(ids_val[2], last[:, [5, 200]], atol=1e-5, rtol=0)
    assert output.input_token_ids_logprobs_idx == [None, None, [5, 200]]
    assert tokens[1] is None and top_val[1] is None and top_val[2] is None and ids_val[0] is None


def test_logits_are_the_same_with_and_without_logprobs(runner: MiniRunner) -> None:
    wish = LogprobRequest(
        enabled=[False] * 3, top_nums=[0] * 3, token_ids=[None] * 3, start_lens=[6, 11, 4],
        target_ids=[[], [], []],
    )  # fmt: skip
    with_wish = extend(runner, PROMPTS, logprobs=wish)
    assert with_wish.input_token_logprobs == [None] * 3
    assert torch.equal(with_wish.next_token_logits, extend(runner, PROMPTS).next_token_logits)


def test_hidden_states_are_kept_as_asked(runner: MiniRunner) -> None:
    assert extend(runner, PROMPTS).hidden_states is None
    full = extend(runner, PROMPTS, capture=CaptureHiddenMode.FULL).hidden_states
    last = extend(runner, PROMPTS, capture=CaptureHiddenMode.LAST).hidden_states
    assert full is not None and last is not None
    assert full.shape == (21, 60)
    torch.testing.assert_close(last, full[[5, 16, 20]], atol=1e-6, rtol=0)
