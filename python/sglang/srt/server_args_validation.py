"""What follows from the values of `ServerArgs`: derived defaults first, refusals second.

`normalize` fills every "auto" that can be decided without reading the model's weights; the
scheduler fills the rest (pool sizes). `validate` raises ValueError with one sentence that names the
flag; it is called at construction and again when processes are started, because the object is
mutable.
Features that this release does not have are rows of `NOT_BUILT`; building one removes its row.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from sglang.srt.configs.draft_config import default_mtp_steps
from sglang.srt.configs.kv_events_config import KVEventsConfig
from sglang.srt.environ import envs
from sglang.srt.observability.metrics import parse_token_buckets
from sglang.srt.server_args_fields import (
    CliArg,
    ServerArgsFields,
    human_int,
)
from sglang.srt.utils.common import (
    available_cpu_count,
    gpu_memory_gb,
    is_cuda,
    parse_json_object,
)
from sglang.srt.utils.network import NetworkAddress

logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------
# Features that are not there yet
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A field whose feature is missing. Without `allowed`, only the default is accepted."""

    field: str
    what: str
    allowed: tuple[Any, ...] | None = None


_FP8_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2")


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("load_format", "this weight format", ("auto", "safetensors", "pt", "gguf", "dummy")),
    NotBuilt("model_impl", "this model implementation", ("auto", "sglang")),
    NotBuilt("quantization", "quantised weights"),
    NotBuilt(
        "kv_cache_dtype", "this KV cache type", ("auto", "bf16", "bfloat16", *_FP8_CACHE_DTYPES)
    ),
    NotBuilt("is_embedding", "serving embeddings"),
    NotBuilt("checkpoint_engine_wait_weights_before_ready", "waiting for a first weight update"),
    NotBuilt("model_loader_extra_config", "options of the weight loader"),
    NotBuilt("download_dir", "another folder for hub models"),
    NotBuilt("delete_ckpt_after_loading", "deleting weight files"),
    NotBuilt("weight_cache_mode", "sharing loaded weights"),
    NotBuilt("completion_template", "completion templates"),
    NotBuilt("warmups", "named warm-up routines"),
    NotBuilt("tokenizer_worker_num", "more than one front process"),
    NotBuilt("sampling_backend", "this sampling backend", (None, "pytorch")),
    NotBuilt(
        "schedule_policy",
        "this policy",
        ("fcfs", "lpm", "random", "dfs-weight", "lof", "priority"),
    ),
    NotBuilt("cuda_graph_config", "options of CUDA graphs"),
    NotBuilt("cuda_graph_backend_decode", "this kind of CUDA graph", (None, "full", "disabled")),
    NotBuilt("cuda_graph_backend_prefill", "this kind of CUDA graph", (None, "full", "disabled")),
    NotBuilt("enable_deterministic_inference", "deterministic inference"),
    NotBuilt("enable_mixed_chunk", "mixed prefill and decode batches"),
    NotBuilt("enable_torch_compile", "torch.compile"),
    NotBuilt("torch_compile_max_bs", "torch.compile"),
    NotBuilt("crash_dump_folder", "writing the last requests at a crash"),
    NotBuilt("pp_size", "pipeline parallelism"),
    NotBuilt("ep_size", "expert parallelism"),
    NotBuilt("enable_dp_attention", "data-parallel attention"),
    NotBuilt("rl_on_policy_target", "matching a trainer's numerics"),
    NotBuilt("rl_quant_profile", "matching a trainer's quantisation"),
    NotBuilt("enable_custom_logit_processor", "custom logit processors"),
    NotBuilt("enable_return_routed_experts", "returning routed experts"),
    NotBuilt("enable_strict_thinking", "limits on thinking"),
    NotBuilt("enable_streaming_session", "sessions"),
    NotBuilt("disaggregation_mode", "splitting prefill and decode"),
    NotBuilt("enable_lora", "LoRA adapters"),
    NotBuilt("lora_paths", "LoRA adapters"),
    NotBuilt("max_lora_rank", "LoRA adapters"),
    NotBuilt("max_loras_per_batch", "LoRA adapters"),
    NotBuilt("hicache_host_memory_mode", "this use of the host pool", ("cache",)),
    NotBuilt("hicache_io_backend", "this way of copying", ("kernel", "direct")),
    NotBuilt(
        "hicache_mem_layout",
        "this layout of the host pool",
        ("layer_first", "page_first", "page_first_direct"),
    ),
    NotBuilt(
        "hicache_storage_backend",
        "this storage backend",
        (None, "file", "mooncake", "redis", "dynamic"),
    ),
    NotBuilt("hicache_storage_retry_poll_interval", "asking storage again after a miss"),
    NotBuilt("hicache_storage_retry_max_attempts", "asking storage again after a miss"),
    NotBuilt(
        "speculative_algorithm",
        "this algorithm",
        (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM"),
    ),
    NotBuilt("speculative_draft_model_revision", "revisions of hub models"),
    NotBuilt("speculative_attention_mode", "another attention of the verification"),
    NotBuilt("speculative_token_map", "restricting the draft's vocabulary"),
    NotBuilt("speculative_draft_attention_backend", "another backend for the draft"),
    NotBuilt("speculative_draft_model_quantization", "quantised drafts"),
    NotBuilt("speculative_adaptive", "adaptive draft lengths"),
    NotBuilt("speculative_adaptive_config", "adaptive draft lengths"),
    NotBuilt("reasoning_parser", "reasoning parsers"),
    NotBuilt("tool_call_parser", "tool call parsers"),
    NotBuilt(
        "attention_backend",
        "this attention backend",
        (None, "auto", "triton", "torch_native", "torch_reference"),
    ),
    NotBuilt("prefill_attention_backend", "another backend for prefill"),
    NotBuilt("decode_attention_backend", "another backend for decode"),
    NotBuilt("radix_eviction_policy", "this eviction policy", ("lru", "lfu", "slru", "priority")),
)


