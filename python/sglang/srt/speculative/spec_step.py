"""A speculative decode step in parts, each a function on the device: what can be captured.

`BaseSpecWorker` implements the parts and runs them one by one; `spec_graph_runner` captures them in
CUDA graphs. Shapes follow from the number of requests alone, nothing is read back, and no part but
`draft` looks at the host's bounds of lengths, which only CPU attention needs. Letters as in
`eagle_info`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.draft_runner import DraftedRows
from sglang.srt.speculative.eagle_info import AcceptResult, Compaction, DraftTree
from sglang.srt.speculative.spec_info import DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPass:
    """The target's forward pass over drafted trees."""

    output: LogitsProcessorOutput  # logits float32 [b * w, V]; hidden states where wanted
    slots: torch.Tensor  # int64 [b * w]: where its KV went


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The target's answer to drafted trees."""

    output: LogitsProcessorOutput  # logits float32 [b * w, V], adjusted
    accept: AcceptResult
    compaction: Compaction


class SpecStep(Protocol):
    """The parts, in order. State by row of the request table is read and written in place."""

    @property
    def shape(self) -> DraftShape: ...

    def drafted_at(self, rows: torch.Tensor, bounds: list[int] | None = None) -> DraftedRows:
        """Where drafting goes on in these rows, int64 [b]. `bounds`: of the committed lengths."""
        ...

    def draft(self, drafted: DraftedRows) -> DraftTree:
        """The best trees of the draft model."""
        ...

    def run_target(self, drafted: DraftedRows, tree: DraftTree) -> TargetPass:
        """One forward pass over all nodes."""
        ...

    def accept_argmax(
        self, tree: DraftTree, passed: TargetPass, simulated_drafts: torch.Tensor | None
    ) -> tuple[Verified, torch.Tensor]:
        """Accept what the target finds most likely, of logits as they are.

        Also the step's report, see `step_ops.pack_report`. `simulated_drafts`: see
        `accept_simulated`.
        """
        ...

    def compaction(self, accept: AcceptResult, slots: torch.Tensor) -> Compaction:
        """Where the accepted paths lie; slots int64 [b * w]: of the target's pass."""
        ...

    def commit(self, drafted: DraftedRows, verified: Verified) -> None:
        """Make the accepted paths part of their requests: KV, draft KV, lengths, roots.

        The padding row stays empty.
        """
        ...
