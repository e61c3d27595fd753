"""Sizes of linear attention in a checkpoint's `config.json` (gated delta rule, arXiv 2412.06464).

Plain JSON in, one frozen record out; read by `model_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError
from sglang.srt.configs.layer_kinds import LINEAR

_DEFAULT_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionConfig:
    """Layers that keep a recurrent state instead of KV. Counts are of the whole model.

    `num_key_heads` pairs of query and key serve `num_value_heads` values, each with a state of
    [key_dim, value_dim]. Queries, keys and values pass a causal convolution of `conv_kernel` taps.
    """

    layer_ids: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    def get_num_key_heads(self, tp_size: int) -> int:
        """Key heads of one rank. Raises ValueError where they do not divide."""
        if self.num_key_heads % tp_size:
            raise ValueError(
                f"{self.num_key_heads} key heads of linear attention cannot be split over "
                f"{tp_size} ranks"
            )
        return self.num_key_heads // tp_size

    def get_num_value_heads(self, tp_size: int) -> int:
        """Value heads of one rank. Raises ValueError where they do not divide."""
        return self.get_num_key_heads(tp_size) * (self.num_value_heads // self.num_key_heads)

    def get_conv_dim(self, tp_size: int) -> int:
        """Channels of one rank's convolution: queries, keys, values."""
        keys = self.get_num_key_heads(tp_size) * self.key_dim
        return 2 * keys + self.get_num_value_heads(tp_size) * self.value_dim


def read_linear_attention(raw: Mapping[str, Any], num_layers: int) -> LinearAttentionConfig | None:
    """The sizes; None for a model without. Raises ModelConfigError for sizes that make no sense."""
    if raw.get("linear_num_value_heads") is None:
        return None
    kinds = raw.get("layer_types")  # checked by `layer_kinds`
    if kinds is None:
        # Every so many layers one attends to all tokens.
        interval = int(raw.get("full_attention_interval") or _DEFAULT_INTERVAL)
        is_linear = [(layer_id + 1) % interval != 0 for layer_id in range(num_layers)]
    else:
        is_linear = [kind == LINEAR for kind in kinds]
    sizes = LinearAttentionConfig(
        layer_ids=tuple(layer_id for layer_id, yes in enumerate(is_linear) if yes),
        num_key_heads=int(raw["linear_num_key_heads"]),
        num_value_heads=int(raw["linear_num_value_heads"]),
        key_dim=int(raw["linear_key_head_dim"]),
        value_dim=int(raw["linear_value_head_dim"]),
        conv_kernel=int(raw["linear_conv_kernel_dim"]),
    )
    numbers = (sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim)
    if min(numbers) < 1 or sizes.num_value_heads % sizes.num_key_heads or sizes.conv_kernel < 2:
        raise ModelConfigError(f"sizes of linear attention that do not fit: {sizes}")
    if not sizes.layer_ids or len(sizes.layer_ids) == num_layers:
        raise ModelConfigError("linear attention needs layers of both kinds")
    return sizes
