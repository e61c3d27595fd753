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
from safetensors.torch import load_file, save_file

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    EAGLE3_ARCHITECTURE,
    MIMO_MTP_ARCHITECTURE,
    NEXTN_ARCHITECTURE,
    as_eagle_draft,
    mtp_layer_config,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.mtp_draft import MtpDraftModel
from sglang.srt.models.registry import resolve_model_class
from sglang.test.fakes.tiny_models import (
    BOS_ID,
    make_tiny_checkpoint,
    random_tensor,
    tiny_config,
    tiny_weights,
    write_weights,
)

DRAFT_VOCAB_SIZE = 101
_MTP_FAMILIES = {NEXTN_ARCHITECTURE: "deepseek_v3", MIMO_MTP_ARCHITECTURE: "mimo"}
# Factor on queries such that each token attends to few others.
_SHARPNESS = 8.0


def tiny_draft_config(architecture: str = EAGLE3_ARCHITECTURE, **overrides: Any) -> dict[str, Any]:
    """Content of config.json; `overrides` replace or add keys."""
    if architecture not in DRAFT_ARCHITECTURES:
        raise ValueError(f"unknown draft architecture {architecture}")
    if architecture in _MTP_FAMILIES:
        # A folder of its own, of the one layer.
        family = _MTP_FAMILIES[architecture]
        own = {"architectures": [architecture], "num_hidden_layers": 1, "first_k_dense_replace": 0}
        return {**tiny_config(family), **own, **overrides}
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
    if config["architectures"][0] in _MTP_FAMILIES:
        return _mtp_weights(config, 0, seed)
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


def add_tiny_nextn_layer(folder: str | Path, seed: int = 0, num_layers: int = 1) -> Path:
    """Add layers that predict one token further to a tiny model's folder; returns it.

    For the families `deepseek_v3` and `mimo`. Under the published names, with the copies of
    embedding and head that files of the former hold (of other values here, so that reading them by
    mistake shows).
    """
    root = Path(folder)
    path = root / "config.json"
    config = {
        **json.loads(path.read_text(encoding="utf-8")),
        "num_nextn_predict_layers": num_layers,
    }
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights: dict[str, torch.Tensor] = {}
    for layer in range(num_layers):
        weights |= _mtp_weights(config, layer, seed + 1 + layer)
    save_file(weights, str(root / "model-mtp.safetensors"), metadata={"format": "pt"})
    return root


def _mtp_weights(config: Mapping[str, Any], layer: int, seed: int) -> dict[str, torch.Tensor]:
    draft = _mtp_draft(config, layer)
    shapes = {name: slot.full_shape for name, slot in draft.weight_table().items()}
    whole = (config["vocab_size"], config["hidden_size"])
    copies = ("embed_tokens", "lm_head")
    shapes |= {f"{name}.weight": whole for name in copies if name in draft.own_names.values()}
    return {
        draft.published_name(name): random_tensor(name, shape, seed)
        for name, shape in shapes.items()
    }


def _mtp_draft(config: Mapping[str, Any], layer: int) -> MtpDraftModel:
    draft_config = mtp_layer_config(as_eagle_draft(ModelConfig.from_dict(config)), layer)
    with torch.device("meta"):
        draft = resolve_model_class(draft_config.architectures)(draft_config)
    assert isinstance(draft, MtpDraftModel)
    return draft


def _draft_token_ids(draft_vocab_size: int, vocab_size: int, seed: int) -> torch.Tensor:
    """A rising choice of tokens."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size]
    return chosen.sort().values


def make_tiny_mtp_copies(
    folder: str | Path,
    num_layers: int,
    family: str = "deepseek_v3",
    *,
    seed: int = 0,
    state_share: float = 0.0,
) -> Path:
    """A tiny model of one layer, with copies of it as the layers that predict further tokens.

    Layer j at position p computes what the target does at p + 1 + j, but for the tokens 0..j that
    it has never seen. Attention is sharp, and BOS_ID has neither key nor value: behind as many of
    them as there are layers drafts are right, as long as the KV of every layer is. With
    `state_share` the states of the layer before disturb each layer, and drafts are right at times.
    """
    root = make_tiny_checkpoint(
        folder, family, seed=seed, num_hidden_layers=1, first_k_dense_replace=0
    )
    weights = load_file(str(root / "model.safetensors"))
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    embedding[BOS_ID] = 0.0
    for name, tensor in weights.items():
        if name.endswith(("q_b_proj.weight", "q_proj.weight")):
            tensor *= _SHARPNESS
        elif name.endswith(("k_proj.bias", "v_proj.bias")):
            tensor.zero_()
    save_file(weights, str(root / "model.safetensors"), metadata={"format": "pt"})
    add_tiny_nextn_layer(root, seed, num_layers)
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    drafts = load_file(str(root / "model-mtp.safetensors"))
    for draft in (_mtp_draft(config, layer) for layer in range(num_layers)):
        for name, tensor in drafts.items():
            if not draft.is_foreign_weight(name):
                _make_copy(tensor, draft.plain_name(name), weights, draft, state_share)
    save_file(drafts, str(root / "model-mtp.safetensors"), metadata={"format": "pt"})
    return root


def _make_copy(
    tensor: torch.Tensor,
    name: str,
    target: Mapping[str, torch.Tensor],
    draft: MtpDraftModel,
    state_share: float,
) -> None:
    """Fill a tensor, of this plain name, of a layer that repeats the target's only one."""
    if name in ("norm.weight", *(n for n in draft.weight_table() if n.startswith("layers.0."))):
        tensor.copy_(target[f"model.{name}"])
    elif name == "enorm.weight":
        tensor.fill_(1.0)
    elif name == "eh_proj.weight":
        embedding, state = tensor.chunk(2, dim=1)
        if draft.joins_state_first:
            embedding, state = state, embedding
        embedding.copy_(torch.eye(tensor.shape[0]))
        state *= state_share
