"""A stand-in for the scheduler's request, with just what sampling reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.constrained.base_grammar_backend import GrammarMatcher
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass
class FakeReq:
    sampling_params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    num_pending_tokens: int = 1  # the step that is being prepared
    grammar: GrammarMatcher | None = None
    eos_token_ids: frozenset[int] = frozenset({0})


@dataclass
class FakeOutput:
    next_token_logits: torch.Tensor
    next_token_logprobs: torch.Tensor | None = None
    next_token_top_logprobs_val: list[list[float]] | None = None
    next_token_top_logprobs_idx: list[list[int]] | None = None
    next_token_token_ids_logprobs_val: list[list[float]] | None = None
    next_token_token_ids_logprobs_idx: list[list[int]] | None = None
    greedy_token_ids: torch.Tensor | None = None
    unusable_rows: torch.Tensor | None = None


def params(**values: Any) -> SamplingParams:
    """Parsed, checked and normalised, as the scheduler receives them."""
    parsed = SamplingParams.from_dict(values)
    parsed.verify(10**6)
    parsed.normalize()
    return parsed


def batch_info(reqs: list[FakeReq], vocab_size: int) -> SamplingBatchInfo:
    info = SamplingBatchInfo.from_reqs(reqs, vocab_size, "cpu")
    info.update_host_state(reqs)
    return info
