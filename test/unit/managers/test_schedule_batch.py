"""What a request forgets when its memory is taken back, and what it keeps."""

from __future__ import annotations

from array import array

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

# Whatever goes with its row and its slots; `prefix_indices` apart, which is a tensor.
_OF_MEMORY = (
    "req_pool_idx",
    "last_node",
    "last_host_node",
    "best_match_node",
    "host_hit_length",
    "cache_protected_len",
    "kv_committed_len",
    "kv_allocated_len",
    "extend_len",
    "is_chunked",
)


def new_req(return_logprob: bool = False) -> Req:
    params = SamplingParams(max_new_tokens=9)
    params.normalize()
    message = TokenizedGenerateReqInput(
        rid="r",
        input_ids=array("i", [5, 6, 7]),
        sampling_params=params,
        return_logprob=return_logprob,
    )
    return Req(message, eos_token_ids=frozenset({0}), weight_version="v")


def test_a_retracted_request_has_no_more_memory_than_a_new_one() -> None:
    fresh, req = new_req(), new_req()
    for name in (*_OF_MEMORY, "prefix_indices"):
        setattr(req, name, f"{name} of an admitted request")
    req.reset_for_retract()
    for name in _OF_MEMORY:
        assert getattr(req, name) == getattr(fresh, name), name
    assert req.prefix_indices.tolist() == [] and req.prefix_indices.dtype == (
        fresh.prefix_indices.dtype
    )


def test_a_retracted_request_keeps_its_tokens_and_what_was_said_of_it() -> None:
    req = new_req(return_logprob=True)
    req.output_ids, req.cached_tokens, req.known_len = [11, 12], 2, 3
    assert req.logprobs is not None
    req.logprobs.input_val.append(-0.5)
    req.reset_for_retract()
    assert (req.output_ids, req.cached_tokens, req.known_len) == ([11, 12], 2, 3)
    assert req.num_retractions == 1
    assert req.logprobs.input_val == []  # the prompt is computed again, from its start

    req.logprobs.input_val.append(-0.5)
    req.logprobs.input_done = True
    req.reset_for_retract()
    assert req.logprobs.input_val == [-0.5]  # complete: it is not asked for again
