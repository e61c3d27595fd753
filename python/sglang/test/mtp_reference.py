"""Layers that predict further tokens and their targets, by the definition, in plain torch.

DeepSeek-V3 and MiMo. Whole sequences, no cache, no batches: for small models that tests compare
with. Reads the files itself and shares no code with the server's models.

Sources: DeepSeek-V3 (arXiv 2412.19437, sections 2.1 and 2.2), MiMo (arXiv 2505.07608).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class _Layer:
    """One decoder layer over a whole sequence."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.eps: float = config["rms_norm_eps"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def norm(self, x: torch.Tensor, name: str, eps: float | None = None) -> torch.Tensor:
        return _rms_norm(x, self.weights[f"{name}.weight"], eps or self.eps)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, hidden] -> [n, hidden]."""
        attend = self._latent_attention if "kv_lora_rank" in self.config else self._attention
        x = x + attend(self.norm(x, "input_layernorm"))
        normed = self.norm(x, "post_attention_layernorm")
        return x + (
            self._experts(normed) if "mlp.gate.weight" in self.weights else self._mlp(normed, "mlp")
        )

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        n, heads = x.shape[0], self.config["num_attention_heads"]
        q = self.linear(x, "self_attn.q_proj").view(n, heads, -1)
        k = self.linear(x, "self_attn.k_proj").view(n, -1, q.shape[-1])
        v = self.linear(x, "self_attn.v_proj").view(n, -1, q.shape[-1])
        repeats = heads // k.shape[1]
        k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
        q, k = (self._rotate(*part.chunk(2, dim=-1)) for part in (q, k))
        return self._attend(torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5, v)

    def _attend(self, scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        shares = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        return self.linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), "self_attn.o_proj")

    def _latent_attention(self, x: torch.Tensor) -> torch.Tensor:
        config, n = self.config, x.shape[0]
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope, width = (
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
            config["v_head_dim"],
        )
        q = self.linear(
            self.norm(self.linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6),
            "self_attn.q_b_proj",
        )
        q_nope, q_rope = q.view(n, heads, nope + rope).split([nope, rope], dim=-1)
        compressed, k_rope = self.linear(x, "self_attn.kv_a_proj_with_mqa").split([rank, rope], -1)
        kv = self.linear(
            self.norm(compressed, "self_attn.kv_a_layernorm", 1e-6), "self_attn.kv_b_proj"
        )
        k_nope, v = kv.view(n, heads, nope + width).split([nope, width], dim=-1)
        # Neighbours are rotated together.
        q_rope = self._rotate(q_rope[..., ::2], q_rope[..., 1::2])
        k_rope = self._rotate(k_rope[:, None, ::2], k_rope[:, None, 1::2]).squeeze(1)
        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
        scores = scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)
        return self._attend(scores * (nope + rope) ** -0.5, v)

    def _rotate(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """[n, heads, pairs] both: the two of each pair."""
        pairs = first.shape[-1]
        speeds = self.config["rope_theta"] ** (-torch.arange(pairs) / pairs)
        angles = (torch.arange(first.shape[0]).unsqueeze(1) * speeds).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = functional.silu(self.linear(x, f"{name}.gate_proj"))
        return self.linear(gate * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        config, n = self.config, x.shape[0]
        scores = self.linear(x, "mlp.gate").sigmoid()
        ranked = scores + self.weights["mlp.gate.e_score_correction_bias"]
        worth = ranked.view(n, config["n_group"], -1).topk(2).values.sum(-1)
        allowed = torch.zeros_like(worth).scatter_(1, worth.topk(config["topk_group"]).indices, 1.0)
        size = scores.shape[1] // config["n_group"]
        ranked = ranked.masked_fill(allowed.repeat_interleave(size, dim=1) == 0, -9.0)
        ids = ranked.topk(config["num_experts_per_tok"]).indices
        chosen = torch.zeros_like(scores).scatter_(1, ids, scores.gather(1, ids))
        shares = chosen / chosen.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        out = self._mlp(x, "mlp.shared_experts")
        for expert in range(scores.shape[1]):
            out = out + shares[:, expert, None] * self._mlp(x, f"mlp.experts.{expert}")
        return out


# MiMo's names -> DeepSeek's.
_RENAMED = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "final_layernorm": "shared_head.norm",
}


def _like_deepseek(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of one of MiMo's layers under DeepSeek's names; state and embedding change sides."""
    renamed = {}
    for name, tensor in weights.items():
        own, _, part = name.rpartition(".")
        renamed[f"{_RENAMED.get(own, own)}.{part}"] = tensor
    projection = renamed.pop("input_proj.weight", None)
    if projection is not None:
        state, embedding = projection.chunk(2, dim=1)
        renamed["eh_proj.weight"] = torch.cat((embedding, state), dim=1)
    return renamed


