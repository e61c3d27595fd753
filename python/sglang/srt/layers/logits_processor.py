"""From final hidden states to next-token logits and prompt logprobs.

Says which rows are needed behind the last layer's attention (`rows_to_keep`), selects those that
need logits before the vocabulary product, gathers the vocabulary shards of all ranks, and computes
input (prompt) logprobs in row blocks so that a long prompt over a large vocabulary needs little
memory. The logprobs of *sampled* tokens are the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang.srt.distributed.communication import tensor_model_parallel_all_gather
from sglang.srt.layers.dispatch import take_rows
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogprobRequest,
)

# 512 rows x 49k vocabulary x 4 bytes = 100 MB, twice (logits and log-softmax).
LOGPROB_BLOCK_ROWS = 512

# Fewest rows worth dropping on a GPU. A bf16 product of up to 180 rows takes as long there as
# reading its weight (H200: 760 TFLOP/s, 4.2 TB/s), which the kept rows need as well; with fewer,
# the launches that pick these would cost more than is saved. A CPU multiplies row by row.
MIN_DROPPED_ROWS = 256


class HostReport(NamedTuple):
    """Of a captured step: its largest logits on their way to the host, there once `done` passed."""

    # int64 [1 + 2 c], c requests or room for them: number that the step was given; token ids; 1
    # where a row has NaN or +inf.
    values: torch.Tensor
    number: int  # of the step, as the host counts
    done: Any  # platform event

    def read(self, num_reqs: int) -> tuple[list[int], list[int]]:
        """Token ids and flags of the first requests, once `done` has passed.

        RuntimeError: it is the report of another step.
        """
        values = self.values.tolist()
        if values[0] != self.number:
            raise RuntimeError(f"the report of step {self.number} is that of step {values[0]}")
        flags = 1 + len(values) // 2
        return values[1 : 1 + num_reqs], values[flags : flags + num_reqs]


@dataclass(slots=True, kw_only=True)
class LogitsProcessorOutput:
    """One step's logits. b requests, V tokens in the vocabulary.

    The `input_*` lists have one entry a request: None where it asked for nothing, else a tensor
    on the device with one row per wanted position whose following token is known (target id >= 0).
    `tolist()` turns each into the lists per position that replies carry.
    """

    # float32 [b, V]; [n, V] in a verify step, where every new token needs a distribution; one row
    # for each of `ForwardBatch.logits_rows` where rows were named.
    next_token_logits: torch.Tensor
    # Of the rows that have logits (LAST) or of all n (FULL); [.., hidden], or a multiple of that
    # where layers are captured. See `CaptureHiddenMode`.
    hidden_states: torch.Tensor | None = None

    input_token_logprobs: list[torch.Tensor | None] | None = None  # float32 [rows]
    input_top_logprobs_val: list[torch.Tensor | None] | None = None  # float32 [rows, k]
    input_top_logprobs_idx: list[torch.Tensor | None] | None = None  # int64 [rows, k]
    input_token_ids_logprobs_val: list[torch.Tensor | None] | None = None  # float32 [rows, m]
    input_token_ids_logprobs_idx: list[list[int] | None] | None = None  # the m ids asked for

    # int64 [b]: the largest logit of each row, where the step found it on the way (captured ones);
    # `unusable_rows` belongs to it. Both are valid as long as the logits are.
    greedy_token_ids: torch.Tensor | None = None
    greedy_report: HostReport | None = None  # both, where the step itself sends them to the host

    # Filled by the sampler after it has drawn the tokens.
    next_token_logprobs: torch.Tensor | None = None  # float32 [b]
    next_token_top_logprobs_val: list[list[float]] | None = None
    next_token_top_logprobs_idx: list[list[int]] | None = None
    next_token_token_ids_logprobs_val: list[list[float]] | None = None
    next_token_token_ids_logprobs_idx: list[list[int]] | None = None
    # [b], 0 or false: all is well; else the row holds NaN or +inf. None: nobody found out.
    unusable_rows: torch.Tensor | None = None


class LogitsProcessor(nn.Module):
    """Apply the output head to the rows that need it."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        forward_batch: ForwardBatch,
        aux_hidden_states: torch.Tensor | None = None,
        are_picked: bool = False,
    ) -> LogitsProcessorOutput:
        """hidden_states [n, hidden], normed; the aux ones [n, width], captured on request.

        `are_picked`: the hidden states, and in mode LAST the aux ones, are only those of the rows
        that `rows_to_keep` gave. Collective with more than one rank (gathers vocabulary shards).
        """
        logit_rows = None if are_picked else _rows_with_logits(forward_batch)
        pruned = hidden_states if logit_rows is None else take_rows(hidden_states, logit_rows)
        output = LogitsProcessorOutput(
            next_token_logits=self._logits(pruned, lm_head),
            hidden_states=_captured(hidden_states, aux_hidden_states, logit_rows, forward_batch),
        )
        request = forward_batch.logprobs
        if request is not None and forward_batch.forward_mode is ForwardMode.EXTEND:
            self._input_logprobs(output, hidden_states, lm_head, forward_batch, request)
        return output

    def _logits(self, hidden_states: torch.Tensor, lm_head: ParallelLMHead) -> torch.Tensor:
        """[rows, hidden] -> float32 [rows, V]."""
        return tensor_model_parallel_all_gather(lm_head(hidden_states))[
            :, : self._vocab_size
        ].float()

    def _input_logprobs(
        self,
        output: LogitsProcessorOutput,
        hidden_states: torch.Tensor,
        lm_head: ParallelLMHead,
        forward_batch: ForwardBatch,
        request: LogprobRequest,
    ) -> None:
        num_requests = forward_batch.batch_size
        token_logprobs: list[torch.Tensor | None] = [None] * num_requests
        top_val: list[torch.Tensor | None] = [None] * num_requests
        top_idx: list[torch.Tensor | None] = [None] * num_requests
        ids_val: list[torch.Tensor | None] = [None] * num_requests
        ids_idx: list[list[int] | None] = [None] * num_requests
        for index, rows, targets in _wanted_rows(forward_batch, request):
            parts = _RequestLogprobs(request.top_nums[index], request.token_ids[index])
            for begin in range(0, len(targets), LOGPROB_BLOCK_ROWS):
                block = hidden_states[rows][begin : begin + LOGPROB_BLOCK_ROWS]
                logprobs = torch.log_softmax(self._logits(block, lm_head), dim=-1)
                parts.add(logprobs, targets[begin : begin + LOGPROB_BLOCK_ROWS])
            token_logprobs[index] = torch.cat(parts.tokens)
            if parts.top_num > 0:
                top_val[index], top_idx[index] = torch.cat(parts.top_val), torch.cat(parts.top_idx)
            if parts.token_ids is not None:
                ids_val[index], ids_idx[index] = torch.cat(parts.ids_val), parts.token_ids
        output.input_token_logprobs = token_logprobs
        output.input_top_logprobs_val, output.input_top_logprobs_idx = top_val, top_idx
        output.input_token_ids_logprobs_val = ids_val
        output.input_token_ids_logprobs_idx = ids_idx