def _default_of(name: str) -> Any:
    for spec in fields(ServerArgsFields):
        if spec.name == name:
            return spec.default_factory() if callable(spec.default_factory) else spec.default
    raise KeyError(name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_built(args: ServerArgsFields) -> None:
    """Refuse settings whose feature does not exist in this release."""
    for row in NOT_BUILT:
        value = getattr(args, row.field)
        allowed = row.allowed if row.allowed is not None else (_default_of(row.field),)
        if value in allowed or (row.allowed is None and not value and not allowed[0]):
            continue
        given = "" if row.allowed is None and isinstance(value, bool) else f" {value}"
        others = "" if row.allowed is None else f" Available: {_named(row.allowed)}."
        raise ValueError(
            f"{_flag(row.field)}{given}: {row.what} is not available in this release.{others}"
        )


def _named(allowed: tuple[Any, ...]) -> str:
    return ", ".join(value for value in allowed if value is not None)


def availability(name: str) -> str:
    """What `--help` says of a field whose feature is missing or there in part; else ""."""
    for row in NOT_BUILT:
        if row.field == name:
            if row.allowed is None:
                return "Not available in this release."
            return f"Available in this release: {_named(row.allowed)}."
    return ""


# ------------------------------------------------------------------------------------------------
# Derived values
# ------------------------------------------------------------------------------------------------


def normalize(args: ServerArgsFields) -> None:
    """Fill derived defaults in place. Calling it again changes nothing."""
    _normalize_types(args)
    # What follows divides by some of these.
    _check_ranges(args)
    _normalize_names(args)
    _normalize_device(args)
    _normalize_scheduling(args)
    _normalize_hicache(args)
    _normalize_speculation(args)


def _normalize_types(args: ServerArgsFields) -> None:
    """Trainers pass torch dtypes, numbers as text, None for lists and switches."""
    if not isinstance(args.dtype, str):
        args.dtype = str(args.dtype).removeprefix("torch.")
    if isinstance(args.context_length, str):
        args.context_length = human_int(args.context_length)
    if args.custom_weight_loader is None:
        args.custom_weight_loader = []
    for name in ("json_model_override_args", "model_loader_extra_config"):
        if getattr(args, name) is None:
            setattr(args, name, "{}")
    _check_types(args)
    if args.speculative_algorithm is not None:
        args.speculative_algorithm = args.speculative_algorithm.upper()


_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "bool": (int, "true or false"),
    "int": (Integral, "an integer"),
    "float": (Real, "a number"),
    "str": (str, "text"),
    "list": ((list, tuple), "a list"),
}