class MtpReference:
    """A folder's target and its layers that predict further tokens, `num_drafts` of them used."""

    def __init__(self, folder: Path, num_drafts: int) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights: dict[str, torch.Tensor] = {}
        for path in folder.glob("*.safetensors"):
            weights |= load_file(str(path))
        count = config["num_hidden_layers"]

        def layer(prefix: str) -> _Layer:
            own = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
            return _Layer(config, _like_deepseek(own))

        self._layers = [layer(f"model.layers.{index}.") for index in range(count)]
        behind = {"mimo": "model.mtp_layers.{0}.", "deepseek_v3": "model.layers.{1}."}
        prefix = behind[config["model_type"]]
        self._drafts = [layer(prefix.format(i, count + i)) for i in range(num_drafts)]
        self._embedding, self._head = (
            weights["model.embed_tokens.weight"],
            weights["lm_head.weight"],
        )
        self._norm, self._eps = weights["model.norm.weight"], config["rms_norm_eps"]
        # Answers are asked for again and again.
        self._next: dict[tuple[int, ...], int] = {}
        self._proposed: dict[tuple[int, ...], list[int]] = {}

    def states(self, tokens: Sequence[int]) -> torch.Tensor:
        """The target's final states, normed: [n, hidden]."""
        x = self._embedding[list(tokens)]
        for layer in self._layers:
            x = layer(x)
        return _rms_norm(x, self._norm, self._eps)

    def next_token(self, tokens: Sequence[int]) -> int:
        """What the target says after these tokens."""
        key = tuple(tokens)
        if key not in self._next:
            self._next[key] = self._best(self.states(tokens))
        return self._next[key]

    def proposals(self, tokens: Sequence[int]) -> list[int]:
        """What the layers draft behind these tokens, of which the target has seen all but the last.

        Layer j reads, at position p, the state of the layer before at p and token p + 1 + j.
        """
        key = tuple(tokens)
        if key not in self._proposed:
            self._proposed[key] = self._propose(tokens)
        return self._proposed[key]

    def _propose(self, tokens: Sequence[int]) -> list[int]:
        states, inputs, drafts = self.states(tokens[:-1]), list(tokens[1:]), []
        for layer in self._drafts:
            embedded = layer.norm(self._embedding[inputs], "enorm")
            joined = torch.cat((embedded, layer.norm(states, "hnorm")), dim=-1)
            states = layer.norm(layer(layer.linear(joined, "eh_proj")), "shared_head.norm")
            drafts.append(self._best(states))
            inputs = [*inputs[1:], drafts[-1]]
        return drafts

    def accepted(self, prompt: Sequence[int], num_new: int) -> list[int]:
        """Drafts that each verification accepts, until at least `num_new` tokens are there."""
        tokens, counts = [*prompt, self.next_token(prompt)], []
        while len(tokens) < len(prompt) + num_new:
            count = 0
            for draft in self.proposals(tokens):
                if self.next_token(tokens) != draft:
                    break
                tokens.append(draft)
                count += 1
            tokens.append(self.next_token(tokens))
            counts.append(count)
        return counts

    def _best(self, states: torch.Tensor) -> int:
        return int((states[-1] @ self._head.T).argmax())
