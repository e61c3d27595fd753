"""Yield the weights of a GGUF file under Hugging Face names, and convert a file to a folder.

Owns: tensor names, dequantisation and the undoing of llama.cpp's reordering of rotary rows. Does
not own: metadata and tokenizer (``utils/gguf_file.py``), nor placing weights in a model. Called by
the model loader for ``--load-format gguf`` and by ``scripts/fetch_model.py``. Only reads; safe to
use from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from sglang.srt.utils.gguf_file import GgufFile, UnsupportedGgufError, open_gguf

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
# Names that mean something else, or nothing, in other architectures.
_IN_LAYER_OF = {
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
# Architectures whose checkpoints hold norm weights less one, which the files add.
_ZERO_CENTRED_NORMS = {"gemma3"}
# Carries rope scaling, which the configuration states; it is no weight.
_NOT_WEIGHTS = {"rope_freqs.weight"}


def hf_tensor_name(gguf_name: str, architecture: str = "llama") -> str:
    """Translate a tensor name, ``blk.3.ffn_up.weight`` to ``model.layers.3.mlp.up_proj.weight``.

    Raises ``UnsupportedGgufError`` for names that no supported architecture has.
    """
    parts = gguf_name.split(".")
    in_layer = _IN_LAYER | _IN_LAYER_OF.get(architecture, {})
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in in_layer:
        return f"model.layers.{parts[1]}.{in_layer[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_LEVEL:
        return f"{_TOP_LEVEL[parts[0]]}.{parts[1]}"
    raise UnsupportedGgufError(f"tensor {gguf_name!r} belongs to no supported architecture")


def undo_rope_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Put the rows of a q or k projection back in Hugging Face order.

    ``rows`` is [num_heads * head_dim, ...]. llama.cpp rotates neighbouring pairs of a head's rows,
    the Hugging Face code rotates row i with row i + head_dim / 2, so a Llama file holds each head
    interleaved as [head_dim / 2, 2] where the original has [2, head_dim / 2].
    """
    half_dim = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half_dim, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def iterate_gguf_arrays(source: GgufFile) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 array in the original's shape), in the file's order.

    Each array is contiguous and owned by the caller. One tensor is dequantised at a time.
    """
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        raise UnsupportedGgufError(
            "reading GGUF weights needs the 'gguf' package: pip install 'sglang-hispec[gguf]'"
        ) from error

    permuted_heads = {}
    if source.architecture == "llama":
        permuted_heads = {"attn_q": source.num_heads, "attn_k": source.num_kv_heads}
    for tensor in source.reader.tensors:
        if tensor.name in _NOT_WEIGHTS:
            continue
        name = hf_tensor_name(tensor.name, source.architecture)
        shape = tuple(reversed(tensor.shape))
        try:
            values = dequantize(tensor.data, GGMLQuantizationType(tensor.type_id))
        except (ValueError, NotImplementedError) as error:
            raise UnsupportedGgufError(f"{source.path.name}: {tensor.name}: {error}") from error
        values = values.astype(np.float32).reshape(shape)
        kind = tensor.name.split(".")[-2]
        if kind in permuted_heads:
            values = undo_rope_permutation(values, permuted_heads[kind])
        if kind.endswith("_norm") and source.architecture in _ZERO_CENTRED_NORMS:
            values = values - np.float32(1.0)
        yield name, np.array(values, dtype=np.float32, order="C")


def gguf_tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of what ``iterate_gguf_weights`` yields, without reading weights."""
    source = open_gguf(path)
    return {
        hf_tensor_name(tensor.name, source.architecture): tuple(reversed(tensor.shape))
        for tensor in source.reader.tensors
        if tensor.name not in _NOT_WEIGHTS
    }


def iterate_gguf_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, float32 CPU tensor) for each weight of the GGUF file at ``path``.

    ``lm_head.weight`` is absent where the file ties it to the embedding. Raises
    ``UnsupportedGgufError`` for files that cannot be translated.
    """
    for name, values in iterate_gguf_arrays(open_gguf(path)):
        yield name, torch.from_numpy(values)