def _check_types(args: ServerArgsFields) -> None:
    """Constructed objects, which no parser has seen; None is for the other checks."""
    for spec in fields(args):
        value = getattr(args, spec.name)
        kind, wanted = _KINDS[re.split(r"\W", str(spec.type))[0]]
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{_flag(spec.name)} must be {wanted}, not {value!r}.")


def _normalize_names(args: ServerArgsFields) -> None:
    args.model_path = os.path.expanduser(args.model_path)
    if args.tokenizer_path is None:
        args.tokenizer_path = args.model_path
    if args.served_model_name is None:
        args.served_model_name = args.model_path
    if args.random_seed is None:
        args.random_seed = secrets.randbelow(1 << 30)
    if envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.get():
        args.enable_deterministic_inference = True
    if args.grammar_backend in ("xgrammar", "outlines"):
        logger.warning(
            "--grammar-backend %s: llguidance is used; it accepts the same schemas",
            args.grammar_backend,
        )
    if args.grammar_backend != "none":
        args.grammar_backend = "llguidance"
    if args.sampling_backend is None:
        args.sampling_backend = "pytorch"


# Larger prefill steps keep the device busy for longer than the host needs to launch them.
_DEFAULT_PREFILL_GRAPH = 512


def _normalize_device(args: ServerArgsFields) -> None:
    if args.device == "auto":
        args.device = "cuda" if is_cuda() else "cpu"
    if args.cuda_graph_backend_decode == "disabled":
        args.disable_decode_cuda_graph = True
    _normalize_prefill_graphs(args)
    if args.device == "cpu":
        # Matrix products in half precision are slow on most CPUs, and float32 is the reference.
        if args.dtype == "auto":
            args.dtype = "float32"
        args.disable_cuda_graph = True
        if not envs.SGLANG_ENABLE_OVERLAP_ON_CPU.get():
            args.disable_overlap_schedule = True
    if args.attention_backend in (None, "auto"):
        args.attention_backend = "torch_native" if args.device == "cpu" else "triton"
    if args.num_threads is None and args.device == "cpu":
        args.num_threads = _default_num_threads(args)


def _normalize_prefill_graphs(args: ServerArgsFields) -> None:
    if args.cuda_graph_backend_prefill == "disabled":
        args.disable_prefill_cuda_graph = True
    is_sized = args.cuda_graph_max_bs_prefill is not None or args.cuda_graph_bs_prefill is not None
    if args.cuda_graph_backend_prefill == "full" and not is_sized:
        args.cuda_graph_max_bs_prefill = _DEFAULT_PREFILL_GRAPH


