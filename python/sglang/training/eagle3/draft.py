"""The draft as it is trained: one Llama layer, its vocabulary head, and the unrolled forward.

Names of parameters and buffers are those of published EAGLE-3 files, so that `state_dict` is what
is saved. Only the plain form is trained: features through `fc` without a norm, own head, no biases,
ordinary rotary positions. The server's class for the same files is
`sglang.srt.models.llama_eagle3`; the two share no code, and a test holds them to equal logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from sglang.training.eagle3.attention import TttAttention
from sglang.training.eagle3.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """Sizes of a draft; its width is the target's."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    num_features: int


class _RmsNorm(nn.Module):
    """In float32 whatever comes in, as the server does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return wide * scale * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        width, head_dim = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(width, shape.num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head_dim, shape.hidden_size, bias=False)
        self._head_dim = head_dim
        self._group = shape.num_heads // shape.num_kv_heads
        exponents = torch.arange(0, head_dim, 2).double() / head_dim
        self.register_buffer(
            "frequencies", (shape.rope_theta**-exponents).float(), persistent=False
        )
        self.frequencies: torch.Tensor

    def project(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B, T, 2H] and [T] -> queries, keys, values [B, heads, T, d], KV heads repeated."""
        queries = self._rotate(self._split(self.q_proj(x)), positions)
        keys = self._rotate(self._split(self.k_proj(x)), positions)
        values = self._split(self.v_proj(x))
        keys, values = (t.repeat_interleave(self._group, dim=1) for t in (keys, values))
        return queries, keys, values

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """[B, heads, T, d] -> [B, T, H]."""
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        low, high = x.float().chunk(2, dim=-1)
        rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return rotated.to(x.dtype)


class _Mlp(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _MidLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = _RmsNorm(size, eps)
        self.hidden_norm = _RmsNorm(size, eps)
        self.post_attention_layernorm = _RmsNorm(size, eps)

    def attention_input(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Embedding of the next token first, then the state: [B, T, 2H]."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(states)), dim=-1)

    def finish(self, states: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Both residual sums; `states` as they came in, without a norm."""
        states = states + self.self_attn.output(mixed)
        out: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Eagle3Draft(nn.Module):
    """Parameters in float32. The embedding is the target's and is passed in as vectors."""

    def __init__(self, shape: DraftShape, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.shape = shape
        size = shape.hidden_size
        self.fc = nn.Linear(shape.num_features * size, size, bias=False)
        self.midlayer = _MidLayer(shape)
        self.norm = _RmsNorm(size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(size, vocabulary.size, bias=False)
        self.register_buffer("d2t", vocabulary.d2t)
        self.register_buffer("t2d", vocabulary.t2d)
        self.register_buffer("token_ids", vocabulary.token_ids, persistent=False)
        self.register_buffer("draft_ids", vocabulary.draft_ids, persistent=False)
        self.d2t: torch.Tensor
        self.t2d: torch.Tensor
        self.token_ids: torch.Tensor  # int64 [V_d]: the token of a draft id
        self.draft_ids: torch.Tensor  # int64 [V]: the draft id of a token, -1 for none

    @torch.no_grad()
    def init_weights(self, seed: int, head_rows: torch.Tensor | None) -> None:
        """Normal matrices of variance 1 / inputs; the head from [V_d, H] rows where given."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                values = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(values * parameter.shape[1] ** -0.5)
        if head_rows is not None:
            self.lm_head.weight.copy_(head_rows)

    def unroll(
        self,
        embeds: torch.Tensor,
        features: torch.Tensor,
        num_steps: int,
        attention: TttAttention,
    ) -> Iterator[torch.Tensor]:
        """Hidden states [B, T, H] (before the final norm) of step 0, 1, ... `num_steps` - 1.

        `embeds` [B, T + num_steps, H]: those of the tokens themselves, the last ones padding.
        `features` [B, T, features * H]. Position p of step k reads the embedding at p + 1 + k and
        the state that step k-1 left at p; its rotary position is p + k. Gradients go through all
        steps.
        """
        length = features.shape[1]
        layer = self.midlayer
        positions = torch.arange(length, device=features.device)
        states = self.fc(features).float()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(num_steps):
            both = layer.attention_input(embeds[:, step + 1 : step + 1 + length], states)
            query, key, value = layer.self_attn.project(both, positions + step)
            keys.append(key)
            values.append(value)
            states = layer.finish(states, attention(query, keys, values))
            yield states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] before the final norm -> [..., V_d]."""
        out: torch.Tensor = self.lm_head(self.norm(states))
        return out
