"""Long prompts without a cached prefix: PyTorch's cuDNN attention on the fresh keys.

It reaches one and a half times the rate of the paged kernel, but builds a plan of some 50 ms for
every new shape, so it gets whole multiples of `DENSE_UNIT` tokens only. What is left of such a
prompt, and every other request, stays with the paged kernel (`rest`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.platforms import current_platform

# Plans exist for multiples of this many tokens; shorter prompts gain nothing worth one.
DENSE_UNIT = 1024
_MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, start + length) of the batch: the first ones of a request."""

    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePlan:
    """How an extend batch is divided. The tensors are on the device, None without any rest."""

    spans: list[Span]
    rest_tokens: torch.Tensor | None  # int64 [r], places in the batch
    rest_lens: torch.Tensor | None  # int64 [b], 0 where a request has no rest


def is_supported(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's attention does these shapes at all."""
    return (
        device.type == "cuda"
        and torch.backends.cudnn.is_available()
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= _MAX_HEAD_DIM
    )


def make_plan(prefix_lens: list[int], query_lens: list[int]) -> DensePlan | None:
    """Divide a batch; None where no prompt is long enough."""
    spans: list[Span] = []
    rest_tokens: list[int] = []
    rest_lens: list[int] = []
    start = 0
    for prefix_len, query_len in zip(prefix_lens, query_lens, strict=True):
        length = query_len // DENSE_UNIT * DENSE_UNIT if prefix_len == 0 else 0
        if length > 0:
            spans.append(Span(start=start, length=length))
        rest_tokens.extend(range(start + length, start + query_len))
        rest_lens.append(query_len - length)
        start += query_len
    if not spans:
        return None
    if not rest_tokens:
        return DensePlan(spans=spans, rest_tokens=None, rest_lens=None)
    to_device = current_platform().to_device_async
    return DensePlan(
        spans=spans,
        rest_tokens=to_device(torch.tensor(rest_tokens, dtype=torch.int64)),
        rest_lens=to_device(torch.tensor(rest_lens, dtype=torch.int64)),
    )


def dense_causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Causal attention of one span: q [n, H, D], k and v [n, H_kv, D] -> [n, H, D]."""
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        None,  # bias
        False,  # log-sum-exp
        0.0,  # dropout
        True,  # causal
        False,  # debug mask
        scale=scaling,
    )[0]
    return out.squeeze(0).transpose(0, 1)
