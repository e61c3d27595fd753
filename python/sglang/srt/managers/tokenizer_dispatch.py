"""Which data-parallel replica gets a request, and the channels to all of them.

`Dispatcher` owns the sending channels and the count of live requests a replica. It moves a
request's state to SENT and nothing else of it. Called by the tokenizer manager, on the event
loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import (
    AbandonReq,
    BatchTokenizedGenerateReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.ipc import IpcError, PushChannel
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.request_normalizer import SingleRequest
from sglang.srt.managers.request_state import Phase, ReqState


class Dispatcher:
    """Channels to rank 0 of every replica."""

    def __init__(self, addresses: Sequence[str], skip_tokenizer: bool) -> None:
        self._push = [PushChannel(address) for address in addresses]
        self._skip_tokenizer = skip_tokenizer
        self.num_live = [0] * len(addresses)  # sent and not ended, by replica
        self._next_rank = 0

    @property
    def dp_size(self) -> int:
        return len(self._push)

    def broadcast(self, message: Any) -> None:
        """Send to every replica."""
        for push in self._push:
            push.send(message)

    def dispatch(self, states: Sequence[ReqState], num_samples: int, stream: bool) -> None:
        """Send all requests that were not aborted while held; one message a replica.

        The samples of a prompt (`num_samples` neighbours) go to one replica: they share a prefix.
        Raises RequestError where a request cannot be put in a message; it stays HELD then.
        """
        by_rank: dict[int, list[ReqState]] = {}
        now = time.time()
        rank = 0
        for position, state in enumerate(states):
            if position % num_samples == 0:
                rank = self._choose_rank(state.single)
            if state.phase is not Phase.HELD:
                continue
            self._assign(state, rank, now)
            by_rank.setdefault(rank, []).append(state)
        for rank, group in by_rank.items():
            self._send(rank, [self._tokenized(state, stream) for state in group])
            for state in group:
                state.phase = Phase.SENT

    def abort(self, state: ReqState) -> None:
        """Tell the replica that works on it, if one does, to stop."""
        if state.sent_rank is not None:
            self._push[state.sent_rank].send(AbandonReq(rids={state.rid}))

    def forget(self, state: ReqState) -> None:
        """The request has ended; harmless when told twice."""
        if state.sent_rank is not None:
            self.num_live[state.sent_rank] -= 1
            state.sent_rank = None

    def close(self) -> None:
        for push in self._push:
            push.close()

    def _choose_rank(self, single: SingleRequest) -> int:
        """The replica that the client names, else the one with the fewest live requests."""
        if single.routed_dp_rank is not None:
            return single.routed_dp_rank
        order = [(self._next_rank + i) % self.dp_size for i in range(self.dp_size)]
        rank = min(order, key=lambda r: self.num_live[r])
        self._next_rank = (rank + 1) % self.dp_size
        return rank

    def _send(self, rank: int, requests: list[TokenizedGenerateReqInput]) -> None:
        message: Any = requests[0]
        if len(requests) > 1:
            message = BatchTokenizedGenerateReqInput(requests=requests)
        try:
            self._push[rank].send(message)
        except IpcError as exc:
            raise RequestError(f"The request cannot be passed on: {exc}") from exc

    def _assign(self, state: ReqState, rank: int, now: float) -> None:
        state.dispatched_time = now
        state.dp_rank = rank if self.dp_size > 1 else None
        state.sent_rank = rank
        self.num_live[rank] += 1

    def _tokenized(self, state: ReqState, stream: bool) -> TokenizedGenerateReqInput:
        single = state.single
        return TokenizedGenerateReqInput(
            rid=state.rid,
            input_ids=state.prompt_ids,
            sampling_params=single.sampling_params,
            stream=stream,
            return_logprob=single.return_logprob,
            logprob_start_len=single.logprob_start_len,
            top_logprobs_num=single.top_logprobs_num,
            token_ids_logprob=single.token_ids_logprob,
            return_hidden_states=bool(single.return_hidden_states),
            extra_key=single.extra_key,
            priority=single.priority,
            received_time=state.created,
            is_health_check=state.rid.startswith(HEALTH_CHECK_RID_PREFIX),
            skip_tokenizer=self._skip_tokenizer,
        )
