"""What a layer has computed for drafted tokens, until it is known which of them count.

A verification leaves the states as they are; afterwards the accepted tokens are run again from
here, which takes a fraction of what states of all nodes would. Scheduler thread only.
"""

from __future__ import annotations

import torch


class DraftedInputs:
    """Tensors [n, ...] of the last verification of n tokens.

    Kept at one place for all that are no larger than the first, so that a captured commit finds
    what a captured verification has left: the largest is captured first.
    """

    def __init__(self) -> None:
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._larger: tuple[torch.Tensor, ...] = ()

    def keep(self, *values: torch.Tensor) -> None:
        """Copy these tensors, of one length n."""
        if not self._buffers:
            self._buffers = tuple(torch.empty_like(value) for value in values)
        num_tokens = len(values[0])
        if num_tokens > len(self._buffers[0]):
            self._larger = values
            return
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer[:num_tokens].copy_(value)

    def kept(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """What `keep` was last given of that length."""
        if not self._buffers or num_tokens > len(self._buffers[0]):
            return self._larger
        return tuple(buffer[:num_tokens] for buffer in self._buffers)
