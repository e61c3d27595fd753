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

from sglang.srt.configs.draft_config import DRAFT_ARCHITECTURES, EAGLE3_ARCHITECTURE
from sglang.test.fakes.tiny_models import tiny_config, tiny_weights, write_weights

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


def _draft_token_ids(draft_vocab_size: int, vocab_size: int, seed: int) -> torch.Tensor:
    """A rising choice of tokens."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
    return chosen.sort().values
