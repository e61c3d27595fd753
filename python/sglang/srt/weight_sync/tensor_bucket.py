"""Many tensors in one buffer, and tensors in one serialized piece a rank.

The forms in which trainers hand weights over. Class names, field names and this module's name are
part of the pickled form. Pure: no device, no process group. Used by trainers and by the weight
updater.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.utils.serialization import MultiprocessingSerializer


@dataclass
class FlattenedTensorMetadata:
    """One tensor's place in a bucket's buffer.

    `start_idx` and `end_idx` count entries of the buffer as it is given: bytes where it is uint8;
    older senders fill buffers of the tensors' own dtype and count elements.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class FlattenedTensorBucket:
    """Named tensors of any dtypes back to back in one 1-D buffer."""

    # Senders ask this before they mix dtypes.
    supports_multi_dtypes = True

    def __init__(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: Sequence[FlattenedTensorMetadata] | None = None,
    ) -> None:
        """From tensors on one device (copied, any strides), or from a buffer and its metadata.

        Raises ValueError where neither is complete or `named_tensors` is empty.
        """
        if named_tensors is not None:
            if not named_tensors:
                raise ValueError("Cannot create empty tensor bucket")
            parts = [_bytes_of(tensor) for _, tensor in named_tensors]
            self.metadata = _describe(
                (name, tensor.shape, tensor.dtype) for name, tensor in named_tensors
            )
            self.flattened_tensor = torch.cat(parts)
        elif flattened_tensor is not None and metadata is not None:
            self.flattened_tensor = flattened_tensor
            self.metadata = list(metadata)
        else:
            raise ValueError("Must provide either named_tensors or flattened_tensor and metadata")

    @classmethod
    def empty(
        cls,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[Sequence[int]],
        device: torch.device | str,
    ) -> FlattenedTensorBucket:
        """A bucket with room for these tensors, to receive into."""
        metadata = _describe(
            (name, torch.Size(shape), dtype) for name, dtype, shape in zip(names, dtypes, shapes)
        )
        size = metadata[-1].end_idx if metadata else 0
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return cls(flattened_tensor=buffer, metadata=metadata)

    def get_flattened_tensor(self) -> torch.Tensor:
        """The buffer, 1-D."""
        return self.flattened_tensor

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        """Names and places, in the order of the buffer."""
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors, as views of the buffer where it is aligned for their dtype.

        Raises ValueError where the metadata does not fit the buffer.
        """
        flat = self.flattened_tensor
        if not isinstance(flat, torch.Tensor) or flat.dim() != 1:
            raise ValueError("the flattened tensor of a bucket must have one dimension")
        return [(meta.name, _take(flat, meta)) for meta in self.metadata]


@dataclass
class LocalSerializedTensor:
    """A tensor as every tensor-parallel rank's own serialized copy of it, by rank."""

    values: list[bytes | str]

    def get(self, rank: int) -> torch.Tensor:
        """The tensor of `rank`. Raises ValueError where there is none."""
        if not 0 <= rank < len(self.values):
            raise ValueError(f"a tensor has copies for {len(self.values)} ranks, not for {rank}")
        tensor = MultiprocessingSerializer.deserialize(self.values[rank])
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"expected a serialized tensor, got {type(tensor).__name__}")
        return tensor


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _describe(
    tensors: Iterable[tuple[str, torch.Size, torch.dtype]],
) -> list[FlattenedTensorMetadata]:
    metadata = []
    start = 0
    for name, shape, dtype in tensors:
        numel = shape.numel()
        end = start + numel * dtype.itemsize
        metadata.append(
            FlattenedTensorMetadata(
                name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=numel
            )
        )
        start = end
    return metadata


def _take(flat: torch.Tensor, meta: Any) -> torch.Tensor:
    shape = torch.Size(meta.shape)
    fits = 0 <= meta.start_idx <= meta.end_idx <= flat.numel()
    num_bytes = (meta.end_idx - meta.start_idx) * flat.dtype.itemsize
    if not fits or num_bytes != shape.numel() * meta.dtype.itemsize:
        raise ValueError(
            f"{meta.name}: shape {tuple(shape)} of {meta.dtype} does not fit entries "
            f"{meta.start_idx}..{meta.end_idx} of a bucket of {flat.numel()} ({flat.dtype})"
        )
    part = flat[meta.start_idx : meta.end_idx]
    if flat.dtype == meta.dtype:
        return part.view(shape)
    if part.data_ptr() % meta.dtype.itemsize or part.storage_offset() % meta.dtype.itemsize:
        part = part.clone()
    return part.view(meta.dtype).view(shape)
