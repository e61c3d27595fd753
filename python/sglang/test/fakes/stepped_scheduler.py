"""What the schedulers that tests drive by hand have in common: steps, requests, collected news.

Whoever derives from it makes `scheduler`, lets its `beat` and the streamer's messages come here,
and says how messages go in (`send`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    RequestOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.sampling.sampling_params import SamplingParams


class SteppedScheduler(ABC):
    """`step()` is one iteration of the event loop; `outputs[rid]` collects news by request."""

    scheduler: Scheduler

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = defaultdict(list)
        self._steps_left = 0

    @abstractmethod
    def send(self, *messages: Any) -> None:
        """Messages that the next step receives."""

    def step(self, count: int = 1) -> None:
        """Run iterations of the event loop that the configuration names."""
        if count == 0:
            return
        self._steps_left = count + 1
        self.scheduler.stopping = False
        self.scheduler.run()

    def tokens(self, rid: str) -> list[int]:
        """All output tokens of a request so far."""
        return [token for output in self.outputs[rid] for token in output.new_token_ids]

    def finish(self, rid: str) -> dict[str, Any] | None:
        """The finish reason, None while the request runs."""
        ends = [o.finish_reason for o in self.outputs[rid] if o.finish_reason is not None]
        if len(ends) > 1:
            raise AssertionError(f"{rid} ended {len(ends)} times: {ends}")
        return ends[0] if ends else None

    def _send_request(
        self, rid: str, prompt: Sequence[int], fields: Mapping[str, Any], **defaults: Any
    ) -> None:
        """`fields`: of the message or of SamplingParams, for which `defaults` hold otherwise."""
        own = TokenizedGenerateReqInput.__dataclass_fields__
        message = {k: v for k, v in fields.items() if k in own}
        options = {k: v for k, v in fields.items() if k not in own}
        params = SamplingParams(**{"temperature": 0.0, **defaults, **options})
        params.normalize()
        self.send(
            TokenizedGenerateReqInput(
                rid=rid, input_ids=array("i", prompt), sampling_params=params, **message
            )
        )

    def _beat(self) -> None:
        # Called at the start of each iteration: the loop leaves after this one when none is left.
        self._steps_left -= 1
        if self._steps_left == 1:
            self.scheduler.stopping = True

    def _on_output(self, message: BatchTokenIDOutput) -> None:
        for output in message.outputs:
            # A copy: the scheduler fills the same object anew for the next message.
            self.outputs[output.rid].append(dataclasses.replace(output))
