"""What all speculative workers share: the target's verification of drafted trees.

Owns the per-row lengths on the device and the acceptance of drafts. Subclasses supply the trees
and take note of what was accepted. A decode step is

    propose -> verify (one forward pass of the target) -> accept -> catch up

and yields 1 to d tokens a request. The scheduler has taken slots behind the committed ones of each
request (`step_shape`); which of them hold accepted tokens is known on the device at once and on
the host when the step's result is read. Scheduler thread only; collective over the TP ranks.

Requests whose logits depend on tokens that the host must have seen (penalties, grammar, suppressed
end tokens) take one token a step: the first logits of the verification are exactly those of a
plain step, and none of their drafts is accepted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang.srt.layers.dispatch import argmax
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import adjust_logits, fill_logprobs, nan_rows, sampling_probs
from sglang.srt.managers.schedule_batch import ScheduleBatch, StepShape
from sglang.srt.managers.tp_worker import GenerationBatchResult, LayerLoadCounter, TpModelWorker
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.acceptance import (
    CoinUse,
    accept_by_rejection,
    accept_by_thresholds,
    accept_chain,
    accept_tree,
    draw_targets,
    limit_to_root,
)
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows
from sglang.srt.speculative.eagle_info import AcceptResult, Compaction, DraftTree, EagleExtendInput
from sglang.srt.speculative.eagle_utils import compact, extend_after_verify, tree_positions
from sglang.srt.speculative.spec_info import DraftShape
from sglang.srt.speculative.tree_attention import TreeAttention, window_mask

# No token: what a draft that must not be accepted is compared as.
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceRule:
    """How sampled requests accept drafts; greedy ones always accept the target's argmax."""

    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    use_rejection_sampling: bool = False

    @property
    def is_exact_draw(self) -> bool:
        """Whether drafts count as far as they equal the target's own draws."""
        return self.threshold_single >= 1.0 and self.threshold_acc >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The target's answer to drafted trees."""

    output: LogitsProcessorOutput  # logits float32 [b * w, V], adjusted
    accept: AcceptResult
    compaction: Compaction


