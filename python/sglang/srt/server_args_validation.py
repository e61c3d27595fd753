"""Refusals of `ServerArgs`.

`validate` raises ValueError with one sentence that names the flag; it is called at construction and
again when processes are started, because the object is mutable.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import fields

from sglang.srt.configs.kv_events_config import KVEventsConfig
from sglang.srt.observability.metrics import parse_token_buckets
from sglang.srt.server_args_availability import FP8_CACHE_DTYPES, check_built, flag_of
from sglang.srt.server_args_fields import (
    CliArg,
    ServerArgsFields,
)
from sglang.srt.utils.common import (
    available_cpu_count,
    parse_json_object,
)
from sglang.srt.utils.network import NetworkAddress


def validate(args: ServerArgsFields) -> None:
    """Raise ValueError, one sentence, for the first setting that cannot work."""
    for check in _CHECKS:
        check(args)
    check_built(args)


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError with the sentence unless the condition holds."""
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
        raise ValueError(f"{flag_of(spec.name)} {value!r} is not one of {', '.join(cli.choices)}.")


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


def check_ranges(args: ServerArgsFields) -> None:
    """Refuse numbers that are too small or too large. Raises ValueError."""
    for name, least in _AT_LEAST.items():
        value = getattr(args, name)
        if value is None:
            continue
        if isinstance(value, str) or not value >= least:
            raise ValueError(f"{flag_of(name)} must be at least {least:g}, not {value!r}.")
        if value > _most(name):
            raise ValueError(f"{flag_of(name)} must be at most {_most(name)}, not {value!r}.")
    fraction = args.mem_fraction_static
    require(
        fraction is None or 0 < fraction < 1,
        f"--mem-fraction-static must lie between 0 and 1, not {fraction}.",
    )
    require(
        0 < args.swa_full_tokens_ratio <= 1,
        f"--swa-full-tokens-ratio must lie in (0, 1], not {args.swa_full_tokens_ratio}.",
    )
    ratio = args.hicache_ratio
    require(
        ratio is None or 0 < ratio < math.inf,
        f"--hicache-ratio must be greater than 0, not {ratio}.",
    )
    require(
        0 < args.hicache_host_memory_fraction <= 1,
        "--hicache-host-memory-fraction must lie in (0, 1].",
    )
    require(1 <= args.port <= 65535, f"--port must lie in 1..65535, not {args.port}.")
    require(args.log_requests_level in (0, 1, 2, 3), "--log-requests-level must be 0, 1, 2 or 3.")


def _check_model(args: ServerArgsFields) -> None:
    require(bool(args.model_path), "--model-path must name a folder or a hub model.")
    parse_json_object(args.json_model_override_args, "--json-model-override-args")
    parse_json_object(args.model_loader_extra_config, "--model-loader-extra-config")
    if args.preferred_sampling_params is not None:
        parse_json_object(args.preferred_sampling_params, "--preferred-sampling-params")
    if args.extra_metric_labels is not None:
        parse_json_object(args.extra_metric_labels, "--extra-metric-labels")
    require(
        args.device == "cpu" or args.cpu_weight_format == "auto",
        "--cpu-weight-format needs --device cpu.",
    )


def _check_attention(args: ServerArgsFields) -> None:
    # Triton's own switch, with which kernels run on the CPU, very slowly.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    require(
        args.device == "cuda" or args.attention_backend != "triton" or is_interpreted,
        "--attention-backend triton needs --device cuda.",
    )


