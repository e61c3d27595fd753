"""A scheduler and detokenizer in one thread, without a model, for tests of the front.

It reads the real channels and answers with real messages. The answer to a prompt is scripted, or
the prompt itself over and over; one token a step. It obeys abort, pause and the control requests,
keeps everything it received in `received`, and can be made slow, silent or refusing.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.detokenizer_manager import Detokenizer
from sglang.srt.managers.io_struct import (
    AbandonReq,
    AbortReq,
    BatchTokenIDOutput,
    BatchTokenizedGenerateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlReqInput,
    ControlReqOutput,
    DecodeParams,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FreezeGCReqOutput,
    GetInternalStateReqInput,
    GetInternalStateReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    InitWeightsUpdateGroupReqInput,
    LogprobDelta,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PingReqInput,
    PingReqOutput,
    ProfileReqInput,
    ProfileReqOutput,
    ReleaseMemoryOccupationReqInput,
    RequestOutput,
    ResumeMemoryOccupationReqInput,
    SchedulerReady,
    SetInternalStateReqInput,
    SetInternalStateReqOutput,
    SlowDownReqInput,
    SlowDownReqOutput,
    TokenizedGenerateReqInput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    WeightUpdateReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.managers.ipc import PullChannel, PushChannel
from sglang.srt.server_args import PortArgs
from sglang.srt.utils.tokenizer import BaseTokenizer
from sglang.test.fakes.tiny_tokenizer import CONTEXT_LEN, VOCAB_SIZE

logger = logging.getLogger(__name__)

_WEIGHT_MESSAGES = (
    WeightUpdateReqInput,
    InitWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)


def fake_ready(context_len: int = CONTEXT_LEN, vocab_size: int = VOCAB_SIZE) -> SchedulerReady:
    """What a scheduler reports of itself at the start."""
    return SchedulerReady(
        max_total_num_tokens=4 * context_len,
        max_req_input_len=context_len - 1,
        context_len=context_len,
        vocab_size=vocab_size,
        eos_token_ids=[],
        page_size=1,
        max_running_requests=64,
        memory_usage={"weight": 0.0, "kv_cache": 0.0, "graph": 0.0, "token_capacity": 0.0},
        resolved_args={},
    )


@dataclass
class _Live:
    """A request in progress."""

    req: TokenizedGenerateReqInput
    output: list[int] = field(default_factory=list)
    started: bool = False


class FakeScheduler:
    """Start with `with`; set attributes at any time.

    Attributes:
        script: prompt ids -> output ids; None repeats the prompt. Ends with "stop" if the script
            ends before `max_new_tokens`.
        step_s: seconds a step takes. silent: nothing is read or sent, as if hung.
        refuse: finish reason given to every new request. flush_ok: answer to a flush.
        weight_reply: answer to everything about weights and memory.
    """

    def __init__(
        self, port_args: PortArgs, tokenizer: BaseTokenizer | None, dp_rank: int = 0
    ) -> None:
        self._pull = PullChannel(port_args.scheduler_input_ipc_names[dp_rank])
        self._push = PushChannel(port_args.tokenizer_ipc_name)
        self._detokenizer = Detokenizer(tokenizer)
        self.dp_rank = dp_rank
        self.script: Callable[[list[int]], list[int]] | None = None
        self.step_s = 0.0
        self.silent = False
        self.refuse: dict[str, Any] | None = None
        self.flush_ok = True
        self.weight_reply = WeightUpdateReqOutput(message="Success")
        self.received: list[Any] = []
        self.paused: str | None = None
        self.weight_version = "default"
        self.live: dict[str, _Live] = {}
        self._news: list[RequestOutput] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-scheduler", daemon=True)

    def __enter__(self) -> FakeScheduler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._pull.close()
        self._push.close()

    def of_type(self, kind: type) -> list[Any]:
        """The received messages of one class, batches taken apart."""
        flat: list[Any] = []
        for message in list(self.received):
            if isinstance(message, BatchTokenizedGenerateReqInput):
                flat.extend(message.requests)
            else:
                flat.append(message)
        return [message for message in flat if isinstance(message, kind)]

    # -- loop -----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self.silent:
                time.sleep(0.005)
                continue
            is_idle = self.paused is not None or not self.live
            message = self._pull.recv(0.01 if is_idle else 0.0)
            while message is not None:
                self.received.append(message)
                self._handle(message)
                message = self._pull.recv(0.0)
            if self.paused is None and self.live:
                self._step()
            self._flush_news()

    def _step(self) -> None:
        if self.step_s:
            time.sleep(self.step_s)
        for live in list(self.live.values()):
            self._advance(live)

    def _advance(self, live: _Live) -> None:
        req = live.req
        script = self.script(req.input_ids.tolist()) if self.script else None
        limit = req.sampling_params.max_new_tokens or 0
        reason: dict[str, Any] | None = None
        new: list[int] = []
        position = len(live.output)
        if limit > position and (script is None or position < len(script)):
            new = [script[position] if script else req.input_ids[position % len(req.input_ids)]]
            live.output += new
        position = len(live.output)
        if script is not None and position >= len(script):
            reason = {"type": "stop", "matched": None}
        if position >= limit:
            reason = {"type": "length", "length": position}
        self._emit(live, new, reason)

    def _emit(self, live: _Live, new: list[int], reason: dict[str, Any] | None) -> None:
        req, params = live.req, live.req.sampling_params
        decode = None
        if not live.started:
            decode = DecodeParams(
                skip_special_tokens=params.skip_special_tokens,
                no_stop_trim=params.no_stop_trim,
                stop_strs=params.stop_strs,
                skip_tokenizer=req.skip_tokenizer,
            )
        logprobs = None
        if req.return_logprob:
            logprobs = LogprobDelta(
                output_val=[-0.5] * len(new),
                output_idx=array("i", new),
                output_top=[([-0.5], [token]) for token in new] if req.top_logprobs_num else None,
            )
            if not live.started and req.logprob_start_len >= 0:
                ids = req.input_ids[req.logprob_start_len :]
                logprobs.input_val = [None] + [-1.0] * (len(ids) - 1)
                logprobs.input_idx = ids
        live.started = True
        self._news.append(
            RequestOutput(
                rid=req.rid,
                new_token_ids=array("i", new),
                finish_reason=reason,
                prompt_tokens=len(req.input_ids),
                completion_tokens=len(live.output),
                weight_versions=[(self.weight_version, 0, len(live.output))],
                logprobs=logprobs,
                decode=decode,
            )
        )
        if reason is not None:
            self.live.pop(req.rid, None)

    def _flush_news(self) -> None:
        if self._news:
            news, self._news = self._news, []
            batch = BatchTokenIDOutput(outputs=news, dp_rank=self.dp_rank)
            self._push.send(self._detokenizer.process(batch))

    # -- messages -------------------------------------------------------------------------------

    def _handle(self, message: Any) -> None:
        if isinstance(message, TokenizedGenerateReqInput):
            self._accept(message)
        elif isinstance(message, BatchTokenizedGenerateReqInput):
            for request in message.requests:
                self._accept(request)
        elif isinstance(message, AbortReq | AbandonReq):
            self._abort(message)
        elif isinstance(message, ControlReqInput):
            reply = self._control(message)
            reply.control_id, reply.dp_rank = message.control_id, self.dp_rank
            self._flush_news()
            self._push.send(reply)
        else:
            raise TypeError(f"the fake cannot handle a {type(message).__name__}")

    def _accept(self, req: TokenizedGenerateReqInput) -> None:
        live = _Live(req)
        if self.refuse is not None:
            self._emit(live, [], self.refuse)
            return
        self.live[req.rid] = live

    def _abort(self, message: AbortReq | AbandonReq) -> None:
        text = (message.abort_message if isinstance(message, AbortReq) else None) or "Aborted"
        for live in list(self.live.values()):
            if message.means(live.req.rid):
                reason = {"type": "abort", "message": text, "status_code": None, "err_type": None}
                self._emit(live, [], reason)

    def _control(self, message: ControlReqInput) -> ControlReqOutput:
        if isinstance(message, PauseGenerationReqInput):
            self.paused = message.mode
        elif isinstance(message, ContinueGenerationReqInput):
            self.paused = None
        elif isinstance(message, UpdateWeightVersionReqInput):
            self.weight_version = message.new_version
        return self._reply_of(message)

    def _reply_of(self, message: ControlReqInput) -> ControlReqOutput:
        load = {
            "num_running_reqs": len(self.live),
            "num_waiting_reqs": 0,
            "num_total_tokens": 0,
            "memory": {"token_capacity": 1},
        }
        if isinstance(message, _WEIGHT_MESSAGES):
            return dataclasses.replace(self.weight_reply)
        is_idle = not self.live
        replies: dict[type, ControlReqOutput] = {
            FlushCacheReqInput: FlushCacheReqOutput(success=self.flush_ok and is_idle),
            PauseGenerationReqInput: PauseGenerationReqOutput(),
            ContinueGenerationReqInput: ContinueGenerationReqOutput(),
            PingReqInput: PingReqOutput(),
            GetInternalStateReqInput: GetInternalStateReqOutput(
                internal_state={"last_gen_throughput": 0.0}
            ),
            SetInternalStateReqInput: SetInternalStateReqOutput(updated=False),
            GetLoadsReqInput: GetLoadsReqOutput(load=load),
            ProfileReqInput: ProfileReqOutput(),
            SlowDownReqInput: SlowDownReqOutput(),
            UpdateWeightVersionReqInput: UpdateWeightVersionReqOutput(),
        }
        return replies.get(type(message), FreezeGCReqOutput())
