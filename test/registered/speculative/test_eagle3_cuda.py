"""Draft models and captured features on a GPU: as on the CPU, and the same inside a CUDA graph.

Tiny models with head sizes that kernels like, so that it takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.configs.draft_config import DRAFT_ARCHITECTURES, read_draft_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import use_attention_backend
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TOKENS = [(7 * i + 3) % 250 for i in range(8)]
HEAD_DIM = 16
# Of the targets, where drafts are layers of their own family.
FAMILIES = {"DeepseekV3ForCausalLMNextN": "deepseek_v3", "MiMoMTP": "mimo"}


@pytest.fixture(autouse=True)
def _platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)


def make_pair(
    folder: Path, architecture: str, device: str
) -> tuple[RecordingRunner, RecordingRunner]:
    """Target and draft in float32 on a device; both kinds in one process, one after the other."""
    platforms._current = None
    platforms.init_platform(device).configure_process(None)
    family = FAMILIES.get(architecture, "llama")
    sizes: dict[str, Any] = {} if family == "deepseek_v3" else {"head_dim": HEAD_DIM}
    target_folder = make_tiny_checkpoint(folder / "target", family, num_hidden_layers=6, **sizes)
    draft_folder = make_tiny_draft(folder / "draft", architecture, head_dim=HEAD_DIM)
    config = ModelConfig.from_path(str(target_folder), dtype="float32")
    target = load_model(config, device=device, show_progress=False)
    draft = load_model(
        read_draft_config(str(draft_folder), config), device=device, show_progress=False
    )
    assert isinstance(draft, EagleDraftModel)
    layers = draft.draft_config.layers_to_capture(config.num_hidden_layers)
    if layers is not None:
        target.set_eagle3_layers_to_capture(layers)
    draft.set_embed_and_head(*target.get_embed_and_head())
    backend = platforms.current_platform().default_attention_backend
    return RecordingRunner(target, backend), RecordingRunner(draft, backend)


class RecordingRunner(MiniRunner):
    """Keeps its batches, so that they can be run again."""

    def __init__(self, model: LanguageModel, backend: str) -> None:
        super().__init__(model, backend=backend)
        self.batches: list[ForwardBatch] = []

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        self.batches.append(batch)
        return super().run(batch)


@dataclass(frozen=True)
class Steps:
    """Verification, catching up and one draft step."""

    outputs: list[LogitsProcessorOutput]
    batches: list[tuple[RecordingRunner, ForwardBatch]]


def run_steps(folder: Path, architecture: str, device: str) -> Steps:
    target, draft = make_pair(folder, architecture, device)
    full, last = CaptureHiddenMode.FULL, CaptureHiddenMode.LAST
    row = target.new_request()
    target.extend([row], [TOKENS[:5]])
    verified = target.extend([row], [TOKENS[5:]], capture=full, mode=ForwardMode.TARGET_VERIFY)
    assert verified.hidden_states is not None
    row = draft.new_request()
    caught_up = draft.extend(
        [row],
        [TOKENS[5:]],
        capture=last,
        mode=ForwardMode.DRAFT_EXTEND,
        hidden_states=verified.hidden_states,
        logits_rows=[1],
    )
    draft.rewind(row, 2)
    stepped = draft.decode([row], [9], last, hidden_states=caught_up.hidden_states)
    return Steps(
        [verified, caught_up, stepped],
        [(target, target.batches[-1]), *((draft, batch) for batch in draft.batches)],
    )


def assert_same(got: LogitsProcessorOutput, expected: LogitsProcessorOutput) -> None:
    assert got.hidden_states is not None and expected.hidden_states is not None
    for ours, theirs in (
        (got.next_token_logits, expected.next_token_logits),
        (got.hidden_states, expected.hidden_states),
    ):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("architecture", DRAFT_ARCHITECTURES)
def test_gpu_computes_what_the_cpu_does(tmp_path: Path, architecture: str) -> None:
    on_cpu = run_steps(tmp_path, architecture, "cpu")
    on_gpu = run_steps(tmp_path, architecture, "cuda")
    for got, expected in zip(on_gpu.outputs, on_cpu.outputs, strict=True):
        assert_same(got, expected)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", DRAFT_ARCHITECTURES)
def test_every_step_can_be_captured_and_replayed(tmp_path: Path, architecture: str) -> None:
    steps = run_steps(tmp_path, architecture, "cuda")
    for (runner, batch), expected in zip(steps.batches, steps.outputs, strict=True):
        runner.backend.init_forward_metadata(batch)
        states = batch.input_hidden_states
        graph = torch.cuda.CUDAGraph()
        with use_attention_backend(runner.backend), torch.cuda.graph(graph):
            output = runner.model(batch.input_ids, batch.positions, batch)
        for part in (output.next_token_logits, output.hidden_states):
            part.zero_()
        before = torch.empty(0) if states is None else states.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(output, expected)
        # A graph's inputs are static tensors: it must not write to them.
        assert states is None or torch.equal(states, before)
