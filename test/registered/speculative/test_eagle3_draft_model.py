"""The shipped draft on the server's model classes against the loop written out in plain torch.

Real target and draft, no server: the same chain decoding runs once on transformers and plain torch,
once on our models over a paged pool. Tokens, proposals and accept lengths must be the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.draft_config import read_draft_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.eagle3_reference import (
    DraftStep,
    ReferenceDraft,
    ReferenceTarget,
    TargetStep,
    chat_prompt,
    repeated_prompt,
    run_chain,
)
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.test_utils import SMALL_EAGLE3_DRAFT

register_cpu_ci(est_time=45, suite="speculative")

NUM_STEPS = 7
FOX = " The quick brown fox jumps over the lazy dog."
CHATS = (
    "Explain why the sky is blue in two sentences.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
)


class OwnTarget:
    """A `ChainTarget` over our model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._runner = MiniRunner(model, max_requests=1, max_len=2048)
        self._row = self._runner.new_request()

    def forward(self, token_ids: list[int], start: int, num_logits: int) -> TargetStep:
        self._runner.rewind(self._row, start)
        mode = ForwardMode.EXTEND if num_logits == 1 else ForwardMode.TARGET_VERIFY
        output = self._runner.extend(
            [self._row], [token_ids], capture=CaptureHiddenMode.FULL, mode=mode
        )
        assert output.hidden_states is not None
        assert output.next_token_logits.shape[0] == num_logits
        return TargetStep(logits=output.next_token_logits, features=output.hidden_states)


class OwnDraft:
    """A `ChainDraft` over our model; catching up is padded to full width, as graphs need it."""

    def __init__(self, model: EagleDraftModel) -> None:
        self._model = model
        self._runner = MiniRunner(model, max_requests=1, max_len=2048)
        self._row = self._runner.new_request()

    def forward(self, token_ids: list[int], states: torch.Tensor, start: int) -> DraftStep:
        self._runner.rewind(self._row, start)
        if states.shape[1] == self._model.config.hidden_size:
            output = self._runner.decode(
                [self._row], token_ids, capture=CaptureHiddenMode.LAST, hidden_states=states
            )
        else:
            padding = max(NUM_STEPS + 1 - len(token_ids), 0)
            output = self._runner.extend(
                [self._row],
                [token_ids + [0] * padding],
                capture=CaptureHiddenMode.LAST,
                mode=ForwardMode.DRAFT_EXTEND,
                hidden_states=torch.nn.functional.pad(states, (0, 0, 0, padding)),
                logits_rows=[len(token_ids) - 1],
            )
        state, logits = output.hidden_states, output.next_token_logits[0]
        assert state is not None
        token = int(self._model.to_target_ids(logits.argmax()))
        return DraftStep(logits=logits, token_id=token, state=state)


@pytest.fixture(scope="module")
def reference(small_model: Path) -> tuple[ReferenceTarget, ReferenceDraft]:
    target = ReferenceTarget(small_model)
    return target, ReferenceDraft(SMALL_EAGLE3_DRAFT, target.embedding)


@pytest.fixture(scope="module")
def own(small_model: Path) -> tuple[OwnTarget, OwnDraft]:
    target_config = ModelConfig.from_path(str(small_model))
    target = load_model(target_config, show_progress=False)
    draft = load_model(
        read_draft_config(str(SMALL_EAGLE3_DRAFT), target_config), show_progress=False
    )
    assert isinstance(target, LlamaForCausalLM) and isinstance(draft, EagleDraftModel)
    layers = draft.draft_config.layers_to_capture(target_config.num_hidden_layers)
    target.set_eagle3_layers_to_capture(layers)
    draft.set_embed_and_head(*target.get_embed_and_head())
    return OwnTarget(target), OwnDraft(draft)


def _check(
    reference: tuple[ReferenceTarget, ReferenceDraft],
    own: tuple[OwnTarget, OwnDraft],
    prompt: list[int],
    max_new_tokens: int,
) -> float:
    expected = run_chain(*reference, prompt, num_steps=NUM_STEPS, max_new_tokens=max_new_tokens)
    got = run_chain(*own, prompt, num_steps=NUM_STEPS, max_new_tokens=max_new_tokens)
    assert got.output_ids == expected.output_ids
    assert got.accept_lens == expected.accept_lens
    assert got.proposals == expected.proposals
    torch.testing.assert_close(
        torch.stack(got.draft_logits), torch.stack(expected.draft_logits), atol=2e-3, rtol=1e-3
    )
    return expected.accept_length


def test_repeated_prompt_of_1024_tokens(
    small_model: Path,
    reference: tuple[ReferenceTarget, ReferenceDraft],
    own: tuple[OwnTarget, OwnDraft],
) -> None:
    prompt = repeated_prompt(small_model, FOX)
    assert len(prompt) == 1024
    assert _check(reference, own, prompt, max_new_tokens=32) == 8.0


@pytest.mark.parametrize("text", CHATS)
def test_chat_prompt(
    small_model: Path,
    reference: tuple[ReferenceTarget, ReferenceDraft],
    own: tuple[OwnTarget, OwnDraft],
    text: str,
) -> None:
    assert _check(reference, own, chat_prompt(small_model, text), max_new_tokens=24) > 1.5
