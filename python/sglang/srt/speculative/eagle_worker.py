"""Speculation with a draft model: `EAGLEWorker` (EAGLE, EAGLE3, NEXTN) and `StandaloneWorker`.

The host reads how much was accepted at the end of each step; see `eagle_worker_v2` for the worker
that does not wait. Scheduler thread only.
"""

from __future__ import annotations

import torch

from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult, LayerLoadCounter, TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.base_spec_worker import AcceptanceRule, BaseSpecWorker
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows, Drafting, PromptState
from sglang.srt.speculative.eagle_info import DraftTree, EagleExtendInput
from sglang.srt.speculative.spec_step import Verified


class DraftModelWorker(BaseSpecWorker):
    """A worker whose trees come from a draft model. `drafting` runs it."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        drafting: Drafting,
        rule: AcceptanceRule,
        feature_mode: CaptureHiddenMode,
    ) -> None:
        super().__init__(target_worker, drafting.shape, rule)
        self.drafting = drafting
        self._feature_mode = feature_mode

    @property
    def model_runner(self) -> ModelRunner:
        """The draft's runner; of several layers that are models of their own, the first one's."""
        return self.drafting.model_runner

    @property
    def draft_runner_list(self) -> tuple[ModelRunner, ...]:
        """Those of all layers, whose KV travels with the target's (`draft_runner.draft_kv`)."""
        return self.drafting.runners

    def draft_fingerprint(self) -> str:
        """Content digest of the draft's weights, those that it shares with the target included."""
        return "+".join(runner.weights_fingerprint for runner in self.draft_runner_list)

    @property
    def num_draft_slots(self) -> int:
        return self.drafting.num_slots

    @property
    def feature_mode(self) -> CaptureHiddenMode:
        return self._feature_mode

    def register_hicache_layer_transfer_counter(self, counter: LayerLoadCounter) -> None:
        """See `TpModelWorker`; the draft's layers wait for theirs too."""
        super().register_hicache_layer_transfer_counter(counter)
        for runner in self.draft_runner_list:
            runner.token_to_kv_pool.register_layer_transfer_counter(counter)

    def _catch_up_prefill(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        lookahead, prompt = self.drafting.lookahead, None
        following_ids = self._following_ids(batch, next_ids, lookahead)
        if lookahead > 1:
            lens = zip(batch.reqs, batch.prefix_lens)
            prompt = PromptState(
                following_ids=following_ids,
                num_own=[prefix_len - req.cache_protected_len for req, prefix_len in lens],
            )
        self.drafting.after_prefill(forward_batch, following_ids[:, 0], features, prompt)

    def _propose(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        return self.drafting.propose(drafted, coins, batch.sampling_info)

    @property
    def captures_draft(self) -> bool:
        return True

    def steps_aside(self, num_reqs: int) -> bool:
        """Large batches fill the device without drafts: verifying costs what it brings."""
        limit = envs.SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS.get()
        return num_reqs * self.shape.num_draft_tokens > limit

    def draft(self, drafted: DraftedRows) -> DraftTree:
        """See `SpecStep`."""
        return self.drafting.propose(drafted, None, None).tree

    def _catch_up(self, drafted: DraftedRows, path: EagleExtendInput, verified: Verified) -> None:
        self.drafting.after_verify(drafted, path)


class EAGLEWorker(DraftModelWorker):
    """Waits for the outcome of each step before it returns."""

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """See `BaseSpecWorker`."""
        result = super().forward_batch_generation(batch)
        result.copy_done.synchronize()
        return result


class StandaloneWorker(EAGLEWorker):
    """The same over a language model of its own."""
