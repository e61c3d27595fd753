"""What a draft model's configuration says beyond an ordinary one, and whether it fits a target.

Owns the keys that only EAGLE drafts have (draft vocabulary, captured target layers, optional
norms) and the rules between a draft and its target. Pure functions of two configurations: no torch,
no weights. Called at start-up by the launcher, the draft model classes and the speculative workers.

Sources: EAGLE (arXiv 2401.15077), EAGLE-3 (arXiv 2503.01840), EAGLE-3.1 (arXiv 2605.09992), and the
configurations of published drafts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError

EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
# Layers beside a model's own, in the same files, each of which predicts one token further.
NEXTN_ARCHITECTURE = "DeepseekV3ForCausalLMNextN"
MIMO_MTP_ARCHITECTURE = "MiMoMTP"
# Models whose files may hold such layers -> the draft that one of them is.
_MTP_ARCHITECTURES = {
    "DeepseekV3ForCausalLM": NEXTN_ARCHITECTURE,
    "MiMoForCausalLM": MIMO_MTP_ARCHITECTURE,
}
# Key of this program in a draft's `hf_config`: which of those layers it is.
_MTP_LAYER = "mtp_layer_of_draft"

# What `models.registry` has draft classes for. Listed here, because importing those takes torch.
DRAFT_ARCHITECTURES = (
    EAGLE_ARCHITECTURE,
    EAGLE3_ARCHITECTURE,
    NEXTN_ARCHITECTURE,
    MIMO_MTP_ARCHITECTURE,
)

_DEFAULT_NUM_FEATURES = 3


class HeadSource(Enum):
    """Where the matrix comes from that turns a draft's hidden states into logits."""

    OWN = "own"  # stored with the draft, over the draft vocabulary
    TARGET = "target"  # the target's, over the whole vocabulary
    EMBEDDING = "embedding"  # the draft's embedding (which may be the target's)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleDraftConfig:
    """The draft-only part of a configuration, checked."""

    is_eagle3: bool
    hidden_size: int  # the draft's
    target_hidden_size: int
    vocab_size: int  # the target's: the draft reads tokens of the whole vocabulary
    draft_vocab_size: int  # tokens that the draft can propose
    head: HeadSource
    # Target features a token: captured layers, or 1 for the final normed hidden state.
    num_features: int
    captures_layers: bool
    # Layers at whose entry the target's stream is taken, in the target's numbering; None: the
    # usual three.
    capture_layer_ids: tuple[int, ...] | None
    # None where the config is silent: then the checkpoint decides.
    fc_bias: bool | None
    norm_before_fc: bool  # one norm over all features side by side
    fc_norm: bool  # one norm a feature
    norm_output: bool  # the hidden state that the next step reads is normed

    @property
    def has_own_embedding(self) -> bool:
        """Whether the embedding is stored with the draft; the target's could not be added."""
        return self.target_hidden_size != self.hidden_size

    @property
    def input_width(self) -> int:
        """Width of the target features of one token."""
        return self.num_features * self.target_hidden_size

    def layers_to_capture(self, num_target_layers: int) -> list[int] | None:
        """Argument for the target's `set_eagle3_layers_to_capture`.

        None where the draft reads the final hidden states, so that nothing is to be captured.
        """
        if not self.captures_layers:
            return None
        if self.capture_layer_ids is not None:
            return list(self.capture_layer_ids)
        return default_layers_to_capture(num_target_layers)


