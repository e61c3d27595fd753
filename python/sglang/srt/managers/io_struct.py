"""Every message between the processes, and the public request objects of the Python API.

Three families: *generation* (`GenerateReqInput` from a client, `TokenizedGenerateReqInput` to the
schedulers, `BatchTokenIDOutput` to the detokenizer, `BatchStrOutput` back to the front),
*control* (pairs `…ReqInput` / `…ReqOutput`; the reply carries the request's `control_id`) and
*lifecycle*. Plain dataclasses, because trainers call `dataclasses.asdict` on the public ones;
`managers.ipc` puts them on the wire. Token ids inside messages are `array('i')`.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    # The codec evaluates the annotations, and Python 3.11 cannot subscript `array`.
    TokenIds = array


def new_rid() -> str:
    """A fresh request id: 32 hex digits."""
    return uuid.uuid4().hex


# ------------------------------------------------------------------------------------------------
# Generation: client -> front
# ------------------------------------------------------------------------------------------------


@dataclass(kw_only=False)
class GenerateReqInput:
    """A `/generate` request as the client wrote it: one prompt or a batch of prompts.

    Fields may be scalars (for all prompts) or lists (one a prompt); the tokenizer manager splits
    a batch into single requests. Unknown client fields never reach this class.
    """

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    input_embeds: list[Any] | None = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int] | list[list[int]] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    log_metrics: bool = True
    return_hidden_states: bool | str | list[bool | str] = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    session_id: str | None = None
    session_params: dict[str, Any] | list[dict[str, Any]] | None = None
    lora_path: str | list[str | None] | None = None
    custom_logit_processor: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    max_thinking_tokens: int | None = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    routing_key: str | None = None
    conversation_id: str | None = None
    custom_labels: dict[str, str] | None = None
    no_logs: bool = False
    external_trace_header: dict[str, str] | None = None


@dataclass
class EmbeddingReqInput:
    """An embedding request; refused with a clear error by generation-only servers."""

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    rid: str | list[str] | None = None


# ------------------------------------------------------------------------------------------------
# Generation: front -> scheduler
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class TokenizedGenerateReqInput:
    """One prompt, tokenised and checked by the front, for the schedulers."""

    rid: str
    input_ids: TokenIds
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: output tokens only
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool = False
    extra_key: str | None = None  # cache namespace; None is the shared one
    priority: int | None = None
    received_time: float = 0.0  # time.time() at which the front saw the request
    is_health_check: bool = False
    # Set when the detokenizer is not used (`--skip-tokenizer-init`).
    skip_tokenizer: bool = False


@dataclass(slots=True, kw_only=True)
class BatchTokenizedGenerateReqInput:
    """Several requests in one message: they reach the waiting queue in the same scheduler step."""

    requests: list[TokenizedGenerateReqInput]


@dataclass
class AbortReq:
    """Abort requests whose id starts with `rid`, or all. Goes front -> scheduler."""

    rid: str = ""
    abort_all: bool = False
    abort_message: str | None = None
    exact: bool = False  # only the request with this very id, not those it is a prefix of

    def means(self, rid: str) -> bool:
        """Whether that request is to be aborted; without an id nobody is."""
        if self.abort_all or not self.rid:
            return self.abort_all
        return rid == self.rid if self.exact else rid.startswith(self.rid)


@dataclass(slots=True, kw_only=True)
class AbandonReq:
    """Abort the requests with these ids: nobody waits for their answers any more."""

    rids: set[str]

    def means(self, rid: str) -> bool:
        """Whether that request is to be aborted."""
        return rid in self.rids


# ------------------------------------------------------------------------------------------------
# Generation: scheduler -> detokenizer -> front
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LogprobDelta:
    """Logprobs that are new since the request's previous output message.

    `output_*`: one entry a new output token. `input_*`: set once, in the first message after the
    prefill ended; the first value is None where no preceding token exists. `top` and `token_ids`
    members hold, per position, (values, token ids) or None.
    """

    input_val: list[float | None] | None = None
    input_idx: TokenIds | None = None
    input_top: list[tuple[list[float], list[int]] | None] | None = None
    input_token_ids: list[tuple[list[float], list[int]] | None] | None = None
    output_val: list[float] = field(default_factory=list)
    output_idx: TokenIds = field(default_factory=lambda: array("i"))
    output_top: list[tuple[list[float], list[int]] | None] | None = None
    output_token_ids: list[tuple[list[float], list[int]] | None] | None = None


@dataclass(slots=True, kw_only=True)
class DecodeParams:
    """What the detokenizer must know of a request; sent with its first output message."""

    skip_special_tokens: bool
    no_stop_trim: bool
    stop_strs: list[str]  # text that could still become one of these is held back
    skip_tokenizer: bool = False


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """News of one request: tokens since its previous message, and its counters so far."""

    rid: str
    new_token_ids: TokenIds
    finish_reason: dict[str, Any] | None  # contract shapes; None while running
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    cached_tokens_details: dict[str, Any] | None = None
    num_retractions: int = 0
    weight_versions: list[tuple[str, int, int]] = field(default_factory=list)  # version, start, end
    logprobs: LogprobDelta | None = None
    hidden_states: list[Any] | None = None
    spec: dict[str, Any] | None = None  # speculative counters, finished requests only
    timings: dict[str, float] | None = None  # seconds / unix times; see output_streamer
    decode: DecodeParams | None = None  # first message only
    # Set by the detokenizer: text to append after what was sent before.
    new_text: str = ""


@dataclass(slots=True, kw_only=True)
class BatchTokenIDOutput:
    """Scheduler -> detokenizer: one step's news."""

    outputs: list[RequestOutput]
    dp_rank: int = 0


