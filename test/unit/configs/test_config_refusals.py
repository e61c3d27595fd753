"""Configurations that would be served wrongly, or die at the first request: one sentence each."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.configs.draft_config import as_eagle_draft
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.test.fakes.tiny_models import tiny_config

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def build(family: str, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(family, **overrides))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek_v3", {"n_group": 3}, "8 experts .* cannot form 3 groups of equal size"),
        ("deepseek_v2", {"n_group": 3}, "8 experts .* cannot form 3 groups of equal size"),
        ("deepseek_v3", {"topk_group": 9}, "topk_group .*cannot choose 9 of 4 groups"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "choose 5 experts .* among 4"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "choose 9 experts .* among 8"),
        ("qwen3_next", {"num_experts_per_tok": None}, "choose 0 experts .* among 8"),
        ("deepseek_v3", {"topk_method": "lottery"}, "'lottery' is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "'softmax' does not go with"),
    ],
)
def test_routing_that_cannot_be(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        build(family, **changes)


@pytest.mark.parametrize(
    ("architecture", "uses_bias"),
    [("DeepseekV3ForCausalLM", True), ("DeepseekV2ForCausalLM", False)],
)
def test_the_way_of_routing_is_the_familys_where_none_is_named(
    architecture: str, uses_bias: bool
) -> None:
    silent = {"topk_method": None, "scoring_func": None, "num_nextn_predict_layers": 1}
    config = build("deepseek_v3", architectures=[architecture], **silent)
    assert config.routing is not None and config.routing.uses_bias == uses_bias
    # The layer beside the model's own has the same experts.
    assert as_eagle_draft(config).routing == config.routing


def test_the_way_of_routing_of_a_draft_in_a_folder_of_its_own() -> None:
    silent = {"topk_method": None, "scoring_func": None}
    config = build("deepseek_v3", architectures=["DeepseekV3ForCausalLMNextN"], **silent)
    assert config.routing is not None and config.routing.uses_bias


def test_dense_models_have_no_routing() -> None:
    assert build("llama").routing is None
    assert build("deepseek_v3", n_routed_experts=None).routing is None


@pytest.mark.parametrize("window", [-5, 0, "512", None, True, 4.5])
@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_a_window_is_a_positive_number(family: str, window: Any) -> None:
    layers = [SLIDING, FULL]
    overrides = {"layer_types": layers, "num_hidden_layers": 2, "sliding_window": window}
    with pytest.raises(ModelConfigError, match="'sliding_window' must be .*1 layers have a window"):
        build(family, **overrides)
    # Where no layer has one it may be anything.
    assert build(family, **overrides | {"layer_types": [FULL] * 2}).mixed_window is None


def test_the_usual_window_is_taken_only_where_none_is_stated() -> None:
    raw = tiny_config("gemma3")
    del raw["sliding_window"]
    assert ModelConfig.from_dict(raw).mixed_window == 4096


@pytest.mark.parametrize(
    ("family", "layers", "reason"),
    [
        ("qwen3_next", [LINEAR, SLIDING, LINEAR, FULL], r"layer_types\[1\] is 'sliding_attention'"),
        ("gemma3", [SLIDING, LINEAR, FULL, FULL], r"layer_types\[1\] is 'linear_attention'"),
        ("llama", [FULL, FULL, "chunked_attention", FULL], r"\[2\] is 'chunked_attention'"),
        ("qwen3_next", [LINEAR, FULL], "2 entries for 4 layers"),
        ("gemma3", [SLIDING, FULL], "2 entries for 4 layers"),
    ],
)
def test_kinds_of_layers_are_those_of_the_family(
    family: str, layers: list[str], reason: str
) -> None:
    with pytest.raises(ModelConfigError, match=reason):
        build(family, layer_types=layers, num_hidden_layers=4)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_quantised_weights_are_refused_by_name(family: str) -> None:
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    with pytest.raises(ModelConfigError, match=r"FP8 weights \(quantization_config\) are not"):
        build(family, quantization_config=stated)
    with pytest.raises(ModelConfigError, match="QUANTIZED weights"):
        build(family, compression_config={"format": "pack-quantized"})
    build(family, quantization_config=None)
