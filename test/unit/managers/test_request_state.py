"""What the front keeps of a request's news."""

from __future__ import annotations

from array import array

import pytest

from sglang.srt.managers.io_struct import GenerateReqInput, RequestOutput
from sglang.srt.managers.request_normalizer import split_request
from sglang.srt.managers.request_state import OutputListener, ReqState


@pytest.mark.parametrize(
    ("wish", "wanted"),
    [(True, [[[1.0], [2.0]], [[1.0], [2.0], [3.0]]]), ("last", [[[2.0]], [[3.0]]])],
)
def test_hidden_states_are_all_or_only_the_last(wish: bool | str, wanted: list[object]) -> None:
    request = GenerateReqInput(input_ids=[1, 2], return_hidden_states=wish)
    state = ReqState(split_request(request).singles[0], OutputListener(), created=1.0)
    answers = []
    for rows in ([[1.0], [2.0]], [[3.0]]):
        news = RequestOutput(
            rid=state.rid,
            new_token_ids=array("i", [7]),
            finish_reason=None,
            prompt_tokens=2,
            completion_tokens=1,
            hidden_states=rows,
        )
        state.absorb(news, now=2.0)
        answer = state.render(
            with_text=False, incremental=False, with_timings=False, weight_version="v"
        )
        answers.append(answer["meta_info"]["hidden_states"])
    assert answers == wanted


@pytest.mark.parametrize(
    ("num_messages", "finished_prefill", "first_token"),
    [(1, 3.0, 3.0), (2, 3.0, 5.0), (1, 0.0, 9.0)],
    ids=["all at once", "streamed", "no prefill"],
)
def test_the_first_token_is_timed_where_it_was_made_or_first_seen(
    num_messages: int, finished_prefill: float, first_token: float
) -> None:
    """Who gets all tokens with the end is not told that the first took as long."""
    single = split_request(GenerateReqInput(input_ids=[1, 2])).singles[0]
    state = ReqState(single, OutputListener(), created=1.0)
    for index, now in enumerate([5.0, 9.0][-num_messages:]):
        is_last = index == num_messages - 1
        news = RequestOutput(
            rid=state.rid,
            new_token_ids=array("i", [7, 8]),
            finish_reason={"type": "length", "length": 2} if is_last else None,
            prompt_tokens=2,
            completion_tokens=2,
            timings={"prefill_finished_time": finished_prefill} if is_last else None,
        )
        state.absorb(news, now=now)
    answer = state.render(with_text=False, incremental=False, with_timings=True, weight_version="v")
    meta = answer["meta_info"]
    assert meta["first_token_latency"] == first_token - 1.0
    assert meta["e2e_latency"] == 8.0
    if first_token < 9.0:
        num_later = 2 * num_messages - 1
        assert meta["decode_throughput"] == num_later / (9.0 - first_token)
