"""Requests that compute a prompt before its samples: who gets one, and what it hands on."""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput, RequestOutput
from sglang.srt.managers.prefix_warm_up import make_warm_ups
from sglang.srt.managers.request_normalizer import split_request
from sglang.srt.managers.request_state import OutputListener, Phase, ReqState


def states_of(prompts: list[list[int]], num_samples: int) -> list[ReqState]:
    request = GenerateReqInput(input_ids=prompts, rid="r", sampling_params={"n": num_samples})
    states = [ReqState(s, OutputListener(), created=1.0) for s in split_request(request).singles]
    for state in states:
        state.prompt_ids = array("i", state.single.input_ids or ())
    return states


def news(state: ReqState, **counters: Any) -> RequestOutput:
    return RequestOutput(
        rid=state.rid,
        new_token_ids=array("i"),
        finish_reason=None,
        prompt_tokens=3,
        completion_tokens=0,
        **counters,
    )


def test_one_for_each_prompt_that_is_long_enough_and_not_aborted() -> None:
    states = states_of([[1, 2], [3], [4, 5], [6, 7]], num_samples=2)
    states[4].phase = Phase.FINISHED  # of the third prompt
    warm_ups = make_warm_ups(states, 2)
    assert [w.state.prompt_ids.tolist() for w in warm_ups] == [[1, 2], [6, 7]]
    assert [list(w.samples) for w in warm_ups] == [states[0:2], states[6:8]]
    assert all(w.state.single.sampling_params.max_new_tokens == 0 for w in warm_ups)
    assert warm_ups[0].state.rid.startswith("r_0_"), "an abort of r would miss it"
    assert len({w.state.rid for w in warm_ups}) == 2


def test_samples_follow_the_prefix_and_count_only_what_was_cached_before() -> None:
    states = states_of([[1, 2, 3]], num_samples=2)
    (warm_up,) = make_warm_ups(states, 2)
    warm_up.state.dp_rank = 1
    before = {"device": 1, "host": 0}
    warm_up.state.last = news(warm_up.state, cached_tokens=1, cached_tokens_details=before)
    warm_up.hand_on()
    for state in states:
        state.absorb(news(state, cached_tokens=2), now=2.0)
        assert state.single.routed_dp_rank == 1
        answer = state.render(
            with_text=False, incremental=False, with_timings=False, weight_version="v"
        )
        meta = answer["meta_info"]
        assert (meta["cached_tokens"], meta["cached_tokens_details"]) == (1, before)