@dataclass(slots=True, kw_only=True)
class BatchStrOutput:
    """Detokenizer -> front: the same with `new_text` filled."""

    outputs: list[RequestOutput]
    dp_rank: int = 0


# ------------------------------------------------------------------------------------------------
# Control: requests carry `control_id`, the reply of each scheduler echoes it
# ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class ControlReqInput:
    """Base of the requests that get exactly one reply from every data-parallel scheduler."""

    control_id: str | None = None


@dataclass(kw_only=True)
class ControlReqOutput:
    """Base of the replies."""

    control_id: str | None = None
    dp_rank: int = 0
    success: bool = True
    message: str = ""


@dataclass(kw_only=True)
class FlushCacheReqInput(ControlReqInput):
    timeout_s: float = 0.0  # > 0: flush at the first idle moment before this many seconds


@dataclass(kw_only=True)
class FlushCacheReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class PauseGenerationReqInput(ControlReqInput):
    mode: str = "abort"  # abort | retract | in_place


@dataclass(kw_only=True)
class PauseGenerationReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class ContinueGenerationReqInput(ControlReqInput):
    torch_empty_cache: bool = True


@dataclass(kw_only=True)
class ContinueGenerationReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class PingReqInput(ControlReqInput):
    """Answered by the scheduler loop whatever its state: the liveness probe of `/health`."""


@dataclass(kw_only=True)
class PingReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class GetInternalStateReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class GetInternalStateReqOutput(ControlReqOutput):
    internal_state: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SetInternalStateReqInput(ControlReqInput):
    server_args: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class SetInternalStateReqOutput(ControlReqOutput):
    updated: bool = False


@dataclass(kw_only=True)
class GetLoadsReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class GetLoadsReqOutput(ControlReqOutput):
    load: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ProfileReqInput(ControlReqInput):
    """Start (`start` true) or stop torch's profiler in the schedulers."""

    start: bool = True
    output_dir: str | None = None
    start_step: int | None = None
    num_steps: int | None = None
    activities: list[str] | None = None
    profile_by_stage: bool = False  # without effect, as `merge_profiles` and `profile_stages`
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_id: str | None = None
    profile_prefix: str | None = None
    merge_profiles: bool = False
    profile_stages: list[str] | None = None


# The name used by the Python API.
ProfileReq = ProfileReqInput


@dataclass(kw_only=True)
class ProfileReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class SlowDownReqInput(ControlReqInput):
    forward_sleep_time: float | None = None  # seconds before each step; None = off


@dataclass(kw_only=True)
class SlowDownReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class FreezeGCReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class FreezeGCReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class WeightUpdateReqInput(ControlReqInput):
    """What the requests that replace weights have in common."""

    flush_cache: bool = True  # empty the caches; refused, weights untouched, while requests run
    abort_all_requests: bool = False
    weight_version: str | None = None  # label of the new weights; None: the label stays
    torch_empty_cache: bool = False


@dataclass(kw_only=True)
class UpdateWeightsFromTensorReqInput(WeightUpdateReqInput):
    """Tensors from a trainer on this host, as `MultiprocessingSerializer` writes them."""

    serialized_named_tensors: list[Any]  # str (base64) or bytes; one a tensor-parallel rank
    load_format: str | None = None  # None | direct | flattened_bucket | name of a custom loader
    selector: str = "all"  # all | target | draft


@dataclass(kw_only=True)
class UpdateWeightsFromDistributedReqInput(WeightUpdateReqInput):
    """Tensors that rank 0 of a trainer's group will broadcast, in this order."""

    names: list[str]
    dtypes: list[str]  # torch names, "bfloat16"
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None  # None | flattened_bucket
    selector: str = "all"


@dataclass(kw_only=True)
class UpdateWeightFromDiskReqInput(WeightUpdateReqInput):
    """A complete checkpoint on a disk that the schedulers can read."""

    model_path: str
    load_format: str | None = None  # None: "auto", whatever the server was started with
    # Accepted for clients that send them; weights are written in place, so graphs stay valid.
    is_async: bool = False
    keep_pause: bool = False
    recapture_cuda_graph: bool = False
    token_step: int = 0
    manifest: dict[str, Any] | None = None


