"""The fields of `ServerArgs`: name, type, default, help text, choices. Data only.

One field is one command-line flag (`page_size` is `--page-size`); the parser is generated from
the metadata. Derived defaults are in `server_args_defaults`, refusals in `server_args_validation`,
what is missing in `server_args_availability`; people construct `server_args.ServerArgs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any

DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = (
    "auto pt safetensors npcache dummy sharded_state gguf bitsandbytes mistral layered flash_rl "
    "remote remote_instance fastsafetensors private runai_streamer presharded instanttensor"
).split()
DTYPES = "auto half float16 bfloat16 float float32".split()
ATTENTION_BACKENDS = (
    "auto triton torch_native torch_reference flex_attention fa3 fa4 flashinfer flashmla "
    "cutlass_mla trtllm_mla trtllm_mha"
).split()
SCHEDULE_POLICIES = (
    "fcfs lpm random dfs-weight lof priority routing-key hrrn shortest-prefill-first"
).split()
STORAGE_BACKENDS = (
    "file mooncake redis dynamic sim npu_memcache hf3fs nixl aibrix eic simm mori shm tensorcast "
    "seaweedfs"
).split()


def human_int(text: str) -> int:
    """Read an integer with an optional suffix: 4k = 4000, 4Ki = 4096 (also m/Mi, g/Gi)."""
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([kmg]i?)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not an integer (suffixes k, Ki, m, Mi, g, Gi are allowed)")
    unit = (match[2] or "").lower()
    base = 1024 if unit.endswith("i") else 1000
    value = float(match[1]) * base ** ("kmg".index(unit[0]) + 1 if unit else 0)
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class CliArg:
    """How a field looks on the command line."""

    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    parse: Callable[[str], Any] | None = None
    # "+": one or more values, "*": any number; None: exactly one.
    nargs: str | None = None


def arg(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | list[str] | None = None,
    parse: Callable[[str], Any] | None = None,
    nargs: str | None = None,
) -> Any:
    """A dataclass field with its flag. A list default is copied for every instance."""
    cli = CliArg(
        help=help,
        aliases=aliases,
        choices=tuple(choices) if choices is not None else None,
        parse=parse,
        nargs=nargs,
    )
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"cli": cli})
    if default is MISSING:
        return field(metadata={"cli": cli})
    return field(default=default, metadata={"cli": cli})


@dataclass
class ServerArgsFields:
    """All settings of one server. None in a field with "auto" in its help: derived at start."""

    # ---- Model and weights ---------------------------------------------------------------------
    model_path: str = arg(
        MISSING, "Folder or hub id of the weights and config.", aliases=("--model",)
    )
    tokenizer_path: str | None = arg(None, "Folder of the tokenizer; default: the model's.")
    tokenizer_mode: str = arg("auto", "Which tokenizer code to use.", choices=["auto", "slow"])
    skip_tokenizer_init: bool = arg(False, "Token ids in, token ids out; no text anywhere.")
    load_format: str = arg("auto", "Format of the weight files.", choices=LOAD_FORMATS)
    model_loader_extra_config: str = arg("{}", "JSON options of the weight loader.")
    trust_remote_code: bool = arg(False, "Allow code that comes with a model.")
    context_length: int | None = arg(
        None, "Longest sequence (suffixes k, Ki allowed); default: the model's.", parse=human_int
    )
    is_embedding: bool = arg(False, "Serve embeddings instead of generation.")
    revision: str | None = arg(None, "Revision of the hub model.")
    model_impl: str = arg(
        "auto", "Which model code to use.", choices=["auto", "sglang", "transformers"]
    )
    json_model_override_args: str = arg("{}", "JSON object merged into the model's config.")
    dtype: str = arg("auto", "Type of weights and activations.", choices=DTYPES)
    quantization: str | None = arg(None, "Quantisation method of the weights.")
    kv_cache_dtype: str = arg(
        "auto",
        "Type of the KV cache; auto: the model's. Keys and values are rounded to it without "
        "scales; fp16 holds none above 65504, which models in other types may have.",
    )
    cpu_weight_format: str = arg(
        "auto",
        "Format in which decode steps of few requests read the weights on CPU; arithmetic stays "
        "float32. auto: the smallest that changes no value. int8 changes results.",
        choices=["auto", "fp32", "bf16", "fp16", "int8"],
    )
    custom_weight_loader: list[str] = arg(
        [], "Dotted names of functions(model, named_tensors) usable as load_format.", nargs="*"
    )
    weight_version: str = arg("default", "Label of the initial weights.")
    checkpoint_engine_wait_weights_before_ready: bool = arg(
        False, "Become ready only after the first weight update."
    )
    enable_weights_cpu_backup: bool = arg(False, "Keep a host copy of released weights.")
    enable_draft_weights_cpu_backup: bool = arg(False, "The same for the draft model.")
    delete_ckpt_after_loading: bool = arg(False, "Delete the weight files after loading.")
    download_dir: str | None = arg(None, "Where hub models are stored.")
    weight_cache_mode: str = arg("off", "Sharing of loaded weights between servers.")

    # ---- HTTP and logging ----------------------------------------------------------------------
    host: str = arg("127.0.0.1", "Address that the HTTP server listens on.")
    port: int = arg(30000, "Port that the HTTP server listens on.")
    api_key: str | None = arg(None, "Key that inference clients must send.")
    admin_api_key: str | None = arg(None, "Key that control endpoints need.")
    served_model_name: str | None = arg(None, "Name shown to clients; default: the model path.")
    chat_template: str | None = arg(None, "File or text of a Jinja chat template.")
    completion_template: str | None = arg(None, "Name of a completion template.")
    enable_cache_report: bool = arg(False, "Report cached tokens in OpenAI usage.")
    sampling_defaults: str = arg(
        "model", "Where default sampling values come from.", choices=["model", "openai"]
    )
    preferred_sampling_params: str | None = arg(None, "JSON object of sampling defaults.")
    reasoning_parser: str | None = arg(None, "Parser that separates reasoning from the answer.")
    tool_call_parser: str | None = arg(None, "Parser of tool calls in the answer.")
    stream_interval: int = arg(1, "Tokens between two stream chunks.")
    incremental_streaming_output: bool = arg(False, "Stream chunks hold only what is new.")
    stream_response_default_include_usage: bool = arg(False, "End streams with usage.")
    allow_auto_truncate: bool = arg(False, "Cut inputs that are too long instead of refusing.")
    skip_server_warmup: bool = arg(False, "Be ready without a first test request.")
    warmups: str | None = arg(None, "Comma list of named warm-up routines.")
    tokenizer_worker_num: int = arg(1, "Number of front processes.")
    ssl_keyfile: str | None = arg(None, "TLS key file.")
    ssl_certfile: str | None = arg(None, "TLS certificate file.")
    ssl_ca_certs: str | None = arg(None, "TLS certificate authorities.")
    ssl_keyfile_password: str | None = arg(None, "Password of the TLS key file.")
    log_level: str = arg(
        "info",
        "Log level of all processes.",
        choices=["debug", "info", "warning", "error", "critical"],
    )
    log_level_http: str | None = arg(None, "Log level of the HTTP server; default: log level.")
    log_requests: bool = arg(False, "Log every request.")
    log_requests_level: int = arg(
        2, "0 metadata; 1 and sampling parameters; 2 and cut input and output; 3 in full."
    )
    log_requests_format: str = arg("text", "Form of request logs.", choices=["text", "json"])
    decode_log_interval: int = arg(40, "Decode steps between two log lines.")
    enable_metrics: bool = arg(False, "Serve Prometheus metrics at /metrics.")
    enable_metrics_for_all_schedulers: bool = arg(False, "Metrics of every rank, not only rank 0.")
    bucket_time_to_first_token: list[float] | None = arg(None, "Histogram limits, s.", nargs="+")
    bucket_inter_token_latency: list[float] | None = arg(None, "Histogram limits, s.", nargs="+")
    bucket_e2e_request_latency: list[float] | None = arg(None, "Histogram limits, s.", nargs="+")
    prompt_tokens_buckets: list[str] | None = arg(None, "Histogram limits, tokens.", nargs="+")
    generation_tokens_buckets: list[str] | None = arg(None, "Histogram limits, tokens.", nargs="+")
    extra_metric_labels: str | None = arg(None, "JSON object of labels put on every metric.")
    tokenizer_metrics_custom_labels_header: str = arg(
        "x-custom-labels", "HTTP header that carries custom labels."
    )
    tokenizer_metrics_allowed_custom_labels: list[str] | None = arg(
        None, "Custom labels that are taken over from that header.", nargs="+"
    )
    kv_events_config: str | None = arg(
        None,
        'JSON object: publish over ZeroMQ what the KV cache holds, e.g. {"endpoint": '
        '"tcp://*:5557", "topic": "kv-events"}; {} takes the defaults. Keys: docs/kv_events.md.',
    )
    watchdog_timeout: float = arg(
        300.0, "End the server when a scheduler loop stands still this many seconds; 0: never."
    )
    crash_dump_folder: str | None = arg(None, "Where the last requests are written at a crash.")
    random_seed: int | None = arg(None, "Seed of unseeded sampling; default: random.")

    # ---- Memory, scheduling, kernels -----------------------------------------------------------
    mem_fraction_static: float | None = arg(None, "Share of memory for weights and KV pool; auto.")
    max_running_requests: int | None = arg(None, "Most requests in a batch; auto.")
    max_queued_requests: int | None = arg(None, "Longest waiting queue; more get 503.")
    max_total_tokens: int | None = arg(None, "Size of the KV pool in tokens; auto.")
    swa_full_tokens_ratio: float = arg(
        0.8, "KV of sliding-window layers over KV of the others, in tokens, for models with both."
    )
    disable_hybrid_swa_memory: bool = arg(
        False, "Keep the KV of sliding-window layers as long as that of the others."
    )
    mamba_full_memory_ratio: float = arg(
        0.9, "Memory of recurrent states over memory of the KV pool, for models that have both."
    )
    max_mamba_cache_size: int | None = arg(
        None, "Recurrent states in total: of running requests and cached ones; auto."
    )
    mamba_track_interval: int = arg(
        256, "Output tokens after which a request's recurrent state is kept for the prefix cache."
    )
    chunked_prefill_size: int | None = arg(None, "Most tokens of a prefill step; -1 off; auto.")
    max_prefill_tokens: int = arg(16384, "Most tokens of all prompts of one prefill batch.")
    schedule_policy: str = arg("fcfs", "Order of the waiting queue.", choices=SCHEDULE_POLICIES)
    enable_priority_scheduling: bool = arg(False, "Higher `priority` goes first.")
    schedule_conservativeness: float = arg(1.0, "Greater: fewer retractions, smaller batches.")
    page_size: int | None = arg(None, "Tokens of a KV page; auto.")
    disable_overlap_schedule: bool = arg(False, "Prepare a batch only after the former ended.")
    enable_mixed_chunk: bool = arg(False, "Mix prefill chunks and decodes in one batch.")
    radix_eviction_policy: str = arg(
        "lru",
        "Which cached prefix is dropped first.",
        choices=["lru", "lfu", "slru", "priority", "tlru"],
    )
    disable_radix_cache: bool = arg(False, "Do not keep finished requests' KV.")
    attention_backend: str | None = arg(
        None, "Attention kernels; auto.", choices=ATTENTION_BACKENDS
    )
    prefill_attention_backend: str | None = arg(
        None, "Attention kernels of prefill.", choices=ATTENTION_BACKENDS
    )
    decode_attention_backend: str | None = arg(
        None, "Attention kernels of decode.", choices=ATTENTION_BACKENDS
    )
    sampling_backend: str | None = arg(
        None, "Sampling kernels; auto.", choices=["flashinfer", "pytorch"]
    )
    grammar_backend: str | None = arg(
        None,
        "Structured output engine; auto.",
        choices=["xgrammar", "outlines", "llguidance", "none"],
    )
    cuda_graph_config: str | None = arg(None, "JSON options of CUDA graphs.")
    cuda_graph_backend_decode: str | None = arg(
        None, "Graphs of decode steps; auto.", choices=["full", "breakable", "disabled"]
    )
    cuda_graph_backend_prefill: str | None = arg(
        None,
        "Graphs of prefill steps: of those that --cuda-graph-max-bs-prefill or "
        "--cuda-graph-bs-prefill says; none with disabled.",
        choices=["full", "breakable", "disabled"],
    )
    cuda_graph_max_bs_decode: int | None = arg(
        None, "Greatest captured decode batch; auto.", aliases=("--cuda-graph-max-bs",)
    )
    cuda_graph_max_bs_prefill: int | None = arg(
        None,
        "Capture prefill steps of up to so many new tokens and 7 requests, as what is left of a "
        "prompt after a cache hit; 512 on CUDA, or as --cuda-graph-bs-prefill says. 0: none.",
    )
    cuda_graph_bs_decode: list[int] | None = arg(
        None, "Captured decode batch sizes; auto.", aliases=("--cuda-graph-bs",), nargs="+"
    )
    cuda_graph_bs_prefill: list[int] | None = arg(
        None, "Numbers of new tokens of captured prefill steps; a ladder.", nargs="+"
    )
    disable_cuda_graph: bool = arg(False, "No CUDA graphs at all.")
    disable_decode_cuda_graph: bool = arg(False, "No CUDA graphs of decode steps.")
    disable_prefill_cuda_graph: bool = arg(False, "No CUDA graphs of prefill steps.")
    disable_cuda_graph_padding: bool = arg(False, "Replay only batches of captured sizes.")
    enable_torch_compile: bool = arg(False, "Compile the model with torch.compile.")
    torch_compile_max_bs: int = arg(32, "Greatest batch that is compiled.")
    enable_memory_saver: bool = arg(False, "Allow releasing and resuming memory.")
    disable_weight_version_kv_isolation: bool = arg(
        False,
        "After a weight update without a flush, go on using cached KV of the old weights.",
    )
    tp_size: int = arg(1, "Tensor-parallel ranks.", aliases=("--tensor-parallel-size",))
    pp_size: int = arg(1, "Pipeline stages.", aliases=("--pipeline-parallel-size",))
    dp_size: int = arg(1, "Replicas behind one port.", aliases=("--data-parallel-size",))
    ep_size: int = arg(1, "Expert-parallel ranks.", aliases=("--expert-parallel-size",))
    enable_dp_attention: bool = arg(False, "Data-parallel attention inside a TP group.")
    nnodes: int = arg(1, "Number of hosts of the server.")
    node_rank: int = arg(0, "Number of this host, from 0; host 0 serves HTTP.")
    dist_init_addr: str | None = arg(
        None, "host:port where ranks meet; needed with --nnodes > 1.", aliases=("--nccl-init-addr",)
    )
    nccl_port: int | None = arg(None, "Port where the ranks of one host meet; auto.")
    base_gpu_id: int = arg(0, "First GPU.")
    gpu_id_step: int = arg(1, "Distance between the GPUs of neighbouring ranks.")
    device: str = arg("auto", "Device; auto: cuda if there is one.", choices=DEVICES)
    num_threads: int | None = arg(
        None, "torch threads of one CPU rank; default: cores of the host / ranks on it."
    )
    enable_deterministic_inference: bool = arg(False, "Results independent of batching.")
    rl_on_policy_target: str | None = arg(
        None, "Match the numerics of a trainer.", choices=["fsdp"]
    )
    rl_quant_profile: str | None = arg(None, "Match a trainer's quantisation.")
    enable_custom_logit_processor: bool = arg(False, "Allow logit processors in requests.")
    enable_return_hidden_states: bool = arg(False, "Allow return_hidden_states in requests.")
    enable_return_routed_experts: bool = arg(False, "Allow return_routed_experts in requests.")
    enable_strict_thinking: bool = arg(False, "Enforce thinking limits in structured output.")
    enable_streaming_session: bool = arg(False, "Allow sessions that keep their KV.")
    disaggregation_mode: str = arg(
        "null", "Split of prefill and decode servers.", choices=["null", "prefill", "decode"]
    )

    # ---- LoRA ----------------------------------------------------------------------------------
    enable_lora: bool = arg(False, "Serve LoRA adapters.")
    lora_paths: list[str] | None = arg(None, "Adapters to load, name=path.", nargs="*")
    max_lora_rank: int | None = arg(None, "Greatest adapter rank.")
    max_loras_per_batch: int = arg(8, "Most adapters in one batch.")

    # ---- HiCache -------------------------------------------------------------------------------
    enable_hierarchical_cache: bool = arg(
        False, "Keep KV in host memory and storage too.", aliases=("--enable-hicache",)
    )
    hicache_ratio: float | None = arg(None, "Host pool size / device pool size; auto.")
    hicache_size: int = arg(0, "Host pool in whole GB a rank; > 0 wins over the ratio.")
    hicache_host_memory_fraction: float = arg(
        0.8, "Share of free host memory that the default ratio may use."
    )
    hicache_host_memory_mode: str = arg(
        "cache", "What the host pool is for.", choices=["cache", "buffer_only"]
    )
    hicache_write_policy: str = arg(
        "write_through",
        "When KV is copied to the host.",
        choices=["write_back", "write_through", "write_through_selective"],
    )
    hicache_io_backend: str = arg(
        "kernel", "How KV is copied.", choices=["kernel", "direct", "kernel_ascend"]
    )
    hicache_mem_layout: str = arg(
        "page_first",
        "Layout of the host pool.",
        choices=[
            "layer_first",
            "page_first",
            "page_first_direct",
            "page_first_kv_split",
            "page_head",
        ],
    )
    hicache_storage_backend: str | None = arg(
        None, "Third tier of the cache.", choices=STORAGE_BACKENDS
    )
    hicache_storage_prefetch_policy: str = arg(
        "timeout",
        "How long a request waits for storage.",
        choices=["best_effort", "wait_complete", "timeout"],
    )
    hicache_storage_backend_extra_config: str | None = arg(
        None, "JSON text, or @file.json / .toml / .yaml, for the storage backend."
    )
    hicache_draft_storage_policy: str = arg(
        "clamp",
        "A draft page missing in storage: clamp ends the hit before it, best_effort zeroes it.",
        choices=["clamp", "best_effort"],
    )
    hicache_storage_retry_poll_interval: int = arg(8, "Ticks between two looks at storage.")
    hicache_storage_retry_max_attempts: int = arg(8, "Most retries of a storage look-up.")

    # ---- Speculative decoding ------------------------------------------------------------------
    speculative_algorithm: str | None = arg(
        None, "EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM, DFLASH, DSPARK or UNO.", parse=str.upper
    )
    speculative_draft_model_path: str | None = arg(
        None, "Folder or hub id of the draft model.", aliases=("--speculative-draft-model",)
    )
    speculative_draft_model_revision: str | None = arg(None, "Revision of the draft model.")
    speculative_draft_load_format: str | None = arg(
        None, "Format of the draft's weight files.", choices=LOAD_FORMATS
    )
    speculative_num_steps: int | None = arg(None, "Draft steps; auto.")
    speculative_eagle_topk: int | None = arg(None, "Branches of a draft step; auto.")
    speculative_num_draft_tokens: int | None = arg(None, "Tokens verified in one step; auto.")
    speculative_accept_threshold_single: float = arg(1.0, "Accept a token above this.")
    speculative_accept_threshold_acc: float = arg(1.0, "Accept above this accumulated.")
    speculative_use_rejection_sampling: bool = arg(False, "Exact rejection sampling.")
    enable_multi_layer_eagle: bool = arg(
        False, "Draft step i by layer i of those that predict further tokens (MTP)."
    )
    speculative_token_map: str | None = arg(None, "File of the draft's hot vocabulary.")
    speculative_attention_mode: str = arg(
        "prefill", "Attention kernels of verification.", choices=["prefill", "decode"]
    )
    speculative_draft_attention_backend: str | None = arg(
        None, "Attention kernels of the draft.", choices=ATTENTION_BACKENDS
    )
    speculative_draft_model_quantization: str | None = arg(None, "Quantisation of the draft.")
    speculative_ngram_min_bfs_breadth: int = arg(1, "Fewest branches of a draft node.")
    speculative_ngram_max_bfs_breadth: int = arg(10, "Most branches of a draft node.")
    speculative_ngram_match_type: str = arg("BFS", "Order of candidates.", choices=["BFS", "PROB"])
    speculative_ngram_max_trie_depth: int = arg(18, "Longest stored n-gram, tokens.")
    speculative_ngram_capacity: int = arg(10_000_000, "Most stored tokens.")
    speculative_ngram_external_corpus_path: str | None = arg(
        None, "Texts to draft from, UTF-8, one a line (token ids with --skip-tokenizer-init)."
    )
    speculative_adaptive: bool = arg(False, "Choose draft lengths at run time.")
    speculative_adaptive_config: str | None = arg(None, "JSON options of that choice.")


@dataclass(frozen=True, slots=True)
class LegacyFlag:
    """A flag of older releases: accepted, ignored, warned about."""

    name: str
    takes_value: bool = False


LEGACY_FLAGS: tuple[LegacyFlag, ...] = (
    LegacyFlag("--enable-ep-moe"),
    LegacyFlag("--torchao-config", takes_value=True),
    LegacyFlag("--enable-nan-detection"),
    LegacyFlag("--enable-multimodal"),
    LegacyFlag("--disable-piecewise-cuda-graph"),
    LegacyFlag("--prefill-round-robin-balance"),
    LegacyFlag("--disable-custom-all-reduce"),
    LegacyFlag("--enable-p2p-check"),
    LegacyFlag("--triton-attention-num-kv-splits", takes_value=True),
    LegacyFlag("--num-continuous-decode-steps", takes_value=True),
    LegacyFlag("--mm-attention-backend", takes_value=True),
)
