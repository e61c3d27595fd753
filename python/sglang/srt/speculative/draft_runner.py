"""The draft model of a speculative worker: catching up with the target, and proposing tokens.

Owns the draft's `ModelRunner` (weights, KV buffers, attention backend) and, per row of the request
table, where drafting goes on from. Slots and rows are the target's: slot p of a request holds the
target's KV and the draft's KV of position p, in buffers of their own. Decides nothing about
acceptance. Scheduler thread only; collective over the TP ranks like every forward pass.

Kinds of draft:

* `EagleDrafting`: entry p is made of token p + 1 and the target's hidden states of position p. The
  draft has always run one token further than the target, so its first proposal costs nothing.
* `StandaloneDrafting`: a small language model; entry p is made of token p, and the first proposal
  costs a forward pass over the last known token.
* `multi_layer_drafting`: like the first, with a layer and a runner of its own for each step.

What a proposal writes behind the committed slots is scratch: catching up overwrites what counts.

    slots  [0, committed)   [committed, committed + num_slots)
            final            proposals: k entries a draft step
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.configs.draft_config import stacked_mtp_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import draw, sampling_probs
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.acceptance import CoinUse, to_target_vocab
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.eagle_info import (
    DraftFrontier,
    DraftTree,
    EagleExtendInput,
    StepPlaces,
)
from sglang.srt.speculative.eagle_utils import (
    chain_tree,
    extend_paths,
    organize_draft_results,
    parent_rows,
    select_top_k,
)
from sglang.srt.speculative.fixed_tensors import filled
from sglang.srt.speculative.spec_info import DraftShape
from sglang.srt.speculative.step_ops import DraftTables, step_ops
from sglang.srt.speculative.tree_attention import TreeAttention, branch_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """What is proposed. `draft_probs` float32 [b, w - 1, V]: of what drafts were drawn from."""

    tree: DraftTree
    draft_probs: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRows:
    """The requests of a decode step, on the device.

    `rows` int64 [b]: of the request table. `bounds`: their committed lengths or more, on the host
    (exact where reading the device is free).
    """

    rows: torch.Tensor
    places: StepPlaces
    bounds: list[int]

    @property
    def root_ids(self) -> torch.Tensor:
        """int64 [b]: the last known tokens."""
        return self.places.root_ids

    @property
    def committed_lens(self) -> torch.Tensor:
        """int64 [b]: tokens whose KV is there, which is the position of the root."""
        return self.places.lens[0]

    def first(self, num_reqs: int) -> DraftedRows:
        """The first requests of them."""
        return DraftedRows(
            rows=self.rows[:num_reqs],
            places=self.places.first(num_reqs),
            bounds=self.bounds[:num_reqs],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """What drafts that read further ahead must know of the requests of a prefill step.

    `following_ids` int64 [b, `Drafting.lookahead`], on the device: what comes after each request's
    last token, NO_TOKEN where it is unknown. `num_own`: slots right before those of the step that
    earlier steps of the request wrote, and that are not the prefix cache's.
    """

    following_ids: torch.Tensor
    num_own: list[int]


class Drafting(ABC):
    """Forward passes of a draft model; see the module docstring."""

    def __init__(self, runner: ModelRunner, shape: DraftShape) -> None:
        self.model_runner = runner
        self.shape = shape
        self.device = runner.device
        self._ops = step_ops(self.device)

    @property
    def runners(self) -> tuple[ModelRunner, ...]:
        """Those of all layers that are models of their own, in the order of the steps."""
        return (self.model_runner,)

    @property
    def lookahead(self) -> int:
        """Tokens after its own, at most, that an entry of the draft's KV is a function of."""
        return 1

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Slots behind the committed ones that drafting writes, per request."""

    @abstractmethod
    def after_prefill(
        self,
        batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
        prompt: PromptState | None = None,
    ) -> None:
        """Run the target's prefill step `batch` through the draft.

        next_ids int64 [b]: what follows each request's last token: sampled, or the next token of
        the prompt in a chunk with more to come. features [n, ...]: the target's hidden states.
        `prompt`: needed where `lookahead` is more than 1.
        """

    @abstractmethod
    def after_verify(self, drafted: DraftedRows, path: EagleExtendInput) -> None:
        """Write the draft's KV of the accepted path."""

    @abstractmethod
    def propose(
        self, drafted: DraftedRows, coins: Coins | None, info: SamplingBatchInfo | None
    ) -> Drafted:
        """Draft a tree below each root. `coins`: draw the drafts (chains only), else the best."""

    # -- shared ---------------------------------------------------------------------------------

    def _prefill_batch(self, batch: ForwardBatch, token_ids: torch.Tensor) -> ForwardBatch:
        """The target's prefill step `batch` over the draft's KV, with `token_ids` int64 [n]."""
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=batch.batch_size,
            input_ids=token_ids,
            positions=batch.positions,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            out_cache_loc=batch.out_cache_loc,
            req_to_token_pool=batch.req_to_token_pool,
            token_to_kv_pool=self.model_runner.token_to_kv_pool,
            extend_seq_lens=batch.extend_seq_lens,
            extend_prefix_lens=batch.extend_prefix_lens,
            extend_seq_lens_cpu=batch.extend_seq_lens_cpu,
            extend_prefix_lens_cpu=batch.extend_prefix_lens_cpu,
            hicache_consumer_index=batch.hicache_consumer_index,
        )

    def _step_batch(
        self,
        drafted: DraftedRows,
        token_ids: torch.Tensor,
        hidden_states: torch.Tensor | None,
        *,
        position: int,
        first_slot: int,
        attention: TreeAttention | None,
    ) -> ForwardBatch:
        """One draft step of k = `attention.tokens_per_req` branches (1 without).

        The new tokens have position committed + `position` and slots from `first_slot` on.
        """
        k = 1 if attention is None else attention.tokens_per_req
        places, b = drafted.places, drafted.rows.shape[0]
        positions, slots = places.step_positions[position], places.step_slots[first_slot]
        if k > 1:
            positions = positions.repeat_interleave(k)
            slots = places.slots[:, first_slot : first_slot + k].flatten()
        lens = [bound + first_slot + k for bound in drafted.bounds]
        common: dict[str, Any] = {
            "batch_size": b,
            "input_ids": token_ids.flatten(),
            "positions": positions,
            "req_pool_indices": drafted.rows,
            "seq_lens": places.lens[first_slot + k],
            "seq_lens_cpu": lens,
            "out_cache_loc": slots,
            "req_to_token_pool": self.model_runner.req_to_token_pool,
            "token_to_kv_pool": self.model_runner.token_to_kv_pool,
            "capture_hidden_mode": CaptureHiddenMode.LAST,
            "input_hidden_states": hidden_states,
        }
        if attention is None:
            return ForwardBatch(forward_mode=ForwardMode.DECODE, **common)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            extend_seq_lens=filled(b, k, self.device),
            extend_prefix_lens=places.lens[first_slot],
            extend_seq_lens_cpu=[k] * b,
            extend_prefix_lens_cpu=[bound + first_slot for bound in drafted.bounds],
            spec_info=attention,
            **common,
        )

    def _top_k(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(probabilities float32 [r, k], target ids int64 [r, k]) of logits [r, V_d]."""
        probs, ids = torch.softmax(logits.float(), dim=-1).topk(self.shape.topk, dim=-1)
        hot = self._hot_token_id
        return probs, ids if hot is None else hot[ids]

    @property
    def _hot_token_id(self) -> torch.Tensor | None:
        """int64 [V_d]: the token that each id of the draft stands for; None: the id itself."""
        model = self.model_runner.model
        return model.hot_token_id if isinstance(model, EagleDraftModel) else None

    def _grow_chain(
        self,
        drafted: DraftedRows,
        token_ids: torch.Tensor,
        hidden: torch.Tensor | None,
        *,
        first_slot: int,
        first_position: int,
    ) -> DraftTree:
        """The most likely chain that begins with the first two columns of `token_ids`.

        int64 [b, w]; the others are written. All else as for `_grow`.
        """
        for step in range(self.shape.num_steps - 1):
            output = self.model_runner.forward(
                self._step_batch(
                    drafted,
                    token_ids[:, step + 1],
                    hidden,
                    position=first_position + step,
                    first_slot=first_slot + step,
                    attention=None,
                )
            )
            hidden = output.hidden_states if hidden is not None else None
            logits = output.next_token_logits
            self._ops.write_best(logits, self._hot_token_id, token_ids[:, step + 2])
        return chain_tree(token_ids)

    def _grow(
        self,
        drafted: DraftedRows,
        frontier: DraftFrontier,
        hidden: torch.Tensor | None,
        *,
        first_slot: int,
        first_position: int,
    ) -> DraftTree:
        """Expand the first frontier for the remaining steps and choose what is verified.

        For trees; see `_grow_chain`. hidden [b, H]: the state that the first frontier came from.
        Its nodes get the positions committed + `first_position` and slots from `first_slot` on.
        """
        k = self.shape.topk
        steps, paths = [frontier], None
        for step in range(1, self.shape.num_steps):
            rows = parent_rows(step - 1, frontier)
            states = None if hidden is None else hidden.index_select(0, rows)
            paths = extend_paths(paths, frontier)
            output = self.model_runner.forward(
                self._step_batch(
                    drafted,
                    frontier.token_ids,
                    states,
                    position=first_position + step - 1,
                    first_slot=first_slot + (step - 1) * k,
                    attention=branch_attention(paths),
                )
            )
            hidden = output.hidden_states if hidden is not None else None
            probs, ids = self._top_k(output.next_token_logits)
            frontier = select_top_k(step, probs, ids, frontier)
            steps.append(frontier)
        return organize_draft_results(steps, drafted.root_ids, self.shape.num_draft_tokens)

    def _draw_chain(
        self,
        drafted: DraftedRows,
        logits: torch.Tensor,
        hidden: torch.Tensor | None,
        coins: Coins,
        info: SamplingBatchInfo,
        *,
        first_slot: int,
        first_position: int,
    ) -> Drafted:
        """A chain whose tokens are drawn from the draft's distributions; logits float32 [b, V_d]
        and hidden [b, H]: of the first one."""
        tokens, probs = [drafted.root_ids], []
        for step in range(self.shape.num_steps):
            q = self._draft_probs(logits, info)
            coin = coins.at(drafted.committed_lens + 1 + step, CoinUse.DRAFT)
            tokens.append(draw(q, coin))
            probs.append(q / q.sum(dim=-1, keepdim=True))
            if step + 1 == self.shape.num_steps:
                break
            output = self.model_runner.forward(
                self._step_batch(
                    drafted,
                    tokens[-1],
                    hidden,
                    position=first_position + step,
                    first_slot=first_slot + step,
                    attention=None,
                )
            )
            logits = output.next_token_logits
            hidden = output.hidden_states if hidden is not None else None
        return Drafted(
            tree=chain_tree(torch.stack(tokens, dim=1)), draft_probs=torch.stack(probs, dim=1)
        )

    def _draft_probs(self, logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
        """float32 [b, V], target vocabulary: what each request's draft is drawn from."""
        logits = logits.float()
        probs = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        if info.sampled_rows:
            probs[info.sampled_index] = sampling_probs(logits, info)
        hot = self._hot_token_id
        return probs if hot is None else to_target_vocab(probs, hot, info.vocab_size)


class EagleDrafting(Drafting):
    """EAGLE, EAGLE3 and MTP drafts."""

    def __init__(self, runner: ModelRunner, shape: DraftShape, *, draws: bool = False) -> None:
        """`draws`: drafts will be drawn from the draft's distributions."""
        super().__init__(runner, shape)
        rows, k = runner.req_to_token_pool.num_rows, shape.topk
        # The outcome of the last catching up, by row of the request table.
        self._probs = torch.zeros((rows, k), dtype=torch.float32, device=self.device)
        width = self._draft_vocab_size() if draws else 0
        self._logits = torch.zeros((rows, width), dtype=torch.float32, device=self.device)
        self._tables = DraftTables(
            token_ids=torch.zeros((rows, k), dtype=torch.int64, device=self.device),
            hidden=torch.zeros(
                (rows, runner.model_config.hidden_size), dtype=runner.dtype, device=self.device
            ),
        )

    def _draft_vocab_size(self) -> int:
        model = self.model_runner.model
        if not isinstance(model, EagleDraftModel):
            raise TypeError(f"{type(model).__name__} is no EAGLE draft")
        return model.draft_config.draft_vocab_size

    @property
    def num_slots(self) -> int:
        return self.shape.topk * (self.shape.num_steps - 1)

    def after_prefill(
        self,
        batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
        prompt: PromptState | None = None,
    ) -> None:
        """See the base class."""
        if batch.extend_seq_lens is None or features is None:
            raise RuntimeError("a prefill step with the target's hidden states is needed")
        ends = batch.extend_seq_lens.cumsum(0) - 1
        token_ids = batch.input_ids.roll(-1).index_copy_(0, ends, next_ids)
        draft_batch = self._prefill_batch(batch, token_ids)
        draft_batch.capture_hidden_mode = CaptureHiddenMode.LAST
        draft_batch.input_hidden_states = features
        output = self.model_runner.forward(draft_batch)
        self._remember(batch.req_pool_indices, output, None)

    def after_verify(self, drafted: DraftedRows, path: EagleExtendInput) -> None:
        """See the base class: the tokens after each accepted one, with the target's features."""
        batch = catch_up_batch(self, drafted, path, path.token_ids)
        batch.input_hidden_states = path.features
        batch.logits_rows = path.last_rows
        # Of all rows: those that count are picked where they are kept.
        batch.capture_hidden_mode = CaptureHiddenMode.FULL
        self._remember(drafted.rows, self.model_runner.forward(batch), path.last_rows)

    def _remember(
        self, rows: torch.Tensor, output: LogitsProcessorOutput, state_rows: torch.Tensor | None
    ) -> None:
        """`state_rows`: of the hidden states, where they are more than the logits."""
        logits, states, tables = output.next_token_logits, output.hidden_states, self._tables
        if states is None:
            raise RuntimeError("the draft returned no hidden states")
        if self.shape.is_chain:
            # Of a single branch the score decides nothing.
            self._ops.remember(rows, logits, self._hot_token_id, states, state_rows, tables)
        else:
            self._probs[rows], tables.token_ids[rows] = self._top_k(logits)
            tables.hidden[rows] = states if state_rows is None else states[state_rows]
        if self._logits.shape[1]:
            self._logits[rows] = logits.float()

    def propose(
        self, drafted: DraftedRows, coins: Coins | None, info: SamplingBatchInfo | None
    ) -> Drafted:
        """See the base class."""
        rows, tables = drafted.rows, self._tables
        if coins is not None and info is not None:
            logits, hidden = self._logits[rows], tables.hidden[rows]
            return self._draw_chain(
                drafted, logits, hidden, coins, info, first_slot=0, first_position=0
            )
        if self.shape.is_chain:
            token_ids, hidden = self._ops.start_chain(
                rows, drafted.root_ids, tables, self.shape.num_draft_tokens
            )
            tree = self._grow_chain(drafted, token_ids, hidden, first_slot=0, first_position=0)
        else:
            frontier = select_top_k(0, self._probs[rows], tables.token_ids[rows], None)
            hidden = tables.hidden[rows]
            tree = self._grow(drafted, frontier, hidden, first_slot=0, first_position=0)
        return Drafted(tree=tree)


class StandaloneDrafting(Drafting):
    """A language model of its own as the draft."""

    @property
    def num_slots(self) -> int:
        return 1 + self.shape.topk * (self.shape.num_steps - 1)

    def after_prefill(
        self,
        batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
        prompt: PromptState | None = None,
    ) -> None:
        """See the base class: the same tokens, no logits wanted."""
        draft_batch = self._prefill_batch(batch, batch.input_ids)
        draft_batch.logits_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.model_runner.forward(draft_batch)

    def after_verify(self, drafted: DraftedRows, path: EagleExtendInput) -> None:
        """See the base class: the root and the accepted drafts, no logits wanted."""
        new_ids = path.token_ids.view(-1, path.tokens_per_req)
        token_ids = torch.cat([drafted.root_ids.unsqueeze(1), new_ids[:, :-1]], dim=1)
        batch = catch_up_batch(self, drafted, path, token_ids.flatten())
        batch.logits_rows = torch.empty(0, dtype=torch.int64, device=self.device)
        self.model_runner.forward(batch)

    def propose(
        self, drafted: DraftedRows, coins: Coins | None, info: SamplingBatchInfo | None
    ) -> Drafted:
        """See the base class."""
        output = self.model_runner.forward(
            self._step_batch(
                drafted, drafted.root_ids, None, position=0, first_slot=0, attention=None
            )
        )
        if coins is not None and info is not None:
            return self._draw_chain(
                drafted,
                output.next_token_logits,
                None,
                coins,
                info,
                first_slot=1,
                first_position=1,
            )
        logits = output.next_token_logits
        if self.shape.is_chain:
            roots = drafted.root_ids
            token_ids = roots.new_empty((len(roots), self.shape.num_draft_tokens))
            token_ids[:, 0] = roots
            self._ops.write_best(logits, self._hot_token_id, token_ids[:, 1])
            tree = self._grow_chain(drafted, token_ids, None, first_slot=1, first_position=1)
        else:
            frontier = select_top_k(0, *self._top_k(logits), None)
            tree = self._grow(drafted, frontier, None, first_slot=1, first_position=1)
        return Drafted(tree=tree)


def catch_up_batch(
    drafting: Drafting, drafted: DraftedRows, path: EagleExtendInput, token_ids: torch.Tensor
) -> ForwardBatch:
    """d tokens of each request over its committed slots; those not accepted are scratch."""
    runner = drafting.model_runner
    b, d = drafted.rows.shape[0], path.tokens_per_req
    return ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND,
        batch_size=b,
        input_ids=token_ids,
        positions=path.positions,
        req_pool_indices=drafted.rows,
        seq_lens=drafted.places.lens[d],
        seq_lens_cpu=[bound + d for bound in drafted.bounds],
        out_cache_loc=path.slots,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        extend_seq_lens=filled(b, d, drafting.device),
        extend_prefix_lens=drafted.committed_lens,
        extend_seq_lens_cpu=[d] * b,
        extend_prefix_lens_cpu=drafted.bounds,
    )


def draft_kv(runners: Sequence[ModelRunner]) -> tuple[KVCache, ModelConfig]:
    """The KV pool of all layers of a draft, and the configuration that it belongs to.

    Raises ValueError where several runners have buffers that are not layers of one pool.
    """
    first = runners[0]
    if len(runners) == 1:
        return first.token_to_kv_pool, first.model_config
    stack = first.token_to_kv_pool.stack
    pools = [runner.token_to_kv_pool for runner in runners]
    if stack is None or any(pool.stack is not stack for pool in pools):
        raise ValueError(f"the KV of {len(runners)} draft layers does not lie in one pool")
    return stack, stacked_mtp_config(first.model_config, stack.layer_num)
