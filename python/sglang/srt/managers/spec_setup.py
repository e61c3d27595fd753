"""From the server's arguments to the settings of speculative decoding.

Called once per scheduler at start-up.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import resolve_kv_dtype
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import AcceptanceRule
from sglang.srt.speculative.spec_info import DraftShape, SpeculativeAlgorithm
from sglang.srt.speculative.worker_factory import SpecSettings


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
    )


def needs_bigram_keys(server_args: ServerArgs) -> bool:
    """Whether cached KV depends on the token after its own."""
    algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    return algorithm.traits.needs_next_token


def kv_dtype(server_args: ServerArgs, model_config: ModelConfig) -> torch.dtype:
    """Type of the KV pools of target and draft."""
    return resolve_kv_dtype(server_args.kv_cache_dtype, model_config.dtype)
