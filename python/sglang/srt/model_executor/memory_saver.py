"""Memory of the models that trainers may take while nothing is generated: weights and KV.

Owns the regions that parameters and KV buffers lie in, and what of them is released. Without
`--enable-memory-saver` nothing lies in a region and release and resume do nothing. Does not know
requests and caches: the scheduler stops stepping and flushes. Scheduler thread only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from sglang.srt.constants import (
    GPU_MEMORY_ALL_TYPES,
    GPU_MEMORY_TYPE_CUDA_GRAPH,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
)
from sglang.srt.platforms import current_platform
from sglang.srt.platforms.regions import MemoryRegion

logger = logging.getLogger(__name__)

# Where tensors begin in a region: what vector loads and the matrix products like.
_ALIGNMENT = 256
# Parameters are moved in groups of about this size: the peak above the weights themselves.
_GROUP_BYTES = 256 << 20
# Weights go before the KV cache: they are updated while it is still away.
_RESUME_ORDER = (GPU_MEMORY_TYPE_CUDA_GRAPH, GPU_MEMORY_TYPE_WEIGHTS, GPU_MEMORY_TYPE_KV_CACHE)


class MemoryOccupationError(ValueError):
    """A release or resume that does not fit the present state; nothing was changed."""


@dataclass(slots=True)
class _Held:
    """One region. `backup`: its content on the host while it is released, where that is wanted."""

    region: MemoryRegion
    keeps_content: bool
    backup: torch.Tensor | None = None


class MemorySaver:
    """See the module docstring. `released`: the tags whose memory is away."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.released: set[str] = set()
        self._held: dict[str, list[_Held]] = {tag: [] for tag in GPU_MEMORY_ALL_TYPES}
        self._adopted: set[int] = set()  # addresses of parameters that lie in a region
        self._kept: set[int] = set()  # ids of models whose content survives a release

    # -- at start -----------------------------------------------------------------------------

    def kv_allocator(self) -> Callable[[Sequence[int], torch.dtype], torch.Tensor] | None:
        """What makes zeroed KV buffers; None: make them as usual."""
        if not self.enabled:
            return None

        def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            region = current_platform().reserve(math.prod(shape) * dtype.itemsize)
            self._held[GPU_MEMORY_TYPE_KV_CACHE].append(_Held(region, keeps_content=False))
            return _tensor_in(region, 0, shape, dtype)

        return allocate

    def adopt_weights(self, model: nn.Module, keeps_content: bool) -> None:
        """Move a model's parameters into regions, but for those that another model lends it.

        Before anything has noted their addresses. `keeps_content`: copy them to the host when
        they are released.
        """
        if not self.enabled:
            return
        if keeps_content:
            self._kept.add(id(model))
        group: list[nn.Parameter] = []
        for parameter in {id(p): p for p in model.parameters()}.values():
            if parameter.is_meta or parameter.data_ptr() in self._adopted:
                continue
            group.append(parameter)
            if sum(p.nbytes for p in group) >= _GROUP_BYTES:
                self._move(group, keeps_content)
                group = []
        if group:
            self._move(group, keeps_content)
        current_platform().empty_cache()

    @torch.no_grad()
    def _move(self, parameters: Sequence[nn.Parameter], keeps_content: bool) -> None:
        region = current_platform().reserve(sum(_padded(p.nbytes) for p in parameters))
        start = 0
        for parameter in parameters:
            tensor = _tensor_in(region, start, parameter.shape, parameter.dtype)
            tensor.copy_(parameter)
            parameter.data = tensor
            self._adopted.add(tensor.data_ptr())
            start += _padded(tensor.nbytes)
        self._held[GPU_MEMORY_TYPE_WEIGHTS].append(_Held(region, keeps_content))

    def keeps_weights_of(self, model: nn.Module) -> bool:
        """Whether the model's own parameters are what they were after a release and resume."""
        return id(model) in self._kept

    # -- state --------------------------------------------------------------------------------

    def why_no_weights(self) -> str | None:
        """Why weights can be neither read nor written; None where they can."""
        if GPU_MEMORY_TYPE_WEIGHTS in self.released:
            return "The memory of the weights is released: resume it first."
        return None

    @property
    def may_step(self) -> bool:
        """Whether the memory that a step needs is there."""
        return not self.released

    # -- release and resume -------------------------------------------------------------------

    def check_release(self, tags: Iterable[str] | None) -> list[str]:
        """The tags that `release` would release. Raises as it does."""
        return self._check(tags, "already released", lambda tag: tag in self.released)

    def make_copies(self, tags: Iterable[str] | None) -> None:
        """Copy to the host what `release` of these tags is to keep; it cannot fail for that then.

        Raises MemoryOccupationError, with nothing changed, as `release` does.
        """
        chosen = [held for tag in self.check_release(tags) for held in self._held[tag]]
        current_platform().synchronize()
        try:
            for held in chosen:
                if held.keeps_content and held.backup is None:
                    held.backup = held.region.buffer.to("cpu", copy=True)
        except (RuntimeError, MemoryError) as error:
            self.drop_copies()
            raise MemoryOccupationError(f"There is no host memory for a copy: {error}") from error

    def drop_copies(self) -> None:
        """Forget copies of what was not released after all."""
        for tag, helds in self._held.items():
            if tag not in self.released:
                for held in helds:
                    held.backup = None

    def release(self, tags: Iterable[str] | None) -> set[str]:
        """Give memory back; the tags whose memory is gone now.

        Raises MemoryOccupationError, with nothing changed, for unknown tags, those that are
        released already, and where the host has no room for the copies.
        """
        wanted = self.check_release(tags)
        self.make_copies(wanted)
        for held in (held for tag in wanted for held in self._held[tag]):
            held.region.release()
        self.released.update(wanted)
        if not self.enabled:
            logger.warning("No memory is released: that needs --enable-memory-saver at the start")
        logger.info("Released the memory of %s", ", ".join(wanted) or "nothing")
        return set(wanted)

    def resume(self, tags: Iterable[str] | None) -> set[str]:
        """Take memory again; the tags whose memory is back. Its content is zeros or the backup.

        Raises MemoryOccupationError, with nothing changed, for unknown tags, those that are not
        released, and where there is not enough.
        """
        wanted = self._check(tags, "not currently released", lambda tag: tag not in self.released)
        taken: list[_Held] = []
        try:
            for held in (held for tag in wanted for held in self._held[tag]):
                taken.append(held)
                held.region.resume()
        except RuntimeError as error:
            for held in taken:
                held.region.release()
            raise MemoryOccupationError(f"The memory cannot be taken again: {error}") from error
        for held in taken:
            if held.backup is not None:
                held.region.buffer.copy_(held.backup)
                held.backup = None
        self.released -= set(wanted)
        current_platform().synchronize()
        logger.info("Resumed the memory of %s", ", ".join(wanted) or "nothing")
        return set(wanted)

    def _check(
        self, tags: Iterable[str] | None, fault: str, is_wrong: Callable[[str], bool]
    ) -> list[str]:
        wanted = set(tags or GPU_MEMORY_ALL_TYPES)
        unknown = sorted(wanted - set(GPU_MEMORY_ALL_TYPES))
        if unknown:
            known = ", ".join(GPU_MEMORY_ALL_TYPES)
            raise MemoryOccupationError(f"unknown tag {unknown[0]!r}; tags are {known}")
        if not self.enabled:
            return []
        ordered = [tag for tag in _RESUME_ORDER if tag in wanted]
        wrong = [tag for tag in ordered if is_wrong(tag)]
        if not tags and len(wrong) < len(ordered):
            return [tag for tag in ordered if tag not in wrong]  # all that there is to do
        if wrong:
            raise MemoryOccupationError(f"The memory of {', '.join(wrong)} is {fault}.")
        return ordered


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _tensor_in(
    region: MemoryRegion, start: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    return region.buffer[start : start + size].view(dtype).view(tuple(shape))
