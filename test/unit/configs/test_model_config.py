"""config.json in its several shapes -> ModelConfig."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.configs.model_config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    ModelConfigError,
)
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config

_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"


def test_the_names_listed_without_torch_are_those_of_the_registry() -> None:
    from sglang.srt.models.registry import MODEL_CLASSES

    assert sorted(SUPPORTED_ARCHITECTURES) == sorted(MODEL_CLASSES)


def build(family: str = "llama", **kwargs: Any) -> ModelConfig:
    options = {
        key: kwargs.pop(key)
        for key in ("dtype", "context_length", "override_args", "generation_config", "device")
        if key in kwargs
    }
    return ModelConfig.from_dict(tiny_config(family, **kwargs), **options)


def test_sizes_and_stop_ids_of_a_folder(tmp_path: Path) -> None:
    config = ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path, "qwen3")))
    assert config.architectures == ("Qwen3ForCausalLM",)
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (263, 14, 2)
    assert config.hf_eos_token_id == {258, 260}  # of both files
    assert config.bos_token_id == 257
    assert config.dtype == "float32"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 1  # type: ignore[misc]


def test_both_rope_layouts() -> None:
    old = build(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = build(
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    )
    assert old.rope == new.rope
    assert (old.rope.theta, old.rope.rope_type, old.rope.get("factor")) == (5e5, "linear", 2.0)


def test_override_of_the_old_key_wins_over_the_new_layout() -> None:
    config = build(
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        override_args='{"rope_scaling": {"type": "yarn", "factor": 2.0}}',
    )
    assert (config.rope.rope_type, config.rope.theta) == ("yarn", 5e5)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 512),
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "default"}, 512),
    ],
)
def test_context_length_counts_rope_scaling(scaling: dict[str, Any] | None, expected: int) -> None:
    assert build(rope_scaling=scaling).context_len == expected


def test_context_length_may_shrink_but_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_LONGER, raising=False)
    assert build(context_length=100).context_len == 100
    with pytest.raises(ModelConfigError, match=f"513.*512.*{_LONGER}"):
        build(context_length=513)
    monkeypatch.setenv(_LONGER, "1")
    assert build(context_length=513).context_len == 513


@pytest.mark.parametrize(
    ("dtype", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", "bfloat16", "cuda", "bfloat16"),
        ("auto", "float32", "cuda:1", "float16"),
        ("half", "bfloat16", "cpu", "float16"),
        ("torch.bfloat16", "float32", "cpu", "bfloat16"),
    ],
)
def test_dtype(dtype: str, stored: str, device: str, expected: str) -> None:
    assert build(dtype=dtype, torch_dtype=stored, device=device).dtype == expected


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="int3"):
        build(dtype="int3")


def test_sliding_windows_follow_their_switches() -> None:
    assert build("qwen2", sliding_window=9).sliding_windows == (None, None)
    on = {"sliding_window": 9, "use_sliding_window": True}
    assert build("qwen2", **on, max_window_layers=1).sliding_windows == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert build("qwen2", **on, layer_types=kinds).sliding_windows == (9, None)


def test_expert_layers() -> None:
    config = build("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [config.is_moe_layer(i) for i in range(4)] == [False, True, False, False]
    assert not build("llama").is_moe_layer(0)


def test_gemma_windows_and_rotations() -> None:
    config = build("gemma3")
    assert config.sliding_windows == (9, 9, None) * 2
    assert config.mixed_window == 9
    assert config.local_rope is not None and config.local_rope.theta == 1e4
    assert (config.rope.theta, config.rope.rope_type, config.rope.get("factor")) == (
        1e6,
        "linear",
        2.0,
    )
    # The stated length is the one after scaling.
    assert config.context_len == config.max_position_embeddings
    assert config.attention_scaling == 24**-0.5
    assert config.hidden_act == "gelu_pytorch_tanh"


def test_gemma_defaults_that_published_files_leave_out() -> None:
    left_out = [
        *("hidden_activation", "tie_word_embeddings", "head_dim", "query_pre_attn_scalar"),
        *("sliding_window_pattern", "rope_theta", "rope_local_base_freq", "rope_scaling"),
    ]
    config = build("gemma3", **dict.fromkeys(left_out), num_hidden_layers=12)
    assert config.sliding_windows == ((9,) * 5 + (None,)) * 2
    assert config.tie_word_embeddings and config.head_dim == 256
    assert config.attention_scaling == 1 / 16
    assert config.rope.theta == 1e6 and config.local_rope is not None
    assert config.local_rope.theta == 1e4


@pytest.mark.parametrize(
    "feature", ["attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"]
)
def test_gemma_features_that_are_not_computed_are_refused(feature: str) -> None:
    with pytest.raises(ValueError, match=feature):
        build("gemma3", **{feature: 30})


def test_windows_that_need_no_pool_of_their_own() -> None:
    assert build("llama").mixed_window is None
    everywhere = build("gemma3", layer_types=["sliding_attention"] * 6)
    assert everywhere.sliding_windows == (9,) * 6 and everywhere.mixed_window is None
    assert build("gemma3", sliding_window=1).mixed_window is None


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_size_is_named(key: str) -> None:
    with pytest.raises(ModelConfigError, match=key):
        ModelConfig.from_dict({**tiny_config("llama"), key: None})


@pytest.mark.parametrize("text", ["[1]", "{bad"])
def test_bad_overrides_are_refused(text: str) -> None:
    with pytest.raises(ModelConfigError, match="override"):
        build(override_args=text)


def test_bad_files_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelConfig.from_path(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        ModelConfig.from_path(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ModelConfigError, match="JSON object"):
        ModelConfig.from_path(str(tmp_path))


def test_reading_a_config_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    code = (
        "import sys; from sglang.srt.configs.model_config import ModelConfig;"
        f"ModelConfig.from_path({str(folder)!r});"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
