"""What one forward pass needs, as tensors on the device: `ForwardMode` and `ForwardBatch`.

Owns no state across steps. The scheduler's `ScheduleBatch` is turned into a `ForwardBatch` by
`managers.tp_worker`; the attention backend adds its own metadata object; models, layers and the
sampler only read it. Built and used on the scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.mem_cache.state_snapshots import StatePlan

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class ForwardMode(Enum):
    """Kind of step. A batch has exactly one."""

    EXTEND = auto()  # new tokens over a cached prefix (prefill, chunk of a prefill)
    DECODE = auto()  # one new token a request
    TARGET_VERIFY = auto()  # several draft tokens a request, with a tree mask
    DRAFT_EXTEND = auto()  # the draft model catches up with accepted tokens
    IDLE = auto()  # no token at all; keeps ranks in lockstep

    def is_extend(self) -> bool:
        """True where a request may bring more than one token."""
        return self in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY


class CaptureHiddenMode(Enum):
    """Which hidden states the logits processor keeps.

    The final ones after the last norm; with layers to capture the streams at their entry, side by
    side; from a draft model what its next step reads.
    """

    NULL = auto()
    LAST = auto()  # of the rows that get logits: [batch_size, hidden] where it is one a request
    FULL = auto()  # [num_tokens, hidden]


@dataclass(slots=True, kw_only=True)
class LogprobRequest:
    """Per-request wishes for logprobs of one batch; lists have one entry a request.

    `start_lens` counts from the first *new* token of this step: the input logprobs wanted are
    those of new tokens start_len.. (start_len == extend length means none).
    `target_ids` holds, for each request, the token that follows each wanted position (what the
    input logprob is *of*): positions start_len .. extend_len, so its length is
    extend_len - start_len; the last may be -1 where no next prompt token is known.
    """

    enabled: list[bool]
    top_nums: list[int]
    token_ids: list[list[int] | None]
    start_lens: list[int] = field(default_factory=list)
    target_ids: list[list[int]] = field(default_factory=list)

    def wants_inputs(self, extend_lens: list[int]) -> bool:
        """Whether input logprobs are wanted of a step with so many new tokens a request."""
        lens = zip(self.enabled, self.start_lens, extend_lens)
        return any(enabled and start < extend_len for enabled, start, extend_len in lens)

    def repeated(self, count: int) -> LogprobRequest:
        """The wishes for output tokens, each request's `count` times in a row."""
        return LogprobRequest(
            enabled=[value for value in self.enabled for _ in range(count)],
            top_nums=[value for value in self.top_nums for _ in range(count)],
            token_ids=[value for value in self.token_ids for _ in range(count)],
        )


@dataclass(slots=True, kw_only=True)
class ForwardBatch:
    """One step's inputs.

    Shapes: n = number of new tokens of all requests, b = number of requests. Tokens of one
    request are contiguous, requests in batch order.
    """

    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor  # int64 [n]
    positions: torch.Tensor  # int64 [n], position of each new token in its sequence
    req_pool_indices: torch.Tensor  # int64 [b], rows of req_to_token
    seq_lens: torch.Tensor  # int64 [b], length including the new tokens
    seq_lens_cpu: list[int]  # the same on the host; empty in a staged step
    out_cache_loc: torch.Tensor  # int64 [n], KV slot of each new token
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVCache

    # The tensors are those of a captured step: filled by `DecodeRunner.stage`, except `input_ids`
    # and `positions`, which the step itself fills, or all by `PrefillGraphRunner.stage`.
    is_staged: bool = False

    # Extend only (None in decode).
    extend_seq_lens: torch.Tensor | None = None  # int64 [b], new tokens a request
    extend_prefix_lens: torch.Tensor | None = None  # int64 [b], tokens whose KV is in the pool
    extend_seq_lens_cpu: list[int] | None = None
    extend_prefix_lens_cpu: list[int] | None = None

    sampling_info: SamplingBatchInfo | None = None
    logprobs: LogprobRequest | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    # int64 [r]: rows of the batch whose logits (and LAST hidden states) are wanted, instead of
    # what the mode implies. A draft model that catches up reads the last accepted row only.
    logits_rows: torch.Tensor | None = None
    # Draft models only, set by the speculative workers: [n, width], the target's features (or the
    # draft's own hidden states of the step before) that go with each token. Never written to.
    input_hidden_states: torch.Tensor | None = None

    # Set by the attention backend (`init_forward_metadata`); its type is the backend's own.
    attn_metadata: Any = None
    # Of models with recurrent states: which slots the step begins with and what it keeps (None:
    # each request goes on with its own state), and what its layers make of that.
    state_plan: StatePlan | None = None
    step_states: Any = None
    # Set by the speculative workers: draft/verify inputs of `speculative.eagle_info`.
    spec_info: Any = None
    # Layer-wise load-back: the consumer index whose events the layers wait for; -1 = none.
    hicache_consumer_index: int = -1

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])
