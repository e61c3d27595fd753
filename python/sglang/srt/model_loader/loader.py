"""Build a model and fill it with weights, or replace the weights of a running one.

Owns the order: create the module on its device, compare the checkpoint's names and shapes with the
model's table, then copy. A checkpoint that does not fit is refused before anything is written, in
one message that names every tensor. Called by `model_executor.model_runner` at start-up and by
`model_executor.weight_updater`, on the scheduler thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.weight_utils import Checkpoint, open_checkpoint
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.registry import resolve_model_class

logger = logging.getLogger(__name__)

# Spread of dummy matrices: small enough that activations neither die nor explode over depth.
_DUMMY_STD = 0.02


def load_model(
    model_config: ModelConfig,
    load_format: str = "auto",
    device: str | torch.device = "cpu",
    show_progress: bool = True,
) -> LanguageModel:
    """Create this rank's part of the model with its weights, in evaluation mode.

    The tensor-parallel group must exist already (`distributed.parallel_state`). Formats: auto,
    safetensors, pt, gguf, dummy (random but the same for every run and number of ranks).
    Raises ValueError for an unsupported architecture, CheckpointError for unreadable files,
    WeightLoadError where the tensors do not fit the model.
    """
    start = time.perf_counter()
    model_class = resolve_model_class(model_config.architectures)
    dtype: torch.dtype = getattr(torch, model_config.dtype)
    with _defaults(dtype, torch.device(device)):
        model = model_class(model_config).eval()
    if load_format == "dummy":
        fill_with_dummy_weights(model)
    else:
        load_weights_into(model, model_config.model_path, load_format, show_progress)
    logger.info(
        "loaded %s (%s, %s) in %.2f s",
        model_class.__name__,
        load_format,
        model_config.dtype,
        time.perf_counter() - start,
    )
    return model


def load_weights_into(
    model: LanguageModel, path: str, load_format: str = "auto", show_progress: bool = False
) -> set[str]:
    """Replace all weights of `model` from a checkpoint, in place; returns the names loaded.

    Names and shapes are checked first: on CheckpointError or WeightLoadError from that check
    nothing has been written. A file that turns out corrupt half-way leaves the weights mixed.
    """
    checkpoint = open_checkpoint(path, load_format)
    _check(model, checkpoint)
    show = show_progress and get_tp_group().rank == 0
    return model.load_weights(
        checkpoint.tensors_with_progress(show, lambda name: not model.is_foreign_weight(name))
    )


def fill_with_dummy_weights(model: LanguageModel, seed: int = 0) -> None:
    """Random weights that depend on `seed` and each tensor's name only.

    Every rank draws the full tensor and keeps its shard, so that any number of ranks runs the
    same model.
    """
    for name, slot in model.weight_table().items():
        slot.write(_dummy_tensor(name, slot, seed))


def _dummy_tensor(name: str, slot: WeightSlot, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=slot.target.device)
    generator.manual_seed(int.from_bytes(digest[:7], "little"))
    values = torch.empty(slot.full_shape, dtype=torch.float32, device=slot.target.device)
    values.normal_(0.0, _DUMMY_STD, generator=generator)
    # Norm weights scatter around one, everything else (biases, too) around zero.
    is_norm = len(slot.full_shape) == 1 and name.endswith("norm.weight")
    return values + 1.0 if is_norm else values


def _check(model: LanguageModel, checkpoint: Checkpoint) -> None:
    problems = model.check_weights(checkpoint.tensor_infos(), complete=True)
    problems.raise_if_any(f"the checkpoint {checkpoint.path}")


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Create tensors with this dtype on this device inside the block."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
