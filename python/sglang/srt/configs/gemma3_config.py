"""Bring a Gemma 3 configuration to the keys that `model_config` reads.

Published files leave out what is the family's default and have two spellings of the layer pattern
and of the two rotary bases. Owns no state, reads no files. Called by `model_config` only.

Source: the published `config.json` of google/gemma-3-270m and gemma-3-1b-it, and the documentation
of `Gemma3TextConfig` in transformers (defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
# Kinds of scaling whose frequencies do not depend on the length before it.
_FREE_OF_ORIGINAL_LENGTH = ("linear", "dynamic")
# What the family can state and this server does not compute.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def normalize_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `hidden_act`, `layer_types`, `rope_parameters` and `local_rope_parameters` set.

    Raises ModelConfigError for a feature that is not supported.
    """
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise ModelConfigError(f"config.json: {name!r} is not supported for Gemma 3")
    config = {**raw}
    for name, value in _DEFAULTS.items():
        # A window that is null on purpose is not the usual one.
        if config.get(name) is None and (name != "sliding_window" or name not in raw):
            config[name] = value
    config["hidden_act"] = config["hidden_activation"]
    if config.get("layer_types") is None:
        pattern = int(config["sliding_window_pattern"])
        config["layer_types"] = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(int(config["num_hidden_layers"]))
        ]
    stated = config.get("rope_parameters") or {}
    is_per_kind = "full_attention" in stated or "sliding_attention" in stated
    local = dict(stated.get("sliding_attention") or {}) if is_per_kind else {}
    overall = dict(stated.get("full_attention") or {}) if is_per_kind else dict(stated)
    # Scaling is of the layers that see everything: a window never gets long.
    overall.update(config.pop("rope_scaling", None) or {})
    overall.setdefault("rope_theta", config["rope_theta"])
    local.setdefault("rope_theta", config["rope_local_base_freq"])
    factor, kind = overall.get("factor"), overall.get("rope_type", overall.get("type"))
    if factor is not None and kind in _FREE_OF_ORIGINAL_LENGTH:
        # The files state the length after scaling. Of the others (YaRN, Llama 3) this length is a
        # parameter: where it is absent, it is the stated one, as in every family.
        length = int(config["max_position_embeddings"] / float(factor))
        overall.setdefault("original_max_position_embeddings", length)
    config["rope_parameters"], config["local_rope_parameters"] = overall, local
    return config


def normalize_gemma3_with_vision(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a model of text and images that reads text, as `normalize_gemma3` gives it.

    What the file says of the whole (stop ids, dtype) goes before what it says of the part.
    """
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelConfigError("config.json: 'text_config' must be an object")
    whole = {
        name: value
        for name, value in raw.items()
        if value is not None and name not in ("text_config", "vision_config")
    }
    return normalize_gemma3({**text, **whole})
