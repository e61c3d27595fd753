"""From the result of a step to the state of its requests.

Appends tokens, judges ends, gathers logprobs, hands KV to the prefix cache and releases what a
finished request held. The same code for prefill and decode, for one token a step and for several:
a step yields a list of accepted tokens per request. Does not decide what runs next.
Scheduler thread only; every rank does the same, and ranks talk only of what a clock decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.finish_check import (
    DecodeTail,
    FinishAbort,
    FinishResult,
    StepVerdicts,
    agreed_result,
    check_finish,
    is_nan_stop,
)
from sglang.srt.managers.output_streamer import OutputStreamer
from sglang.srt.managers.schedule_batch import Req, ReqStatus, ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult, ResolvedTokens
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.storage_control import MinReduce
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_counters import SpecCounters

TopLogprobs = tuple[list[float], list[int]] | None


class BatchResultProcessor:
    """Applies step results to requests."""

    def __init__(
        self,
        *,
        tree_cache: BasePrefixCache,
        req_to_token_pool: ReqToTokenPool,
        streamer: OutputStreamer,
        decode_tail: DecodeTail | None,
        min_reduce: MinReduce | None = None,
    ) -> None:
        """`min_reduce`: element-wise MIN over the ranks; None for one rank."""
        self.tree_cache = tree_cache
        self.req_to_token_pool = req_to_token_pool
        self.streamer = streamer
        self.decode_tail = decode_tail
        self._min_reduce = min_reduce
        self.num_generated_tokens = 0
        self.num_released = 0  # requests that ended, ever
        self.spec_total: SpecCounters | None = None  # since the last cache flush

    def process(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Apply one step. Waits for the step's copies to the host.

        Collective over the TP ranks where a request of the step has a stop regex.
        """
        tokens = result.resolve()
        logprobs = None
        if batch.traits.wants_logprobs:
            logprobs = _OutputLogprobs(result.logits_output, result.tokens_per_req)
        if batch.forward_mode is ForwardMode.EXTEND:
            ended = result.ended_time
            settled = self._process_prefill(batch, result.logits_output, tokens, logprobs, ended)
        elif tokens.is_plain and logprobs is None and not batch.traits.wants_hidden_states:
            settled = self._process_plain_decode(batch, tokens)
        else:
            settled = self._process_decode(batch, result.logits_output, tokens, logprobs)
        if settled:
            # The cache takes its time over long sequences: clients have their tokens before.
            self.streamer.flush()
        for req in settled:
            if req.finished:
                self._release(req)
            else:
                self.tree_cache.cache_unfinished_req(req)

    def _process_prefill(
        self,
        batch: ScheduleBatch,
        logits: LogitsProcessorOutput,
        tokens: ResolvedTokens,
        logprobs: _OutputLogprobs | None,
        ended: float,
    ) -> list[Req]:
        """Returns the requests whose prompt is complete, for the cache.

        `ended`: when the step ended, Unix time.
        """
        complete: list[Req] = []
        for index, (req, new_ids) in enumerate(zip(batch.reqs, _per_request(batch, tokens))):
            # A request may have ended (been aborted) while this step was on the device.
            if req.finished:
                continue
            self._collect_input_logprobs(req, index, logits)
            if req.return_hidden_states:
                self._collect_hidden(req, batch, index, logits)
            if batch.chunked[index]:
                continue
            self._end_of_prefill(req, ended)
            self._advance(req, index, new_ids, tokens, logprobs, commits=False)
            self.streamer.add(req)
            complete.append(req)
        return complete

    def _process_decode(
        self,
        batch: ScheduleBatch,
        logits: LogitsProcessorOutput,
        tokens: ResolvedTokens,
        logprobs: _OutputLogprobs | None,
    ) -> list[Req]:
        """Returns the requests that ended."""
        ended: list[Req] = []
        for index, (req, new_ids) in enumerate(zip(batch.reqs, _per_request(batch, tokens))):
            if req.finish_reason is not None:
                continue
            if req.return_hidden_states:
                self._collect_hidden(req, batch, index, logits)
            if tokens.accept_lens is not None:
                self._count_drafts(req, batch, len(new_ids))
            self._advance(req, index, new_ids, tokens, logprobs, commits=True)
            if req.finish_reason is not None:
                ended.append(req)
                self.streamer.add(req)
            elif req.stream:
                self.streamer.add(req)
        return ended

    def _process_plain_decode(self, batch: ScheduleBatch, tokens: ResolvedTokens) -> list[Req]:
        """`_process_decode` of a step that brought one good token a request and nothing else."""
        ended: list[Req] = []
        num_kept = 0
        for index, (req, token_id) in enumerate(zip(batch.reqs, tokens.next_token_ids)):
            if req.finish_reason is not None:
                continue
            output_ids = req.output_ids
            if (
                req.always_check_finish
                or token_id in req.end_token_ids
                or len(output_ids) + 1 >= req.max_new_tokens
            ):
                self._advance(req, index, [token_id], tokens, None, commits=True)
            else:
                output_ids.append(token_id)
                req.num_pending_tokens -= 1
                req.kv_committed_len += 1
                num_kept += 1
            if req.finish_reason is not None:
                ended.append(req)
                self.streamer.add(req)
            elif req.stream:
                self.streamer.add(req)
        self.num_generated_tokens += num_kept
        return ended

    def _count_drafts(self, req: Req, batch: ScheduleBatch, num_accepted: int) -> None:
        if req.spec is None:
            req.spec = SpecCounters(batch.step_shape.num_draft_tokens)
        req.spec.count(num_accepted)
        if self.spec_total is None:
            self.spec_total = SpecCounters(batch.step_shape.num_draft_tokens)
        self.spec_total.count(num_accepted)

    # -- tokens ---------------------------------------------------------------------------------

    def _advance(
        self,
        req: Req,
        index: int,
        new_ids: list[int],
        tokens: ResolvedTokens,
        logprobs: _OutputLogprobs | None,
        commits: bool,
    ) -> None:
        """Append accepted tokens up to the request's end; its memory stays as it is.

        `commits`: the step has written KV for as many tokens as are kept.
        """
        req.num_pending_tokens -= 1
        output_ids = req.output_ids
        output_ids.extend(new_ids)
        num_kept = len(new_ids)
        # True whenever `check_finish` could end the request, and rarely otherwise.
        may_end = (
            req.always_check_finish
            or len(output_ids) >= req.max_new_tokens
            or tokens.nan_rows is not None
            or not req.end_token_ids.isdisjoint(new_ids)
        )
        if may_end:
            num_kept = self._check_finish(req, index, new_ids, tokens)
        self.num_generated_tokens += num_kept
        if logprobs is not None and num_kept and req.logprobs is not None:
            logprobs.add_to(req, index, num_kept)
        if commits:
            req.kv_committed_len += num_kept

    def _check_finish(
        self, req: Req, index: int, new_ids: list[int], tokens: ResolvedTokens
    ) -> int:
        """Judge the new tokens; drop those after the end. Returns how many stay."""
        nan = 0 if tokens.nan_rows is not None and tokens.nan_rows[index] else None
        verdicts = self._verdicts(req, new_ids, nan)
        result = check_finish(req, len(new_ids), self.decode_tail, verdicts)
        if self._min_reduce is not None and req.sampling_params.stop_regex_strs:
            result = self._agree(result, self._min_reduce)
        dropped = len(new_ids) - result.num_kept
        if dropped:
            del req.output_ids[-dropped:]
        req.finish_reason = result.reason
        return result.num_kept

    @staticmethod
    def _agree(result: FinishResult, min_reduce: MinReduce) -> FinishResult:
        """A search that took too long on one rank ends the request on all. Collective.

        A rank that went on alone would wait in its next step for the others.
        """
        is_abort = isinstance(result.reason, FinishAbort)
        no_abort, num_kept = min_reduce([int(not is_abort), result.num_kept])
        return agreed_result(result, is_abort=not no_abort, num_kept=num_kept)

    @staticmethod
    def _verdicts(req: Req, new_ids: list[int], nan: int | None) -> StepVerdicts:
        """Advance the grammar over the new tokens and say where it ended."""
        grammar = req.grammar
        if grammar is None or nan is not None:
            return StepVerdicts(nan=nan)
        for index, token_id in enumerate(new_ids):
            accepted = grammar.accept_token(token_id)
            if not accepted or grammar.error is not None:
                text = grammar.error or f"token {token_id} does not fit"
                return StepVerdicts(abort=_broken_grammar(req, text))
            if grammar.is_terminated():
                return StepVerdicts(grammar_end=index)
        return StepVerdicts()

    def _end_of_prefill(self, req: Req, ended: float) -> None:
        if req.logprobs is not None and not req.logprobs.input_done:
            self._finish_input_logprobs(req)
        if not req.prefill_finished_time:
            req.prefill_finished_time = ended

    # -- ends -----------------------------------------------------------------------------------

    def release_finished(self, req: Req) -> None:
        """Release a request whose `finish_reason` is set, and tell its client."""
        self._release(req)
        self.streamer.add(req)

    def _release(self, req: Req) -> None:
        """Take the memory of a request that has ended."""
        self.num_released += 1
        # A probe of the server's health must not leave traces in the cache, nor KV that may hold
        # the NaN that its logits had.
        insert = not req.is_health_check and not is_nan_stop(req.finish_reason)
        self.release_memory(req, insert=insert)
        req.set_status(ReqStatus.FINISHED)

    def release_memory(self, req: Req, *, insert: bool) -> None:
        """Hand a request's KV to the prefix cache (`insert`) or free it; free its row."""
        row = req.req_pool_idx
        if row is None:
            return
        self.tree_cache.cache_finished_req(req, is_insert=insert)
        self.req_to_token_pool.free(row)
        req.req_pool_idx = None
        req.num_pending_tokens = 0

    # -- logprobs and hidden states -------------------------------------------------------------

    @staticmethod
    def _collect_input_logprobs(req: Req, index: int, logits: LogitsProcessorOutput) -> None:
        """Append this chunk's prompt logprobs."""
        state = req.logprobs
        if state is None or logits.input_token_logprobs is None:
            return
        values = logits.input_token_logprobs[index]
        if values is None:
            return
        state.input_val.extend(values.tolist())
        num_rows = len(values)
        state.input_top.extend(
            _rows(logits.input_top_logprobs_val, logits.input_top_logprobs_idx, index, num_rows)
        )
        ids_val, ids = logits.input_token_ids_logprobs_val, logits.input_token_ids_logprobs_idx
        state.input_token_ids.extend(_rows(ids_val, ids, index, num_rows))

    @staticmethod
    def _finish_input_logprobs(req: Req) -> None:
        """Put the gathered prompt logprobs, from `logprob_start_len` on, into the next message.

        The entry at the start position has no value: nothing before it was looked at.
        """
        state = req.logprobs
        if state is None:
            return
        start, delta = req.logprob_start_len, state.pending
        state.input_done = True
        delta.input_idx = req.origin_input_ids[start:] if start >= 0 else array("i")
        has_any = len(delta.input_idx) > 0
        delta.input_val = [None, *state.input_val] if has_any else []
        if req.top_logprobs_num > 0:
            delta.input_top = [None, *state.input_top] if has_any else []
        if req.token_ids_logprob:
            delta.input_token_ids = [None, *state.input_token_ids] if has_any else []
        state.input_val, state.input_top, state.input_token_ids = [], [], []

    @staticmethod
    def _collect_hidden(
        req: Req, batch: ScheduleBatch, index: int, logits: LogitsProcessorOutput
    ) -> None:
        """Final hidden states: of all new prompt tokens in prefill, of the new token in decode."""
        if logits.hidden_states is None:
            return
        if batch.forward_mode is ForwardMode.EXTEND:
            start = sum(batch.extend_lens[:index])
            end = start + batch.extend_lens[index]
            # After a retraction some positions are computed a second time.
            first = batch.prefix_lens[index]
            rows = logits.hidden_states[start + max(0, req.num_hidden - first) : end]
            req.num_hidden = max(req.num_hidden, first + batch.extend_lens[index])
            req.hidden_states.extend(rows.float().tolist())
        else:
            req.num_hidden += 1
            req.hidden_states.append(logits.hidden_states[index].float().tolist())


