"""Read checkpoint tensors from files: safetensors, PyTorch `.bin`, GGUF.

A `Checkpoint` lists names and shapes cheaply and yields the tensors, memory-mapped where the
format allows. It knows nothing about models. Only reads; one thread at a time per object.
"""

from __future__ import annotations

import json
import logging
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from sglang.srt.configs.model_config import find_gguf_file
from sglang.srt.model_loader.gguf import gguf_tensor_shapes, iterate_gguf_weights

logger = logging.getLogger(__name__)

# A lock of this process: tqdm's own is a named semaphore, which a process that ends early leaks.
tqdm.set_lock(threading.RLock())

# Smaller checkpoints load before a bar could be read.
PROGRESS_MIN_BYTES = 256 << 20

LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")


class CheckpointError(ValueError):
    """The files are absent, unreadable, or of a format that is not supported."""


# Types of safetensors as torch calls them. What is not listed is packed: no torch type means it.
_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
_PACKED = torch.uint8

IsWanted = Callable[[str], bool]


def _every(name: str) -> bool:
    return True


class Checkpoint(ABC):
    """The tensors of one checkpoint under the names that its files give them."""

    def __init__(self, path: Path, files: list[Path]) -> None:
        self.path = path
        self.files = files

    @abstractmethod
    def tensor_infos(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor of that shape and type) where only these mean anything."""

    @abstractmethod
    def tensors(self, is_wanted: IsWanted = _every) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor). A tensor may be a view of the mapped file: copy, don't keep.

        Tensors whose name is not wanted are not read where the format allows it. Raises
        CheckpointError where a file is truncated or corrupt.
        """

    def tensors_with_progress(
        self, show: bool, is_wanted: IsWanted = _every
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """`tensors()`, with a bar on stderr for checkpoints that take a while."""
        total = sum(path.stat().st_size for path in self.files)
        silent = not show or total < PROGRESS_MIN_BYTES
        with tqdm(
            total=total, unit="B", unit_scale=True, desc="loading weights", disable=silent
        ) as bar:
            for name, tensor in self.tensors(is_wanted):
                yield name, tensor
                bar.update(tensor.nbytes)


class SafetensorsCheckpoint(Checkpoint):
    """One or many `.safetensors` files, with or without an index."""

    def tensor_infos(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    stored = file.get_slice(name)
                    dtype = _SAFETENSORS_TYPES.get(stored.get_dtype(), _PACKED)
                    yield name, torch.empty(stored.get_shape(), dtype=dtype, device="meta")

    def tensors(self, is_wanted: IsWanted = _every) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            with _open_safetensors(path) as file:
                for name in file.keys():  # noqa: SIM118
                    if is_wanted(name):
                        yield name, file.get_tensor(name)


class TorchCheckpoint(Checkpoint):
    """`.bin` / `.pt` files written by torch.save; read without running pickled code."""

    def tensor_infos(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            for name, tensor in self._read(path).items():
                yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def tensors(self, is_wanted: IsWanted = _every) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            yield from ((n, t) for n, t in self._read(path).items() if is_wanted(n))

    def _read(self, path: Path) -> dict[str, torch.Tensor]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{path} holds more than plain tensors: {error}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"{path} does not hold a dictionary of tensors")
        odd = [str(name) for name, value in state.items() if not _is_plain(value)]
        if odd:
            raise CheckpointError(f"{path} holds more than plain tensors: {', '.join(odd[:5])}")
        return state


class GgufCheckpoint(Checkpoint):
    """A GGUF file; quantised tensors come dequantised to float32."""

    def tensor_infos(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            for name, shape in gguf_tensor_shapes(path).items():
                yield name, torch.empty(shape, dtype=torch.float32, device="meta")

    def tensors(self, is_wanted: IsWanted = _every) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self.files:
            yield from ((n, t) for n, t in iterate_gguf_weights(path) if is_wanted(n))


def open_checkpoint(model_path: str, load_format: str = "auto") -> Checkpoint:
    """Find the weight files of `model_path` (a folder or a file).

    "auto" prefers safetensors, then GGUF, then `.bin`. Raises CheckpointError when there is
    nothing of that format, or the format is unknown.
    """
    if load_format not in LOAD_FORMATS or load_format == "dummy":
        raise CheckpointError(
            f"load format {load_format!r} cannot be read from files; "
            f"supported ones: {', '.join(f for f in LOAD_FORMATS if f != 'dummy')}"
        )
    root = Path(model_path)
    if not root.exists():
        raise CheckpointError(f"model path {model_path} does not exist")
    if load_format in ("auto", "safetensors"):
        files = _safetensors_files(root)
        if files:
            return SafetensorsCheckpoint(root, files)
    if load_format in ("auto", "gguf"):
        gguf_file = find_gguf_file(root)
        if gguf_file is not None:
            return GgufCheckpoint(root, [gguf_file])
    if load_format in ("auto", "pt"):
        files = _torch_files(root)
        if files:
            return TorchCheckpoint(root, files)
    raise CheckpointError(
        f"no weight files for load format {load_format!r} in {model_path}; "
        "--load-format dummy makes random weights"
    )


def _safetensors_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root] if root.suffix == ".safetensors" else []
    index = root / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    return sorted(root.glob("*.safetensors"))


def _torch_files(root: Path) -> list[Path]:
    if root.is_file():
        return [root] if root.suffix in (".bin", ".pt", ".pth") else []
    index = root / "pytorch_model.bin.index.json"
    if index.is_file():
        return _indexed_files(index)
    # Folders of trainers hold other .bin and .pt files (optimizer state), hence the narrow names.
    return sorted([*root.glob("pytorch_model*.bin"), *root.glob("model*.pt")])


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _indexed_files(index: Path) -> list[Path]:
    """Files that an index names. Raises CheckpointError where one of them is absent."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is no valid index: {error!r}") from error
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointError(f"{index.name} names files that are absent: {', '.join(absent)}")
    return files


def _open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
