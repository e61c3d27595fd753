"""The text part of a Gemma 3 that also reads images is the model of text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.model_loader.loader import load_model
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config

ARCHITECTURE = "Gemma3ForConditionalGeneration"
VISION = ("vision_tower.head.probe", "multi_modal_projector.mm_soft_emb_norm.weight")


def with_vision(folder: Path, prefix: str) -> Path:
    """Rewrite a folder of the text model in the layout of the larger one; returns it."""
    path = folder / "config.json"
    text = json.loads(path.read_text(encoding="utf-8"))
    whole: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
    }
    whole |= {"text_config": text, "vision_config": {"hidden_size": 16, "num_hidden_layers": 1}}
    path.write_text(json.dumps(whole), encoding="utf-8")
    weights = load_file(str(folder / "model.safetensors"))
    inner, outer = ("", prefix) if prefix == "language_model." else ("model.", prefix)
    named = {outer + name.removeprefix(inner): tensor for name, tensor in weights.items()}
    beside = "" if prefix == "language_model." else "model."
    named |= {beside + name: torch.ones(2) for name in VISION}
    save_file(named, str(folder / "model.safetensors"))
    return folder


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_it_loads_as_the_text_model_does(tmp_path: Path, prefix: str) -> None:
    plain = make_tiny_checkpoint(tmp_path / "text", "gemma3", tie_word_embeddings=True)
    text_config = ModelConfig.from_path(str(plain))
    text = load_model(text_config, show_progress=False)
    make_tiny_checkpoint(tmp_path / "both", "gemma3", tie_word_embeddings=True)
    folder = with_vision(tmp_path / "both", prefix)
    config = ModelConfig.from_path(str(folder))
    assert config.sliding_windows == text_config.sliding_windows
    assert (config.rope, config.local_rope) == (text_config.rope, text_config.local_rope)
    assert {1, 106} <= config.hf_eos_token_id
    model = load_model(config, show_progress=False)
    ours, theirs = dict(model.named_parameters()), dict(text.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    published = next(
        name for name in load_file(str(folder / "model.safetensors")) if "norm" in name
    )
    assert model.get_weights_by_name(published) is not None


def test_published_files_leave_out_the_usual_sizes() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": [ARCHITECTURE], "model_type": "gemma3", "text_config": text}
    config = ModelConfig.from_dict(raw)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.context_len, config.mixed_window) == (262_208, 131_072, 1024)
    assert config.tie_word_embeddings


def test_others_with_a_section_for_text_are_refused_by_name() -> None:
    raw = {"architectures": ["ParrotForConditionalGeneration"], "model_type": "parrot"}
    with pytest.raises(ModelConfigError, match="not supported: Parrot.*supported ones: Deep"):
        ModelConfig.from_dict({**raw, "text_config": tiny_config("llama")})
