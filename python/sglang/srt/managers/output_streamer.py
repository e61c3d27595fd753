"""From request state to messages: what is new of each request since its last message.

Owns the choice of when a request is worth a message (every `stream_interval` tokens while it
streams, and its end) and the collecting of one step's news into one message. Only rank 0 sends.
Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import BatchTokenIDOutput, RequestOutput
from sglang.srt.managers.schedule_batch import Req


class OutputStreamer:
    """Collects news during a step; `flush` sends them."""

    def __init__(
        self,
        send: Callable[[BatchTokenIDOutput], None] | None,
        *,
        dp_rank: int,
    ) -> None:
        self._send = send  # None on ranks other than 0
        self._dp_rank = dp_rank
        self._outputs: list[RequestOutput] = []

    def add(self, req: Req) -> None:
        """Take note of `req` after its tokens or its end have been recorded."""
        if self._send is None:
            return
        if not req.finished and not self._is_due(req):
            return
        self._outputs.append(self._make_output(req))

    def flush(self) -> None:
        """Send what was collected, as one message."""
        if self._send is not None and self._outputs:
            outputs, self._outputs = self._outputs, []
            self._send(BatchTokenIDOutput(outputs=outputs, dp_rank=self._dp_rank))

    def _is_due(self, req: Req) -> bool:
        if not req.stream:
            return False
        num_sent = req.num_sent_tokens
        num_new = len(req.output_ids) - num_sent
        # The first token goes out at once: it is what a reader waits for.
        return num_new > 0 and (num_sent == 0 or num_new >= req.stream_interval)

    def _make_output(self, req: Req) -> RequestOutput:
        new_ids = array("i", req.output_ids[req.num_sent_tokens :])
        req.num_sent_tokens = len(req.output_ids)
        decode, req.decode_params = req.decode_params, None
        finish = req.finish_reason
        return RequestOutput(
            rid=req.rid,
            new_token_ids=new_ids,
            finish_reason=None if finish is None else finish.to_json(),
            prompt_tokens=len(req.origin_input_ids),
            completion_tokens=len(req.output_ids),
            cached_tokens=req.cached_tokens,
            cached_tokens_details=self._cached_details(req),
            num_retractions=req.num_retractions,
            weight_versions=req.weight_versions.as_list(len(req.output_ids)),
            logprobs=None if req.logprobs is None else req.logprobs.take(),
            hidden_states=req.hidden_states if finish is not None and req.hidden_states else None,
            timings=self._timings(req) if finish is not None else None,
            decode=decode,
        )

    @staticmethod
    def _cached_details(req: Req) -> dict[str, Any] | None:
        if req.cached_tokens == 0:
            return None
        return {
            "device": req.cached_tokens - req.host_cached_tokens,
            "host": req.host_cached_tokens,
        }

    @staticmethod
    def _timings(req: Req) -> dict[str, float]:
        """Unix times (`*_time`) and seconds (`queue_time`); 0 for what never happened."""
        started = req.forward_entry_time
        return {
            "queue_time": max(started - req.queue_entry_time, 0.0) if started else 0.0,
            "forward_entry_time": started,
            "prefill_finished_time": req.prefill_finished_time,
        }