def _check_kv_cache(args: ServerArgsFields) -> None:
    require(
        args.kv_cache_dtype not in FP8_CACHE_DTYPES
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
        require(
            sizes is None or (len(sizes) > 0 and min(sizes) > 0),
            f"{flag_of(name)} must list {units} of at least 1, not {sizes}.",
        )


def _check_http(args: ServerArgsFields) -> None:
    require(
        (args.ssl_keyfile is None) == (args.ssl_certfile is None),
        "--ssl-keyfile and --ssl-certfile must be given together.",
    )


def _check_metrics(args: ServerArgsFields) -> None:
    for rule in (args.prompt_tokens_buckets, args.generation_tokens_buckets):
        parse_token_buckets(rule)


def _check_scheduling(args: ServerArgsFields) -> None:
    chunk, page = args.chunked_prefill_size, args.page_size
    assert chunk is not None and page is not None
    require(
        chunk == -1 or chunk > 0, f"--chunked-prefill-size must be positive or -1, not {chunk}."
    )
    require(
        chunk == -1 or chunk % page == 0,
        f"--chunked-prefill-size {chunk} must be a multiple of --page-size {page}.",
    )
    require(
        not args.enable_priority_scheduling or args.schedule_policy in ("fcfs", "lof"),
        "--enable-priority-scheduling works only with --schedule-policy fcfs or lof.",
    )


def _check_parallel(args: ServerArgsFields) -> None:
    require(
        args.node_rank < args.nnodes,
        f"--node-rank {args.node_rank} must be less than --nnodes {args.nnodes}.",
    )
    if args.dist_init_addr is not None:
        NetworkAddress.parse(args.dist_init_addr)
    if args.nnodes == 1:
        return
    require(args.dist_init_addr is not None, "--nnodes > 1 needs --dist-init-addr host:port.")
    require(args.dp_size == 1, "--dp-size > 1 does not work with --nnodes > 1.")
    require(
        args.tp_size % args.nnodes == 0,
        f"--tp-size {args.tp_size} must be a multiple of --nnodes {args.nnodes}.",
    )


def _check_hicache(args: ServerArgsFields) -> None:
    if not args.enable_hierarchical_cache:
        return
    require(
        not args.disable_radix_cache,
        "--enable-hierarchical-cache and --disable-radix-cache exclude each other.",
    )


def _check_kv_events(args: ServerArgsFields) -> None:
    if args.kv_events_config is None:
        return
    config = KVEventsConfig.from_cli(args.kv_events_config)
    config.check(host=args.host, port=args.port, dp_size=args.dp_size)
    require(
        not (config.is_enabled and args.disable_radix_cache),
        "--kv-events-config and --disable-radix-cache exclude each other.",
    )


def _check_multi_layer_draft(args: ServerArgsFields) -> None:
    if not args.enable_multi_layer_eagle:
        return
    require(
        args.speculative_algorithm in ("EAGLE", "NEXTN"),
        "--enable-multi-layer-eagle needs --speculative-algorithm NEXTN or EAGLE, and a model with "
        "layers that predict further tokens.",
    )
    require(
        args.speculative_eagle_topk == 1,
        "--enable-multi-layer-eagle drafts chains, --speculative-eagle-topk must be 1: each layer "
        "writes its KV while catching up, one entry a position, before there are branches.",
    )
    require(
        not args.speculative_use_rejection_sampling,
        "--enable-multi-layer-eagle drafts while catching up, before it is known how the next "
        "tokens will be sampled: --speculative-use-rejection-sampling cannot draw them.",
    )


def _check_speculation(args: ServerArgsFields) -> None:
    algorithm = args.speculative_algorithm
    if algorithm is None:
        require(
            args.speculative_draft_model_path is None,
            "--speculative-draft-model-path needs --speculative-algorithm.",
        )
        _check_multi_layer_draft(args)
        return
    needs_draft = algorithm in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
    if not needs_draft and algorithm != "NGRAM":
        return  # refused by `check_built`
    require(
        not needs_draft or args.speculative_draft_model_path is not None,
        f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path.",
    )
    require(
        not needs_draft or args.cpu_weight_format in ("auto", "fp32"),
        f"--cpu-weight-format {args.cpu_weight_format} has no effect with "
        f"--speculative-algorithm {algorithm}: there are no plain decode steps.",
    )
    shape = (
        args.speculative_num_steps or 0,
        args.speculative_eagle_topk or 0,
        args.speculative_num_draft_tokens or 0,
    )
    require(
        min(shape) >= 1 and shape[2] >= 2,
        "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
        "must be at least 1, 1 and 2.",
    )
    most = shape[1] + (shape[0] - 1) * shape[1] ** 2
    require(
        algorithm == "NGRAM" or shape[2] - 1 <= most,
        f"{shape[0]} draft steps of top {shape[1]} make {most} nodes: "
        f"--speculative-num-draft-tokens can be at most {most + 1}.",
    )
    _check_multi_layer_draft(args)
    _check_acceptance(args)
    require(
        not args.enable_return_hidden_states,
        "--enable-return-hidden-states does not work with speculative decoding.",
    )


def _check_acceptance(args: ServerArgsFields) -> None:
    thresholds = (
        args.speculative_accept_threshold_single,
        args.speculative_accept_threshold_acc,
    )
    require(
        all(0 < value <= 1 for value in thresholds),
        "--speculative-accept-threshold-single and -acc must lie in (0, 1].",
    )
    require(
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
    check_ranges,
    _check_model,
    _check_attention,
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
