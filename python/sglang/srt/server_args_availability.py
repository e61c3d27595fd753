"""Which settings of `ServerArgs` this release lacks, and which have no effect beside the others.

Features that this release does not have are rows of `NOT_BUILT`; building one removes its row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sglang.srt.server_args_fields import (
    ServerArgsFields,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A field whose feature is missing. Without `allowed`, only the default is accepted.

    `what` is in the singular: it goes before "is not available".
    """

    field: str
    what: str
    allowed: tuple[Any, ...] | None = None


FP8_CACHE_DTYPES = ("fp8_e4m3", "fp8_e5m2")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp16", "float16", *FP8_CACHE_DTYPES)


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt("load_format", "this weight format", ("auto", "safetensors", "pt", "gguf", "dummy")),
    NotBuilt("model_impl", "this model implementation", ("auto", "sglang")),
    NotBuilt("quantization", "serving quantised weights"),
    NotBuilt("kv_cache_dtype", "this KV cache type", KV_CACHE_DTYPES),
    NotBuilt("is_embedding", "serving embeddings"),
    NotBuilt("checkpoint_engine_wait_weights_before_ready", "waiting for a first weight update"),
    NotBuilt("model_loader_extra_config", "configuring the weight loader"),
    NotBuilt("download_dir", "another folder for hub models"),
    NotBuilt("delete_ckpt_after_loading", "deleting weight files"),
    NotBuilt("weight_cache_mode", "sharing loaded weights"),
    NotBuilt("completion_template", "choosing a completion template"),
    NotBuilt("warmups", "naming warm-up routines"),
    NotBuilt("tokenizer_worker_num", "more than one front process"),
    NotBuilt("sampling_backend", "this sampling backend", (None, "pytorch")),
    NotBuilt(
        "schedule_policy",
        "this policy",
        ("fcfs", "lpm", "random", "dfs-weight", "lof", "priority"),
    ),
    NotBuilt("cuda_graph_config", "configuring CUDA graphs"),
    NotBuilt("cuda_graph_backend_decode", "this kind of CUDA graph", (None, "full", "disabled")),
    NotBuilt("cuda_graph_backend_prefill", "this kind of CUDA graph", (None, "full", "disabled")),
    NotBuilt("enable_deterministic_inference", "deterministic inference"),
    NotBuilt("enable_mixed_chunk", "mixing prefill and decode in a batch"),
    NotBuilt("enable_torch_compile", "torch.compile"),
    NotBuilt("torch_compile_max_bs", "torch.compile"),
    NotBuilt("crash_dump_folder", "writing the last requests at a crash"),
    NotBuilt("pp_size", "pipeline parallelism"),
    NotBuilt("ep_size", "expert parallelism"),
    NotBuilt("enable_dp_attention", "data-parallel attention"),
    NotBuilt("rl_on_policy_target", "matching a trainer's numerics"),
    NotBuilt("rl_quant_profile", "matching a trainer's quantisation"),
    NotBuilt("enable_custom_logit_processor", "running custom logit processors"),
    NotBuilt("enable_return_routed_experts", "returning routed experts"),
    NotBuilt("enable_strict_thinking", "limiting the thinking"),
    NotBuilt("enable_streaming_session", "keeping sessions"),
    NotBuilt("disaggregation_mode", "splitting prefill and decode"),
    NotBuilt("enable_lora", "serving LoRA adapters"),
    NotBuilt("lora_paths", "serving LoRA adapters"),
    NotBuilt("max_lora_rank", "serving LoRA adapters"),
    NotBuilt("max_loras_per_batch", "serving LoRA adapters"),
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
    NotBuilt("speculative_draft_model_revision", "choosing a revision of a hub model"),
    NotBuilt("speculative_attention_mode", "another attention of the verification"),
    NotBuilt("speculative_token_map", "restricting the draft's vocabulary"),
    NotBuilt("speculative_draft_attention_backend", "another backend for the draft"),
    NotBuilt("speculative_draft_model_quantization", "quantising the draft"),
    NotBuilt("speculative_adaptive", "adapting the draft length"),
    NotBuilt("speculative_adaptive_config", "adapting the draft length"),
    NotBuilt("reasoning_parser", "parsing reasoning"),
    NotBuilt("tool_call_parser", "parsing tool calls"),
    NotBuilt(
        "attention_backend",
        "this attention backend",
        (None, "auto", "triton", "torch_native", "torch_reference"),
    ),
    NotBuilt("prefill_attention_backend", "another backend for prefill"),
    NotBuilt("decode_attention_backend", "another backend for decode"),
    NotBuilt("radix_eviction_policy", "this eviction policy", ("lru", "lfu", "slru", "priority")),
)


def default_of(name: str) -> Any:
    """The default of a field. Raises KeyError."""
    for spec in fields(ServerArgsFields):
        if spec.name == name:
            return spec.default_factory() if callable(spec.default_factory) else spec.default
    raise KeyError(name)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def check_built(args: ServerArgsFields) -> None:
    """Refuse settings whose feature does not exist in this release."""
    for row in NOT_BUILT:
        value = getattr(args, row.field)
        allowed = row.allowed if row.allowed is not None else (default_of(row.field),)
        if value in allowed or (row.allowed is None and not value and not allowed[0]):
            continue
        given = "" if row.allowed is None and isinstance(value, bool) else f" {value}"
        others = "" if row.allowed is None else f" Available: {_named(row.allowed)}."
        raise ValueError(
            f"{flag_of(row.field)}{given}: {row.what} is not available in this release.{others}"
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


def warn_ignored(args: ServerArgsFields) -> None:
    """Say once, at launch, which settings have no effect beside the others."""
    for names, reason in _without_effect(args):
        given = [name for name in names if getattr(args, name) != default_of(name)]
        if given:
            logger.warning("%s: no effect %s", ", ".join(map(flag_of, given)), reason)
    if args.device == "cuda":
        return
    for name in _CUDA_ONLY:
        if getattr(args, name) != default_of(name):
            logger.warning("%s has no effect on CPU", flag_of(name))


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
