"""CUDA graphs of speculative decode steps: capture at a ladder of batch sizes, replay padded.

A step is a few small forward passes and some hundred tiny kernels around a larger one, all launch
overhead at small batches. Per batch size there are some of these graphs:

    WHOLE   draft, verify, accept the argmax, commit: a greedy step with nothing to report
    FRONT   draft, verify               COMMIT   take note of what was accepted in between,
    TARGET  verify given drafts                  of sampled steps or adjusted logits
    ASIDE   WHOLE without drafts: one token of each request, the draft model kept up to date

Drafts that are made on the host are given to WHOLE too. Owns the static inputs, what passes from
FRONT or TARGET to COMMIT, and the graphs. Padding requests live in a row of the request table that
nobody else has: it is empty before every step, its slots are the dummy one. Weights are read where
they are, so in-place updates stay visible. Steps never wait for loads from the host cache, which
belong to prefill steps. Absent on CPU. Scheduler thread only; with several ranks everything is
collective.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.graph_capture import (
    GraphMemory,
    ReplayableGraph,
    capture,
    capture_sizes,
    size_table,
)
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.draft_runner import DraftedRows
from sglang.srt.speculative.eagle_info import AcceptResult, DraftTree
from sglang.srt.speculative.eagle_utils import chain_tree, root_tree
from sglang.srt.speculative.spec_step import SpecStep, TargetPass, Verified

logger = logging.getLogger(__name__)

# Verified tokens of the largest captured step unless a flag says otherwise: logits of a large
# vocabulary take half a gigabyte then, and larger steps are no longer bound by launches.
DEFAULT_MAX_TOKENS = 1024


class GraphKind(Enum):
    """See the module docstring."""

    WHOLE = "whole"
    FRONT = "front"
    TARGET = "target"
    COMMIT = "commit"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What lies before acceptance; overwritten by the next step."""

    drafted: DraftedRows
    tree: DraftTree
    passed: TargetPass

    def first(self, num_reqs: int) -> Front:
        """The part of the real requests."""
        drafted, tree, passed = self.drafted, self.tree, self.passed
        w = tree.token_ids.shape[1]
        states = passed.output.hidden_states
        return Front(
            drafted=drafted.first(num_reqs),
            tree=_first_trees(tree, num_reqs),
            passed=TargetPass(
                output=LogitsProcessorOutput(
                    next_token_logits=passed.output.next_token_logits[: num_reqs * w],
                    hidden_states=None if states is None else states[: num_reqs * w],
                ),
                slots=passed.slots[: num_reqs * w],
            ),
        )


@dataclass(slots=True)
class _Graphs:
    """Those of one batch size; outputs are overwritten by each replay."""

    graphs: dict[GraphKind, ReplayableGraph] = field(default_factory=dict)
    outputs: dict[GraphKind, Any] = field(default_factory=dict)


