"""Kernels of linear attention against the reference; interpreted where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.mamba import gated_delta_net, step_states
from sglang.srt.layers.mamba.ops import StateMove, TorchLinearAttention
from sglang.srt.layers.mamba.triton_ops.linear_attention import TritonLinearAttention
from sglang.srt.model_loader.loader import load_model
from sglang.test import linear_attention_cases as cases
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.linear_attention_reference import HeadSizes, make_pool, make_step, prefill_part

register_cpu_ci(est_time=40, suite="kernels")

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the cases are made for the interpreter"
)

OPS = TritonLinearAttention()
SIZES = [HeadSizes(), HeadSizes(key_heads=1, value_heads=2, key_dim=17, value_dim=36, taps=3)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("same_keys", [False, True])
def test_scan_equals_token_by_token(sizes: HeadSizes, same_keys: bool) -> None:
    cases.check_delta_prefill(OPS, sizes, same_keys)


def test_shorter_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # The size on a GPU.
    monkeypatch.setitem(step_states._CHUNK_SIZES, "cpu", step_states._CHUNK_SIZES["cuda"])
    cases.check_delta_prefill(OPS, SIZES[0], same_keys=False)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_step_equals_token_by_token(sizes: HeadSizes) -> None:
    cases.check_delta_step(OPS, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_convolution_equals_token_by_token(sizes: HeadSizes) -> None:
    cases.check_conv(OPS, sizes)


def test_gated_norm_equals_reference() -> None:
    cases.check_gated_norm(OPS)


def test_views_of_one_tensor_are_read_where_they_are() -> None:
    sizes = HeadSizes()
    outs = []
    for ops in (OPS, TorchLinearAttention()):
        pool = make_pool(sizes)
        step = make_step(pool, cases.ROWS, cases.PREFIXES, cases.LENS, cases.PLAN)
        inputs = cases.strided_inputs(sizes, sum(cases.LENS))
        states = step.pool.temporal_state(0)
        outs.append(ops.delta_prefill(inputs, states, step.slots, prefill_part(step)))
        few = cases.strided_inputs(sizes, len(cases.ROWS))
        outs.append(ops.delta_step(few, StateMove.in_place(states, step.slots)))
    torch.testing.assert_close(outs[0], outs[2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[1], outs[3], atol=1e-5, rtol=1e-5)


def test_model_on_kernels_alone_equals_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path, "qwen3_next")))
    prompts = [[(7 * i + 3) % 250 for i in range(37)], [5, 6]]
    logits = []
    for backend in ("torch_reference", "triton"):
        if backend == "triton":
            monkeypatch.setattr(gated_delta_net, "select_linear_attention_ops", lambda _: OPS)
        runner = MiniRunner(load_model(config, show_progress=False), page_size=4, backend=backend)
        rows = [runner.new_request() for _ in prompts]
        steps = [runner.extend(rows, prompts), *(runner.decode(rows, [t, 9]) for t in (3, 200))]
        logits.append(torch.stack([step.next_token_logits for step in steps]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