def _default_num_threads(args: ServerArgsFields) -> int:
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdecimal() and int(configured) > 0:
        return int(configured)
    ranks_here = max(1, args.tp_size * args.dp_size // max(1, args.nnodes))
    return max(1, available_cpu_count() // ranks_here)


def _normalize_scheduling(args: ServerArgsFields) -> None:
    if args.page_size is None:
        args.page_size = 1
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = _default_chunk(args)
    if args.max_running_requests is None and args.speculative_algorithm is not None:
        args.max_running_requests = 48
    # On CPU the memory is shared with everything else: the sizing of the pools has its own rule.
    if args.mem_fraction_static is None and args.device == "cuda":
        args.mem_fraction_static = _default_mem_fraction(args)


def _default_chunk(args: ServerArgsFields) -> int:
    total_gb = gpu_memory_gb(args.base_gpu_id) if args.device == "cuda" else None
    chunk = 2048
    for limit_gb, size in ((20, 2048), (60, 4096), (160, 8192)):
        if total_gb is None or total_gb < limit_gb:
            chunk = size
            break
    else:
        chunk = 16384
    assert args.page_size is not None
    # Chunks end at page borders.
    return max(args.page_size, chunk // args.page_size * args.page_size)


def _default_mem_fraction(args: ServerArgsFields) -> float:
    """What is left after activations, communication buffers and graphs.

    Source: the documented rule of the command line (reserve in MB).
    """
    total_gb = gpu_memory_gb(args.base_gpu_id)
    if total_gb is None:
        return 0.85
    assert args.chunked_prefill_size is not None
    max_bs = args.cuda_graph_max_bs_decode or (8 if total_gb < 20 else 256)
    reserve_mb = (
        512
        + 1.5 * max(args.chunked_prefill_size, 2048)
        + args.tp_size * args.pp_size / 8 * 1024
        + 2 * max_bs
    )
    if total_gb > 60:
        reserve_mb = max(reserve_mb, 10 * 1024)
    return round((total_gb * 1024 - reserve_mb) / (total_gb * 1024), 3)


def _normalize_hicache(args: ServerArgsFields) -> None:
    if not args.enable_hierarchical_cache:
        return
    if args.hicache_mem_layout == "page_first_direct" and args.hicache_io_backend == "kernel":
        args.hicache_io_backend = "direct"
    if args.hicache_mem_layout == "page_first" and args.hicache_io_backend == "direct":
        args.hicache_mem_layout = "page_first_direct"
    remote = args.hicache_storage_backend in ("mooncake", "npu_memcache", "redis")
    if remote and args.hicache_mem_layout == "layer_first":
        direct = args.hicache_io_backend == "direct"
        args.hicache_mem_layout = "page_first_direct" if direct else "page_first"
    if args.hicache_host_memory_mode == "buffer_only" and args.hicache_write_policy == "write_back":
        args.hicache_write_policy = "write_through"


# (steps, topk, verified tokens) where nothing is given. Source: the command line's documentation.
_DEFAULT_DRAFT_SHAPES = {
    "EAGLE": (5, 4, 8),
    "EAGLE3": (5, 4, 8),
    "NEXTN": (3, 1, 4),
    "STANDALONE": (3, 1, 4),
}
_DEFAULT_NGRAM_DRAFT_TOKENS = 12


def _normalize_speculation(args: ServerArgsFields) -> None:
    algorithm = args.speculative_algorithm
    if algorithm is None:
        return
    if algorithm == "NGRAM":
        if args.speculative_num_draft_tokens is None:
            args.speculative_num_draft_tokens = _DEFAULT_NGRAM_DRAFT_TOKENS
        args.speculative_eagle_topk = args.speculative_ngram_max_bfs_breadth
        # A path of repeated tokens may use up the whole tree.
        args.speculative_num_steps = max(1, args.speculative_num_draft_tokens - 1)
        return
    if algorithm in ("EAGLE", "NEXTN") and args.speculative_draft_model_path is None:
        # The draft is a layer in the target's own files: `model_check` looks for it.
        args.speculative_draft_model_path = args.model_path
    if args.enable_multi_layer_eagle and args.speculative_eagle_topk is None:
        args.speculative_eagle_topk = 1
        if args.speculative_num_steps is None and args.speculative_num_draft_tokens is None:
            args.speculative_num_steps = default_mtp_steps(
                args.speculative_draft_model_path or args.model_path,
                _DEFAULT_DRAFT_SHAPES["NEXTN"][0],
            )
    if args.speculative_num_steps is None and algorithm in _DEFAULT_DRAFT_SHAPES:
        _require(
            args.speculative_eagle_topk is None and args.speculative_num_draft_tokens is None,
            "--speculative-eagle-topk and --speculative-num-draft-tokens need "
            "--speculative-num-steps.",
        )
        (
            args.speculative_num_steps,
            args.speculative_eagle_topk,
            args.speculative_num_draft_tokens,
        ) = _DEFAULT_DRAFT_SHAPES[algorithm]
    if args.speculative_num_steps is None:
        return
    if args.speculative_eagle_topk is None:
        args.speculative_eagle_topk = 1
    chain = args.speculative_num_steps + 1
    if args.speculative_eagle_topk == 1 and args.speculative_num_draft_tokens != chain:
        if args.speculative_num_draft_tokens is not None:
            logger.warning(
                "--speculative-num-draft-tokens %d: a chain of %d steps verifies %d tokens",
                args.speculative_num_draft_tokens,
                args.speculative_num_steps,
                chain,
            )
        args.speculative_num_draft_tokens = chain
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = chain


def warn_ignored(args: ServerArgsFields) -> None:
    """Say once, at launch, which settings have no effect beside the others."""
    for names, reason in _without_effect(args):
        given = [name for name in names if getattr(args, name) != _default_of(name)]
        if given:
            logger.warning("%s: no effect %s", ", ".join(map(_flag, given)), reason)
    if args.device == "cuda":
        return
    for name in _CUDA_ONLY:
        if getattr(args, name) != _default_of(name):
            logger.warning("%s has no effect on CPU", _flag(name))


def _without_effect(args: ServerArgsFields) -> Iterator[tuple[Sequence[str], str]]:
    """Settings that the others leave without effect, and why."""
    if not args.enable_hierarchical_cache:
        yield (
            _HICACHE_ONLY,
            "without --enable-hierarchical-cache; KV is kept on the device only",
        )
    if args.hicache_storage_backend is None:
        yield (
            _STORAGE_ONLY,
            "without --hicache-storage-backend; what is attached later brings its own",
        )
    if args.speculative_algorithm is None:
        yield _SPECULATION_ONLY, "without --speculative-algorithm"
    if args.speculative_algorithm == "NGRAM":
        yield _DRAFT_ONLY, "with --speculative-algorithm NGRAM, which has no draft model"
    else:
        yield _NGRAM_ONLY, "without --speculative-algorithm NGRAM"


_SPECULATION_ONLY = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
    "speculative_use_rejection_sampling",
)

_DRAFT_ONLY = ("speculative_draft_model_path", "speculative_draft_load_format")

_NGRAM_ONLY = (
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_match_type",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_capacity",
    "speculative_ngram_external_corpus_path",
)

_HICACHE_ONLY = (
    "hicache_ratio",
    "hicache_size",
    "hicache_host_memory_fraction",
    "hicache_write_policy",
    "hicache_io_backend",
    "hicache_mem_layout",
    "hicache_storage_backend",
    "hicache_storage_backend_extra_config",
    "hicache_storage_prefetch_policy",
    "hicache_draft_storage_policy",
)

_STORAGE_ONLY = ("hicache_storage_backend_extra_config",)

_CUDA_ONLY = (
    "cuda_graph_max_bs_decode",
    "cuda_graph_bs_decode",
    "cuda_graph_max_bs_prefill",
    "cuda_graph_bs_prefill",
    "disable_cuda_graph_padding",
    "base_gpu_id",
    "gpu_id_step",
)


# ------------------------------------------------------------------------------------------------
# Refusals
# ------------------------------------------------------------------------------------------------


def validate(args: ServerArgsFields) -> None:
    """Raise ValueError, one sentence, for the first setting that cannot work."""
    for check in _CHECKS:
        check(args)
    check_built(args)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _check_choices(args: ServerArgsFields) -> None:
    """Constructed objects get the same choices as the command line."""
    for spec in fields(args):
        cli: CliArg = spec.metadata["cli"]
        value = getattr(args, spec.name)
        if cli.choices is None or value is None or value in cli.choices:
            continue
        if spec.name == "grammar_backend" and value == "llguidance":
            continue
        if spec.name == "load_format" and value in args.custom_weight_loader:
            continue
        raise ValueError(f"{_flag(spec.name)} {value!r} is not one of {', '.join(cli.choices)}.")


_AT_LEAST: dict[str, float] = {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "ep_size": 1,
    "nnodes": 1,
    "node_rank": 0,
    "base_gpu_id": 0,
    "gpu_id_step": 1,
    "page_size": 1,
    "context_length": 1,
    "max_running_requests": 1,
    "max_queued_requests": 1,
    "max_total_tokens": 1,
    "max_mamba_cache_size": 1,
    "mamba_track_interval": 1,
    "mamba_full_memory_ratio": 0,
    "cuda_graph_max_bs_decode": 1,
    "cuda_graph_max_bs_prefill": 0,
    "max_prefill_tokens": 1,
    "stream_interval": 1,
    "tokenizer_worker_num": 1,
    "decode_log_interval": 1,
    "num_threads": 1,
    "watchdog_timeout": 0,
    "schedule_conservativeness": 0,
    "hicache_size": 0,
    "random_seed": 0,
}


# Sizes and numbers of tokens travel as 32-bit integers.
_INT_MAX = (1 << 31) - 1
_SEED_MAX = (1 << 62) - 1
# More threads than this on so few cores can only be a slip.
_THREADS_PER_CORE = 4
_ALWAYS_ALLOWED_THREADS = 64


def _most(name: str) -> int:
    if name == "num_threads":
        return max(_ALWAYS_ALLOWED_THREADS, _THREADS_PER_CORE * available_cpu_count())
    return _SEED_MAX if name == "random_seed" else _INT_MAX


def _check_ranges(args: ServerArgsFields) -> None:
    for name, least in _AT_LEAST.items():
        value = getattr(args, name)
        if value is None:
            continue
        if isinstance(value, str) or not value >= least:
            raise ValueError(f"{_flag(name)} must be at least {least:g}, not {value!r}.")
        if value > _most(name):
            raise ValueError(f"{_flag(name)} must be at most {_most(name)}, not {value!r}.")
    fraction = args.mem_fraction_static
    _require(
        fraction is None or 0 < fraction < 1,
        f"--mem-fraction-static must lie between 0 and 1, not {fraction}.",
    )
    _require(
        0 < args.swa_full_tokens_ratio <= 1,
        f"--swa-full-tokens-ratio must lie in (0, 1], not {args.swa_full_tokens_ratio}.",
    )
    ratio = args.hicache_ratio
    _require(
        ratio is None or 0 < ratio < math.inf,
        f"--hicache-ratio must be greater than 0, not {ratio}.",
    )
    _require(
        0 < args.hicache_host_memory_fraction <= 1,
        "--hicache-host-memory-fraction must lie in (0, 1].",
    )
    _require(1 <= args.port <= 65535, f"--port must lie in 1..65535, not {args.port}.")
    _require(args.log_requests_level in (0, 1, 2, 3), "--log-requests-level must be 0, 1, 2 or 3.")


def _check_model(args: ServerArgsFields) -> None:
    _require(bool(args.model_path), "--model-path must name a folder or a hub model.")
    parse_json_object(args.json_model_override_args, "--json-model-override-args")
    parse_json_object(args.model_loader_extra_config, "--model-loader-extra-config")
    if args.preferred_sampling_params is not None:
        parse_json_object(args.preferred_sampling_params, "--preferred-sampling-params")
    if args.extra_metric_labels is not None:
        parse_json_object(args.extra_metric_labels, "--extra-metric-labels")
    _require(
        args.device == "cpu" or args.cpu_weight_format == "auto",
        "--cpu-weight-format needs --device cpu.",
    )


def _check_kv_cache(args: ServerArgsFields) -> None:
    _require(
        args.kv_cache_dtype not in _FP8_CACHE_DTYPES
        or (args.device == "cuda" and args.attention_backend == "triton"),
        f"--kv-cache-dtype {args.kv_cache_dtype} needs --device cuda and "
        "--attention-backend triton.",
    )


def _check_cuda_graphs(args: ServerArgsFields) -> None:
    for name, units in (
        ("cuda_graph_bs_decode", "batch sizes"),
        ("cuda_graph_bs_prefill", "numbers of tokens"),
    ):
        sizes = getattr(args, name)
        _require(
            sizes is None or (len(sizes) > 0 and min(sizes) > 0),
            f"{_flag(name)} must list {units} of at least 1, not {sizes}.",
        )


def _check_http(args: ServerArgsFields) -> None:
    _require(
        (args.ssl_keyfile is None) == (args.ssl_certfile is None),
        "--ssl-keyfile and --ssl-certfile must be given together.",
    )


def _check_metrics(args: ServerArgsFields) -> None:
    for rule in (args.prompt_tokens_buckets, args.generation_tokens_buckets):
        parse_token_buckets(rule)


def _check_scheduling(args: ServerArgsFields) -> None:
    chunk, page = args.chunked_prefill_size, args.page_size
    assert chunk is not None and page is not None
    _require(
        chunk == -1 or chunk > 0, f"--chunked-prefill-size must be positive or -1, not {chunk}."
    )
    _require(
        chunk == -1 or chunk % page == 0,
        f"--chunked-prefill-size {chunk} must be a multiple of --page-size {page}.",
    )
    _require(
        not args.enable_priority_scheduling or args.schedule_policy in ("fcfs", "lof"),
        "--enable-priority-scheduling works only with --schedule-policy fcfs or lof.",
    )


def _check_parallel(args: ServerArgsFields) -> None:
    _require(
        args.node_rank < args.nnodes,
        f"--node-rank {args.node_rank} must be less than --nnodes {args.nnodes}.",
    )
    if args.dist_init_addr is not None:
        NetworkAddress.parse(args.dist_init_addr)
    if args.nnodes == 1:
        return
    _require(args.dist_init_addr is not None, "--nnodes > 1 needs --dist-init-addr host:port.")
    _require(args.dp_size == 1, "--dp-size > 1 does not work with --nnodes > 1.")
    _require(
        args.tp_size % args.nnodes == 0,
        f"--tp-size {args.tp_size} must be a multiple of --nnodes {args.nnodes}.",
    )


def _check_hicache(args: ServerArgsFields) -> None:
    if not args.enable_hierarchical_cache:
        return
    _require(
        not args.disable_radix_cache,
        "--enable-hierarchical-cache and --disable-radix-cache exclude each other.",
    )
    _require(
        args.hicache_host_memory_mode != "buffer_only" or args.hicache_storage_backend is not None,
        "--hicache-host-memory-mode buffer_only needs --hicache-storage-backend.",
    )


def _check_kv_events(args: ServerArgsFields) -> None:
    if args.kv_events_config is None:
        return
    config = KVEventsConfig.from_cli(args.kv_events_config)
    config.check(host=args.host, port=args.port, dp_size=args.dp_size)
    _require(
        not (config.is_enabled and args.disable_radix_cache),
        "--kv-events-config and --disable-radix-cache exclude each other.",
    )


def _check_multi_layer_draft(args: ServerArgsFields) -> None:
    if not args.enable_multi_layer_eagle:
        return
    _require(
        args.speculative_algorithm in ("EAGLE", "NEXTN"),
        "--enable-multi-layer-eagle needs --speculative-algorithm NEXTN or EAGLE, and a model with "
        "layers that predict further tokens.",
    )
    _require(
        args.speculative_eagle_topk == 1,
        "--enable-multi-layer-eagle drafts chains, --speculative-eagle-topk must be 1: each layer "
        "writes its KV while catching up, one entry a position, before there are branches.",
    )
    _require(
        not args.speculative_use_rejection_sampling,
        "--enable-multi-layer-eagle drafts while catching up, before it is known how the next "
        "tokens will be sampled: --speculative-use-rejection-sampling cannot draw them.",
    )


def _check_speculation(args: ServerArgsFields) -> None:
    algorithm = args.speculative_algorithm
    if algorithm is None:
        _require(
            args.speculative_draft_model_path is None,
            "--speculative-draft-model-path needs --speculative-algorithm.",
        )
        _check_multi_layer_draft(args)
        return
    needs_draft = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    if not needs_draft and algorithm != "NGRAM":
        return  # refused by `check_built`
    _require(
        not needs_draft or args.speculative_draft_model_path is not None,
        f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path.",
    )
    _require(
        not needs_draft or args.cpu_weight_format in ("auto", "fp32"),
        f"--cpu-weight-format {args.cpu_weight_format} has no effect with "
        f"--speculative-algorithm {algorithm}: there are no plain decode steps.",
    )
    shape = (
        args.speculative_num_steps or 0,
        args.speculative_eagle_topk or 0,
        args.speculative_num_draft_tokens or 0,
    )
    _require(
        min(shape) >= 1 and shape[2] >= 2,
        "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
        "must be at least 1, 1 and 2.",
    )
    most = shape[1] + (shape[0] - 1) * shape[1] ** 2
    _require(
        algorithm == "NGRAM" or shape[2] - 1 <= most,
        f"{shape[0]} draft steps of top {shape[1]} make {most} nodes: "
        f"--speculative-num-draft-tokens can be at most {most + 1}.",
    )
    _check_multi_layer_draft(args)
    _check_acceptance(args)
    _require(
        not args.enable_return_hidden_states,
        "--enable-return-hidden-states does not work with speculative decoding.",
    )


def _check_acceptance(args: ServerArgsFields) -> None:
    thresholds = (
        args.speculative_accept_threshold_single,
        args.speculative_accept_threshold_acc,
    )
    _require(
        all(0 < value <= 1 for value in thresholds),
        "--speculative-accept-threshold-single and -acc must lie in (0, 1].",
    )
    _require(
        not args.speculative_use_rejection_sampling
        or (
            args.speculative_algorithm in ("EAGLE", "EAGLE3", "NEXTN")
            and args.speculative_eagle_topk == 1
            and thresholds == (1.0, 1.0)
        ),
        "--speculative-use-rejection-sampling works with EAGLE, EAGLE3 and NEXTN, "
        "--speculative-eagle-topk 1 and thresholds of 1.",
    )


_CHECKS: tuple[Callable[[ServerArgsFields], None], ...] = (
    _check_choices,
    _check_ranges,
    _check_model,
    _check_kv_cache,
    _check_cuda_graphs,
    _check_http,
    _check_metrics,
    _check_scheduling,
    _check_parallel,
    _check_hicache,
    _check_kv_events,
    _check_speculation,
)
