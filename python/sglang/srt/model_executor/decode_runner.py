"""The shortcut for plain decode steps: what a `ModelRunner` asks of one.

A decode step of few requests is always the same sequence of operations on the same tensors, so it
can be prepared once: as CUDA graphs on a GPU, as one native call on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedStep:
    """The inputs of a captured step, int64 [b] each: views of its static tensors."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor
    # Filled when the step runs.
    input_ids: torch.Tensor
    positions: torch.Tensor


class DecodeRunner(Protocol):
    """Runs decode steps faster than module by module, with the same result."""

    num_steps: int  # steps that took the shortcut, for tests and reports

    def stage(self, step: np.ndarray) -> StagedStep | None:
        """Put the inputs of the coming plain decode step where a captured one reads them.

        `step` int64 [3, b]: rows of the request table, lengths with the new token, its slots. None
        where no step of this size is captured; else a batch of these inputs must run next.
        """
        ...

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
