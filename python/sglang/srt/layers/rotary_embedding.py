"""Rotary position embedding: default, linear, dynamic NTK, llama3 and yarn frequencies.

A `RotaryEmbedding` holds one table of cosines and sines, indexed by position, that all layers of a
model share. Which frequencies fill it is decided by `inverse_frequencies` alone.

Sources: RoFormer (rotary embedding), YaRN (arXiv 2309.00071: interpolation ramp and attention
factor; its section on NTK-aware scaling gives the dynamic base), the Llama 3.1 model card
(three-band frequency scaling).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError, RopeConfig
from sglang.srt.layers.dispatch import KVDestination, default_ops

# Rows beyond the context length: speculative drafts look a few positions past the last token.
TABLE_MARGIN = 128


class RotaryEmbedding(nn.Module):
    """Rotate the first `rotary_dim` features of every head of q and k by their position."""

    def __init__(
        self, head_dim: int, rope: RopeConfig, max_position_embeddings: int, num_positions: int
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        rotary_dim = int(head_dim * rope.partial_rotary_factor)
        if torch.get_default_device().type == "meta":
            # Only the shape is asked for. PyTorch computes a range without values in Python and
            # loads its compiler for that, which takes seconds.
            table = torch.empty(num_positions, rotary_dim, dtype=torch.float32)
        else:
            table = build_cos_sin_table(rope, rotary_dim, max_position_embeddings, num_positions)
        # float32 [num_positions, rotary_dim]: cosines, then sines. No checkpoint holds it.
        self.cos_sin: torch.Tensor
        self.register_buffer("cos_sin", table, persistent=False)
        self._ops = default_ops()

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [n]; q [n, heads * head_dim] and k [n, kv_heads * head_dim], rotated.

        Consumes q and k (they may be written to and returned).
        """
        return self._ops.apply_rope(q, k, positions, self.cos_sin, self.head_dim)

    def rotate_and_store(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        destination: KVDestination,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, and the rotated keys and v [n, kv_heads * head_dim] written to the pool."""
        return self._ops.rope_and_store(
            q, k, v, positions, self.cos_sin, self.head_dim, destination
        )


def create_rotary_embedding(config: ModelConfig, rope: RopeConfig | None = None) -> RotaryEmbedding:
    """The table for a model, long enough for its context; on the default device.

    `rope`: where it is not the one that most layers of the model have.
    """
    return RotaryEmbedding(
        config.head_dim,
        rope or config.rope,
        config.max_position_embeddings,
        max(config.context_len, config.max_position_embeddings) + TABLE_MARGIN,
    )


def build_cos_sin_table(
    rope: RopeConfig, rotary_dim: int, max_position_embeddings: int, num_positions: int
) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines of all pairs, then sines.

    Raises ModelConfigError for an unknown rope type.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    if rope.rope_type == "dynamic":
        frequencies = _dynamic_frequencies(rope, rotary_dim, max_position_embeddings, positions)
    else:
        frequencies = inverse_frequencies(rope, rotary_dim, max_position_embeddings)
    angles = positions.unsqueeze(1) * frequencies  # [num_positions, rotary_dim / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor(rope)


def inverse_frequencies(
    rope: RopeConfig, rotary_dim: int, max_position_embeddings: int
) -> torch.Tensor:
    """float32 [rotary_dim / 2], radians per position. Raises ModelConfigError for other types."""
    plain = _plain_frequencies(rope.theta, rotary_dim)
    if rope.rope_type == "default":
        return plain
    if rope.rope_type == "linear":
        return plain / float(rope.require("factor"))
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain, max_position_embeddings)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, plain, rotary_dim, max_position_embeddings)
    raise ModelConfigError(
        f"rope type {rope.rope_type!r} is not supported; "
        "known ones: default, dynamic, linear, llama3, yarn"
    )


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cosines and sines (so its square scales attention logits); 1 except for yarn."""
    if rope.rope_type != "yarn":
        return 1.0
    explicit = rope.get("attention_factor")
    if explicit is not None:
        return float(explicit)
    factor = float(rope.require("factor"))
    if factor <= 1.0:
        return 1.0
    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    if numerator and denominator:
        return _yarn_scale(factor, numerator) / _yarn_scale(factor, denominator)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def _plain_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def _dynamic_frequencies(
    rope: RopeConfig, rotary_dim: int, max_position_embeddings: int, positions: torch.Tensor
) -> torch.Tensor:
    """[num_positions, rotary_dim / 2]: the base grows with the length once it passes the limit.

    Each position uses the base of a sequence that ends there. So a token's key depends on its
    prefix only, which a shared KV cache needs, and equals what one-token steps of the reference
    compute (a long prompt in one pass would there use the base of its full length).
    """
    original = max_position_embeddings
    factor = float(rope.require("factor"))
    lengths = (positions + 1).clamp(min=original)
    growth = (factor * lengths / original - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    bases = (rope.theta * growth).unsqueeze(1)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / bases**exponents


def _llama3_frequencies(
    rope: RopeConfig, plain: torch.Tensor, max_position_embeddings: int
) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, a linear blend in between."""
    factor = float(rope.require("factor"))
    low, high = float(rope.require("low_freq_factor")), float(rope.require("high_freq_factor"))
    original = rope.get("original_max_position_embeddings", max_position_embeddings)
    # Number of full turns within the original context: <= low is long, >= high is short.
    turns = original * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * keep + plain / factor * (1 - keep)


def _yarn_frequencies(
    rope: RopeConfig, plain: torch.Tensor, rotary_dim: int, max_position_embeddings: int
) -> torch.Tensor:
    """Blend of kept (many turns) and interpolated (few turns) frequencies along the dimensions."""
    factor = float(rope.require("factor"))
    original = rope.get("original_max_position_embeddings", max_position_embeddings)

    def dimension_with_turns(turns: float) -> float:
        wavelength = original / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first = dimension_with_turns(float(rope.get("beta_fast", 32.0)))
    last = dimension_with_turns(float(rope.get("beta_slow", 1.0)))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    span = (last - first) or 0.001  # avoids dividing by zero; any small number makes a step
    index = torch.arange(rotary_dim // 2, dtype=torch.float32)
    interpolate = ((index - first) / span).clamp(0.0, 1.0)
    return plain / factor * interpolate + plain * (1 - interpolate)
