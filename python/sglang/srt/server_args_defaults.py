"""What follows from the values of `ServerArgs`: types made right, and derived defaults.

`normalize` fills every "auto" that can be decided without reading the model's weights; the
scheduler fills the rest (pool sizes).
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import fields
from numbers import Integral, Real

from sglang.srt.configs.draft_config import default_mtp_steps
from sglang.srt.environ import envs
from sglang.srt.server_args_availability import flag_of
from sglang.srt.server_args_fields import (
    ServerArgsFields,
    human_int,
)
from sglang.srt.server_args_validation import check_ranges, require
from sglang.srt.utils.common import (
    available_cpu_count,
    gpu_memory_gb,
    is_cuda,
)

logger = logging.getLogger(__name__)


def normalize(args: ServerArgsFields) -> None:
    """Fill derived defaults in place. Calling it again changes nothing."""
    _normalize_types(args)
    # What follows divides by some of these.
    check_ranges(args)
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
            raise ValueError(f"{flag_of(spec.name)} must be {wanted}, not {value!r}.")


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
    if args.device == "cuda" and not is_sized:
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
    is_shared = args.hicache_storage_backend in ("mooncake", "redis")
    if is_shared and args.hicache_mem_layout == "layer_first":
        direct = args.hicache_io_backend == "direct"
        args.hicache_mem_layout = "page_first_direct" if direct else "page_first"


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
        require(
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
