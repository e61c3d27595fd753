"""What all speculative workers share: the target's verification of drafted trees.

Owns the per-row lengths on the device and the acceptance of drafts. Subclasses supply the trees
and take note of what was accepted. A decode step is

    propose -> verify (one forward pass of the target) -> accept -> catch up

and yields 1 to d tokens a request. The scheduler has taken slots behind the committed ones of each
request (`step_shape`); which of them hold accepted tokens is known on the device at once and on
the host when the step's result is read. Scheduler thread only; collective over the TP ranks.

Sampling wishes count at every drafted node as they would in a plain step behind it
(`verify_sampling`). Masks of a grammar are made on the host, for which the step reads the drafts
back, while the target runs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang.srt.environ import envs
from sglang.srt.layers.dispatch import checked_argmax, send_to_host
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import fill_logprobs, nan_rows
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
from sglang.srt.models.base import VerifiedRows
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.acceptance import (
    CoinUse,
    accept_by_rejection,
    accept_by_thresholds,
    accept_chain,
    accept_simulated,
    accept_tree,
)
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows
from sglang.srt.speculative.eagle_info import (
    AcceptResult,
    Compaction,
    DraftTree,
    EagleExtendInput,
    StepPlaces,
)
from sglang.srt.speculative.eagle_utils import (
    compact,
    compact_chain,
    extend_after_verify,
    root_tree,
    tree_positions,
)
from sglang.srt.speculative.fixed_tensors import counting, filled
from sglang.srt.speculative.spec_graph_runner import GraphKind, SpecGraphRunner
from sglang.srt.speculative.spec_info import NO_TOKEN, DraftShape
from sglang.srt.speculative.spec_step import TargetPass, Verified
from sglang.srt.speculative.step_ops import RowTables, pack_report, step_ops
from sglang.srt.speculative.tree_attention import TreeAttention
from sglang.srt.speculative.verify_sampling import (
    VerifySampling,
    adjust_verify_logits,
    fill_tree_masks,
    target_choices,
    target_probs,
)

logger = logging.getLogger(__name__)


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


class BaseSpecWorker(ABC):
    """A `BatchWorker` whose decode steps verify drafts; see the module docstring."""

    def __init__(
        self, target_worker: TpModelWorker, shape: DraftShape, rule: AcceptanceRule
    ) -> None:
        self.target_worker = target_worker
        self.shape = shape
        self.rule = rule
        self.device = target_worker.device
        rows = target_worker.model_runner.req_to_token_pool.num_rows
        # int64 by row: tokens whose KV is there.
        self.committed_lens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._tables = RowTables(
            req_to_token=target_worker.model_runner.req_to_token_pool.req_to_token,
            committed_lens=self.committed_lens,
            last_token_ids=target_worker.last_token_ids,
            padding_row=target_worker.model_runner.req_to_token_pool.padding_row,
        )
        self._ops = step_ops(self.device)
        self._generator = torch.Generator()
        self._generator.manual_seed((torch.initial_seed() + 1) % 2**63)
        self._sampling: VerifySampling | None = None
        self.graphs: SpecGraphRunner | None = None  # by `capture_graphs`
        self._simulated_len = envs.SGLANG_SIMULATE_ACC_LEN.get()
        if self._simulated_len is not None:
            logger.warning(
                "SGLANG_SIMULATE_ACC_LEN=%s: drafts are accepted BLINDLY, OUTPUT IS GARBAGE. "
                "For measurements only.",
                self._simulated_len,
            )

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
        """Take note of a prefill step. next_ids int64 [b]: what was sampled; features [n, ...]:
        the target's hidden states."""

    @abstractmethod
    def _propose(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        """Draft a tree below each root; with `coins`, draw the drafts of a chain."""

    @abstractmethod
    def _catch_up(self, drafted: DraftedRows, path: EagleExtendInput, verified: Verified) -> None:
        """Take note of what was accepted, on the device alone."""

    @property
    def feature_mode(self) -> CaptureHiddenMode:
        """Which hidden states of the target are needed."""
        return CaptureHiddenMode.NULL

    # -- prefill --------------------------------------------------------------------------------

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        worker, runner = self.target_worker, self.target_runner
        forward_batch = worker.build_forward_batch(batch, self.feature_mode)
        output = runner.forward(forward_batch)
        features, output.hidden_states = output.hidden_states, None
        next_ids = runner.sample(output, forward_batch)
        rows = forward_batch.req_pool_indices
        worker.last_token_ids[rows] = next_ids
        self.committed_lens[rows] = forward_batch.seq_lens
        self._catch_up_prefill(batch, forward_batch, next_ids, features)
        result = GenerationBatchResult(
            next_token_ids=next_ids, logits_output=output, nan_rows=runner.nan_rows(output)
        )
        result.start_copy()
        return result

    @staticmethod
    def _following_ids(batch: ScheduleBatch, next_ids: torch.Tensor, count: int) -> torch.Tensor:
        """int64 [b, count]: what follows each request's last token, as far as it is known.

        In a chunk the prompt goes on; else there is the sampled token alone. NO_TOKEN behind.
        """
        if count == 1 and not any(batch.chunked):
            return next_ids.unsqueeze(1)
        known = torch.full((len(batch.reqs), count), NO_TOKEN, dtype=torch.int64)
        for index, req in enumerate(batch.reqs):
            if batch.chunked[index]:
                end = batch.prefix_lens[index] + batch.extend_lens[index]
                ahead = req.fill_ids[end : end + count].tolist()
                known[index, : len(ahead)] = torch.tensor(ahead)
        following = current_platform().to_device_async(known)
        first = torch.where(following[:, 0] == NO_TOKEN, next_ids, following[:, 0])
        return torch.cat([first.unsqueeze(1), following[:, 1:]], dim=1)

    # -- decode ---------------------------------------------------------------------------------

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        info = self._info(batch)
        steps_aside = self.steps_aside(len(batch))
        if self.graphs is not None and self.graphs.can_run(len(batch)):
            if not steps_aside:
                return self._decode_captured(batch, info, self.graphs)
            if self._wants_argmax_only(batch, info):
                return self._packed_result(self.graphs.run_aside(batch.req_pool_indices))
        drafted = self._drafted_rows(batch)
        coins = None if info.is_all_greedy else Coins(self._generator, info)
        drawn_coins = coins if self.rule.use_rejection_sampling else None
        if steps_aside:
            proposal = Drafted(tree=root_tree(drafted.root_ids))
        else:
            proposal = self._propose(batch, drafted, drawn_coins)
        host_tree = _HostTree(proposal.tree) if info.grammars else None
        passed = self.run_target(drafted, proposal.tree)
        verified = self._judge(batch, drafted, proposal, coins, passed, host_tree)
        self.commit(drafted, verified)
        return self._result(batch, verified)

    def _decode_captured(
        self, batch: ScheduleBatch, info: SamplingBatchInfo, graphs: SpecGraphRunner
    ) -> GenerationBatchResult:
        """The same by graphs: one where only the argmax counts, else with acceptance between."""
        rows = batch.req_pool_indices
        wants_argmax_only = self._wants_argmax_only(batch, info)
        if self.captures_draft and wants_argmax_only:
            simulated = self._simulated_on_host(len(rows))
            return self._packed_result(graphs.run_whole(rows, simulated_drafts=simulated))
        coins = None if info.is_all_greedy else Coins(self._generator, info)
        drawn_coins = coins if self.rule.use_rejection_sampling else None
        if self.captures_draft and drawn_coins is None:
            front = graphs.run_front(rows)
            drafted, proposal, passed = front.drafted, Drafted(tree=front.tree), front.passed
            host_tree = _HostTree(proposal.tree) if info.grammars else None
        else:
            drafted = self._drafted_rows(batch)
            proposal = self._propose(batch, drafted, drawn_coins)
            if wants_argmax_only:
                simulated = self._simulated_on_host(len(rows))
                return self._packed_result(graphs.run_whole(rows, proposal.tree, simulated))
            host_tree = _HostTree(proposal.tree) if info.grammars else None
            passed = graphs.run_target(rows, proposal.tree)
        verified = self._judge(batch, drafted, proposal, coins, passed, host_tree)
        graphs.run_commit(verified.accept)
        return self._result(batch, verified)

    @staticmethod
    def _wants_argmax_only(batch: ScheduleBatch, info: SamplingBatchInfo) -> bool:
        """Whether logits count as they are, and nothing of them is reported."""
        is_adjusted = info.logit_bias is not None or info.penalties is not None
        is_limited = bool(info.grammars or info.min_new_tokens)
        is_reported = batch.traits.wants_logprobs or batch.traits.wants_hidden_states
        return info.is_all_greedy and not (is_adjusted or is_limited or is_reported)

    def _drafted_rows(self, batch: ScheduleBatch) -> DraftedRows:
        rows = current_platform().to_device_async(torch.from_numpy(batch.req_pool_indices.copy()))
        return self.drafted_at(rows, (batch.seq_lens - self.step_shape.max_tokens).tolist())

    # -- the parts of a step: see `SpecStep` ----------------------------------------------------

    @property
    def captures_draft(self) -> bool:
        """Whether there is a `draft` that runs on the device alone."""
        return False

    def steps_aside(self, num_reqs: int) -> bool:
        """Whether a step of so many requests drafts nothing, and takes one token of each."""
        return False

    def capture_graphs(self, batch_sizes: list[int], *, pad: bool, show_progress: bool) -> None:
        """Capture decode steps of these sizes, rising. Collective over the TP ranks."""
        pool = self.target_runner.req_to_token_pool
        self.graphs = SpecGraphRunner(
            self,
            kinds_of=self._graph_kinds,
            drafts=self.captures_draft,
            device=self.device,
            padding_row=pool.padding_row,
            batch_sizes=batch_sizes,
            pad=pad,
            simulates=self._simulated_len is not None,
            show_progress=show_progress,
        )

    def _graph_kinds(self, num_reqs: int) -> frozenset[GraphKind]:
        """The graphs that steps of so many requests may need."""
        if self.steps_aside(num_reqs):
            return frozenset({GraphKind.ASIDE})
        kinds = {GraphKind.WHOLE, GraphKind.COMMIT}
        if self.captures_draft:
            kinds.add(GraphKind.FRONT)
        if not self.captures_draft or self.rule.use_rejection_sampling:
            kinds.add(GraphKind.TARGET)  # drafts are made outside
        return frozenset(kinds)

    def drafted_at(self, rows: torch.Tensor, bounds: list[int] | None = None) -> DraftedRows:
        """See `SpecStep`."""
        places = self._ops.places(
            rows, self._tables, self.step_shape.num_slots, self.model_config.context_len - 1
        )
        return DraftedRows(rows=rows, places=places, bounds=self._bounds(places, bounds))

    def _bounds(self, places: StepPlaces, bounds: list[int] | None) -> list[int]:
        """Of the committed lengths: themselves where reading the device is free."""
        if self.device.type == "cpu":
            return places.lens[0].tolist()
        return bounds or [0] * places.lens.shape[1]

    def draft(self, drafted: DraftedRows) -> DraftTree:
        """See `SpecStep`. Raises NotImplementedError without `captures_draft`."""
        raise NotImplementedError

    def run_target(self, drafted: DraftedRows, tree: DraftTree) -> TargetPass:
        """See `SpecStep`."""
        forward_batch = self._verify_batch(drafted, tree)
        output = self.target_runner.forward(forward_batch)
        return TargetPass(output=output, slots=forward_batch.out_cache_loc)

    def accept_argmax(
        self, tree: DraftTree, passed: TargetPass, simulated_drafts: torch.Tensor | None
    ) -> tuple[Verified, torch.Tensor]:
        """See `SpecStep`."""
        logits, width = passed.output.next_token_logits, tree.token_ids.shape[1]
        if self.shape.is_chain or width == 1:
            drafts = simulated_drafts if width > 1 else None
            accept, report = self._ops.accept_best(logits, tree.token_ids, drafts)
            compaction = self.compaction(accept, passed.slots)
        else:
            best, is_unusable = checked_argmax(logits)
            accept = self._accept_equal(tree, best.view(tree.token_ids.shape), simulated_drafts)
            compaction = self.compaction(accept, passed.slots)
            report = pack_report(accept, is_unusable[compaction.rows].any(dim=1))
        return Verified(output=passed.output, accept=accept, compaction=compaction), report

    def compaction(self, accept: AcceptResult, slots: torch.Tensor) -> Compaction:
        """See `SpecStep`."""
        b, d = accept.accept_index.shape
        w = slots.shape[0] // b
        if self.shape.is_chain or w == 1:
            return compact_chain(slots, w, d)
        return compact(accept, slots, w)

    def commit(self, drafted: DraftedRows, verified: Verified) -> None:
        """See `SpecStep`."""
        accept, compaction = verified.accept, verified.compaction
        runner = self.target_runner
        runner.model.commit_verified(
            runner.token_to_kv_pool,
            VerifiedRows(
                num_nodes=verified.output.next_token_logits.shape[0] // drafted.rows.shape[0],
                rows=drafted.rows,
                nodes=accept.accept_index,
                lens=accept.accept_lens,
                padding_row=runner.req_to_token_pool.padding_row,
            ),
        )
        if not self.shape.is_chain:
            runner.token_to_kv_pool.move(compaction.from_slots, compaction.to_slots)
        ends = self._ops.advance(drafted.rows, drafted.committed_lens, accept, self._tables)
        states = verified.output.hidden_states
        path = extend_after_verify(accept, compaction, states, drafted.places, ends)
        self._catch_up(drafted, path, verified)

    # -- verification ---------------------------------------------------------------------------

    def _judge(
        self,
        batch: ScheduleBatch,
        drafted: DraftedRows,
        proposal: Drafted,
        coins: Coins | None,
        passed: TargetPass,
        host_tree: _HostTree | None,
    ) -> Verified:
        """From the target's logits to what is accepted. `host_tree`: where there are grammars."""
        sampling = self._verify_sampling(batch, proposal.tree.token_ids.shape[1])
        masks = None if host_tree is None else host_tree.fill_masks(batch, sampling)
        logits = passed.output.next_token_logits
        adjust_verify_logits(logits, sampling, proposal.tree, drafted.committed_lens, masks)
        accept = self._accept(sampling, logits, drafted, proposal, coins)
        compaction = self.compaction(accept, passed.slots)
        return Verified(output=passed.output, accept=accept, compaction=compaction)

    def _verify_batch(self, drafted: DraftedRows, tree: DraftTree) -> ForwardBatch:
        runner = self.target_runner
        b, w = tree.token_ids.shape
        places = drafted.places
        if self.shape.is_chain:
            mask, positions = None, places.positions[:, :w].flatten()
        else:
            mask, positions = tree.is_ancestor, tree_positions(tree, drafted.committed_lens)
            positions = positions.clamp(max=self.model_config.context_len - 1)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=b,
            input_ids=tree.token_ids.flatten(),
            positions=positions,
            req_pool_indices=drafted.rows,
            seq_lens=places.lens[w],
            seq_lens_cpu=[bound + w for bound in drafted.bounds],
            out_cache_loc=places.slots[:, :w].flatten(),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            extend_seq_lens=filled(b, w, self.device),
            extend_prefix_lens=drafted.committed_lens,
            extend_seq_lens_cpu=[w] * b,
            extend_prefix_lens_cpu=drafted.bounds,
            capture_hidden_mode=self.feature_mode,
            spec_info=TreeAttention(tokens_per_req=w, custom_mask=mask),
        )

    @staticmethod
    def _info(batch: ScheduleBatch) -> SamplingBatchInfo:
        if batch.sampling_info is None:
            raise RuntimeError("the batch has no sampling info")
        return batch.sampling_info

    def _verify_sampling(self, batch: ScheduleBatch, num_nodes: int) -> VerifySampling:
        """The wishes of `batch` for all its nodes; kept as long as its composition is."""
        info, kept = self._info(batch), self._sampling
        if kept is None or kept.base is not info or kept.num_draft_tokens != num_nodes:
            prompt_lens = [len(req.origin_input_ids) for req in batch.reqs]
            self._sampling = kept = VerifySampling.create(info, num_nodes, prompt_lens)
        return kept

    # -- acceptance -----------------------------------------------------------------------------

    def _accept(
        self,
        sampling: VerifySampling,
        logits: torch.Tensor,
        drafted: DraftedRows,
        proposal: Drafted,
        coins: Coins | None,
    ) -> AcceptResult:
        """logits float32 [b * w, V]: the target's, adjusted."""
        tree = proposal.tree
        d = min(self.shape.max_accept_len, tree.token_ids.shape[1])
        # Place in its sequence of the token behind the root.
        after = drafted.committed_lens.unsqueeze(1) + 1
        if coins is None or (self.rule.is_exact_draw and proposal.draft_probs is None):
            use = CoinUse.TARGET
            at_nodes = None if coins is None else coins.at(after + tree.depths, use)
            choices = target_choices(logits, sampling, at_nodes)
            return self._accept_equal(tree, choices, self._simulated_drafts(len(after), d))
        probs = target_probs(logits, sampling)
        places = after + counting(d, self.device)
        accept_coins = coins.at(places[:, :-1], CoinUse.ACCEPT)
        final_coins = coins.at(places, CoinUse.TARGET)
        if proposal.draft_probs is not None:
            return accept_by_rejection(
                tree.token_ids, probs, proposal.draft_probs, accept_coins, final_coins
            )
        return accept_by_thresholds(
            tree,
            probs,
            accept_coins,
            final_coins,
            self.rule.threshold_single,
            self.rule.threshold_acc,
        )

    def _accept_equal(
        self, tree: DraftTree, choices: torch.Tensor, simulated_drafts: torch.Tensor | None
    ) -> AcceptResult:
        """choices int64 [b, w]: the target's, which drafts must equal."""
        d = self.shape.max_accept_len
        is_root_only = tree.token_ids.shape[1] == 1
        if simulated_drafts is not None and not is_root_only:
            return accept_simulated(tree.token_ids, choices, simulated_drafts, d)
        if self.shape.is_chain or is_root_only:
            return accept_chain(tree.token_ids, choices)
        return accept_tree(tree, choices, d)

    def _simulated_drafts(self, num_reqs: int, max_accept_len: int) -> torch.Tensor | None:
        drafts = None if max_accept_len == 1 else self._simulated_on_host(num_reqs)
        return None if drafts is None else current_platform().to_device_async(drafts)

    def _simulated_on_host(self, num_reqs: int) -> torch.Tensor | None:
        """int64 [b]: numbers of drafts, such that the mean accept length is the one asked for."""
        if self._simulated_len is None:
            return None
        wanted = min(max(self._simulated_len, 1.0), float(self.shape.max_accept_len))
        drawn = torch.rand(num_reqs, generator=self._generator)
        drafts = (drawn + (wanted - 1.0)).floor().to(torch.int64)
        return drafts.clamp_(max=self.shape.max_accept_len - 1)

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

    def _packed_result(self, packed: torch.Tensor) -> GenerationBatchResult:
        """packed int64 [b, d + 2]: see `SpecGraphRunner.run_whole`. One copy to the host."""
        on_host = send_to_host(packed)
        d = packed.shape[1] - 2
        result = GenerationBatchResult(
            next_token_ids=on_host[:, :d],
            accept_lens=on_host[:, d],
            nan_rows=on_host[:, d + 1],
            logits_output=LogitsProcessorOutput(next_token_logits=packed[:, :0].float()),
        )
        result.start_copy()
        return result

    @staticmethod
    def _nan_rows(verified: Verified) -> torch.Tensor:
        """bool [b]: requests with NaN on their accepted path, which ends them."""
        is_nan = nan_rows(verified.output.next_token_logits)
        on_path = is_nan[verified.compaction.rows]
        return on_path.any(dim=1)


class _HostTree:
    """A drafted tree on its way to the host, where grammars are."""

    def __init__(self, tree: DraftTree) -> None:
        self._token_ids = send_to_host(tree.token_ids)
        self._parents = send_to_host(tree.parents)
        self._arrived = current_platform().event()
        self._arrived.record()

    def fill_masks(self, batch: ScheduleBatch, sampling: VerifySampling) -> np.ndarray | None:
        """See `fill_tree_masks`. The host has seen every token up to the roots."""
        self._arrived.synchronize()
        num_generated = [len(req.output_ids) for req in batch.reqs]
        return fill_tree_masks(
            sampling.base, self._token_ids.tolist(), self._parents.tolist(), num_generated
        )
