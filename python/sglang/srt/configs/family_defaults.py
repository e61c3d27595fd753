"""What a family's configuration means where it is silent, and keys that mean nothing in it.

What changes answers without changing the shape of a tensor, and sizes that a file may well leave
out; other missing sizes are found by the loader.
Families with more to say have a file of their own (`gemma3_config`). Pure; called by `model_config`
only.

Source: the configuration classes documented by transformers; `test_against_transformers.py`
compares whole models whose files leave these keys out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A window counts only where it is switched on, and by default from a layer that few models have.
_QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    "mimo": _QWEN_WINDOW,
    "qwen2": _QWEN_WINDOW,
    "qwen3": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
    },
}

# Keys that files carry over from other families.
_MEANINGLESS: dict[str, tuple[str, ...]] = {
    "deepseek_v2": ("sliding_window", "rope_interleave"),
    "deepseek_v3": ("sliding_window",),
    "llama": ("sliding_window",),
    "qwen3_moe": ("max_window_layers",),
    "qwen3_next": ("sliding_window",),
}


def complete_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with its family's defaults and without what means nothing in it.

    A file that lists the kinds of its layers means what it says of their windows.
    """
    family = str(raw.get("model_type", ""))
    config = {**_DEFAULTS.get(family, {}), **raw}
    for name in _MEANINGLESS.get(family, ()):
        if name != "sliding_window" or config.get("layer_types") is None:
            config.pop(name, None)
    return config