def _broken_grammar(req: Req, reason: str) -> FinishAbort:
    """The end of a request whose grammar goes no further: some limits are met only on the way."""
    constraint = req.sampling_params.grammar
    assert constraint is not None
    # The engine's reason does not say what it is about.
    text = f"The {constraint[0]} cannot be followed any further: {reason}"
    return FinishAbort(text, 400, "BadRequestError")


class _OutputLogprobs:
    """Output logprobs of one step, read from the device at most once and only when asked for.

    `tokens_per_req`: rows of each request, of which the first so many as it kept tokens count.
    """

    def __init__(self, logits: LogitsProcessorOutput, tokens_per_req: int) -> None:
        self._logits = logits
        self._tokens_per_req = tokens_per_req
        self._values: list[float] | None = None

    def add_to(self, req: Req, index: int, num_kept: int) -> None:
        """Add the entries of the tokens that `req` has just kept."""
        state, logits = req.logprobs, self._logits
        if state is None or logits.next_token_logprobs is None:
            return
        if self._values is None:
            self._values = logits.next_token_logprobs.tolist()
        first = index * self._tokens_per_req
        rows = range(first, first + num_kept)
        delta = state.pending
        delta.output_val.extend(self._values[first : first + num_kept])
        delta.output_idx.extend(req.output_ids[-num_kept:])
        if req.top_logprobs_num > 0:
            values, ids = logits.next_token_top_logprobs_val, logits.next_token_top_logprobs_idx
            delta.output_top = (delta.output_top or []) + [_pair(values, ids, row) for row in rows]
        if req.token_ids_logprob:
            values = logits.next_token_token_ids_logprobs_val
            ids = logits.next_token_token_ids_logprobs_idx
            pairs = [_pair(values, ids, row) for row in rows]
            delta.output_token_ids = (delta.output_token_ids or []) + pairs


def _per_request(batch: ScheduleBatch, tokens: ResolvedTokens) -> Iterator[list[int]]:
    """Accepted tokens of each request, in batch order."""
    if tokens.accept_lens is None:
        for req, token_id in zip(batch.reqs, tokens.next_token_ids):
            yield [token_id] if req.max_new_tokens > 0 else []
        return
    start = 0
    for num_accepted in tokens.accept_lens:
        yield tokens.next_token_ids[start : start + num_accepted]
        start += num_accepted


def _rows(
    values: list[torch.Tensor | None] | None,
    ids: list[Any] | None,
    index: int,
    num_rows: int,
) -> list[TopLogprobs]:
    """(values, token ids) per prompt position of request `index`; None where not asked for."""
    of_request = None if values is None else values[index]
    if of_request is None or ids is None:
        return [None] * num_rows
    row_ids = ids[index]
    if isinstance(row_ids, torch.Tensor):
        return list(zip(of_request.tolist(), row_ids.tolist()))
    return [(row, list(row_ids)) for row in of_request.tolist()]


def _pair(values: list[Any] | None, ids: list[Any] | None, index: int) -> TopLogprobs:
    if values is None or ids is None:
        return None
    return list(values[index]), list(ids[index])
