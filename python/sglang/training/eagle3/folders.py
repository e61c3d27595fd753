"""Draft folders in the published layout, written and read, and checkpoints of a run.

A draft folder holds `config.json` and `model.safetensors` and appears under its name only when it
is complete. A checkpoint is one file with everything that the next step depends on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.draft_config import (
    EAGLE3_ARCHITECTURE,
    default_layers_to_capture,
    read_eagle_config,
)
from sglang.srt.configs.model_config import ModelConfig, read_rope_config
from sglang.training.eagle3.draft import DraftShape, Eagle3Draft
from sglang.training.eagle3.target import FrozenTarget
from sglang.training.eagle3.vocabulary import DraftVocabulary, vocabulary_of_d2t

_INT_TENSORS = ("d2t", "t2d")


class DraftFolderError(ValueError):
    """A draft cannot be started from; the message says why."""


def draft_config(draft: Eagle3Draft, target: FrozenTarget, dtype: str) -> dict[str, Any]:
    """Content of config.json."""
    shape, of_target = draft.shape, target.config
    raw = of_target.hf_config
    config: dict[str, Any] = {
        "architectures": [EAGLE3_ARCHITECTURE],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": raw.get("bos_token_id"),
        "draft_vocab_size": draft.lm_head.out_features,
        "eos_token_id": raw.get("eos_token_id"),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": of_target.context_len,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": raw.get("pad_token_id"),
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "vocab_size": of_target.vocab_size,
    }
    layers = list(target.capture_layers)
    if layers != default_layers_to_capture(of_target.num_hidden_layers):
        # Files name the layers whose output is read, one before those that read it as input.
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in layers]}
    return config


def write_draft(folder: Path, draft: Eagle3Draft, target: FrozenTarget, dtype: str) -> None:
    """Replace `folder` by the draft as it is now."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    torch_dtype = getattr(torch, dtype)
    tensors = {
        name: (t if name in _INT_TENSORS else t.to(torch_dtype)).detach().cpu().contiguous()
        for name, t in draft.state_dict().items()
    }
    save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
    # safetensors makes its files private; a draft may be shared.
    (partial / "model.safetensors").chmod(0o644)
    text = json.dumps(draft_config(draft, target, dtype), indent=2) + "\n"
    (partial / "config.json").write_text(text, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedDraft:
    """A draft folder's content."""

    shape: DraftShape
    vocabulary: DraftVocabulary
    capture_layers: tuple[int, ...] | None
    weights: dict[str, torch.Tensor]  # float32, without the maps


def read_draft(folder: str | Path) -> SavedDraft:
    """Raises DraftFolderError for kinds of drafts that are not trained here."""
    config = ModelConfig.from_path(str(folder))
    eagle = read_eagle_config(config)
    unsupported = {
        "a norm of the features": eagle.norm_before_fc or eagle.fc_norm,
        "a normed output": eagle.norm_output,
        "biases": eagle.fc_bias or config.attention_bias or config.mlp_bias,
        "more than one layer": config.num_hidden_layers != 1,
        "no own head": config.hf_config.get("draft_vocab_size") is None,
        "another width than the target": eagle.has_own_embedding,
        "scaled rotary positions": read_rope_config(config.hf_config).rope_type != "default",
        "no EAGLE-3 layout": not (eagle.is_eagle3 and eagle.captures_layers),
    }
    found = [what for what, is_so in unsupported.items() if is_so]
    if found:
        raise DraftFolderError(f"{folder} cannot be trained on: it has {', '.join(found)}")
    tensors = load_file(Path(folder) / "model.safetensors")
    weights = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): tensor.float()
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and "embed_tokens" not in name
    }
    return SavedDraft(
        shape=DraftShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope.theta,
            num_features=eagle.num_features,
        ),
        vocabulary=vocabulary_of_d2t(tensors["d2t"].long(), config.vocab_size),
        capture_layers=eagle.capture_layer_ids,
        weights=weights,
    )


class Checkpoints:
    """The newest few checkpoints of a run: `step-00000500.pt`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Durable when it returns; older ones beyond `keep` are removed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step-{step:08d}.pt"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        for old in self._all()[: -self._keep]:
            old.unlink()
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """On the CPU; None where there is none."""
        found = self._all()
        if not found:
            return None
        state: dict[str, Any] = torch.load(found[-1], map_location="cpu", weights_only=True)
        return state

    def _all(self) -> list[Path]:
        return sorted(self._folder.glob("step-*.pt"))
