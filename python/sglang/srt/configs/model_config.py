"""Turn a checkpoint's `config.json` into one frozen `ModelConfig`.

Owns the reading of `config.json` and `generation_config.json` and every rule derived from them
(head size, context length, stop ids, working dtype). Reads plain JSON: neither torch nor
transformers is imported, so front processes may use it. Called once at start-up by every process;
the result is immutable and safe to share between threads.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError
from sglang.srt.configs.experts_config import ExpertsConfig, read_experts
from sglang.srt.configs.family_defaults import complete_config
from sglang.srt.configs.gemma3_config import normalize_gemma3, normalize_gemma3_with_vision
from sglang.srt.configs.layer_kinds import check_layer_types, read_sliding_windows
from sglang.srt.configs.linear_attention_config import (
    LinearAttentionConfig,
    read_linear_attention,
)
from sglang.srt.configs.routing_config import RoutingRule, read_routing_rule
from sglang.srt.environ import envs
from sglang.srt.utils.gguf_file import open_gguf

logger = logging.getLogger(__name__)


# Accepted spellings of a dtype -> torch attribute name.
_DTYPE_NAMES = {
    "float32": "float32",
    "float": "float32",
    "fp32": "float32",
    "float16": "float16",
    "half": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}

# Rope types whose `factor` does not lengthen the context beyond `max_position_embeddings`:
# the published llama3 configurations already state the extended length there.
_ROPE_TYPES_WITHOUT_STRETCH = ("default", "llama3", "longrope", "su", "proportional")


# What `models.registry` has classes for. Listed here, because importing those takes torch.
SUPPORTED_ARCHITECTURES = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "LlamaForCausalLM",
    "MiMoForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
)


# Families whose files say things their own way: `model_type` -> the same in the common keys.
_NORMALIZERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "gemma3": normalize_gemma3_with_vision,
    "gemma3_text": normalize_gemma3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding parameters.

    `params` holds the remaining keys of `rope_scaling` / `rope_parameters` (factor, betas, ...),
    as (name, value) pairs so that the whole object can be hashed and used as a cache key.
    """

    theta: float
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    params: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a scaling parameter, or `default` where the config is silent (or null)."""
        value = dict(self.params).get(name)
        return default if value is None else value

    def require(self, name: str) -> Any:
        """Value of a scaling parameter; raises ModelConfigError where it is absent."""
        value = self.get(name)
        if value is None:
            raise ModelConfigError(f"rope type {self.rope_type!r} needs the parameter {name!r}")
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    What is cached of a token is one row for all heads: a compressed vector of `kv_lora_rank`,
    from which each head's key and value are made, and a rotated key of `qk_rope_head_dim`.
    """

    kv_lora_rank: int
    q_lora_rank: int | None  # None: queries are not compressed
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def latent_dim(self) -> int:
        """Width of a token's row in the KV pool."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the server needs to know about a model before its weights are loaded.

    Counts are of the whole model; per-rank numbers come from the `get_*` methods. `hf_config` is
    the raw JSON object (after overrides) for families that need a key not listed here.
    """

    model_path: str
    architectures: tuple[str, ...]
    model_type: str
    dtype: str  # torch attribute name: "float32", "float16", "bfloat16"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    max_position_embeddings: int  # as stated by the checkpoint
    model_context_len: int  # what the weights support, rope scaling included
    context_len: int  # what the server will use
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    hf_eos_token_id: frozenset[int]
    bos_token_id: int | None
    pad_token_id: int | None
    # One entry a layer: tokens a query may look back on (itself included), None = all of them.
    sliding_windows: tuple[int | None, ...]
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    # Choice of experts where it is more than the best of a softmax.
    routing: RoutingRule | None = None
    # Rotation in layers with a window, where it is another than in the others.
    local_rope: RopeConfig | None = None
    # Attention scores are divided by its root; None: by that of the head size.
    query_pre_attn_scalar: float | None = None
    # Latent attention; `head_dim` is the rotated part of a head then.
    mla: MLAConfig | None = None
    # Layers with a recurrent state instead of KV.
    linear_attention: LinearAttentionConfig | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_path(
        cls,
        model_path: str,
        dtype: str = "auto",
        context_length: int | None = None,
        override_args: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        device: str = "cpu",
    ) -> ModelConfig:
        """Read `<model_path>/config.json`, or the header of a GGUF file.

        `model_path` is a folder, a `config.json`, or a `.gguf` file; a folder without config.json
        may hold one GGUF file instead.
        `override_args` is a JSON object (text or mapping) laid over the file, key by key.
        `trust_remote_code` changes nothing for configurations that JSON describes; a config whose
        sizes are missing is refused, because its code is never run here.
        Raises ModelConfigError with the reason.
        """
        root = Path(model_path).expanduser()
        hf_config, generation_config = _read_checkpoint_config(root)
        try:
            return cls.from_dict(
                hf_config,
                model_path=model_path,
                dtype=dtype,
                context_length=context_length,
                override_args=override_args,
                generation_config=generation_config,
                device=device,
            )
        except ModelConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelConfigError(
                f"the config of {root} has a malformed value: {error}"
            ) from error

    @classmethod
    def from_dict(
        cls,
        hf_config: Mapping[str, Any],
        *,
        model_path: str = "",
        dtype: str = "auto",
        context_length: int | None = None,
        override_args: str | Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> ModelConfig:
        """Build from an already parsed Hugging Face config (a GGUF header gives one, too).

        Raises ModelConfigError for missing keys, bad values or a context that is too long.
        """
        raw = _in_common_keys({**hf_config, **_parse_overrides(override_args)})
        experts = read_experts(raw)
        num_layers = _need_int(raw, "num_hidden_layers")
        num_heads = _need_int(raw, "num_attention_heads")
        check_layer_types(raw, num_layers)
        max_position = _need_int(raw, "max_position_embeddings")
        rope = read_rope_config(raw)
        model_context_len = derive_context_len(max_position, rope)
        mla = read_mla_config(raw)
        return cls(
            model_path=model_path,
            architectures=tuple(raw.get("architectures") or ()),
            model_type=str(raw.get("model_type", "")),
            dtype=resolve_dtype(dtype, raw, device),
            vocab_size=_need_int(raw, "vocab_size"),
            hidden_size=_need_int(raw, "hidden_size"),
            intermediate_size=_need_int(raw, "intermediate_size"),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=mla.qk_rope_head_dim if mla is not None else _head_dim(raw),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            hidden_act=str(raw.get("hidden_act", "silu")),
            rope=rope,
            max_position_embeddings=max_position,
            model_context_len=model_context_len,
            context_len=_choose_context_len(context_length, model_context_len),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            hf_eos_token_id=_stop_ids(raw) | _stop_ids(generation_config or {}),
            bos_token_id=_first_id(raw.get("bos_token_id")),
            pad_token_id=_first_id(raw.get("pad_token_id")),
            sliding_windows=read_sliding_windows(raw, num_layers),
            experts=experts,
            routing=read_routing_rule(raw),
            local_rope=_local_rope(raw),
            query_pre_attn_scalar=_optional_float(raw.get("query_pre_attn_scalar")),
            mla=mla,
            linear_attention=read_linear_attention(raw, num_layers),
            hf_config=raw,
        )

    @property
    def mixed_window(self) -> int | None:
        """Window of those layers that have one, where there are others that see everything.

        None where all layers are alike, windows differ, or are of a single token.
        """
        windows = {self.sliding_windows[layer_id] for layer_id in self.kv_layer_ids}
        if self.mla is not None or len(windows) != 2 or None not in windows:
            return None
        return next((window for window in windows if window is not None and window > 1), None)

    @property
    def attention_scaling(self) -> float:
        """Factor on the products of queries and keys."""
        return float(self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def get_num_attention_heads(self, tp_size: int) -> int:
        """Query heads of one rank. Raises ModelConfigError where they do not divide."""
        if self.num_attention_heads % tp_size:
            raise ModelConfigError(
                f"{self.num_attention_heads} attention heads cannot be split over {tp_size} ranks"
            )
        return self.num_attention_heads // tp_size

    def get_num_kv_heads(self, tp_size: int) -> int:
        """KV heads of one rank; with more ranks than heads each rank holds one (replicated).

        With latent attention it is one, the same on every rank. Raises ModelConfigError where
        neither number divides the other.
        """
        if self.mla is not None:
            return 1
        total = self.num_key_value_heads
        if max(total, tp_size) % min(total, tp_size):
            raise ModelConfigError(f"{total} KV heads cannot be spread over {tp_size} ranks")
        return max(1, total // tp_size)

    @property
    def kv_layer_ids(self) -> tuple[int, ...]:
        """Layers that keep KV of tokens: all but those with a recurrent state."""
        linear = self.linear_attention.layer_ids if self.linear_attention is not None else ()
        return tuple(i for i in range(self.num_hidden_layers) if i not in linear)

    @property
    def kv_key_dim(self) -> int:
        """Width of a KV head's key in the pool."""
        return self.mla.latent_dim if self.mla is not None else self.head_dim

    @property
    def kv_value_dim(self) -> int:
        """Width of a KV head's value in the pool; with latent attention a part of the key."""
        return self.mla.kv_lora_rank if self.mla is not None else self.head_dim

    def is_moe_layer(self, layer_id: int) -> bool:
        """Whether layer `layer_id` has experts instead of one dense MLP."""
        return self.experts.are_in_layer(layer_id)


def resolve_dtype(dtype: str, hf_config: Mapping[str, Any], device: str = "cpu") -> str:
    """Torch attribute name of the working dtype.

    "auto" is float32 on CPU, where half types are emulated and many times slower; elsewhere the
    checkpoint's own dtype, float32 checkpoints being run in float16. Raises ModelConfigError for
    an unknown name.
    """
    if dtype == "auto":
        if device.split(":")[0] == "cpu":
            return "float32"
        own = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
        name = _DTYPE_NAMES.get(own.removeprefix("torch."), "bfloat16")
        return "float16" if name == "float32" else name
    name = _DTYPE_NAMES.get(dtype.removeprefix("torch."), "")
    if not name:
        raise ModelConfigError(
            f"unknown dtype {dtype!r}; choose auto or one of {sorted(_DTYPE_NAMES)}"
        )
    return name


def read_rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Rope parameters from either layout.

    Older files have `rope_theta` at top level and an optional `rope_scaling` object (its kind
    under `rope_type` or `type`); newer ones put everything in `rope_parameters`. Where both
    exist the explicit `rope_scaling` wins (it is what override arguments set).
    """
    merged: dict[str, Any] = {}
    for section in ("rope_parameters", "rope_scaling"):
        values = dict(raw.get(section) or {})
        kind = values.pop("type", None)
        if kind is not None:
            values.setdefault("rope_type", kind)
        merged.update(values)
    rope_type = str(merged.pop("rope_type", None) or "default")
    theta = merged.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    partial = merged.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    params = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in merged.items()
        if not isinstance(value, Mapping)
    }
    return RopeConfig(
        theta=float(theta),
        rope_type=rope_type,
        partial_rotary_factor=float(partial),
        params=tuple(sorted(params.items())),
    )


def _local_rope(raw: Mapping[str, Any]) -> RopeConfig | None:
    stated = raw.get("local_rope_parameters")
    return None if stated is None else read_rope_config({"rope_parameters": stated})


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def read_mla_config(raw: Mapping[str, Any]) -> MLAConfig | None:
    """Sizes of latent attention; None for a model without. ModelConfigError for bad sizes."""
    if raw.get("kv_lora_rank") is None:
        return None
    q_lora_rank = raw.get("q_lora_rank")
    mla = MLAConfig(
        kv_lora_rank=_need_int(raw, "kv_lora_rank"),
        q_lora_rank=None if q_lora_rank is None else _need_int(raw, "q_lora_rank"),
        qk_nope_head_dim=_need_int(raw, "qk_nope_head_dim"),
        qk_rope_head_dim=_need_int(raw, "qk_rope_head_dim"),
        v_head_dim=_need_int(raw, "v_head_dim"),
    )
    if mla.qk_rope_head_dim % 2:
        raise ModelConfigError(f"qk_rope_head_dim must be even, got {mla.qk_rope_head_dim}")
    return mla


def derive_context_len(max_position_embeddings: int, rope: RopeConfig) -> int:
    """Number of positions that the weights support once rope scaling is counted.

    linear and dynamic scaling multiply the stated length by `factor`. yarn multiplies the
    *original* length, and a file that already states the extended length keeps it. llama3 (and
    no scaling at all) leaves the stated length.
    """
    factor = float(rope.get("factor", 1.0))
    if rope.rope_type in _ROPE_TYPES_WITHOUT_STRETCH or factor <= 1.0:
        return max_position_embeddings
    original = rope.get("original_max_position_embeddings")
    if original is not None:
        return max(max_position_embeddings, int(original * factor))
    return int(max_position_embeddings * factor)


def _choose_context_len(requested: int | None, supported: int) -> int:
    if requested is None:
        return supported
    if requested <= 0:
        raise ModelConfigError(f"context length must be positive, got {requested}")
    if requested <= supported:
        return requested
    message = (
        f"context length {requested} is greater than the {supported} that the model's "
        "configuration supports"
    )
    switch = envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN
    if not switch.get():
        raise ModelConfigError(f"{message}; set {switch.name}=1 to use it anyway")
    logger.warning("%s; used because %s is set", message, switch.name)
    return requested


def find_gguf_file(root: Path) -> Path | None:
    """The GGUF file that `root` is or holds; None where there is none.

    Raises ModelConfigError for a folder with several of them.
    """
    if root.is_file():
        return root if root.suffix == ".gguf" else None
    found = sorted(root.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ModelConfigError(f"{root} holds several GGUF files, name one of them: {names}")
    return found[0] if found else None


def _read_checkpoint_config(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, generation_config.json) of a checkpoint; the second may be empty."""
    config_file = root if root.suffix == ".json" else root / "config.json"
    if not config_file.is_file():
        gguf_file = find_gguf_file(root) if root.exists() else None
        if gguf_file is not None:
            header = open_gguf(gguf_file)
            return header.hf_config(), header.generation_config()
    config = _read_json(config_file)
    generation_file = config_file.parent / "generation_config.json"
    return config, _read_json(generation_file) if generation_file.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path} must hold a JSON object")
    return data


def _parse_overrides(override_args: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if not override_args:
        return {}
    if isinstance(override_args, str):
        try:
            parsed = json.loads(override_args)
        except ValueError as error:
            raise ModelConfigError(f"model override arguments are not JSON: {error}") from error
    else:
        parsed = dict(override_args)
    if not isinstance(parsed, dict):
        raise ModelConfigError("model override arguments must be a JSON object")
    return parsed


def _need_int(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelConfigError(f"config.json: {key!r} must be a positive integer, got {value!r}")
    return value


def _in_common_keys(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` as the other families say it. Raises ModelConfigError for models not served here."""
    normalize = _NORMALIZERS.get(str(raw.get("model_type", "")))
    raw = complete_config(raw) if normalize is None else normalize(raw)
    _check_is_one_model(raw)
    _check_is_unquantized(raw)
    return raw


def _head_dim(raw: Mapping[str, Any]) -> int:
    """Width of a head; by custom the hidden size is shared out among the heads."""
    shared = _need_int(raw, "hidden_size") // _need_int(raw, "num_attention_heads")
    return int(raw.get("head_dim") or shared)


def _check_is_one_model(raw: Mapping[str, Any]) -> None:
    """Models of text and more keep their sizes in sections; of most, none is read here."""
    if raw.get("num_hidden_layers") is None and isinstance(raw.get("text_config"), Mapping):
        asked = ", ".join(raw.get("architectures") or ()) or str(raw.get("model_type"))
        raise ModelConfigError(
            f"model architecture not supported: {asked} (text and more in one); "
            f"supported ones: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )


def _check_is_unquantized(raw: Mapping[str, Any]) -> None:
    stated = raw.get("quantization_config") or raw.get("compression_config")
    if not stated:
        return
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    raise ModelConfigError(
        f"config.json: {str(method or 'quantized').upper()} weights (quantization_config) are not "
        "supported; where the files hold plain ones, remove that key"
    )


def _stop_ids(raw: Mapping[str, Any]) -> frozenset[int]:
    """The `eos_token_id` of a file, which may be one, several or none."""
    value = raw.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({int(value)})


def _first_id(value: Any) -> int | None:
    if isinstance(value, list):
        return value[0] if value else None
    return value
