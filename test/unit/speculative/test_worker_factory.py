"""Drafts that cannot be used are refused by their configuration, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.speculative.base_spec_worker import AcceptanceRule
from sglang.srt.speculative.spec_info import DraftShape, SpeculativeAlgorithm
from sglang.srt.speculative.worker_factory import DraftPlan, SpecSettings, plan_draft
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint


def plan(algorithm: SpeculativeAlgorithm, draft: Path, target: Path, topk: int) -> DraftPlan:
    settings = SpecSettings(
        algorithm=algorithm,
        shape=DraftShape(num_steps=3, topk=topk, num_draft_tokens=8),
        rule=AcceptanceRule(),
        draft_model_path=str(draft),
    )
    found = plan_draft(settings, ModelConfig.from_path(str(target)), torch.float32)
    assert found is not None
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "target", num_hidden_layers=6)


def test_a_branch_for_every_token_that_the_draft_knows_and_no_more(
    tmp_path: Path, target: Path
) -> None:
    draft = make_tiny_draft(tmp_path / "draft")
    assert len(plan(SpeculativeAlgorithm.EAGLE3, draft, target, topk=101).configs) == 1
    with pytest.raises(ModelConfigError, match="eagle-topk 102: the draft .* knows 101 tokens"):
        plan(SpeculativeAlgorithm.EAGLE3, draft, target, topk=102)
    plan(SpeculativeAlgorithm.STANDALONE, target, target, topk=263)
    with pytest.raises(ModelConfigError, match="eagle-topk 264: the draft .* knows 263 tokens"):
        plan(SpeculativeAlgorithm.STANDALONE, target, target, topk=264)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLMEagle3"])
def test_what_reads_hidden_states_stands_not_alone(
    tmp_path: Path, target: Path, architecture: str
) -> None:
    draft = make_tiny_draft(tmp_path / "draft", architecture)
    with pytest.raises(ModelConfigError, match=f"it is {architecture}, which reads its target's"):
        plan(SpeculativeAlgorithm.STANDALONE, draft, target, topk=2)
