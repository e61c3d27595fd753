"""What the front keeps of a live request, and the answer that it makes of it.

`ReqState` takes in `RequestOutput` messages and renders the contract's output dict, cumulative or
incremental. `OutputListener` wakes the one task that waits for a group of states. Event loop
thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from sglang.srt.managers.io_struct import LogprobDelta, RequestOutput
from sglang.srt.managers.request_normalizer import SingleRequest

logger = logging.getLogger(__name__)

# What the schedulers report as matched when the model's logits were not numbers.
_NAN_MATCHED = "NaN happened"

TokenText = Callable[[int], str | None]
# [logprob, token id, text or null]
Triple = list[Any]


class Phase(Enum):
    """Where a request is. Only the tokenizer manager moves it, only forwards."""

    HELD = "held"  # tokenised or not, not yet sent to a scheduler
    SENT = "sent"
    FINISHED = "finished"


class OutputListener:
    """Tells one task which of its requests have news. A state is queued at most once."""

    def __init__(self) -> None:
        self._ready: deque[ReqState] = deque()
        self._event = asyncio.Event()

    def notify(self, state: ReqState) -> None:
        if not state.is_queued:
            state.is_queued = True
            self._ready.append(state)
            self._event.set()

    async def next(self, timeout_s: float) -> ReqState | None:
        """The next state with news, or None after `timeout_s` seconds without any."""
        if not self._ready:
            self._event.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return None
        state = self._ready.popleft()
        state.is_queued = False
        return state


@dataclass(slots=True)
class Logprobs:
    """Accumulated logprobs in the form of the answer."""

    input_token: list[Triple] = field(default_factory=list)
    output_token: list[Triple] = field(default_factory=list)
    input_top: list[list[Triple] | None] = field(default_factory=list)
    output_top: list[list[Triple] | None] = field(default_factory=list)
    input_token_ids: list[list[Triple] | None] = field(default_factory=list)
    output_token_ids: list[list[Triple] | None] = field(default_factory=list)

    def add(self, delta: LogprobDelta, text_of: TokenText) -> None:
        """Append what is new."""
        if delta.input_val is not None and delta.input_idx is not None:
            self.input_token.extend(_triples(delta.input_val, delta.input_idx, text_of))
        self.output_token.extend(_triples(delta.output_val, delta.output_idx, text_of))
        for target, rows in (
            (self.input_top, delta.input_top),
            (self.output_top, delta.output_top),
            (self.input_token_ids, delta.input_token_ids),
            (self.output_token_ids, delta.output_token_ids),
        ):
            for row in rows or ():
                target.append(None if row is None else _triples(row[0], row[1], text_of))


def _triples(
    values: Sequence[float | None], token_ids: Sequence[int], text_of: TokenText
) -> list[Triple]:
    return [[value, idx, text_of(idx)] for value, idx in zip(values, token_ids)]


def _no_text(token_id: int) -> None:
    return None


@dataclass(slots=True)
class Sent:
    """What incremental chunks have already carried."""

    text: int = 0
    tokens: int = 0
    input_logprobs: bool = False


class ReqState:
    """One prompt and sample between its arrival and its last chunk."""

    def __init__(
        self,
        single: SingleRequest,
        listener: OutputListener,
        *,
        created: float,
        text_of: TokenText | None = None,
        return_prompt_token_ids: bool = False,
    ) -> None:
        self.single = single
        self.rid = single.rid
        self.listener = listener
        self.created = created  # time.time()
        self.phase = Phase.HELD
        self.is_queued = False  # by the listener
        self.is_counted = False  # the waiting task has seen its end
        self.sent_rank: int | None = None  # replica that works on it
        self.prompt_ids: array[int] = array("i")
        self.return_prompt_token_ids = return_prompt_token_ids
        self.dp_rank: int | None = None
        self.text = ""
        self.output_ids: array[int] = array("i")
        self.logprobs = Logprobs() if single.return_logprob else None
        self.hidden_states: list[Any] | None = None
        self.finish_reason: dict[str, Any] | None = None
        self.last: RequestOutput | None = None
        # What was cached of the prompt before a warm-up of this very request computed it.
        self.cached_before: RequestOutput | None = None
        self.dispatched_time = 0.0
        self.first_token_time = 0.0
        self.last_token_time = 0.0
        self.finished_time = 0.0
        self._text_of = text_of or _no_text
        self._sent = Sent()

    @property
    def is_finished(self) -> bool:
        return self.phase is Phase.FINISHED

    def absorb(self, output: RequestOutput, now: float) -> None:
        """Take in one message and wake the waiting task."""
        self.last = output
        self.text += output.new_text
        if output.new_token_ids:
            self.output_ids.extend(output.new_token_ids)
            self.last_token_time = now
            if not self.first_token_time:
                self.first_token_time = _first_token_time(output, now)
        if self.logprobs is not None and output.logprobs is not None:
            self.logprobs.add(output.logprobs, self._text_of)
        if output.hidden_states is not None:
            rows = (self.hidden_states or []) + output.hidden_states
            self.hidden_states = rows[-1:] if self.single.return_hidden_states == "last" else rows
        if output.finish_reason is not None:
            self.finish(output.finish_reason, now)
        self.listener.notify(self)

    def finish(self, reason: dict[str, Any], now: float) -> None:
        """End the request, also without any message from a scheduler (abort, dead engine)."""
        if self.phase is Phase.FINISHED:
            return
        self.phase = Phase.FINISHED
        self.finish_reason = reason
        self.finished_time = now
        self.listener.notify(self)

    # -- rendering ------------------------------------------------------------------------------

    def render(
        self, *, with_text: bool, incremental: bool, with_timings: bool, weight_version: str
    ) -> dict[str, Any]:
        """The answer so far (cumulative), or what is new since the last call (incremental)."""
        meta = self._meta_info(weight_version, with_timings)
        sent = self._sent if incremental else Sent()
        self._add_logprobs(meta, sent)
        answer: dict[str, Any] = {}
        if with_text:
            answer["text"] = self.text[sent.text :]
        answer["output_ids"] = self.output_ids[sent.tokens :].tolist()
        if self.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.prompt_ids.tolist()
        answer["meta_info"] = meta
        if incremental:
            self._sent = Sent(len(self.text), len(self.output_ids), True)
        return answer

    def _meta_info(self, weight_version: str, with_timings: bool) -> dict[str, Any]:
        last = self.last
        cached = self.cached_before or last
        spans: list[dict[str, Any]] = [
            {"version": version, "start": start, "end": end}
            for version, start, end in (last.weight_versions if last is not None else ())
        ]
        if spans:
            weight_version = spans[-1]["version"]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish_reason,
            "prompt_tokens": last.prompt_tokens if last is not None else len(self.prompt_ids),
            "completion_tokens": len(self.output_ids),
            "cached_tokens": cached.cached_tokens if cached is not None else 0,
            "cached_tokens_details": cached.cached_tokens_details if cached is not None else None,
            "reasoning_tokens": 0,
            "weight_version": weight_version,
            "weight_versions": spans
            or [{"version": weight_version, "start": 0, "end": len(self.output_ids)}],
            "num_retractions": last.num_retractions if last is not None else 0,
            "dp_rank": self.dp_rank,
        }
        if last is not None and last.spec:
            meta.update(last.spec)
        if self.hidden_states is not None:
            meta["hidden_states"] = self.hidden_states
        if with_timings:
            self._add_timings(meta)
        if self.is_finished:
            meta["e2e_latency"] = self.finished_time - self.created
            meta["response_sent_to_client_ts"] = time.time()
        return meta

    def _add_timings(self, meta: dict[str, Any]) -> None:
        meta["request_received_ts"] = self.created
        meta["api_server_dispatch_finish_ts"] = self.dispatched_time or None
        if self.first_token_time:
            meta["first_token_latency"] = self.first_token_time - self.created
        if self.last is not None and self.last.timings:
            meta.update(self.last.timings)
        if self.is_finished:
            meta["request_finished_ts"] = self.finished_time
            decode_s = self.finished_time - self.first_token_time
            if self.first_token_time and decode_s > 0 and len(self.output_ids) > 1:
                meta["decode_throughput"] = (len(self.output_ids) - 1) / decode_s

    def _add_logprobs(self, meta: dict[str, Any], sent: Sent) -> None:
        logprobs = self.logprobs
        if logprobs is None:
            return
        start = sent.tokens
        # Copies: the lists go on growing while an in-process caller holds the answer.
        meta["input_token_logprobs"] = [] if sent.input_logprobs else list(logprobs.input_token)
        meta["output_token_logprobs"] = logprobs.output_token[start:]
        meta["output_token_logprobs_length"] = len(logprobs.output_token)
        if self.single.top_logprobs_num > 0:
            meta["input_top_logprobs"] = [] if sent.input_logprobs else list(logprobs.input_top)
            meta["output_top_logprobs"] = logprobs.output_top[start:]
        if self.single.token_ids_logprob is not None:
            meta["input_token_ids_logprobs"] = (
                [] if sent.input_logprobs else list(logprobs.input_token_ids)
            )
            meta["output_token_ids_logprobs"] = logprobs.output_token_ids[start:]


def _first_token_time(output: RequestOutput, now: float) -> float:
    """When the first token was there, of a request whose first tokens came with `output`, now.

    Where the end came with them, nobody was to get the first one: the scheduler knows when it was.
    """
    made = (output.timings or {}).get("prefill_finished_time")
    return made or now


def warn_of_nan(state: ReqState) -> None:
    """Log an answer that a broken model or broken weights cut short."""
    matched = (state.finish_reason or {}).get("matched")
    if matched == _NAN_MATCHED and matched not in state.single.sampling_params.stop_strs:
        logger.warning(
            "Request %s ended after %d tokens: the model computed NaN",
            state.rid,
            len(state.output_ids),
        )
