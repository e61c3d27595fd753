"""The shortcut for plain decode steps: what a `ModelRunner` asks of one.

A decode step of few requests is always the same sequence of operations on the same tensors, so it
can be prepared once: as CUDA graphs on a GPU, as one native call on a CPU.
"""

from __future__ import annotations

from typing import Protocol

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)


class DecodeRunner(Protocol):
    """Runs decode steps faster than module by module, with the same result."""

    num_steps: int  # steps that took the shortcut, for tests and reports

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether this step may take the shortcut."""
        ...

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """One decode step. The logits are valid until the next `run`, in stream order."""
        ...

    def weights_changed(self) -> None:
        """The model's parameters were written in place."""
        ...


def is_plain_decode(batch: ForwardBatch) -> bool:
    """One token a request, no hidden states wanted, no speculation."""
    return (
        batch.forward_mode is ForwardMode.DECODE
        and batch.capture_hidden_mode is CaptureHiddenMode.NULL
        and batch.spec_info is None
    )
