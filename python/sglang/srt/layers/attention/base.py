"""What an attention backend must supply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from sglang.srt.layers.radix_attention import RadixAttention, Rotation
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """What a backend may want to know when it is created. Head counts are this rank's."""

    device: str
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_context_len: int
    max_running_requests: int
    kv_dtype: torch.dtype | None = None  # of the pool; None: like `dtype`
    # Of a value; with latent attention less than `head_dim`, else None.
    v_head_dim: int | None = None


@runtime_checkable
class TreeMaskInput(Protocol):
    """A `spec_info` that limits what draft tokens may see.

    `custom_mask`: bool [b, q, m], contiguous: for each of a request's q new tokens (as many in
    every request) which of the last m key positions it sees, True = visible. Every key before
    them is visible; m is no more than any request's seq_len. None means causal.
    """

    custom_mask: torch.Tensor | None


class AttentionBackend(ABC):
    """Attention over the paged pool, for one model runner. Used on the scheduler thread only.

    Guaranteed by the caller: `init_forward_metadata` runs once per batch before the first layer;
    tokens of a request are contiguous; `seq_lens` counts the new tokens; slots of all positions
    below seq_len are in `req_to_token_pool.req_to_token[row, :seq_len]`, those of new tokens
    included.
    """

    # Whether an extend step needs nothing of the host's lists of lengths, so that a captured one
    # can be replayed with other lengths. Requests without new tokens must be possible in it.
    captures_prefill = False

    @abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Compute what all layers share and set `forward_batch.attn_metadata`."""

    def can_rotate(self, forward_batch: ForwardBatch) -> bool:
        """Whether `forward_rotating` does this batch's layers."""
        return False

    def forward_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Rotation,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """`forward` for q and k that are still to be rotated; both are left as they are."""
        raise NotImplementedError

    def planned_prefill_lengths(self, max_tokens: int) -> list[int]:
        """Lengths up to `max_tokens` of new prompts that are planned for, once each: to warm up."""
        return []

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Write k and v (unless `save_kv_cache` is false), then attend.

        q [n, H * D] or [n, H, D]; k and v [n, H_kv, D]. Without `save_kv_cache` the pool holds the
        new tokens' keys and values already, and k and v may be None.
        Returns [n, H * D] in q's dtype, D being the width of a value.
        """
