"""`NGRAMWorker`: speculation without a draft model, by what was generated before.

Trees of drafts come from an `NgramCache` on the host, so every step needs the tokens of all
requests there: the scheduler reads each result before the next step (`StepShape.needs_host_tokens`)
and the worker may know the time that a step takes. Where drafts do not pay (`draft_gate`) the step
is a plain one of the target, its shortcut included. Scheduler thread only; ranks agree on times,
and decide alike.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from sglang.srt.distributed.communication import all_reduce_min
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch, StepShape
from sglang.srt.managers.tp_worker import GenerationBatchResult, TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.base_spec_worker import AcceptanceRule, BaseSpecWorker, Verified
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_gate import DraftGate, DraftShadow
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows
from sglang.srt.speculative.eagle_info import EagleExtendInput
from sglang.srt.speculative.eagle_utils import tree_from_parents
from sglang.srt.speculative.ngram_cache import NgramCache, NgramDrafts
from sglang.srt.speculative.spec_info import DraftShape

# The end of a prompt that is worth learning: texts that repeat themselves do so soon.
MAX_PROMPT_TOKENS = 1024
# Requests of a batch whose drafts are followed while none is verified.
MAX_SHADOWS = 4


class _Followed:
    """A request whose tokens the cache learns."""

    __slots__ = ("num_known", "req", "shadow")

    def __init__(self, req: Req, num_known: int) -> None:
        self.req = req
        self.num_known = num_known  # tokens of prompt and output that the cache has
        self.shadow = DraftShadow()


class NGRAMWorker(BaseSpecWorker):
    """See the module docstring."""

    def __init__(
        self,
        target_worker: TpModelWorker,
        shape: DraftShape,
        rule: AcceptanceRule,
        cache: NgramCache,
    ) -> None:
        super().__init__(target_worker, shape, rule)
        self.gate = DraftGate()
        self._cache = cache
        self._followed: dict[str, _Followed] = {}
        self._drafts: NgramDrafts | None = None  # of the step that runs

    @property
    def step_shape(self) -> StepShape:
        """Tokens and slots of a decode step, per request."""
        return replace(super().step_shape, needs_host_tokens=True)

    def clear_cache_pool(self) -> None:
        """Forget what was learnt: after a flush everything starts anew."""
        self._cache.clear()

    # -- decode ---------------------------------------------------------------------------------

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        start = time.perf_counter()
        size = len(batch)
        drafts = None
        if not self.gate.is_asleep:
            self._learn(batch)
            if self._wants_verification(batch):
                drafts = self._cache.draft([req.rid for req in batch.reqs])
        # Nothing found for anybody: nothing to verify.
        self._drafts = drafts if drafts is not None and (drafts.num_found > 1).any() else None
        if self._drafts is None:
            result = self._plain_step(batch)
        else:
            result = super()._decode(batch)
        result.copy_done.synchronize()
        seconds = self._agreed(time.perf_counter() - start)
        if self._drafts is None:
            self.gate.count_plain(size, seconds)
        else:
            self.gate.count_verification(size, seconds)
            if result.accept_lens is not None:
                self.gate.observe([float(result.accept_lens.double().mean())])
        return result

    def _wants_verification(self, batch: ScheduleBatch) -> bool:
        if batch.traits.wants_hidden_states:
            return False
        running = [self._followed[req.rid].shadow.length for req in batch.reqs[:MAX_SHADOWS]]
        return self.gate.wants_verification(len(batch), sum(running) / len(running))

    def _agreed(self, seconds: float) -> float:
        """The same number on all ranks."""
        agreed = all_reduce_min(torch.tensor([seconds]), get_tp_group().cpu_group)
        return float(agreed[0])

    def _plain_step(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """One token for each request; the statistics count it as a verification of nothing."""
        self._start_shadows(batch)
        step = batch.snapshot()
        committed = torch.tensor([req.kv_committed_len for req in batch.reqs])
        step.seq_lens = (committed + 1).numpy()
        rows = torch.from_numpy(batch.req_pool_indices)
        table = self.target_runner.req_to_token_pool.req_to_token_cpu
        step.out_cache_loc = table[rows, committed].to(torch.int64)
        result = self.target_worker.forward_batch_generation(step)
        result.next_token_ids = result.next_token_ids.unsqueeze(1)
        result.accept_lens = torch.ones(len(batch), dtype=torch.int64)
        device_rows = current_platform().to_device_async(rows.clone())
        self.committed_lens[device_rows] += 1
        return result

    # -- what is learnt -------------------------------------------------------------------------

    def _learn(self, batch: ScheduleBatch) -> None:
        """Bring the cache up to date with the batch's requests, and drop those that have gone."""
        running = {req.rid: req for req in batch.reqs}
        for rid, entry in list(self._followed.items()):
            if running.get(rid) is not entry.req:
                del self._followed[rid]
                self._cache.finish(rid)
        for req in batch.reqs:
            followed = self._followed.get(req.rid)
            if followed is None:
                known = req.origin_input_ids[-MAX_PROMPT_TOKENS:].tolist() + req.output_ids
                self._cache.start(req.rid, known)
                self._followed[req.rid] = _Followed(req, req.seq_len)
                continue
            start = followed.num_known - len(req.origin_input_ids)
            new_ids = req.output_ids[start:]
            followed.num_known = req.seq_len
            self._cache.extend(req.rid, new_ids)
            for token_id in new_ids:
                length = followed.shadow.follow(token_id)
                if length is not None:
                    self.gate.observe([length])

    def _start_shadows(self, batch: ScheduleBatch) -> None:
        """Draft for some requests, to see how far that would have gone."""
        if self.gate.is_asleep:
            return
        for req in batch.reqs[:MAX_SHADOWS]:
            shadow = self._followed[req.rid].shadow
            if shadow.is_over:
                drafts = self._cache.draft([req.rid])
                found = drafts.num_found[0]
                if found > 1:
                    shadow.start(drafts.token_ids[0, :found], drafts.parents[0, :found])

    # -- BaseSpecWorker -------------------------------------------------------------------------

    def _catch_up_prefill(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        """Nothing: requests are followed from their first decode step on."""

    def _propose(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        if self._drafts is None:
            raise RuntimeError("no drafts were made for this step")
        platform = current_platform()
        token_ids = platform.to_device_async(torch.from_numpy(self._drafts.token_ids))
        parents = platform.to_device_async(torch.from_numpy(self._drafts.parents))
        return Drafted(tree=tree_from_parents(token_ids, parents))

    def _catch_up(self, drafted: DraftedRows, path: EagleExtendInput, verified: Verified) -> None:
        """Nothing: the tokens are learnt once the host has them."""
