"""The requests that compute a prompt once before its samples: with them samples share a prefix.

A `WarmUp` stands for the samples of one prompt. It asks for no new token, so that its end means
that the prompt is in the cache; what it found out is then handed on to the samples. Pure
bookkeeping; sending and waiting are the tokenizer manager's, on whose event loop this runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.managers.io_struct import new_rid
from sglang.srt.managers.request_state import OutputListener, Phase, ReqState
from sglang.srt.sampling.sampling_params import SamplingParams

# The last token of a prompt is always computed: a shorter one has nothing to share.
_MIN_PROMPT_TOKENS = 2


@dataclass(slots=True)
class WarmUp:
    """One prompt's request without output (`state`), and the samples that wait for it."""

    state: ReqState
    samples: Sequence[ReqState]

    def hand_on(self) -> None:
        """Send the samples where their prefix is now, and tell them what was cached before."""
        for sample in self.samples:
            sample.single.routed_dp_rank = self.state.dp_rank
            sample.cached_before = self.state.last


def make_warm_ups(states: Sequence[ReqState], num_samples: int) -> list[WarmUp]:
    """One a prompt; `num_samples` neighbours of `states` are of one prompt.

    Prompts whose first sample was aborted meanwhile, or which are too short, get none.
    """
    listener = OutputListener()
    warm_ups = []
    for place in range(0, len(states), num_samples):
        first = states[place]
        if first.phase is Phase.HELD and len(first.prompt_ids) >= _MIN_PROMPT_TOKENS:
            state = _without_output(first, listener)
            warm_ups.append(WarmUp(state, states[place : place + num_samples]))
    return warm_ups


def _without_output(sample: ReqState, listener: OutputListener) -> ReqState:
    params = SamplingParams(max_new_tokens=0)
    params.normalize()
    single = dataclasses.replace(
        sample.single,
        # Begins with the sample's own, so that an abort of the request reaches it.
        rid=f"{sample.rid}_{new_rid()}",
        sampling_params=params,
        return_logprob=False,
        return_hidden_states=False,
    )
    state = ReqState(single, listener, created=sample.created)
    state.prompt_ids = sample.prompt_ids
    return state
