"""Tiny random Hugging Face checkpoints on disk, one for every supported family.

`make_tiny_checkpoint` writes config.json, generation_config.json, safetensors and a byte-level
tokenizer with a ChatML template, so that a whole server runs on the folder. Sizes are odd on
purpose (vocabulary, head size, grouped heads), and the weights are large enough that greedy
continuations do not hang on rounding. Tokens 0..255 are the bytes themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.registry import resolve_model_class

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
PAD_ID, BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = range(256, 261)
VOCAB_SIZE = 263  # two ids that the tokenizer does not know, and odd, so that two ranks must pad

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
    "torch_dtype": "float32",
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 6,
    "attention_bias": False,
    "kv_lora_rank": 22,
    "q_lora_rank": 26,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 26,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": False,
    },
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "use_sliding_window": False,
        "num_nextn_predict_layers": 0,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 14,
        "attention_bias": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 14,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 26,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 14,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 9,
        "sliding_window_pattern": 3,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        # Published ones tie the head; of random weights that would repeat each token for ever.
        "tie_word_embeddings": False,
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 10,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 26,
        "shared_expert_intermediate_size": 22,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        **_DEEPSEEK,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        **_DEEPSEEK,
    },
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """Content of config.json of a tiny model; `overrides` replace or add keys."""
    return {**_COMMON, **_FAMILIES[family], **overrides}


def make_tiny_checkpoint(
    folder: str | Path,
    family: str = "llama",
    *,
    seed: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a complete model folder and return its path.

    The weights depend on `seed` and the tensors' names and shapes only. `num_shards` > 1 writes
    an index, too.
    """
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **config_overrides)
    _write_json(root / "config.json", config)
    _write_json(
        root / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID], "pad_token_id": PAD_ID},
    )
    write_weights(root, tiny_weights(config, seed, dtype), num_shards)
    write_byte_tokenizer(root)
    return root


def tiny_weights(
    config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random tensors under their checkpoint names, for any supported architecture."""
    model_config = ModelConfig.from_dict(config)
    # On the CPU: so little memory costs nothing, and what a model computes when it is made would
    # let PyTorch load its compiler on the meta device, which takes seconds.
    with torch.device("cpu"):
        model = resolve_model_class(model_config.architectures)(model_config)
    return {
        name: random_tensor(name, slot.full_shape, seed).to(dtype)
        for name, slot in model.weight_table().items()
    }


def write_weights(root: Path, weights: Mapping[str, torch.Tensor], num_shards: int = 1) -> None:
    """Write `model.safetensors`, or shards dealt out in turn with their index."""
    names = list(weights)
    if num_shards == 1:
        save_file(dict(weights), str(root / "model.safetensors"), metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, str(root / file_name), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file_name))
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(root / "model.safetensors.index.json", index)


def write_byte_tokenizer(root: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a tokenizer without merges."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(root / "tokenizer.json"))
    pad, bos, eos = SPECIAL_TOKENS[:3]
    _write_json(
        root / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level tokenizer."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Values of a tiny model's tensor: of a size at which activations neither die nor explode."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return values * 0.1 + (1.0 if name.endswith("norm.weight") else 0.0)
    return values if "embed_tokens" in name else values * (1.5 / math.sqrt(shape[-1]))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
