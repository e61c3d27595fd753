"""`EAGLEWorkerV2`: speculation whose steps the host does not wait for.

The outcome of step n stays on the device and is the input of step n + 1; the host reads it one step
late. Nothing in a step reads the device. Drafting, verification and acceptance are those of
`eagle_worker`. Scheduler thread only.
"""

from __future__ import annotations

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.draft_runner import Drafting
from sglang.srt.speculative.eagle_worker import DraftModelWorker


class EagleDraftWorker:
    """The draft side of `EAGLEWorkerV2`."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting

    @property
    def draft_runner(self) -> ModelRunner:
        """The draft's model runner; of several layers the first one's."""
        return self.drafting.model_runner

    @property
    def draft_runner_list(self) -> tuple[ModelRunner, ...]:
        """Those of all layers that are models of their own."""
        return self.drafting.runners


class EAGLEWorkerV2(DraftModelWorker):
    """Returns as soon as a step is launched."""

    @property
    def draft_worker(self) -> EagleDraftWorker:
        """The draft side."""
        return EagleDraftWorker(self.drafting)
