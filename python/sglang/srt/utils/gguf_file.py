"""Read the metadata of a GGUF file as the JSON files that a Hugging Face model folder has.

Owns: the translation of GGUF key-value metadata into ``config.json``, ``generation_config.json``,
``tokenizer.json`` and ``tokenizer_config.json`` (the chat template among them). Does not own: the
weights (``model_loader/gguf.py``). Called by the model configuration, by the processes that
tokenise when they are pointed at a ``.gguf`` file, and by the converter. Imports neither torch nor
transformers. The bytes are read by ``gguf_reader``.

Threads: a ``GgufFile`` only reads and may be shared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from sglang.srt.utils.gguf_reader import TYPE_NAMES, GgufReader
from sglang.srt.utils.sentencepiece_bpe import build_sentencepiece_bpe

ARCHITECTURES = {
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Values of tokenizer.ggml.token_type that need an entry of their own in tokenizer.json.
_CONTROL_TOKEN = 3
_USER_DEFINED_TOKEN = 4

# The words a byte-level tokenizer splits text into before it merges bytes, as published with the
# Qwen2 and Llama 3 tokenizers; they differ in how many digits may stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_WORDS = _WORDS % r"\p{N}"
_LLAMA3_WORDS = _WORDS % r"\p{N}{1,3}"

# Every published Llama 3.x checkpoint scales its rotary frequencies with these three values; a
# GGUF file keeps only the table that results from them.
_LLAMA3_LOW_FREQ, _LLAMA3_HIGH_FREQ, _LLAMA3_CONTEXT = 1.0, 4.0, 8192

# The one Gemma 3 size whose attention scores are not scaled by the size of a head.
_GEMMA3_27B_LAYERS = 62


class UnsupportedGgufError(ValueError):
    """The file is no GGUF file or describes something that cannot be translated."""


class GgufFile:
    """An opened GGUF file: metadata by key, and what a model folder's JSON files say of it.

    Raises ``UnsupportedGgufError`` where the file is broken or its architecture is unknown.
    Servers call ``open_gguf``, which parses a file once.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.reader = _open_reader(self.path)
        self.architecture = str(self.value("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedGgufError(
                f"{self.path.name}: architecture {self.architecture!r} is not supported; "
                f"known ones: {', '.join(ARCHITECTURES)}"
            )
        self.tensor_names = {tensor.name for tensor in self.reader.tensors}

    def value(self, key: str, default: Any = None) -> Any:
        """Return the metadata value under ``key``, or ``default`` where it is absent."""
        return self.reader.fields.get(key, default)

    def arch_value(self, key: str, default: Any = None) -> Any:
        """Return the value under ``<architecture>.<key>``; raise when absent without default."""
        found = self.value(f"{self.architecture}.{key}", default)
        if found is None:
            raise UnsupportedGgufError(
                f"{self.path.name}: metadata {self.architecture}.{key} is missing"
            )
        return found

    @property
    def num_heads(self) -> int:
        return int(self.arch_value("attention.head_count"))

    @property
    def num_kv_heads(self) -> int:
        return int(self.arch_value("attention.head_count_kv", self.num_heads))

    @property
    def head_dim(self) -> int:
        hidden_size = int(self.arch_value("embedding_length"))
        return int(self.arch_value("attention.key_length", hidden_size // self.num_heads))

    def hf_config(self) -> dict[str, Any]:
        """Return the content of ``config.json``."""
        rope = self._rope_parameters()
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_size": int(self.arch_value("embedding_length")),
            "intermediate_size": int(self.arch_value("feed_forward_length")),
            "num_hidden_layers": int(self.arch_value("block_count")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": int(self.arch_value("context_length")),
            # Stored as float32; the decimal that was meant has few digits.
            "rms_norm_eps": float(f"{self.arch_value('attention.layer_norm_rms_epsilon'):.6g}"),
            # Both spellings: the older top-level key and the newer nested one.
            "rope_theta": rope["rope_theta"],
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in self.tensor_names,
            "mlp_bias": "blk.0.ffn_gate.bias" in self.tensor_names,
            "tie_word_embeddings": "output.weight" not in self.tensor_names,
            "vocab_size": self._vocab_size(),
            "torch_dtype": self._dtype(),
        }
        config.update(self._special_ids())
        if self.architecture == "gemma3":
            self._to_gemma3(config, rope)
        return config

    def _to_gemma3(self, config: dict[str, Any], rope: dict[str, Any]) -> None:
        """Give `config` the family's own keys; what a file leaves out is the family's default."""
        num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
        # The largest model alone scales its scores by another size than the head's.
        is_largest = num_layers == _GEMMA3_27B_LAYERS
        scalar = hidden_size // self.num_heads if is_largest else self.head_dim
        del config["rope_parameters"]
        config |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": int(self.arch_value("attention.sliding_window")),
            "sliding_window_pattern": int(self.arch_value("attention.sliding_window_pattern", 6)),
            "query_pre_attn_scalar": scalar,
            "rope_local_base_freq": float(self.arch_value("rope.freq_base_swa", 10000.0)),
            "rope_scaling": None
            if rope["rope_type"] == "default"
            else {"rope_type": rope["rope_type"], "factor": rope["factor"]},
        }
        del config["hidden_act"]

    def generation_config(self) -> dict[str, Any]:
        """Return the content of ``generation_config.json``."""
        return self._special_ids()

    def chat_template(self) -> str | None:
        """Return the Jinja chat template, or None where the file has none."""
        template = self.value("tokenizer.chat_template")
        return None if template is None else str(template)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer that ``tokenizer.json`` describes.

        Raises ``UnsupportedGgufError`` for tokenizers that are neither byte-level BPE nor
        SentencePiece BPE that adds no space in front.
        """
        kind = self.value("tokenizer.ggml.model")
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        if kind == "gpt2":
            tokenizer = self._byte_level_tokenizer(tokens)
        elif kind == "llama" and not self.value("tokenizer.ggml.add_space_prefix", True):
            tokenizer = build_sentencepiece_bpe(
                tokens,
                self.value("tokenizer.ggml.scores"),
                self.value("tokenizer.ggml.token_type"),
                tokens[int(self.value("tokenizer.ggml.unknown_token_id"))],
            )
        else:
            raise UnsupportedGgufError(
                f"{self.path.name}: tokenizer of kind {kind!r} cannot be rebuilt; give a folder "
                "with a tokenizer.json as --tokenizer-path"
            )
        bos_id = self._special_ids().get("bos_token_id")
        if self._adds_bos() and bos_id is not None:
            bos = tokens[bos_id]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
            )
        return tokenizer

    def _byte_level_tokenizer(self, tokens: list[str]) -> Tokenizer:
        types: list[int] = self.value("tokenizer.ggml.token_type", [1] * len(tokens))
        merges = [tuple(merge.split(" ")) for merge in self.value("tokenizer.ggml.merges", [])]
        vocab = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        self._set_pre_tokenizer(tokenizer)
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind_of_token in zip(tokens, types):
            if kind_of_token == _CONTROL_TOKEN:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif kind_of_token == _USER_DEFINED_TOKEN:
                tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """Return the content of ``tokenizer_config.json``, chat template included."""
        tokens: list[str] = self.value("tokenizer.ggml.tokens")
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": int(self.arch_value("context_length")),
            "clean_up_tokenization_spaces": False,
        }
        for name, token_id in self._special_ids(unknown=True).items():
            config[name.removesuffix("_id")] = tokens[token_id]
        template = self.chat_template()
        if template is not None:
            config["chat_template"] = template
        return config

    def write_json_files(self, folder: Path) -> None:
        """Write the four JSON files of a model folder into ``folder``, which must exist."""
        self.tokenizer().save(str(folder / "tokenizer.json"))
        for name, content in (
            ("config.json", self.hf_config()),
            ("generation_config.json", self.generation_config()),
            ("tokenizer_config.json", self.tokenizer_config()),
        ):
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")

    def _vocab_size(self) -> int:
        tokens = self.value("tokenizer.ggml.tokens")
        return len(tokens) if tokens else int(self.arch_value("vocab_size"))

    def _special_ids(self, *, unknown: bool = False) -> dict[str, int]:
        keys = {"bos": "bos", "eos": "eos", "padding": "pad"}
        if unknown:
            keys["unknown"] = "unk"
        found = {hf: self.value(f"tokenizer.ggml.{ggml}_token_id") for ggml, hf in keys.items()}
        return {f"{hf}_token_id": int(value) for hf, value in found.items() if value is not None}

    def _adds_bos(self) -> bool:
        # Files of Llama 3 may leave the flag out and mean yes.
        default = self.value("tokenizer.ggml.pre") == "llama-bpe"
        return bool(self.value("tokenizer.ggml.add_bos_token", default))

    def _dtype(self) -> str:
        # Quantised weights are dequantised to float32, which holds their values exactly.
        kinds = Counter(t.type_id for t in self.reader.tensors if len(t.shape) > 1)
        most_common = TYPE_NAMES.get(kinds.most_common(1)[0][0] if kinds else 0, "")
        return {"F16": "float16", "BF16": "bfloat16"}.get(most_common, "float32")

    def _set_pre_tokenizer(self, tokenizer: Tokenizer) -> None:
        kind = self.value("tokenizer.ggml.pre", "default")
        if kind in ("default", "gpt-2"):
            tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=True)
            return
        if kind == "smollm":
            tokenizer.pre_tokenizer = pre.Sequence(
                [
                    pre.Digits(individual_digits=True),
                    pre.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
            return
        words = {"qwen2": _QWEN_WORDS, "llama-bpe": _LLAMA3_WORDS}.get(kind)
        if words is None:
            raise UnsupportedGgufError(
                f"{self.path.name}: pre-tokenizer {kind!r} is not known; give a folder with a "
                "tokenizer.json as --tokenizer-path"
            )
        if kind == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre.Sequence(
            [
                pre.Split(Regex(words), behavior="isolated"),
                pre.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def _rope_parameters(self) -> dict[str, Any]:
        theta = float(self.arch_value("rope.freq_base", 10000.0))
        kind = self.value(f"{self.architecture}.rope.scaling.type", "none")
        if kind == "linear":
            factor = float(self.arch_value("rope.scaling.factor"))
            return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
        if kind != "none":
            raise UnsupportedGgufError(f"{self.path.name}: rope scaling {kind!r} is not supported")
        for tensor in self.reader.tensors:
            if tensor.name == "rope_freqs.weight":
                return self._llama3_rope(theta, np.asarray(tensor.data, dtype=np.float64))
        return {"rope_type": "default", "rope_theta": theta}

    def _llama3_rope(self, theta: float, divisors: np.ndarray) -> dict[str, Any]:
        """Recover Llama 3 rope scaling from ``divisors``, float [head_dim / 2]."""
        factor = round(float(divisors.max()), 3)
        expected = _llama3_divisors(theta, self.head_dim, factor)
        if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
            raise UnsupportedGgufError(
                f"{self.path.name}: its table of rotary frequencies follows no known scaling"
            )
        return {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": _LLAMA3_LOW_FREQ,
            "high_freq_factor": _LLAMA3_HIGH_FREQ,
            "original_max_position_embeddings": _LLAMA3_CONTEXT,
        }


def _llama3_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """Return by how much Llama 3 divides each rotary frequency, float64 [head_dim / 2]."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    # 0 where a wave is too long for the original context, 1 where it is short, a ramp between.
    ramp = (_LLAMA3_CONTEXT / wavelength - _LLAMA3_LOW_FREQ) / (
        _LLAMA3_HIGH_FREQ - _LLAMA3_LOW_FREQ
    )
    ramp = np.clip(ramp, 0.0, 1.0)
    return 1.0 / ((1.0 - ramp) / factor + ramp)


def open_gguf(path: str | Path) -> GgufFile:
    """The file at `path`, parsed once a process as long as it does not change."""
    resolved = Path(path).expanduser().resolve()
    if not resolved.is_file():
        raise UnsupportedGgufError(f"{path} is not a file")
    state = resolved.stat()
    return _open_version(resolved, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _open_version(path: Path, mtime_ns: int, size: int) -> GgufFile:
    return GgufFile(path)


def _open_reader(path: Path) -> GgufReader:
    if not path.is_file():
        raise UnsupportedGgufError(f"{path} is not a file")
    try:
        return GgufReader(path)
    except ValueError as error:
        raise UnsupportedGgufError(f"{path.name} is no readable GGUF file: {error}") from error
