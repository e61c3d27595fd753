"""Read the header of a GGUF file: metadata by key, and where every tensor lies.

Owns the binary layout (version 2 and 3, little endian). What the keys mean is in `gguf_file`. The
`gguf` package reads the same, but takes seconds for the hundred thousand strings of a vocabulary;
it is used only for the sizes of quantised blocks, when tensor data are asked for.

Called by `gguf_file`. An object only reads and may be shared by threads.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Type number in the file -> how a value of it is laid out.
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
# No tensor has more; a greater number means that the file is broken.
_MAX_DIMS = 8

_F32, _F16 = 0, 1
_PLAIN_TYPES: dict[int, type[np.generic]] = {_F32: np.float32, _F16: np.float16}
TYPE_NAMES = {_F32: "F32", _F16: "F16", 30: "BF16"}


class GgufFormatError(ValueError):
    """The bytes are no GGUF file, or a damaged one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor. `shape` is in the file's order: the fastest dimension first."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file
    file: mmap.mmap

    @property
    def data(self) -> np.ndarray:
        """A view of the file: [..., columns] of a float type, [..., bytes] of a quantised one.

        Raises GgufFormatError where the file ends before the tensor does.
        """
        rows = tuple(reversed(self.shape))
        dtype = _PLAIN_TYPES.get(self.type_id)
        if dtype is None:
            from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(self.type_id)]
            rows, dtype = (*rows[:-1], rows[-1] // block * size), np.uint8
        count = int(np.prod(rows, dtype=np.int64))
        if self.offset + count * np.dtype(dtype).itemsize > len(self.file):
            raise GgufFormatError(f"the file ends inside of the tensor {self.name}")
        return np.frombuffer(self.file, dtype, count, self.offset).reshape(rows)


class GgufReader:
    """The parsed header. Raises GgufFormatError or OSError."""

    def __init__(self, path: Path) -> None:
        self.fields: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise GgufFormatError("it does not begin with the letters GGUF")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = len(_MAGIC)
        try:
            self._parse()
        except (struct.error, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
            raise GgufFormatError(f"its header is damaged ({error!r})") from error

    def _parse(self) -> None:
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            raise GgufFormatError(f"version {version} is not supported")
        num_tensors, num_fields = self._scalar(_U64), self._scalar(_U64)
        for _ in range(num_fields):
            key = self._string()
            self.fields[key] = self._value(self._scalar(_U32))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = int(self.fields.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-self._position // alignment) * alignment
        self.tensors = [
            GgufTensor(name=name, shape=shape, type_id=kind, offset=start + at, file=self._data)
            for name, shape, kind, at in infos
        ]

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar(_U32)
        if num_dims > _MAX_DIMS:
            raise GgufFormatError(f"the tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(num_dims))
        return name, shape, self._scalar(_U32), self._scalar(_U64)

    def _scalar(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return value

    def _string(self) -> str:
        length = self._scalar(_U64)
        start = self._position
        self._position = end = start + length
        if end > len(self._data):
            raise IndexError("a string goes beyond the end of the file")
        return self._data[start:end].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._scalar(_U32), self._scalar(_U64)
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        layout = _SCALARS[kind]
        start = self._position
        self._position += layout.size * length
        if self._position > len(self._data):
            raise IndexError("an array goes beyond the end of the file")
        values = layout.iter_unpack(self._data[start : self._position])
        return [value for (value,) in values]
