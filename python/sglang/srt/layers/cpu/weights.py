"""Compressed copies of weight matrices, read instead of the float32 weight for few rows.

Owns the formats and the conversion; the products are in `native` and `reference`. A copy does not
follow its source by itself: whoever writes a weight calls `refresh()`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

WeightFormat = Literal["fp32", "bf16", "fp16", "int8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)

_FLOAT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class CompressedWeight:
    """A float32 weight [m, k] beside a copy of it in a smaller format.

    `source` is the float32 weight itself (shared, not copied), `data` [m, k] the copy and `scale`
    [m] float32 the factor of each int8 row (None for the other formats). int8 rows are symmetric:
    weight ~ scale * data with |data| <= 127.
    """

    def __init__(self, source: torch.Tensor, weight_format: WeightFormat) -> None:
        """Make the copy. Raises ValueError for fp32 (no copy needed) and unknown formats."""
        if source.ndim != 2 or source.dtype != torch.float32:
            raise ValueError(f"expected a float32 matrix, got {source.dtype} {source.shape}")
        self.source = source
        self.weight_format = weight_format
        self.scale: torch.Tensor | None = None
        if weight_format == "int8":
            self.data = torch.empty(source.shape, dtype=torch.int8)
            self.scale = torch.empty(source.shape[0])
        elif weight_format in _FLOAT_DTYPES:
            self.data = torch.empty(source.shape, dtype=_FLOAT_DTYPES[weight_format])
        else:
            raise ValueError(f"no compressed copy of format {weight_format!r}")
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the copy anew, in place, after `source` was written."""
        source = self.source
        if self.scale is None:
            self.data.copy_(source)
            return
        largest = source.abs().amax(dim=1)
        # A row of zeros has any scale; 1 keeps the division finite.
        self.scale.copy_(torch.where(largest > 0, largest / 127.0, 1.0))
        # Row blocks: a whole float32 temporary of a vocabulary matrix would double the memory.
        for rows, scale, data in zip(source.split(4096), self.scale.split(4096), self._blocks()):
            data.copy_(torch.round(rows / scale[:, None]))

    def _blocks(self) -> tuple[torch.Tensor, ...]:
        return self.data.split(4096)

    def dequantized(self) -> torch.Tensor:
        """The float32 matrix [m, k] that the copy stands for."""
        wide = self.data.to(torch.float32)
        return wide if self.scale is None else wide * self.scale[:, None]


@torch.no_grad()
def find_lossless_format(weight: torch.Tensor) -> WeightFormat:
    """The smallest format that holds every value of a float32 weight exactly.

    Checkpoints that were saved in bfloat16 or float16 lose nothing in that format, so that decode
    reads half the bytes and computes the very same float32 products. Returns fp32 where none fits.
    """
    for name, dtype in _FLOAT_DTYPES.items():
        # Where something is lost, the first rows nearly always say so: no pass over the others.
        blocks = (weight[:16], *weight[16:].split(4096))
        if all(torch.equal(rows.to(dtype).float(), rows) for rows in blocks):
            return "bf16" if name == "bf16" else "fp16"
    return "fp32"
