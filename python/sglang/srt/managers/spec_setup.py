"""From the server's arguments to the settings of speculative decoding.

Called once per scheduler at start-up.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.served_tokenizer import load_tokenizer
from sglang.srt.model_executor.model_runner import resolve_kv_dtype
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import AcceptanceRule
from sglang.srt.speculative.ngram_cache import MatchType, NgramOptions
from sglang.srt.speculative.spec_info import DraftShape, SpeculativeAlgorithm
from sglang.srt.speculative.worker_factory import NgramCorpus, SpecSettings


def spec_settings(server_args: ServerArgs) -> SpecSettings | None:
    """The settings; None without speculation. Numbers were resolved before the launch."""
    algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    if algorithm.is_none():
        return None
    shape = (
        server_args.speculative_num_steps,
        server_args.speculative_eagle_topk,
        server_args.speculative_num_draft_tokens,
    )
    num_steps, topk, num_draft_tokens = shape
    if num_steps is None or topk is None or num_draft_tokens is None:
        raise ValueError(f"the draft's shape {shape} must be resolved before the launch")
    is_ngram = algorithm is SpeculativeAlgorithm.NGRAM
    if is_ngram:
        # Branches of several matches meet at the root, whatever the breadth: never a chain.
        topk = max(2, topk)
    return SpecSettings(
        algorithm=algorithm,
        shape=DraftShape(num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens),
        rule=AcceptanceRule(
            threshold_single=server_args.speculative_accept_threshold_single,
            threshold_acc=server_args.speculative_accept_threshold_acc,
            use_rejection_sampling=server_args.speculative_use_rejection_sampling,
        ),
        draft_model_path=server_args.speculative_draft_model_path,
        draft_load_format=server_args.speculative_draft_load_format or "auto",
        overlap=not server_args.disable_overlap_schedule,
        multi_layer=server_args.enable_multi_layer_eagle,
        ngram=_ngram_options(server_args, num_draft_tokens) if is_ngram else None,
        ngram_corpus=_ngram_corpus(server_args) if is_ngram else None,
    )


def _ngram_options(server_args: ServerArgs, num_draft_tokens: int) -> NgramOptions:
    return NgramOptions(
        num_draft_tokens=num_draft_tokens,
        max_trie_depth=server_args.speculative_ngram_max_trie_depth,
        min_bfs_breadth=server_args.speculative_ngram_min_bfs_breadth,
        max_bfs_breadth=server_args.speculative_ngram_max_bfs_breadth,
        match_type=MatchType(server_args.speculative_ngram_match_type),
        capacity=server_args.speculative_ngram_capacity,
    )


def _ngram_corpus(server_args: ServerArgs) -> NgramCorpus | None:
    path = server_args.speculative_ngram_external_corpus_path
    if path is None:
        return None
    tokenizer = load_tokenizer(server_args)
    return NgramCorpus(path=path, encode=tokenizer.encode if tokenizer is not None else None)


def key_lookahead(server_args: ServerArgs) -> int:
    """On how many tokens after its own cached KV depends."""
    algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    if server_args.enable_multi_layer_eagle and server_args.speculative_num_steps is not None:
        return server_args.speculative_num_steps
    return int(algorithm.traits.needs_next_token)


def kv_dtype(server_args: ServerArgs, model_config: ModelConfig) -> torch.dtype:
    """Type of the KV pools of target and draft."""
    return resolve_kv_dtype(server_args.kv_cache_dtype, model_config.dtype)