class SpecGraphRunner:
    """Captures at construction. See the module docstring."""

    def __init__(
        self,
        step: SpecStep,
        *,
        kinds_of: Callable[[int], frozenset[GraphKind]],
        drafts: bool,
        device: torch.device,
        padding_row: int,
        batch_sizes: list[int],
        pad: bool = True,
        simulates: bool = False,
        show_progress: bool = False,
    ) -> None:
        """`kinds_of`: the graphs of a number of requests; those of the numbers between two others
        are theirs. `batch_sizes`: rising; without `pad` only batches of exactly these sizes are
        replayed.

        `drafts`: WHOLE calls `step.draft`; else trees are given. `simulates`: accept as many
        drafts as the caller says (measurements).
        """
        self._step = step
        self._kinds_of = kinds_of
        self._drafts = drafts
        self._device = device
        self._padding_row = padding_row
        self.batch_sizes = batch_sizes
        self._exact_sizes = None if pad else frozenset(batch_sizes)
        self._size_of = size_table(batch_sizes)
        self._make_inputs(batch_sizes[-1], simulates)
        # [largest * w, ...]: what all sizes share of a target's pass, instead of keeping their own.
        self._buffers: dict[str, torch.Tensor] = {}
        self._graphs: dict[int, _Graphs] = {}
        self._size = 0  # captured size of the step that is being run
        self.num_steps = dict.fromkeys(GraphKind, 0)  # replays, for tests and reports
        self.memory = GraphMemory(device)  # for graphs that are captured later, too
        self._capture_all(show_progress)

    def _make_inputs(self, max_size: int, simulates: bool) -> None:
        shape = self._step.shape
        w, d = shape.num_draft_tokens, shape.max_accept_len

        def zeros(*sizes: int) -> torch.Tensor:
            return torch.zeros((max_size, *sizes), dtype=torch.int64, device=self._device)

        self._rows = zeros().fill_(self._padding_row)
        self._simulated = zeros() if simulates else None
        chain = chain_tree(zeros(w))
        self._tree = DraftTree(
            token_ids=chain.token_ids,
            parents=chain.parents.contiguous(),
            depths=chain.depths.contiguous(),
            is_ancestor=chain.is_ancestor.contiguous(),
        )
        self._accept = AcceptResult(
            accept_index=zeros(d),
            accept_lens=zeros().fill_(1),
            output_ids=zeros(d),
            bonus_ids=zeros(),
        )

    # -- replay ---------------------------------------------------------------------------------

    def can_run(self, num_reqs: int) -> bool:
        """Whether a decode step of so many requests was captured."""
        if self._exact_sizes is not None:
            return num_reqs in self._exact_sizes
        return num_reqs <= self.batch_sizes[-1]

    def run_whole(
        self,
        rows: np.ndarray,
        tree: DraftTree | None = None,
        simulated_drafts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A greedy step of the requests in these rows, int64 [b] on the host. `tree`: if given.

        Returns its report, int64 [b, d + 2] (`step_ops.pack_report`), valid until the next step in
        stream order.
        `simulated_drafts` int64 [b] on the host where the runner simulates.
        """
        self._fill_rows(rows)
        if tree is not None:
            self._fill_tree(tree)
        if self._simulated is not None and simulated_drafts is not None:
            self._copy_in(self._simulated[: len(rows)], simulated_drafts)
        packed: torch.Tensor = self._replay(GraphKind.WHOLE)
        return packed[: len(rows)]

    def run_aside(self, rows: np.ndarray) -> torch.Tensor:
        """A greedy step without drafts; as `run_whole`, with d = 1."""
        self._fill_rows(rows)
        packed: torch.Tensor = self._replay(GraphKind.ASIDE)
        return packed[: len(rows)]

    def run_front(self, rows: np.ndarray) -> Front:
        """Draft and verify; valid until the next step. Logits may be written to."""
        self._fill_rows(rows)
        front: Front = self._replay(GraphKind.FRONT)
        return front.first(len(rows))

    def run_target(self, rows: np.ndarray, tree: DraftTree) -> TargetPass:
        """Verify these trees; as `run_front`."""
        self._fill_rows(rows)
        self._fill_tree(tree)
        front: Front = self._replay(GraphKind.TARGET)
        return front.first(len(rows)).passed

    def run_commit(self, accept: AcceptResult) -> None:
        """End the step that `run_front` or `run_target` has begun."""
        b, own = accept.accept_lens.shape[0], self._accept
        torch._foreach_copy_(
            [own.accept_index[:b], own.accept_lens[:b], own.output_ids[:b], own.bonus_ids[:b]],
            [accept.accept_index, accept.accept_lens, accept.output_ids, accept.bonus_ids],
        )
        self._replay(GraphKind.COMMIT)

    def _replay(self, kind: GraphKind) -> Any:
        entry = self._graphs[self._size]
        entry.graphs[kind].replay()
        self.num_steps[kind] += 1
        return entry.outputs[kind]

    def _fill_rows(self, rows: np.ndarray) -> None:
        """Begin a step: one copy to the device, padding rows included."""
        self._size = self._size_of[len(rows)]
        padded = np.full(self._size, self._padding_row, dtype=np.int64)
        padded[: len(rows)] = rows
        self._copy_in(self._rows[: self._size], torch.from_numpy(padded))

    def _fill_tree(self, tree: DraftTree) -> None:
        """Trees left from an earlier step are good enough for padding requests."""
        own = _first_trees(self._tree, tree.token_ids.shape[0])
        torch._foreach_copy_(
            [own.token_ids, own.parents, own.depths], [tree.token_ids, tree.parents, tree.depths]
        )
        own.is_ancestor.copy_(tree.is_ancestor)

    @staticmethod
    def _copy_in(static: torch.Tensor, on_host: torch.Tensor) -> None:
        current_platform().write_to_device(on_host, static)

    # -- the steps ------------------------------------------------------------------------------

    def _whole(self, size: int) -> torch.Tensor:
        step = self._step
        drafted = step.drafted_at(self._rows[:size])
        tree = step.draft(drafted) if self._drafts else _first_trees(self._tree, size)
        simulated = None if self._simulated is None else self._simulated[:size]
        return self._verified_and_committed(drafted, tree, simulated)

    def _aside(self, size: int) -> torch.Tensor:
        drafted = self._step.drafted_at(self._rows[:size])
        return self._verified_and_committed(drafted, root_tree(drafted.root_ids), None)

    def _verified_and_committed(
        self, drafted: DraftedRows, tree: DraftTree, simulated: torch.Tensor | None
    ) -> torch.Tensor:
        passed = self._step.run_target(drafted, tree)
        verified, report = self._step.accept_argmax(tree, passed, simulated)
        self._step.commit(drafted, verified)
        return report

    def _front(self, size: int) -> Front:
        drafted = self._step.drafted_at(self._rows[:size])
        return self._verify(drafted, self._step.draft(drafted))

    def _target(self, size: int) -> Front:
        drafted = self._step.drafted_at(self._rows[:size])
        return self._verify(drafted, _first_trees(self._tree, size))

    def _verify(self, drafted: DraftedRows, tree: DraftTree) -> Front:
        passed = self._step.run_target(drafted, tree)
        output = passed.output
        self._keep("logits", output.next_token_logits)
        self._keep("slots", passed.slots)
        if output.hidden_states is not None:
            self._keep("states", output.hidden_states)
        kept = self._kept(drafted.rows.shape[0])
        return Front(drafted=drafted, tree=tree, passed=kept)

    def _keep(self, name: str, values: torch.Tensor) -> None:
        """Buffers are made in the first run, of the largest size, before anything is captured."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty_like(values)
        self._buffers[name][: values.shape[0]].copy_(values)

    def _kept(self, size: int) -> TargetPass:
        num_tokens = size * self._step.shape.num_draft_tokens
        parts = {name: buffer[:num_tokens] for name, buffer in self._buffers.items()}
        output = LogitsProcessorOutput(
            next_token_logits=parts["logits"], hidden_states=parts.get("states")
        )
        return TargetPass(output=output, slots=parts["slots"])

    def _commit(self, size: int) -> None:
        own, passed = self._accept, self._kept(size)
        accept = AcceptResult(
            accept_index=own.accept_index[:size],
            accept_lens=own.accept_lens[:size],
            output_ids=own.output_ids[:size],
            bonus_ids=own.bonus_ids[:size],
        )
        compaction = self._step.compaction(accept, passed.slots)
        verified = Verified(output=passed.output, accept=accept, compaction=compaction)
        # Nothing has changed these rows since the draft.
        self._step.commit(self._step.drafted_at(self._rows[:size]), verified)

    # -- capture --------------------------------------------------------------------------------

    def _capture_all(self, show_progress: bool) -> None:
        seconds = capture_sizes(
            self.batch_sizes,
            self._capture_size,
            what=" of speculative steps",
            rows_each=self._step.shape.num_draft_tokens,
            show_progress=show_progress,
        )
        logger.info(
            "captured speculative steps (%d graphs) of %d batch sizes, %d to %d, in %.1f s",
            sum(len(entry.graphs) for entry in self._graphs.values()),
            len(self.batch_sizes),
            self.batch_sizes[0],
            self.batch_sizes[-1],
            seconds,
        )

    def _capture_size(self, size: int) -> None:
        entry = self._graphs[size] = _Graphs()
        functions: dict[GraphKind, Callable[[int], Any]] = {
            GraphKind.WHOLE: self._whole,
            GraphKind.ASIDE: self._aside,
            GraphKind.FRONT: self._front,
            GraphKind.TARGET: self._target,
            GraphKind.COMMIT: self._commit,  # after what fills the buffers
        }
        # A few requests less may want other graphs, and are padded to this size, too.
        kinds = self._kinds_of(size) | self._kinds_of(self._fewest_in(size))
        for kind, function in functions.items():
            if kind in kinds:
                graph, entry.outputs[kind] = capture(functools.partial(function, size), self.memory)
                entry.graphs[kind] = graph

    def _fewest_in(self, size: int) -> int:
        """The smallest batch that is run with graphs of this size."""
        return size if self._exact_sizes is not None else self._size_of.index(size, 1)


def _first_trees(tree: DraftTree, num_reqs: int) -> DraftTree:
    return DraftTree(
        token_ids=tree.token_ids[:num_reqs],
        parents=tree.parents[:num_reqs],
        depths=tree.depths[:num_reqs],
        is_ancestor=tree.is_ancestor[:num_reqs],
    )
