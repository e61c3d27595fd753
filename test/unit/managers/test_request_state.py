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
