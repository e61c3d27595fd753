"""The MTP layer as a draft: arithmetic, names in the target's files, what is read of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from sglang.srt.configs.draft_config import (
    NEXTN_ARCHITECTURE,
    as_eagle_draft,
    mtp_layer_config,
    read_draft_config,
    read_eagle_config,
)
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.weight_names import CheckpointNames, assign
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_utils import SafetensorsCheckpoint
from sglang.srt.models.base import LanguageModel, WeightLoadError
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

HIDDEN, LAYERS = 60, 2
PREFIX = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_tiny_checkpoint(tmp_path_factory.mktemp("v3"), "deepseek_v3")
    return add_tiny_nextn_layer(root)


@pytest.fixture(scope="module")
def target(folder: Path) -> LanguageModel:
    return load_model(ModelConfig.from_path(str(folder)), show_progress=False)


@pytest.fixture(scope="module")
def draft(folder: Path, target: LanguageModel) -> DeepseekV3ForCausalLMNextN:
    model = load_model(read_draft_config(str(folder), target.config), show_progress=False)
    assert isinstance(model, DeepseekV3ForCausalLMNextN)
    model.set_embed_and_head(*target.get_embed_and_head())
    return model


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class Plain:
    """The layer for a sequence of one token, whose attention is its own value."""

    def __init__(self, folder: Path, target: LanguageModel) -> None:
        weights = load_file(str(folder / "model-mtp.safetensors"))
        self.weights = {name.removeprefix(PREFIX): t for name, t in weights.items()}
        self.embed, self.head = (p.data for p in target.get_embed_and_head())

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"])

    def norm(self, x: torch.Tensor, name: str, eps: float = 1e-5) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], eps)

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def moe(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.linear(x, "mlp.gate").sigmoid()[0]
        ranked = scores + self.weights["mlp.gate.e_score_correction_bias"]
        worth = ranked.view(4, 2).topk(2).values.sum(1)
        allowed = torch.zeros(4, dtype=torch.bool)
        allowed[worth.topk(2).indices] = True
        ids = ranked.masked_fill(~allowed.repeat_interleave(2), -9.0).topk(3).indices
        share = scores[ids] / scores[ids].sum() * 2.5
        routed = sum(w * self.mlp(x, f"mlp.experts.{e}") for w, e in zip(share, ids.tolist()))
        return routed + self.mlp(x, "mlp.shared_experts")

    def run(self, token: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(states for the next step, logits)."""
        embedded = self.norm(self.embed[token : token + 1], "enorm")
        x = self.linear(torch.cat((embedded, self.norm(state, "hnorm")), -1), "eh_proj")
        normed = self.norm(x, "input_layernorm")
        compressed = self.linear(normed, "self_attn.kv_a_proj_with_mqa")[:, :22]
        compressed = self.norm(compressed, "self_attn.kv_a_layernorm", 1e-6)
        values = self.linear(compressed, "self_attn.kv_b_proj").view(6, 24)[:, 14:]
        x = x + self.linear(values.reshape(1, 60), "self_attn.o_proj")
        x = x + self.moe(self.norm(x, "post_attention_layernorm"))
        states = self.norm(x, "shared_head.norm")
        return states, functional.linear(states, self.head)


def test_single_token(
    folder: Path, target: LanguageModel, draft: DeepseekV3ForCausalLMNextN
) -> None:
    state = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(3))
    runner = MiniRunner(draft)
    output = runner.extend(
        [runner.new_request()],
        [[17]],
        capture=CaptureHiddenMode.FULL,
        mode=ForwardMode.DRAFT_EXTEND,
        hidden_states=state,
    )
    states, logits = Plain(folder, target).run(17, state)
    assert output.hidden_states is not None
    torch.testing.assert_close(output.hidden_states, states, atol=1e-4, rtol=0)
    torch.testing.assert_close(output.next_token_logits, logits, atol=1e-4, rtol=0)


def test_the_draft_is_one_layer_of_the_targets_folder(folder: Path, target: LanguageModel) -> None:
    config = as_eagle_draft(ModelConfig.from_path(str(folder)))
    assert config.architectures == (NEXTN_ARCHITECTURE,) and config.num_hidden_layers == 1
    eagle = read_eagle_config(config)
    assert not eagle.is_eagle3 and eagle.layers_to_capture(LAYERS) is None
    assert eagle.input_width == HIDDEN
    # Without such a layer a DeepSeek-V3 is no draft.
    plain = ModelConfig.from_dict({**config.hf_config, "num_nextn_predict_layers": 0})
    with pytest.raises(ModelConfigError, match="not a draft"):
        read_eagle_config(as_eagle_draft(plain))


