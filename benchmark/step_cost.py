"""What a step must at least read or compute, by family of model: the limits of `bench_one_batch`.

Bytes of a decode step: every weight once, in the format that is read (of the embedding only rows;
of a layer's experts those that so many tokens are expected to choose), the KV that its layers look
at (all tokens, or those of their window), and recurrent states, which are read and written.
Operations of a prompt: two for each weight and token (the head for one token only; of the experts
the chosen ones) and causal attention; those of recurrent states are left out, being few.
"""

from __future__ import annotations

from sglang.srt.layers.moe import FusedExperts
from sglang.srt.model_executor.cpu_decode_runner import CpuDecodeRunner
from sglang.srt.model_executor.kv_pools import bytes_per_state
from sglang.srt.model_executor.model_runner import ModelRunner


def _experts(runner: ModelRunner) -> list[FusedExperts]:
    return [module for module in runner.model.modules() if isinstance(module, FusedExperts)]


def idle_elements(runner: ModelRunner, num_tokens: int) -> float:
    """Expected elements of experts that none of so many tokens chooses, each independently."""
    chosen = runner.model_config.experts.num_experts_per_tok
    return sum(
        parameter.numel() * (1.0 - chosen / parameter.shape[0]) ** num_tokens
        for module in _experts(runner)
        for parameter in module.parameters()
    )


def _visible(runner: ModelRunner, layer: int, context: float) -> float:
    windows = runner.model_config.sliding_windows
    window = windows[layer] if windows else None
    return context if window is None else min(context, window)


def weight_bytes(runner: ModelRunner, batch: int) -> int:
    """Bytes of all weights as a decode step of `batch` requests reads them."""
    decode = runner.decode_runner
    spared = decode.spared_bytes(batch) if isinstance(decode, CpuDecodeRunner) else 0
    return runner.weight_bytes - spared


def step_bytes(runner: ModelRunner, batch: int, context: float) -> float:
    """Bytes of a decode step of `batch` requests of `context` tokens."""
    config, itemsize = runner.model_config, runner.dtype.itemsize
    embed = config.vocab_size * config.hidden_size * itemsize
    weights = weight_bytes(runner, batch) - (0 if config.tie_word_embeddings else embed)
    weights -= idle_elements(runner, batch) * itemsize
    if config.mla is not None:
        in_layer = config.mla.latent_dim
    else:
        in_layer = 2 * config.num_key_value_heads * config.head_dim
    tokens = sum(_visible(runner, layer, context) for layer in config.kv_layer_ids)
    kv = tokens * in_layer * runner.kv_dtype.itemsize
    return weights + batch * (kv + 2 * bytes_per_state(config, 1))


def prefill_ops(runner: ModelRunner, length: int) -> float:
    """Operations of one prompt of `length` tokens."""
    config = runner.model_config
    embed = config.vocab_size * config.hidden_size
    matrices = runner.weight_bytes / runner.dtype.itemsize
    matrices -= embed * (1 if config.tie_word_embeddings else 2)
    matrices -= idle_elements(runner, 1)
    if config.mla is not None:
        width = config.num_attention_heads * (config.mla.qk_head_dim + config.mla.v_head_dim) / 2
    else:
        width = config.num_attention_heads * config.head_dim
    # Half of the square is masked; a window leaves a band of it.
    pairs = 0.0
    for layer in config.kv_layer_ids:
        seen = _visible(runner, layer, length)
        pairs += length * seen - seen * seen / 2
    return 2 * matrices * length + 2 * embed + 4 * width * pairs