class BaseSpecWorker(ABC):
    """A `BatchWorker` whose decode steps verify drafts; see the module docstring."""

    def __init__(
        self, target_worker: TpModelWorker, shape: DraftShape, rule: AcceptanceRule
    ) -> None:
        self.target_worker = target_worker
        self.shape = shape
        self.rule = rule
        self.device = target_worker.device
        rows = target_worker.model_runner.req_to_token_pool.size
        # int64 by row: tokens whose KV is there.
        self.committed_lens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._generator = torch.Generator()
        self._generator.manual_seed((torch.initial_seed() + 1) % 2**63)
        self._repeated: tuple[SamplingBatchInfo, SamplingBatchInfo] | None = None

    # -- BatchWorker ------------------------------------------------------------------------------

    @property
    def target_runner(self) -> ModelRunner:
        return self.target_worker.model_runner

    @property
    def model_config(self) -> Any:
        return self.target_worker.model_config

    @property
    def step_shape(self) -> StepShape:
        """Tokens and slots of a decode step, per request."""
        return StepShape(
            max_tokens=self.shape.max_accept_len,
            num_slots=max(self.shape.num_draft_tokens, self.num_draft_slots),
            num_draft_tokens=self.shape.num_draft_tokens,
        )

    @property
    def num_draft_slots(self) -> int:
        """Slots behind the committed ones that drafting writes."""
        return 0

    def get_memory_pool(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """The request table and the slot allocator of the target, which the draft shares."""
        return self.target_worker.get_memory_pool()

    def register_hicache_layer_transfer_counter(self, counter: LayerLoadCounter) -> None:
        """See `TpModelWorker`."""
        self.target_worker.register_hicache_layer_transfer_counter(counter)

    def clear_cache_pool(self) -> None:
        """Nothing to do: the shared allocator is cleared by the scheduler."""
        return

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step of `batch`. Collective over the tensor-parallel ranks."""
        self.target_worker.set_hicache_consumer(batch.hicache_consumer_index)
        with torch.inference_mode():
            if batch.forward_mode is ForwardMode.EXTEND:
                return self._prefill(batch)
            return self._decode(batch)

    # -- for subclasses -------------------------------------------------------------------------

    @abstractmethod
    def _catch_up_prefill(
        self,
        batch: ScheduleBatch,
        forward_batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        """Take note of a prefill step; arguments as in `Drafting.after_prefill`."""

    @abstractmethod
    def _propose(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        """Draft a tree below each root; with `coins`, draw the drafts of a chain."""

    @abstractmethod
    def _catch_up(self, drafted: DraftedRows, path: EagleExtendInput, verified: Verified) -> None:
        """Take note of what was accepted."""

    @property
    def feature_mode(self) -> CaptureHiddenMode:
        """Which hidden states of the target are needed."""
        return CaptureHiddenMode.NULL

    # -- prefill --------------------------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        worker, runner = self.target_worker, self.target_runner
        forward_batch = worker.build_forward_batch(batch)
        forward_batch.capture_hidden_mode = self.feature_mode
        output = runner.forward(forward_batch)
        features, output.hidden_states = output.hidden_states, None
        next_ids = runner.sample(output, forward_batch)
        rows = forward_batch.req_pool_indices
        worker.last_token_ids[rows] = next_ids
        self.committed_lens[rows] = forward_batch.seq_lens
        self._catch_up_prefill(batch, forward_batch, self._following_ids(batch, next_ids), features)
        result = GenerationBatchResult(
            next_token_ids=next_ids, logits_output=output, nan_rows=runner.nan_rows(output)
        )
        result.start_copy()
        return result

    def _following_ids(self, batch: ScheduleBatch, next_ids: torch.Tensor) -> torch.Tensor:
        """What follows each request's last token: in a chunk the prompt goes on."""
        if not any(batch.chunked):
            return next_ids
        known = [
            req.fill_ids[prefix + extend] if chunked else _NO_TOKEN
            for req, prefix, extend, chunked in zip(
                batch.reqs, batch.prefix_lens, batch.extend_lens, batch.chunked
            )
        ]
        following = current_platform().to_device_async(torch.tensor(known, dtype=torch.int64))
        return torch.where(following == _NO_TOKEN, next_ids, following)

    # -- decode ---------------------------------------------------------------------------------

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        drafted = self._drafted_rows(batch)
        info = batch.sampling_info
        if info is None:
            raise RuntimeError("the batch has no sampling info")
        coins = None if info.is_all_greedy else Coins(self._generator, info)
        drawn_coins = coins if self.rule.use_rejection_sampling else None
        proposal = self._propose(batch, drafted, drawn_coins)
        verified = self._verify(batch, drafted, proposal, coins)
        accept = verified.accept
        path = extend_after_verify(
            accept, verified.compaction, verified.output.hidden_states, drafted.committed_lens
        )
        self._catch_up(drafted, path, verified)
        self.target_worker.last_token_ids[drafted.rows] = accept.bonus_ids
        self.committed_lens[drafted.rows] = path.committed_lens
        return self._result(batch, verified)

    def _drafted_rows(self, batch: ScheduleBatch) -> DraftedRows:
        rows = current_platform().to_device_async(torch.from_numpy(batch.req_pool_indices.copy()))
        committed = self.committed_lens[rows]
        if self.device.type == "cpu":
            bounds = committed.tolist()
        else:
            bounds = (batch.seq_lens - self.step_shape.max_tokens).tolist()
        return DraftedRows(
            rows=rows,
            root_ids=self.target_worker.last_token_ids[rows],
            committed_lens=committed,
            bounds=bounds,
        )

    def _verify(
        self,
        batch: ScheduleBatch,
        drafted: DraftedRows,
        proposal: Drafted,
        coins: Coins | None,
    ) -> Verified:
        tree, runner = proposal.tree, self.target_runner
        forward_batch = self._verify_batch(drafted, tree)
        output = runner.forward(forward_batch)
        self._adjust(self._info(batch), output.next_token_logits)
        accept = self._accept(batch, output.next_token_logits, drafted, proposal, coins)
        slots = forward_batch.out_cache_loc
        compaction = compact(accept, slots, self.shape.num_draft_tokens)
        if not self.shape.is_chain:
            runner.token_to_kv_pool.move(compaction.from_slots, compaction.to_slots)
        return Verified(output=output, accept=accept, compaction=compaction)

    def _verify_batch(self, drafted: DraftedRows, tree: DraftTree) -> ForwardBatch:
        runner, w = self.target_runner, self.shape.num_draft_tokens
        b = drafted.rows.shape[0]
        table = runner.req_to_token_pool.req_to_token
        columns = drafted.committed_lens.unsqueeze(1) + torch.arange(w, device=self.device)
        seq_lens = drafted.committed_lens + w
        mask = None
        if not self.shape.is_chain:
            mask = window_mask(tree.is_ancestor, seq_lens, sum(drafted.bounds) + b * w)
        positions = tree_positions(tree, drafted.committed_lens)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=b,
            input_ids=tree.token_ids.flatten(),
            positions=positions.clamp(max=self.model_config.context_len - 1),
            req_pool_indices=drafted.rows,
            seq_lens=seq_lens,
            seq_lens_cpu=[bound + w for bound in drafted.bounds],
            out_cache_loc=table[drafted.rows.unsqueeze(1), columns].flatten().to(torch.int64),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            extend_seq_lens=torch.full((b,), w, dtype=torch.int64, device=self.device),
            extend_prefix_lens=drafted.committed_lens,
            extend_seq_lens_cpu=[w] * b,
            extend_prefix_lens_cpu=drafted.bounds,
            capture_hidden_mode=self.feature_mode,
            spec_info=TreeAttention(tokens_per_req=w, custom_mask=mask),
        )

    def _adjust(self, info: SamplingBatchInfo, logits: torch.Tensor) -> None:
        """Apply wishes to logits [b * w, V] in place.

        Bias counts at every node. What depends on generated tokens is right at the root only, and
        applied there only: see `limit_to_root`.
        """
        if info.logit_bias is not None:
            adjust_logits(logits, self._repeated_info(info))
        if info.host_dependent_rows:
            roots = logits.view(info.batch_size, -1, logits.shape[1])[:, 0]
            adjust_logits(roots, replace(info, logit_bias=None))

    @staticmethod
    def _info(batch: ScheduleBatch) -> SamplingBatchInfo:
        if batch.sampling_info is None:
            raise RuntimeError("the batch has no sampling info")
        return batch.sampling_info

    def _repeated_info(self, info: SamplingBatchInfo) -> SamplingBatchInfo:
        """The static wishes of each request for all its nodes; kept as long as `info` is."""
        if self._repeated is None or self._repeated[0] is not info:
            self._repeated = (info, info.repeated(self.shape.num_draft_tokens))
        return self._repeated[1]

    # -- acceptance -----------------------------------------------------------------------------

    def _accept(
        self,
        batch: ScheduleBatch,
        logits: torch.Tensor,
        drafted: DraftedRows,
        proposal: Drafted,
        coins: Coins | None,
    ) -> AcceptResult:
        info, tree = self._info(batch), proposal.tree
        best = argmax(logits).view(tree.token_ids.shape)
        if coins is None:
            accept, at_root = self._accept_equal(tree, best), best[:, :1]
        else:
            probs = self._target_probs(info, logits, best)
            accept = self._accept_by_chance(drafted, proposal, probs, coins)
            at_root = best[:, :1]
            if info.host_dependent_rows:
                # A coin of its own use: that of acceptance has decided nothing in these rows.
                coin = coins.at(drafted.committed_lens + 1, CoinUse.TARGET)
                at_root = draw_targets(probs[:, :1], coin)
        limited = info.host_dependent_rows
        return limit_to_root(accept, limited, at_root) if limited else accept

    def _accept_by_chance(
        self,
        drafted: DraftedRows,
        proposal: Drafted,
        probs: torch.Tensor,
        coins: Coins,
    ) -> AcceptResult:
        """probs float32 [b, w, V]: the target's, rows sum to 1."""
        tree, d = proposal.tree, self.shape.max_accept_len
        after = drafted.committed_lens.unsqueeze(1) + 1  # place of the token behind the root
        places = after + torch.arange(d, device=self.device)
        if proposal.draft_probs is not None:
            return accept_by_rejection(
                tree.token_ids,
                probs,
                proposal.draft_probs,
                coins.at(places[:, :-1], CoinUse.ACCEPT),
                coins.at(places, CoinUse.TARGET),
            )
        if self.rule.is_exact_draw:
            choices = draw_targets(probs, coins.at(after + tree.depths, CoinUse.TARGET))
            return self._accept_equal(tree, choices)
        return accept_by_thresholds(
            tree,
            probs,
            coins.at(places[:, :-1], CoinUse.ACCEPT),
            coins.at(places, CoinUse.TARGET),
            self.rule.threshold_single,
            self.rule.threshold_acc,
        )

    def _accept_equal(self, tree: DraftTree, choices: torch.Tensor) -> AcceptResult:
        if self.shape.is_chain:
            return accept_chain(tree.token_ids, choices)
        return accept_tree(tree, choices, self.shape.max_accept_len)

    def _target_probs(
        self, info: SamplingBatchInfo, logits: torch.Tensor, best: torch.Tensor
    ) -> torch.Tensor:
        """float32 [b, w, V], rows sum to 1: one-hot for greedy requests."""
        b, w = best.shape
        repeated = self._repeated_info(info)
        drawn = sampling_probs(logits, repeated)
        drawn = drawn / drawn.sum(dim=-1, keepdim=True)
        if len(info.sampled_rows) == b:
            return drawn.view(b, w, -1)
        probs = torch.zeros_like(logits).scatter_(1, best.view(-1, 1), 1.0)
        probs[repeated.sampled_index] = drawn
        return probs.view(b, w, -1)

    # -- result ---------------------------------------------------------------------------------

    def _result(self, batch: ScheduleBatch, verified: Verified) -> GenerationBatchResult:
        accept = verified.accept
        d = accept.output_ids.shape[1]
        output = verified.output
        request = batch.logprob_request()
        if request is not None:
            path_logits = output.next_token_logits[verified.compaction.rows.flatten()]
            output = LogitsProcessorOutput(next_token_logits=path_logits)
            fill_logprobs(
                output,
                self._info(batch).repeated(d),
                request.repeated(d),
                accept.output_ids.view(-1),
            )
        result = GenerationBatchResult(
            next_token_ids=accept.output_ids,
            accept_lens=accept.accept_lens,
            logits_output=output,
            nan_rows=self._nan_rows(verified),
        )
        result.start_copy()
        return result

    @staticmethod
    def _nan_rows(verified: Verified) -> torch.Tensor:
        """bool [b]: requests with NaN on their accepted path, which ends them."""
        is_nan = nan_rows(verified.output.next_token_logits)
        on_path = is_nan[verified.compaction.rows]
        return on_path.any(dim=1)
