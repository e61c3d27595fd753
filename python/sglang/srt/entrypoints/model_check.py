"""What can be said about a model before any process is started: one sentence instead of seconds.

Reads names of files and the JSON of the config (or a GGUF header), never weights; imports neither
torch nor transformers. What only the tensors show (missing ones, shapes) is found by the scheduler
processes. Called by the launcher in the parent process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from sglang.srt.configs.draft_config import as_eagle_draft, check_own_draft, mtp_layer_configs
from sglang.srt.configs.model_config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    ModelConfigError,
)
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# (what a model may have, whether it does, settings about that)
_OF_SOME_MODELS: tuple[tuple[str, Callable[[ModelConfig], bool], tuple[str, ...]], ...] = (
    (
        "pool of its own for layers with a window",
        lambda config: config.mixed_window is not None,
        ("swa_full_tokens_ratio", "disable_hybrid_swa_memory"),
    ),
    (
        "layers with recurrent states",
        lambda config: config.linear_attention is not None,
        ("mamba_full_memory_ratio", "max_mamba_cache_size", "mamba_track_interval"),
    ),
)
_DEFAULTS = {spec.name: spec.default for spec in fields(ServerArgs)}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHT_PATTERNS = ("*.safetensors", "*.gguf", "pytorch_model*.bin", "model*.pt", "*.index.json")


def check_model(args: ServerArgs) -> None:
    """Raise ValueError, one sentence, where the model cannot be served with these settings."""
    root = Path(args.model_path).expanduser()
    if not root.exists():
        if _looks_like_path(args.model_path):
            raise ValueError(f"--model-path {args.model_path} does not exist.")
        raise ValueError(
            f"--model-path {args.model_path} is no folder here, and models are not downloaded: "
            "fetch it first and give its folder."
        )
    _check_config(args)
    _check_weights(args, root)
    _check_tokenizer(args)


def _looks_like_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text.count("/") != 1


def _check_config(args: ServerArgs) -> None:
    config = ModelConfig.from_path(args.model_path, **args.model_options())
    check_architecture(config.architectures)
    _warn_of_other_families(args, config)
    _check_own_draft(args, config)
    try:
        config.get_num_attention_heads(args.tp_size)
        config.get_num_kv_heads(args.tp_size)
    except ModelConfigError as error:
        raise ModelConfigError(f"--tp-size {args.tp_size} does not fit: {error}.") from error


def _warn_of_other_families(args: ServerArgs, config: ModelConfig) -> None:
    """Say which settings have no effect, because the model lacks what they are about."""
    for kind, has, names in _OF_SOME_MODELS:
        given = [name for name in names if getattr(args, name) != _DEFAULTS[name]]
        if given and not has(config):
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            logger.warning("%s: no effect, %s has no %s", flags, args.model_path, kind)


def _check_own_draft(args: ServerArgs, config: ModelConfig) -> None:
    """A draft in the model's own files must be there, with as many layers as are wanted."""
    is_own = args.speculative_draft_model_path == args.model_path
    if args.speculative_algorithm not in ("EAGLE", "NEXTN") or not is_own:
        return
    draft = as_eagle_draft(config)
    check_own_draft(draft)
    if args.enable_multi_layer_eagle:
        mtp_layer_configs(draft, args.speculative_num_steps or 1)


def check_architecture(architectures: Sequence[str]) -> None:
    """Raise ModelConfigError, which lists what is supported, where none of them is."""
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        asked = ", ".join(architectures) or "none (config.json has no 'architectures')"
        raise ModelConfigError(
            f"model architecture not supported: {asked}; "
            f"supported ones: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )


def _check_weights(args: ServerArgs, root: Path) -> None:
    if args.load_format == "dummy" or root.is_file():
        return
    if not any(any(root.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ValueError(f"{root} holds no weights (safetensors, GGUF or PyTorch files).")


def _check_tokenizer(args: ServerArgs) -> None:
    if args.skip_tokenizer_init:
        return
    path = args.tokenizer_path or args.model_path
    folder = Path(path).expanduser()
    if not folder.exists():
        if _looks_like_path(path):
            raise ValueError(f"--tokenizer-path {path} does not exist.")
        return  # a hub name: the library that fetches it says what is wrong
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ValueError(
            f"{folder} holds no tokenizer.json: name one with --tokenizer-path, or "
            "serve token ids only with --skip-tokenizer-init."
        )
