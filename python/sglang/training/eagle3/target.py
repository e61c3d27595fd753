"""The frozen target: features, logits, embedding, and answers that it writes itself.

A transformers model of the Llama or Qwen kind, read from a local folder. Features are the streams
that enter three of its layers, taken by hooks, so that the other layers' streams are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from sglang.srt.configs.draft_config import default_layers_to_capture
from sglang.srt.configs.model_config import ModelConfig


class TargetError(ValueError):
    """The model cannot serve as a target; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetStates:
    """What the target makes of a batch [B, T] of tokens."""

    features: torch.Tensor  # [B, T, layers * H]
    last: torch.Tensor  # [B, T, H], normed: what the head reads


class FrozenTarget:
    """Weights never change; nothing here makes gradients."""

    def __init__(
        self,
        folder: str | Path,
        device: torch.device,
        dtype: torch.dtype,
        capture_layers: Sequence[int] | None = None,
    ) -> None:
        self.config = ModelConfig.from_path(str(folder))
        self.device = device
        transformers_logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True
        )
        self.model = model.to(device).eval().requires_grad_(False)
        num_layers = self.config.num_hidden_layers
        layers = list(capture_layers or default_layers_to_capture(num_layers))
        if any(not 0 <= layer <= num_layers for layer in layers):
            raise TargetError(
                f"layers {layers} cannot be captured of a target with {num_layers}: "
                "name others with --capture-layers"
            )
        self.capture_layers = tuple(layers)
        self._decoder = self.model.get_decoder()
        self._captured: dict[int, torch.Tensor] = {}
        for layer in set(layers):
            self._module_at(layer).register_forward_pre_hook(self._keeper(layer), with_kwargs=True)
        self._check_head()

    @property
    def embedding(self) -> torch.Tensor:
        """[V, H]."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_rows(self) -> torch.Tensor:
        """[V, H]: the matrix that makes logits."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        stated = self.model.generation_config.eos_token_id
        found = [stated] if isinstance(stated, int) else list(stated or ())
        return frozenset(found) | self.config.hf_eos_token_id

    @torch.no_grad()
    def states(self, token_ids: torch.Tensor) -> TargetStates:
        """Of right-padded sequences [B, T]; what stands before the padding does not see it."""
        # Named: the decoder would otherwise build a cache that nobody reads.
        output = self._decoder(input_ids=token_ids, use_cache=False)
        return TargetStates(features=self._take_features(), last=output.last_hidden_state)

    @torch.no_grad()
    def step(
        self, token_ids: torch.Tensor, cache: Any, num_logits: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens [1, n] to a transformers cache: logits [num_logits, V], features [n, w]."""
        output = self._decoder(input_ids=token_ids, past_key_values=cache, use_cache=True)
        logits = self.logits(output.last_hidden_state[0, -num_logits:])
        return logits, self._take_features()[0]

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., V]."""
        head = self.model.get_output_embeddings()
        return functional.linear(last, head.weight, head.bias)

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[..., H]."""
        return functional.embedding(token_ids, self.embedding)

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float,
        top_p: float = 1.0,
        stop_at_end: bool = True,
    ) -> list[list[int]]:
        """Continuations of all prompts as one batch; `temperature` 0 is greedy.

        Each ends with the token that ended it, or has `max_new_tokens` tokens.
        """
        width = max(len(prompt) for prompt in prompts)
        token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        ends = sorted(self.end_ids) if stop_at_end else []
        choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
        if temperature > 0:
            choice = {"do_sample": True, "temperature": temperature, "top_p": top_p}
        output = self.model.generate(
            input_ids=token_ids.to(self.device),
            attention_mask=mask.to(self.device),
            max_new_tokens=max_new_tokens,
            min_new_tokens=None if stop_at_end else max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
            top_k=0 if temperature > 0 else None,
            **choice,
        )
        self._captured.clear()
        return [_until(row, ends) for row in output[:, width:].tolist()]

    def _take_features(self) -> torch.Tensor:
        features = torch.cat([self._captured[layer] for layer in self.capture_layers], dim=-1)
        self._captured.clear()
        return features

    def _module_at(self, layer: int) -> torch.nn.Module:
        layers = self._decoder.layers
        module: torch.nn.Module = layers[layer] if layer < len(layers) else self._decoder.norm
        return module

    def _keeper(self, layer: int) -> Any:
        def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return keep

    def _check_head(self) -> None:
        """Families that scale or cap their logits would be taught wrongly."""
        token_ids = torch.tensor([[1, 2, 3]], device=self.device)
        with torch.no_grad():
            expected = self.model(input_ids=token_ids, use_cache=False).logits
        self._captured.clear()
        got = self.logits(self.states(token_ids).last)
        if not torch.allclose(got, expected, rtol=1e-2, atol=1e-2):
            raise TargetError("this model's logits are not its head times its last states")


def _until(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    for index, token in enumerate(token_ids):
        if token in ends:
            return token_ids[: index + 1]
    return token_ids