def test_each_model_reads_its_own_tensors_only(
    folder: Path, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    tensors = SafetensorsCheckpoint.tensors

    def spy(self: Any, *args: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(self, *args):
            read.append(name)
            yield name, tensor

    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", spy)
    load_model(target.config, show_progress=False)
    assert read and not any(name.startswith(PREFIX) for name in read)
    read.clear()
    load_model(read_draft_config(str(folder), target.config), show_progress=False)
    assert read and all(name.startswith(PREFIX) for name in read)


def test_names_go_there_and_back(draft: DeepseekV3ForCausalLMNextN) -> None:
    for name in draft.weight_table():
        published = draft.published_name(name)
        assert published.startswith(PREFIX) and draft.plain_name(published) == name


def test_a_layer_that_was_promised_and_not_saved_is_named(tmp_path: Path) -> None:
    root = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    config = ModelConfig.from_path(str(root))
    with pytest.raises(WeightLoadError, match=f"not in the files .*{PREFIX[:-1]}, which predicts"):
        load_model(read_draft_config(str(root), config), show_progress=False)


def test_problems_have_the_names_of_the_files(tmp_path: Path) -> None:
    root = add_tiny_nextn_layer(make_tiny_checkpoint(tmp_path, "deepseek_v3"))
    path = root / "model-mtp.safetensors"
    stored = load_file(str(path))
    bias = stored.pop(f"{PREFIX}mlp.gate.e_score_correction_bias")
    stored[f"{PREFIX}mlp.surplus.weight"] = bias.clone()
    stored[f"{PREFIX}shared_head.norm.weight"] = torch.zeros(HIDDEN + 1)
    save_file(stored, str(path))
    with pytest.raises(WeightLoadError) as error:
        load_model(read_draft_config(str(root), ModelConfig.from_path(str(root))))
    message = str(error.value)
    assert f"missing tensors (1): {PREFIX}mlp.gate.e_score_correction_bias" in message
    assert f"unexpected tensors (1): {PREFIX}mlp.surplus.weight" in message
    assert f"{PREFIX}shared_head.norm.weight: expected (60,), got (61,)" in message


def test_without_a_named_way_of_routing_it_has_the_targets(tmp_path: Path) -> None:
    silent: dict[str, Any] = {"topk_method": None, "scoring_func": None}
    root = add_tiny_nextn_layer(make_tiny_checkpoint(tmp_path, "deepseek_v3", **silent))
    config = ModelConfig.from_path(str(root))
    load_model(config, show_progress=False)
    load_model(read_draft_config(str(root), config), show_progress=False)


def test_updates_reach_the_layer_and_nobody_misses_it(
    target: LanguageModel, draft: DeepseekV3ForCausalLMNextN
) -> None:
    named = [
        (f"{PREFIX}eh_proj.weight", torch.zeros(HIDDEN, 2 * HIDDEN)),
        ("model.norm.weight", torch.ones(HIDDEN)),
    ]
    names = [CheckpointNames(model) for model in (target, draft)]
    to_target, to_draft = assign(named, "all", names[0], names[1:])
    assert [name for name, _ in to_target] == ["model.norm.weight"]
    assert [name for name, _ in to_draft] == [f"{PREFIX}eh_proj.weight"]
    names[1].check(to_draft)
    (alone,) = assign(named, "all", names[0], [])
    assert [name for name, _ in alone] == ["model.norm.weight"]
    values = draft.get_weights_by_name(f"{PREFIX}shared_head.norm.weight")
    assert values is not None and len(values) == HIDDEN


def test_each_of_several_layers_reads_and_is_sent_its_own(tmp_path: Path) -> None:
    root = add_tiny_nextn_layer(make_tiny_checkpoint(tmp_path, "deepseek_v3"), num_layers=2)
    config = ModelConfig.from_path(str(root))
    first = read_draft_config(str(root), config)
    drafts = [load_model(mtp_layer_config(first, i), show_progress=False) for i in range(2)]
    stored = load_file(str(root / "model-mtp.safetensors"))
    for layer, draft in enumerate(drafts):
        assert isinstance(draft, DeepseekV3ForCausalLMNextN)
        name = f"model.layers.{LAYERS + layer}.eh_proj.weight"
        assert torch.equal(draft.eh_proj.weight, stored[name])
        assert draft.plain_name(name) == "eh_proj.weight"
    target = load_model(config, show_progress=False)
    names = [CheckpointNames(model) for model in (target, *drafts)]
    dealt = assign(list(stored.items()), "draft", names[0], names[1:])
    assert not dealt[0]
    for layer, part in enumerate(dealt[1:]):
        prefix = f"model.layers.{LAYERS + layer}."
        assert [name for name, _ in part] == [name for name in stored if name.startswith(prefix)]
