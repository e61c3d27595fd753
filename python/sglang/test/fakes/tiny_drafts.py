"""Tiny random EAGLE drafts on disk, in the published layouts, for the targets of `tiny_models`.

What they propose is noise: they are for shapes, names and arithmetic, and for speculation that
must stay exact whatever the draft says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    EAGLE3_ARCHITECTURE,
    as_eagle_draft,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.registry import resolve_model_class
from sglang.test.fakes.tiny_models import random_tensor, tiny_config, tiny_weights, write_weights

DRAFT_VOCAB_SIZE = 101


def tiny_draft_config(architecture: str = EAGLE3_ARCHITECTURE, **overrides: Any) -> dict[str, Any]:
    """Content of config.json; `overrides` replace or add keys."""
    if architecture not in DRAFT_ARCHITECTURES:
        raise ValueError(f"unknown draft architecture {architecture}")
    config = tiny_config(
        "llama",
        architectures=[architecture],
        num_hidden_layers=1,
        intermediate_size=70,
        head_dim=10,
    )
    if architecture == EAGLE3_ARCHITECTURE:
        config["draft_vocab_size"] = DRAFT_VOCAB_SIZE
    return {**config, **overrides}


def tiny_draft_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors under their published names."""
    weights = tiny_weights(config, seed)
    if "d2t" in weights:
        token_ids = _draft_token_ids(len(weights["d2t"]), config["vocab_size"], seed)
        weights["d2t"] = token_ids - torch.arange(len(token_ids))
        weights["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool)
        weights["t2d"][token_ids] = True
    if config["architectures"] != [EAGLE3_ARCHITECTURE] or config["num_hidden_layers"] > 1:
        return weights
    return {name.replace("layers.0.", "midlayer."): t for name, t in weights.items()}


def make_tiny_draft(
    folder: str | Path,
    architecture: str = EAGLE3_ARCHITECTURE,
    *,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Write config.json and model.safetensors of a draft and return the folder."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    config = tiny_draft_config(architecture, **config_overrides)
    (root / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_weights(root, tiny_draft_weights(config, seed))
    return root


def add_tiny_nextn_layer(folder: str | Path, seed: int = 0) -> Path:
    """Add a layer that predicts one token further to a tiny DeepSeek-V3's folder; returns it.

    Under the published names, with the copies of embedding and head that published files hold (of
    other values here, so that reading them by mistake shows).
    """
    root = Path(folder)
    path = root / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    draft_config = as_eagle_draft(ModelConfig.from_dict(config))
    with torch.device("meta"):
        draft = resolve_model_class(draft_config.architectures)(draft_config)
    assert isinstance(draft, DeepseekV3ForCausalLMNextN)
    shapes = {name: slot.full_shape for name, slot in draft.weight_table().items()}
    whole = (config["vocab_size"], config["hidden_size"])
    shapes |= {"embed_tokens.weight": whole, "lm_head.weight": whole}
    weights = {
        draft.published_name(name): random_tensor(name, shape, seed + 1)
        for name, shape in shapes.items()
    }
    save_file(weights, str(root / "model-mtp.safetensors"), metadata={"format": "pt"})
    return root


def _draft_token_ids(draft_vocab_size: int, vocab_size: int, seed: int) -> torch.Tensor:
    """A rising choice of tokens."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
    return chosen.sort().values