@dataclass(kw_only=True)
class UpdateWeightsFromIPCReqInput(WeightUpdateReqInput):
    """Tensors from a checkpoint engine on this host."""

    zmq_handles: dict[str, str]  # UUID of a GPU ("cpu-<rank>" without) -> zmq address


@dataclass(kw_only=True)
class WeightUpdateReqOutput(ControlReqOutput):
    """Reply to everything about weights that has no more to say."""

    weights_mixed: bool = False  # the models hold tensors of two versions
    mixed_tensors: str = ""  # which
    released_tags: list[str] | None = None  # replies about memory: what is released now


@dataclass(kw_only=True)
class InitWeightsUpdateGroupReqInput(ControlReqInput):
    """Join a trainer's process group as rank `rank_offset` + own tensor-parallel rank."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass(kw_only=True)
class DestroyWeightsUpdateGroupReqInput(ControlReqInput):
    group_name: str = "weight_update_group"


@dataclass(kw_only=True)
class BeginWeightUpdateReqInput(ControlReqInput):
    """Open a session: the updates until its end are parts of one."""

    selector: str = "all"


@dataclass(kw_only=True)
class EndWeightUpdateReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class GetWeightsByNameReqInput(ControlReqInput):
    name: str
    truncate_size: int = 100  # rows


@dataclass(kw_only=True)
class GetWeightsByNameReqOutput(ControlReqOutput):
    parameter: list[Any] | None = None  # nested lists of floats


@dataclass(kw_only=True)
class CheckWeightsReqInput(ControlReqInput):
    """Checksums of the weights, or comparison with a snapshot."""

    action: str = "checksum"  # checksum | snapshot | reset_tensors | compare
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: str = "all"


@dataclass(kw_only=True)
class CheckWeightsReqOutput(WeightUpdateReqOutput):
    checksum: dict[str, Any] | None = None  # `ranks` and `per_engine_checksum`


@dataclass(kw_only=True)
class ReleaseMemoryOccupationReqInput(ControlReqInput):
    """Give memory back to the system until it is resumed."""

    tags: list[str] | None = None  # None or empty: all of `constants.GPU_MEMORY_ALL_TYPES`


@dataclass(kw_only=True)
class ResumeMemoryOccupationReqInput(ControlReqInput):
    tags: list[str] | None = None


@dataclass(kw_only=True)
class UpdateWeightVersionReqInput(ControlReqInput):
    new_version: str = ""
    abort_all_requests: bool = True


@dataclass(kw_only=True)
class UpdateWeightVersionReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class AttachHiCacheStorageReqInput(ControlReqInput):
    """Attach a storage backend to the hierarchical cache. None keeps the present policy."""

    hicache_storage_backend: str = ""
    hicache_storage_backend_extra_config_json: str | None = None  # as given by the user
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


@dataclass(kw_only=True)
class AttachHiCacheStorageReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class DetachHiCacheStorageReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class DetachHiCacheStorageReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class ClearHiCacheReqInput(ControlReqInput):
    """Delete what our own namespaces hold in the storage backend."""


@dataclass(kw_only=True)
class ClearHiCacheReqOutput(ControlReqOutput):
    pass


@dataclass(kw_only=True)
class GetHiCacheStatusReqInput(ControlReqInput):
    pass


@dataclass(kw_only=True)
class GetHiCacheStatusReqOutput(ControlReqOutput):
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ConfigureLoggingReq:
    """Front only: what is logged of each request."""

    log_requests: bool | None = None
    log_requests_level: int | None = None
    log_requests_format: str | None = None
    dump_requests_folder: str | None = None
    crash_dump_folder: str | None = None


# ------------------------------------------------------------------------------------------------
# Lifecycle
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ShutdownReq:
    """Front -> scheduler and detokenizer: leave the loop and exit with code 0."""


@dataclass(slots=True, kw_only=True)
class KVEventEndpoints:
    """Where a replica publishes its KV events: ZeroMQ addresses as bound or connected to.

    ``is_bound``: subscribers connect to ``endpoint``; else the server connected to a collector.
    """

    endpoint: str
    replay_endpoint: str | None
    is_bound: bool


@dataclass(slots=True, kw_only=True)
class SchedulerReady:
    """Scheduler -> parent over the start-up pipe: the facts `/server_info` and the front need."""

    max_total_num_tokens: int
    max_req_input_len: int
    context_len: int
    vocab_size: int
    eos_token_ids: list[int]
    page_size: int
    max_running_requests: int
    memory_usage: dict[str, float]  # GB: weight, kv_cache, graph; token_capacity in tokens
    resolved_args: dict[str, Any]  # ServerArgs fields that the scheduler resolved
    load_time_s: float = 0.0
    kv_events: KVEventEndpoints | None = None  # None: nothing is published
