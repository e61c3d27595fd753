"""Pickled tensors of weight updates: writing them, and reading them without running what they say.

The only place of the server where pickle is read. What comes may be written by anybody who holds
the admin key, or by a confused trainer, so nothing is called that is not on the list here.
Documented import name: `sglang.srt.utils.MultiprocessingSerializer`.
"""

from __future__ import annotations

import binascii
import importlib
import io
import pickle
import re
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import numpy as np
import torch

_TORCH_REBUILD = (
    "rebuild_tensor",
    "rebuild_cuda_tensor",
    "rebuild_storage_fd",
    "rebuild_storage_filename",
    "rebuild_storage_empty",
    "rebuild_typed_storage",
    "rebuild_typed_storage_child",
)
_BUCKET_CLASSES = ("FlattenedTensorMetadata", "FlattenedTensorBucket", "LocalSerializedTensor")
_BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"
# Where releases of trainers and servers keep classes of the same names and fields.
_BUCKET_ALIASES = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.model_executor.model_runner_components.weight_updater",
    "nemo_rl.models.generation.sglang.utils.train_utils",
)
_PATCH_MODULE = "sglang.srt.utils.patch_torch"
_PATCHED_REBUILD = "_rebuild_cuda_tensor_modified"

# (module, name) as pickled -> (module, name) to use.
_ALLOWED: dict[tuple[str, str], tuple[str, str]] = {
    (module, name): (module, name)
    for module, names in {
        "builtins": ("list", "dict", "set", "frozenset", "tuple", "int", "float", "str", "bool"),
        "collections": ("OrderedDict",),
        "torch": ("Size", "device", "Tensor"),
        "torch.storage": ("UntypedStorage", "TypedStorage"),
        "torch.nn.parameter": ("Parameter",),
        "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
        "torch.multiprocessing.reductions": _TORCH_REBUILD,
        "multiprocessing.resource_sharer": ("DupFd",),
        "sglang.srt.utils.serialization": ("_rebuild_cpu_tensor",),
        _PATCH_MODULE: (_PATCHED_REBUILD,),
        _BUCKET_MODULE: _BUCKET_CLASSES,
    }.items()
    for name in names
}
_ALLOWED["sglang.srt.patch_torch", _PATCHED_REBUILD] = (_PATCH_MODULE, _PATCHED_REBUILD)
for _alias in _BUCKET_ALIASES:
    for _name in _BUCKET_CLASSES:
        _ALLOWED[_alias, _name] = (_BUCKET_MODULE, _name)
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _ALLOWED[_module, "scalar"] = ("sglang.srt.utils.serialization", "_number")
_ALLOWED["numpy", "dtype"] = ("sglang.srt.utils.serialization", "_NumberType")


# For the author of a trainer, who sees no more than the message.
_EXPECTED = (
    "each entry must be the base64 text that "
    "MultiprocessingSerializer.serialize(named_tensors, output_str=True) returns"
)


class UnsafePickleError(RuntimeError):
    """The data asks for something that is not on the list."""


class SerializationError(ValueError):
    """The data cannot be read: truncated, corrupt, or made from tensors that are gone."""


class SafeUnpickler(pickle._Unpickler):
    """Reads tensors, containers and the classes of weight updates, and nothing else.

    The implementation in Python, because the one in C lets the data choose how much memory its
    table takes and set attributes of classes and functions.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        super().__init__(io.BytesIO(data))
        self._num_bytes = len(data)

    def find_class(self, module: str, name: str) -> Any:
        """The object behind a pickled name. Raises UnsafePickleError if it is not on the list."""
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        target = _ALLOWED.get((module, name))
        if target is None:
            raise UnsafePickleError(f"Blocked unsafe global ({module}.{name})")
        return getattr(importlib.import_module(target[0]), target[1])

    def get_extension(self, code: int) -> None:
        raise UnsafePickleError(f"Blocked unsafe global (extension {code})")

    def _load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if callable(target):
            raise UnsafePickleError(f"Blocked unsafe change of {target!r}")
        plain: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]
        plain(self)

    def _load_bytearray(self) -> None:
        size = int.from_bytes(self.read(8), "little")  # type: ignore[attr-defined]
        # The memory is taken before it is known whether so many bytes follow.
        if size > self._num_bytes:
            raise pickle.UnpicklingError(f"{size} bytes are claimed of {self._num_bytes}")
        target = bytearray(size)
        self.readinto(target)  # type: ignore[attr-defined]
        self.append(target)  # type: ignore[attr-defined]

    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray


class _TensorPickler(ForkingPickler):
    """CUDA tensors as handles, CPU tensors as their bytes.

    torch would send file descriptors for CPU tensors, which only related processes can receive
    and which need the sender alive.
    """

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.device.type != "cpu" or obj.is_sparse:
            return NotImplemented
        data: Any = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _rebuild_cpu_tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape))


class MultiprocessingSerializer:
    """Objects that hold tensors, to bytes or text and back, for another process of this host."""

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes | str:
        """Pickle `obj`; base64 text with `output_str`. CUDA tensors must outlive the reading."""
        buffer = io.BytesIO()
        _TensorPickler(buffer, 5).dump(obj)
        data = buffer.getvalue()
        return binascii.b2a_base64(data, newline=False).decode("ascii") if output_str else data

    @staticmethod
    def deserialize(data: str | bytes | bytearray | memoryview) -> Any:
        """Read what `serialize` wrote.

        Raises UnsafePickleError for names that are not allowed, SerializationError for data that
        is damaged or whose tensors cannot be opened here.
        """
        if isinstance(data, str):
            try:
                data = binascii.a2b_base64(data, strict_mode=True)
            except ValueError as error:
                raise SerializationError(f"not base64 ({error}): {_EXPECTED}") from error
        try:
            return SafeUnpickler(data).load()
        except UnsafePickleError:
            raise
        # Damaged data makes the listed functions fail in any way they can.
        except Exception as error:
            raise SerializationError(
                f"cannot read serialized tensors ({type(error).__name__}: {error}): {_EXPECTED}"
            ) from error


def _rebuild_cpu_tensor(
    data: bytearray | bytes, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Called by unpickling. Raises ValueError where the number of bytes does not fit."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


class _NumberType:
    """Stands for the numpy dtype of a scalar while it is read; numpy's own is not to be built."""

    def __init__(self, name: str, *_: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[biuf](?:1|2|4|8)", name):
            raise UnsafePickleError(f"Blocked unsafe global (numpy.dtype {name!r})")
        self.name = name

    def __setstate__(self, state: Any) -> None:
        if state[1] in ("<", ">"):
            self.name = state[1] + self.name


def _number(dtype: Any, data: bytes) -> int | float | bool:
    """Called by unpickling a numpy scalar: the same number as a Python object."""
    if not isinstance(dtype, _NumberType):
        raise UnsafePickleError("Blocked unsafe global (numpy scalar of another type)")
    value: int | float | bool = np.frombuffer(data, dtype=dtype.name, count=1)[0].item()
    return value