def default_layers_to_capture(num_layers: int) -> list[int]:
    """The early, middle and late layer at whose entry EAGLE-3 takes the target's stream.

    May name a layer twice, or one that does not exist, where the target has few layers.
    """
    return [2, num_layers // 2, num_layers - 3]


def read_eagle_config(config: ModelConfig) -> EagleDraftConfig:
    """The draft-only keys of a draft's config.json.

    Raises ModelConfigError where the architecture is no EAGLE draft or keys contradict each other.
    """
    architecture = next((a for a in config.architectures if a in DRAFT_ARCHITECTURES), None)
    if architecture is None:
        raise ModelConfigError(
            f"{', '.join(config.architectures) or 'no architecture'} is not a draft architecture; "
            f"supported ones: {', '.join(DRAFT_ARCHITECTURES)}"
        )
    raw = config.hf_config
    if architecture == EAGLE3_ARCHITECTURE:
        return _read_eagle3(config, raw)
    return _read_eagle1(config, raw)


def _read_eagle1(config: ModelConfig, raw: Mapping[str, Any]) -> EagleDraftConfig:
    return EagleDraftConfig(
        is_eagle3=False,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        head=HeadSource.TARGET,
        num_features=1,
        captures_layers=False,
        capture_layer_ids=None,
        fc_bias=_optional_bool(raw.get("bias")),
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )


def _read_eagle3(config: ModelConfig, raw: Mapping[str, Any]) -> EagleDraftConfig:
    # Trainers write their keys at top level or in a section of their own.
    keys = {**raw, **(raw.get("eagle_config") or {})}
    captures = keys.get("use_aux_hidden_state") is not False
    layer_ids = _capture_layer_ids(keys) if captures else None
    stated = keys.get("num_aux_hidden_states")
    num_features = len(layer_ids) if layer_ids else int(stated or _DEFAULT_NUM_FEATURES)
    if layer_ids is None and captures and num_features != _DEFAULT_NUM_FEATURES:
        raise ModelConfigError(
            f"the draft wants {num_features} target layers, but does not say which: "
            "eagle_aux_hidden_state_layer_ids is missing"
        )
    if layer_ids is not None and stated is not None and int(stated) != len(layer_ids):
        raise ModelConfigError(
            f"num_aux_hidden_states is {stated}, but {len(layer_ids)} layers are named"
        )
    norm_before_fc = bool(keys.get("norm_before_fc"))
    fc_norm = bool(keys.get("fc_norm") or keys.get("use_aux_norm"))
    if norm_before_fc and fc_norm:
        raise ModelConfigError("norm_before_fc and fc_norm exclude each other; both are set")
    draft_vocab_size = raw.get("draft_vocab_size")
    return EagleDraftConfig(
        is_eagle3=True,
        hidden_size=config.hidden_size,
        target_hidden_size=int(raw.get("target_hidden_size") or config.hidden_size),
        vocab_size=config.vocab_size,
        draft_vocab_size=_draft_vocab_size(config, draft_vocab_size),
        head=_head_source(config, draft_vocab_size),
        num_features=num_features if captures else 1,
        captures_layers=captures,
        capture_layer_ids=layer_ids,
        fc_bias=bool(raw.get("bias")),
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=bool(keys.get("norm_output")),
    )


def _capture_layer_ids(keys: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The file names layers whose *output* is wanted: what enters the layer after each."""
    layer_ids = keys.get("eagle_aux_hidden_state_layer_ids")
    if not layer_ids:
        return None
    if not all(isinstance(layer_id, int) for layer_id in layer_ids):
        raise ModelConfigError(f"eagle_aux_hidden_state_layer_ids holds no layers: {layer_ids}")
    return tuple(layer_id + 1 for layer_id in layer_ids)


def _draft_vocab_size(config: ModelConfig, stated: int | None) -> int:
    if stated is None:
        return config.vocab_size
    if not 0 < stated <= config.vocab_size:
        raise ModelConfigError(
            f"draft_vocab_size must be within 1..{config.vocab_size} (vocab_size), got {stated}"
        )
    if config.tie_word_embeddings and stated != config.vocab_size:
        raise ModelConfigError(
            f"tie_word_embeddings gives logits over {config.vocab_size} tokens, "
            f"but draft_vocab_size is {stated}"
        )
    return stated


def _head_source(config: ModelConfig, draft_vocab_size: int | None) -> HeadSource:
    if config.tie_word_embeddings:
        return HeadSource.EMBEDDING
    return HeadSource.TARGET if draft_vocab_size is None else HeadSource.OWN


def _optional_bool(value: Any) -> bool | None:
    return None if value is None else bool(value)


def has_nextn_layers(config: ModelConfig) -> bool:
    """Whether a model's files hold layers that predict further tokens."""
    return bool(config.hf_config.get("num_nextn_predict_layers"))


def is_mtp_draft(config: ModelConfig) -> bool:
    """Whether a draft is a layer that predicts one token further."""
    return any(name in _MTP_ARCHITECTURES.values() for name in config.architectures)


def num_mtp_layers(config: ModelConfig) -> int:
    """How many such layers a draft's files hold; 1 for drafts of other kinds.

    A folder of their own may count them as its layers.
    """
    if not is_mtp_draft(config):
        return 1
    raw = config.hf_config
    return int(raw.get("num_nextn_predict_layers") or raw["num_hidden_layers"])


def mtp_layer(config: ModelConfig) -> int:
    """Which of those layers a draft is, from 0."""
    return int(config.hf_config.get(_MTP_LAYER, 0))


def published_mtp_layer(config: ModelConfig) -> int:
    """The same where the files count on behind the target's last layer.

    In a folder of their own they may begin at 0.
    """
    raw = config.hf_config
    num_layers, layer = int(raw["num_hidden_layers"]), mtp_layer(config)
    stated = raw.get("architectures") or ()
    is_own_folder = any(name in _MTP_ARCHITECTURES.values() for name in stated)
    if is_own_folder and num_layers <= num_mtp_layers(config):
        return layer
    return num_layers + layer


def mtp_layer_config(config: ModelConfig, layer: int) -> ModelConfig:
    """The draft that layer number `layer` of those that predict further tokens is.

    Raises ModelConfigError where the files have fewer.
    """
    count = num_mtp_layers(config)
    if not 0 <= layer < count:
        raise ModelConfigError(f"{config.model_path} has {_mtp_layers(count)}, not {layer + 1}")
    return replace(
        config,
        num_hidden_layers=1,
        sliding_windows=(None,),
        hf_config={**config.hf_config, _MTP_LAYER: layer},
    )


def mtp_layer_configs(config: ModelConfig, num_steps: int) -> tuple[ModelConfig, ...]:
    """A draft for each step of a chain, of the folder that `config` is the first draft of.

    Raises ModelConfigError where there are too few, or the draft is of another kind.
    """
    if not is_mtp_draft(config):
        raise ModelConfigError(
            f"--enable-multi-layer-eagle: {', '.join(config.architectures)} is one draft, not "
            "layers each of which predicts one token further"
        )
    count = num_mtp_layers(config)
    if num_steps > count:
        raise ModelConfigError(
            f"--enable-multi-layer-eagle: {config.model_path} has {_mtp_layers(count)}, "
            f"--speculative-num-steps can be at most {count}, not {num_steps}"
        )
    return tuple(mtp_layer_config(config, layer) for layer in range(num_steps))


def _mtp_layers(count: int) -> str:
    layers = "layer that predicts" if count == 1 else "layers that predict"
    return f"{count} {layers} further tokens"


def default_mtp_steps(model_path: str, most: int) -> int:
    """Steps of a chain with a layer each, where nobody says how many: `most` at most.

    A folder that cannot be a draft gives `most`: whoever opens it for good says why.
    """
    try:
        config = as_eagle_draft(ModelConfig.from_path(model_path))
    except ModelConfigError:
        return most
    return min(most, num_mtp_layers(config)) if is_mtp_draft(config) else most


def check_draft_kind(config: ModelConfig, algorithm: str) -> None:
    """Raise ModelConfigError where a draft is of another kind than the algorithm has.

    EAGLE-3 reads inner layers of its target and has a vocabulary of its own; the others do not.
    """
    is_eagle3 = read_eagle_config(config).is_eagle3
    if is_eagle3 != (algorithm == "EAGLE3"):
        raise ModelConfigError(
            f"--speculative-algorithm {algorithm}: {config.model_path} is a draft for "
            f"{'EAGLE3' if is_eagle3 else 'EAGLE'} ({', '.join(config.architectures)})"
        )


def check_own_draft(config: ModelConfig) -> None:
    """Raise ModelConfigError where a draft that is read from its target's folder is not there."""
    if not is_mtp_draft(config):
        raise ModelConfigError(
            f"{config.model_path} has no layers that predict further tokens: "
            "--speculative-draft-model-path must name a draft"
        )


def stacked_mtp_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """That of `num_layers` such layers together, of which `config` is the first."""
    windows = config.sliding_windows * num_layers
    return replace(config, num_hidden_layers=num_layers, sliding_windows=windows)


def as_eagle_draft(config: ModelConfig) -> ModelConfig:
    """`config` with a draft architecture.

    Some published drafts call themselves an ordinary Llama; a DeepSeek-V3 has its drafts beside its
    own layers, of which this is the first. To be asked only where the algorithm is an EAGLE one:
    the same folder as a STANDALONE draft would be what it says.
    """
    if is_mtp_draft(config):
        return mtp_layer_config(config, 0)
    if any(name in DRAFT_ARCHITECTURES for name in config.architectures):
        return config
    mtp = next((m for a, m in _MTP_ARCHITECTURES.items() if a in config.architectures), None)
    if mtp is not None and has_nextn_layers(config):
        return mtp_layer_config(replace(config, architectures=(mtp,)), 0)
    if "LlamaForCausalLM" not in config.architectures:
        return config
    is_eagle3 = "draft_vocab_size" in config.hf_config
    name = EAGLE3_ARCHITECTURE if is_eagle3 else EAGLE_ARCHITECTURE
    return replace(config, architectures=(name,))


def read_draft_config(model_path: str, target: ModelConfig, *, tp_size: int = 1) -> ModelConfig:
    """Configuration of an EAGLE draft for `target`: the target's dtype and context length.

    Drafts state the length that they were trained on, often 2,048; they run at every position
    that the target does. Raises ModelConfigError with the reason where the two do not fit.
    """
    config = as_eagle_draft(ModelConfig.from_path(model_path, dtype=target.dtype))
    config = replace(config, context_len=target.context_len)
    reason = why_draft_does_not_fit(config, target, tp_size)
    if reason is not None:
        raise ModelConfigError(f"the draft {model_path} cannot be used: {reason}")
    return config


def why_draft_does_not_fit(draft: ModelConfig, target: ModelConfig, tp_size: int = 1) -> str | None:
    """The reason why `draft` cannot propose tokens for `target`; None where it can."""
    try:
        eagle = read_eagle_config(draft)
        draft.get_num_attention_heads(tp_size)
        draft.get_num_kv_heads(tp_size)
    except ModelConfigError as error:
        return str(error)
    return (
        _family_mismatch(draft, target)
        or _shape_mismatch(draft, eagle, target)
        or _attention_problem(draft, target)
    )


def _family_mismatch(draft: ModelConfig, target: ModelConfig) -> str | None:
    """Layers that predict further tokens were trained with one model, and go with its family."""
    fitting = [a for a, mtp in _MTP_ARCHITECTURES.items() if mtp in draft.architectures]
    if not fitting or any(name in fitting for name in target.architectures):
        return None
    return (
        f"it is a layer of {' or '.join(fitting)}, "
        f"the target is {', '.join(target.architectures) or 'of no known architecture'}"
    )


def _shape_mismatch(draft: ModelConfig, eagle: EagleDraftConfig, target: ModelConfig) -> str | None:
    if eagle.target_hidden_size != target.hidden_size:
        return (
            f"it was made for hidden states of width {eagle.target_hidden_size}, "
            f"the target's have {target.hidden_size}"
        )
    if draft.vocab_size != target.vocab_size:
        return f"its vocabulary has {draft.vocab_size} tokens, the target's has {target.vocab_size}"
    if eagle.head is HeadSource.TARGET and eagle.has_own_embedding:
        return (
            f"it wants the target's head, which takes width {target.hidden_size}, "
            f"but its own hidden states have {draft.hidden_size}"
        )
    if draft.dtype != target.dtype:
        return f"it would run in {draft.dtype}, the target in {target.dtype}"
    num_layers = target.num_hidden_layers
    layers = eagle.layers_to_capture(num_layers) or []
    if any(not 0 <= layer_id <= num_layers for layer_id in layers):
        return f"it reads layers {layers}, the target has layers 0..{num_layers}"
    return None


def _attention_problem(draft: ModelConfig, target: ModelConfig) -> str | None:
    heads, kv_heads = draft.num_attention_heads, draft.num_key_value_heads
    if heads % kv_heads:
        return f"its {heads} attention heads cannot share {kv_heads} KV heads evenly"
    if int(draft.head_dim * draft.rope.partial_rotary_factor) % 2:
        return f"its head size {draft.head_dim} cannot be rotated in pairs"
    if draft.context_len < target.context_len:
        return (
            f"it has positions for {draft.context_len} tokens, "
            f"the target's context is {target.context_len}"
        )
    return None
