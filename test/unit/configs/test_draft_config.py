"""The draft-only keys of a configuration, and which drafts are refused for which targets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    EAGLE3_ARCHITECTURE,
    EAGLE_ARCHITECTURE,
    MIMO_MTP_ARCHITECTURE,
    NEXTN_ARCHITECTURE,
    EagleDraftConfig,
    HeadSource,
    as_eagle_draft,
    check_draft_kind,
    default_mtp_steps,
    is_mtp_draft,
    mtp_layer_config,
    mtp_layer_configs,
    num_mtp_layers,
    published_mtp_layer,
    read_draft_config,
    read_eagle_config,
    why_draft_does_not_fit,
)
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.models.registry import DRAFT_CLASSES, resolve_model_class
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.tiny_drafts import make_tiny_draft, tiny_draft_config
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config

NUM_TARGET_LAYERS = 8


# Draft -> the family of its target, where it does not go with all.
FAMILY_OF = {NEXTN_ARCHITECTURE: "deepseek_v3", MIMO_MTP_ARCHITECTURE: "mimo"}


def target_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    raw = tiny_config(family, num_hidden_layers=NUM_TARGET_LAYERS, **overrides)
    return ModelConfig.from_dict(raw)


def draft_config(architecture: str = EAGLE3_ARCHITECTURE, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_draft_config(architecture, **overrides))


def eagle3(**overrides: Any) -> EagleDraftConfig:
    return read_eagle_config(draft_config(**overrides))


def test_architectures_are_those_of_the_registry() -> None:
    assert sorted(DRAFT_ARCHITECTURES) == sorted(DRAFT_CLASSES)
    assert resolve_model_class([EAGLE3_ARCHITECTURE]) is DRAFT_CLASSES[EAGLE3_ARCHITECTURE]


def test_plain_eagle3() -> None:
    config = eagle3()
    assert (config.num_features, config.input_width, config.head) == (3, 180, HeadSource.OWN)
    assert not config.has_own_embedding
    assert config.layers_to_capture(NUM_TARGET_LAYERS) == [2, 4, 5]
    assert config.layers_to_capture(30) == [2, 15, 27]


def test_named_layers_mean_their_output() -> None:
    named = eagle3(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]})
    assert named.layers_to_capture(30) == eagle3().layers_to_capture(30)
    two = eagle3(eagle_aux_hidden_state_layer_ids=[0, 6], num_aux_hidden_states=2)
    assert two.layers_to_capture(NUM_TARGET_LAYERS) == [1, 7]
    assert two.input_width == 120


def test_capture_can_be_off() -> None:
    config = eagle3(eagle_config={"use_aux_hidden_state": False})
    assert config.layers_to_capture(NUM_TARGET_LAYERS) is None
    assert config.input_width == 60


@pytest.mark.parametrize(
    ("overrides", "head"),
    [
        ({"draft_vocab_size": None}, HeadSource.TARGET),
        ({"draft_vocab_size": None, "tie_word_embeddings": True}, HeadSource.EMBEDDING),
        ({"draft_vocab_size": 263}, HeadSource.OWN),
    ],
)
def test_source_of_the_head(overrides: dict[str, Any], head: HeadSource) -> None:
    config = eagle3(**overrides)
    assert (config.head, config.draft_vocab_size) == (head, 263)


def test_old_and_new_name_of_the_feature_norms() -> None:
    assert eagle3(fc_norm=True).fc_norm
    assert eagle3(eagle_config={"use_aux_norm": True}).fc_norm
    assert eagle3(norm_output=True).norm_output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"draft_vocab_size": 264}, "1..263"),
        ({"draft_vocab_size": 101, "tie_word_embeddings": True}, "263 tokens.*101"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"num_aux_hidden_states": 2}, "does not say which"),
        (
            {"num_aux_hidden_states": 2, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "is 2, but 3 layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": ["one"]}, "holds no layers"),
        ({"architectures": ["LlamaForCausalLM"]}, "not a draft architecture"),
    ],
)
def test_contradictions_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        eagle3(**overrides)


def test_ordinary_names_are_read_as_drafts() -> None:
    plain: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]}
    old = as_eagle_draft(draft_config(EAGLE_ARCHITECTURE, **plain))
    assert old.architectures == (EAGLE_ARCHITECTURE,)
    assert as_eagle_draft(draft_config(**plain)).architectures == (EAGLE3_ARCHITECTURE,)
    other = draft_config(architectures=["Qwen2ForCausalLM"])
    assert as_eagle_draft(other) is other


@pytest.mark.parametrize("architecture", DRAFT_ARCHITECTURES)
def test_fitting_draft_has_no_reason_against_it(architecture: str) -> None:
    target = target_config(FAMILY_OF.get(architecture, "llama"))
    assert why_draft_does_not_fit(draft_config(architecture), target, 2) is None


@pytest.mark.parametrize("architecture", list(FAMILY_OF))
def test_a_layer_of_another_family_is_refused_whatever_its_sizes(architecture: str) -> None:
    found = why_draft_does_not_fit(draft_config(architecture), target_config("gemma3"))
    assert found is not None and re.search(r"a layer of .*the target is Gemma3ForCausalLM", found)


@pytest.mark.parametrize(
    ("algorithm", "architecture", "kind"),
    [
        ("EAGLE3", EAGLE_ARCHITECTURE, "EAGLE "),
        ("EAGLE3", NEXTN_ARCHITECTURE, "EAGLE "),
        ("EAGLE", EAGLE3_ARCHITECTURE, "EAGLE3 "),
    ],
)
def test_a_draft_of_another_kind_than_the_algorithm_is_refused(
    algorithm: str, architecture: str, kind: str
) -> None:
    with pytest.raises(ModelConfigError, match=f"{algorithm}: .* is a draft for {kind}"):
        check_draft_kind(draft_config(architecture), algorithm)
    check_draft_kind(draft_config(architecture), kind.strip())


def test_the_usual_number_of_steps_is_that_of_the_layers(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    assert default_mtp_steps(str(folder), 3) == 1
    flags: dict[str, Any] = {
        "speculative_algorithm": "NEXTN",
        "enable_multi_layer_eagle": True,
    }
    args = ServerArgs(model_path=str(folder), device="cpu", **flags)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (1, 2)
    assert default_mtp_steps(str(tmp_path / "absent"), 3) == 3
    with pytest.raises(ModelConfigError, match="has 1 layer that predicts .* at most 1, not 3"):
        mtp_layer_configs(as_eagle_draft(ModelConfig.from_path(str(folder))), 3)


@pytest.mark.parametrize(
    ("draft", "target", "tp_size", "reason"),
    [
        ({}, {"hidden_size": 66}, 1, "width 60, the target's have 66"),
        ({"target_hidden_size": 66}, {}, 1, "width 66, the target's have 60"),
        ({}, {"vocab_size": 300}, 1, "263 tokens, the target's has 300"),
        (
            {"target_hidden_size": 66, "draft_vocab_size": None},
            {"hidden_size": 66},
            1,
            "takes width 66.*have 60",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 8]}, {}, 1, r"\[2, 3, 9\].*0..8"),
        ({}, {"max_position_embeddings": 1024}, 1, "512 tokens.*1024"),
        ({"num_key_value_heads": 4}, {}, 1, "6 attention heads.*4 KV heads"),
        ({"head_dim": 9}, {}, 1, "head size 9"),
        ({}, {}, 4, "6 attention heads.*4 ranks"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, 1, "not a draft architecture"),
    ],
)
def test_unfit_draft_is_refused_with_the_numbers(
    draft: dict[str, Any], target: dict[str, Any], tp_size: int, reason: str
) -> None:
    found = why_draft_does_not_fit(draft_config(**draft), target_config(**target), tp_size)
    assert found is not None
    assert re.search(reason, found), found


def test_the_target_needs_the_usual_layers() -> None:
    shallow = ModelConfig.from_dict(tiny_config("llama", num_hidden_layers=2))
    assert "layers 0..2" in (why_draft_does_not_fit(draft_config(), shallow) or "")


def test_draft_takes_dtype_and_context_from_the_target(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path, max_position_embeddings=64)
    raw = tiny_config("llama", num_hidden_layers=NUM_TARGET_LAYERS)
    target = ModelConfig.from_dict(raw, dtype="bfloat16", context_length=300)
    config = read_draft_config(str(folder), target)
    assert (config.dtype, config.context_len) == ("bfloat16", 300)
    with pytest.raises(ModelConfigError, match="cannot be used: its vocabulary has 263"):
        read_draft_config(str(folder), target_config(vocab_size=300))


def v3_config(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config("deepseek_v3", **overrides))


def test_layers_that_predict_further_tokens_are_drafts_one_by_one() -> None:
    config = as_eagle_draft(v3_config(num_hidden_layers=5, num_nextn_predict_layers=2))
    assert num_mtp_layers(config) == 2 and is_mtp_draft(config)
    layers = [mtp_layer_config(config, layer) for layer in range(2)]
    assert [published_mtp_layer(layer) for layer in layers] == [5, 6]
    assert all(layer.num_hidden_layers == 1 for layer in layers)
    with pytest.raises(ModelConfigError, match="2 layers that predict further tokens, not 3"):
        mtp_layer_config(config, 2)
    assert num_mtp_layers(draft_config()) == 1 and not is_mtp_draft(draft_config())


@pytest.mark.parametrize(
    ("num_hidden_layers", "num_nextn_predict_layers", "published", "count"),
    [(1, None, 0, 1), (1, 1, 0, 1), (2, 2, 0, 2), (2, None, 0, 2), (61, 1, 61, 1)],
)
def test_a_folder_of_their_own_may_count_from_zero(
    num_hidden_layers: int, num_nextn_predict_layers: int | None, published: int, count: int
) -> None:
    sizes = {
        "num_hidden_layers": num_hidden_layers,
        "num_nextn_predict_layers": num_nextn_predict_layers,
    }
    config = as_eagle_draft(v3_config(architectures=[NEXTN_ARCHITECTURE], **sizes))
    assert config.num_hidden_layers == 1 and num_mtp_layers(config) == count
    assert published_mtp_layer(config) == published
