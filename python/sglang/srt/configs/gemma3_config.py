"""Bring a Gemma 3 configuration to the keys that `model_config` reads.

Published files leave out what is the family's default and have two spellings of the layer pattern
and of the two rotary bases. Owns no state, reads no files. Called by `model_config` only.

Source: the published `config.json` of google/gemma-3-270m and gemma-3-1b-it, and the documentation
of `Gemma3TextConfig` in transformers (defaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
# What the family can state and this server does not compute.
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def normalize_gemma3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `hidden_act`, `layer_types`, `rope_parameters` and `local_rope_parameters` set.

    Raises ValueError for a feature that is not supported.
    """
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise ValueError(f"config.json: {name!r} is not supported for Gemma 3")
    config = {**raw}
    for name, value in _DEFAULTS.items():
        if config.get(name) is None:
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
    factor = overall.get("factor")
    if factor is not None:
        # The files state the length after scaling.
        length = int(config["max_position_embeddings"] / float(factor))
        overall.setdefault("original_max_position_embeddings", length)
    config["rope_parameters"], config["local_rope_parameters"] = overall, local
    return config