class _RequestLogprobs:
    """Collects one request's input logprobs block by block."""

    def __init__(self, top_num: int, token_ids: list[int] | None) -> None:
        self.top_num = top_num
        self.token_ids = token_ids or None
        self.tokens: list[torch.Tensor] = []
        self.top_val: list[torch.Tensor] = []
        self.top_idx: list[torch.Tensor] = []
        self.ids_val: list[torch.Tensor] = []

    def add(self, logprobs: torch.Tensor, targets: list[int]) -> None:
        """logprobs [rows, V] of the positions that `targets` follow."""
        target_ids = torch.tensor(targets, device=logprobs.device)
        self.tokens.append(logprobs.gather(1, target_ids.unsqueeze(1)).squeeze(1))
        if self.top_num > 0:
            values, indices = logprobs.topk(min(self.top_num, logprobs.shape[1]), dim=-1)
            self.top_val.append(values)
            self.top_idx.append(indices)
        if self.token_ids is not None:
            self.ids_val.append(logprobs[:, self.token_ids])


def _wanted_rows(
    forward_batch: ForwardBatch, request: LogprobRequest
) -> Iterator[tuple[int, slice, list[int]]]:
    """(request index, rows of the batch, following tokens) for requests that want any."""
    start = 0
    for index, query_len in enumerate(forward_batch.extend_seq_lens_cpu or []):
        first = start + request.start_lens[index] if request.enabled[index] else start + query_len
        end = start + query_len
        start = end
        if first >= end:
            continue
        targets = request.target_ids[index]
        if targets and targets[-1] < 0:
            targets, end = targets[:-1], end - 1
        if targets:
            yield index, slice(first, end), targets


def rows_to_keep(forward_batch: ForwardBatch, all_captured: bool) -> torch.Tensor | None:
    """The rows that anybody reads behind the last layer's attention: int64 [r], 0 < r < n.

    Those that get logits, in a prefill step without input logprobs. None: all of them, or the
    others are too few to be worth dropping. The same on all ranks, and decided without reading the
    device. `all_captured`: what is captured has a row of every token behind that attention.
    """
    if all_captured or forward_batch.forward_mode is not ForwardMode.EXTEND:
        return None
    request, asked = forward_batch.logprobs, forward_batch.logits_rows
    if request is not None and request.wants_inputs(forward_batch.extend_seq_lens_cpu or []):
        return None
    num_kept = forward_batch.batch_size if asked is None else len(asked)
    least = 1 if forward_batch.input_ids.device.type == "cpu" else MIN_DROPPED_ROWS
    if num_kept == 0 or forward_batch.num_tokens - num_kept < least:
        return None
    return _rows_with_logits(forward_batch)


def _rows_with_logits(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """Rows that get logits: the asked ones or each request's last; None where every row counts."""
    if forward_batch.logits_rows is not None:
        return forward_batch.logits_rows
    if forward_batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.DRAFT_EXTEND):
        return None
    if forward_batch.extend_seq_lens is None:
        raise ValueError("an extend batch needs extend_seq_lens")
    return forward_batch.extend_seq_lens.cumsum(0) - 1


def _captured(
    hidden_states: torch.Tensor,
    aux_hidden_states: torch.Tensor | None,
    logit_rows: torch.Tensor | None,
    forward_batch: ForwardBatch,
) -> torch.Tensor | None:
    mode = forward_batch.capture_hidden_mode
    if mode is CaptureHiddenMode.NULL:
        return None
    if aux_hidden_states is not None:
        hidden_states = aux_hidden_states
    if mode is CaptureHiddenMode.FULL or logit_rows is None:
        return hidden_states
    return take_rows(hidden_states, logit_rows)
