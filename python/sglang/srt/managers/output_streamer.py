"""From request state to messages: what is new of each request since its last message.

Owns the choice of when a request is worth a message (every `stream_interval` tokens while it
streams, and its end) and the collecting of one step's news into one message. Only rank 0 sends.
Scheduler thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

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
        self._flush_number = 0

    def add(self, req: Req) -> None:
        """Take note of `req` after its tokens or its end have been recorded."""
        if self._send is None:
            return
        if req.finish_reason is not None or self._is_due(req):
            output = self._make_output(req)  # may flush what was collected before
            self._outputs.append(output)

    def flush(self) -> None:
        """Send what was collected, as one message."""
        if self._send is not None and self._outputs:
            outputs, self._outputs = self._outputs, []
            self._flush_number += 1
            self._send(BatchTokenIDOutput(outputs=outputs, dp_rank=self._dp_rank))

    def _is_due(self, req: Req) -> bool:
        if not req.stream:
            return False
        num_sent = req.news.num_sent_tokens
        num_new = len(req.output_ids) - num_sent
        # The first token goes out at once: it is what a reader waits for.
        return num_new > 0 and (num_sent == 0 or num_new >= req.stream_interval)

    def _make_output(self, req: Req) -> RequestOutput:
        """The request's news. The same object each time: it is encoded before the next step."""
        news = req.news
        if news.flush_number == self._flush_number:
            # Collected in this step already: that message must leave before it is overwritten.
            self.flush()
        news.flush_number = self._flush_number
        output = news.output
        if output is None:
            output = news.output = self._first_output(req)
        else:
            output.decode = None
        num_tokens = len(req.output_ids)
        output.new_token_ids = array("i", req.output_ids[news.num_sent_tokens :])
        news.num_sent_tokens = num_tokens
        output.completion_tokens = num_tokens
        output.num_retractions = req.num_retractions
        output.weight_versions = req.weight_versions.as_list(num_tokens)
        if req.logprobs is not None:
            output.logprobs = req.logprobs.take()
        if req.finish_reason is not None:
            output.finish_reason = req.finish_reason.to_json()
            output.hidden_states = req.hidden_states or None
            output.timings = self._timings(req)
            if req.spec is not None:
                output.spec = req.spec.to_meta_info(num_tokens)
        return output

    def _first_output(self, req: Req) -> RequestOutput:
        """What stays as it is from the first message on."""
        sources = req.cached_sources
        return RequestOutput(
            rid=req.rid,
            new_token_ids=array("i"),
            finish_reason=None,
            prompt_tokens=len(req.origin_input_ids),
            completion_tokens=0,
            cached_tokens=req.cached_tokens,
            cached_tokens_details=sources.to_json() if sources is not None else None,
            decode=req.news.decode,
        )

    @staticmethod
    def _timings(req: Req) -> dict[str, float]:
        """Unix times (`*_time`) and seconds (`queue_time`); 0 for what never happened."""
        return {
            "queue_time": req.waited_s,
            "forward_entry_time": req.forward_entry_time,
            "prefill_finished_time": req.prefill_finished_time,
        }
