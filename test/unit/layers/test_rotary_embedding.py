"""Rotary tables against transformers' for published configurations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError, read_rope_config
from sglang.srt.layers.dispatch import CpuFloat32Ops, Ops, TorchOps
from sglang.srt.layers.rotary_embedding import RotaryEmbedding, build_cos_sin_table
from sglang.test.fakes.tiny_models import tiny_config

# (rope keys of config.json, max_position_embeddings, head_dim)
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "llama2": ({"rope_theta": 10000.0}, 4096, 128),
    "vicuna_16k_linear": (
        {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        4096,
        128,
    ),
    "dynamic_within_limit": (
        {"rope_theta": 10000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        4096,
        128,
    ),
    "llama_3_1": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        131072,
        128,
    ),
    "llama_3_2_1b": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        131072,
        64,
    ),
    "qwen2_5_yarn": (
        {
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        32768,
        128,
    ),
    "deepseek_v2_yarn": (
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.5,
                "original_max_position_embeddings": 4096,
            },
        },
        163840,
        64,
    ),
    "gpt_oss_yarn": (
        {
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        131072,
        64,
    ),
}


def reference_table(
    raw: dict[str, Any], max_position: int, head_dim: int, num_positions: int
) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines."""
    from transformers import LlamaConfig  # takes seconds: only by the worker that runs this
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        **raw,
    )
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    half = head_dim // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_equals_reference(name: str) -> None:
    raw, max_position, head_dim = PUBLISHED[name]
    num_positions = 4096
    ours = build_cos_sin_table(read_rope_config(raw), head_dim, max_position, num_positions)
    expected = reference_table(raw, max_position, head_dim, num_positions)
    # An angle of 4096 rad carries a float32 rounding of about 2e-4.
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(ours[:256], expected[:256], atol=3e-5, rtol=0)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("original", [None, 128])
def test_gemma_table_equals_reference(kind: str, original: int | None) -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    scaled: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e6, "factor": 4.0}
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if original is not None:
        scaled["original_max_position_embeddings"] = original
    local = {"rope_type": "default", "rope_theta": 1e4}
    raw = tiny_config("gemma3", rope_scaling=None, head_dim=16)
    raw["rope_parameters"] = {"full_attention": scaled, "sliding_attention": local}
    config = ModelConfig.from_dict(raw)
    rotary = Gemma3RotaryEmbedding(Gemma3TextConfig(**copy.deepcopy(raw)))
    length = config.max_position_embeddings
    for ours, name in ((config.rope, "full_attention"), (config.local_rope, "sliding_attention")):
        assert ours is not None
        cos, sin = rotary(torch.zeros(1), torch.arange(length)[None], name)
        expected = torch.cat((cos[0, :, :8], sin[0, :, :8]), dim=1)
        table = build_cos_sin_table(ours, 16, length, length)
        torch.testing.assert_close(table, expected, atol=1e-4, rtol=0)


def test_rope_parameters_layout_means_the_same() -> None:
    old, max_position, head_dim = PUBLISHED["llama_3_1"]
    new = {"rope_parameters": {"rope_theta": old["rope_theta"], **old["rope_scaling"]}}
    assert read_rope_config(new) == read_rope_config(old)


def test_dynamic_rows_depend_on_their_own_position_only() -> None:
    rope = read_rope_config({"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    short = build_cos_sin_table(rope, 16, 32, 40)
    long = build_cos_sin_table(rope, 16, 32, 200)
    assert torch.equal(short, long[:40])
    plain = build_cos_sin_table(read_rope_config({}), 16, 32, 40)
    assert torch.allclose(short[:32], plain[:32])
    assert not torch.allclose(short[33:], plain[33:], atol=1e-3)


@pytest.mark.parametrize("ops", [TorchOps(), CpuFloat32Ops()], ids=["torch", "cpu"])
def test_partial_rotation_leaves_the_other_features(ops: Ops) -> None:
    rope = read_rope_config({"partial_rotary_factor": 0.5})
    table = RotaryEmbedding(16, rope, 64, 64).cos_sin
    fused = torch.randn(5, 3 * 16)
    q, k = fused[:, :32], fused[:, 32:]
    before = fused.clone()
    new_q, new_k = ops.apply_rope(q, k, torch.tensor([0, 3, 9, 1, 60]), table, 16)
    heads, old = torch.cat((new_q, new_k), 1).view(5, 3, 16), before.view(5, 3, 16)
    assert torch.equal(heads[..., 8:], old[..., 8:])
    assert torch.allclose(heads[0], old[0])  # position 0 is the identity
    assert not torch.allclose(heads[1:, :, :8], old[1:, :, :8], atol=1e-3)
    # A rotation keeps the length of each pair.
    pairs = heads[..., :4] ** 2 + heads[..., 4:8] ** 2
    torch.testing.assert_close(pairs, old[..., :4] ** 2 + old[..., 4:8] ** 2)


def test_unknown_rope_type_is_refused_by_name() -> None:
    rope = read_rope_config({"rope_scaling": {"type": "spiral", "factor": 2.0}})
    with pytest.raises(ModelConfigError, match="spiral"):
        build_cos_sin_table(rope, 16, 32, 40)


def test_missing_scaling_parameter_is_named() -> None:
    rope = read_rope_config({"rope_scaling": {"type": "llama3", "factor": 2.0}})
    with pytest.raises(ModelConfigError, match="low_freq_factor"):
        build_cos_sin_table(rope, 16, 32, 40)
