"""The attention backend of the running forward pass, so that layers need not carry it.

One forward at a time a process; entering twice raises. Used by `ModelRunner` (enter) and
`layers.radix_attention` (read), on the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionForward(Protocol):
    """The methods of a backend that layers call; see `layers.attention.base`."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor: ...

    def can_rotate(self, forward_batch: ForwardBatch) -> bool: ...

    def forward_rotating(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotation: Any,
        layer: Any,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor: ...


_current: AttentionForward | None = None


@contextmanager
def use_attention_backend(backend: AttentionForward) -> Iterator[None]:
    """Make `backend` the current one inside the block. Raises RuntimeError when nested."""
    global _current
    if _current is not None:
        raise RuntimeError("a forward pass is already running in this process")
    _current = backend
    try:
        yield
    finally:
        _current = None


def current_attention_backend() -> AttentionForward:
    """Backend of the running forward pass. Raises RuntimeError outside of one."""
    if _current is None:
        raise RuntimeError("no forward pass is running: enter `use_attention_backend` first")
    return _current
