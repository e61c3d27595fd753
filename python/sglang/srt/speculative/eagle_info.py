"""Data of a speculative step: what is drafted, verified, accepted and given back to the draft.

Plain records of device tensors; `speculative.eagle_utils` makes them, the speculative workers
pass them on. No method reads a device, shapes never depend on values.

Letters: b requests, w verified tokens a request (root and w - 1 drafted ones), k branches of a
draft step, d most tokens that a step can add (longest path of drafts + 1), H hidden size. Nodes of
a request's tree are numbered 0..w-1, the root (last known token) is 0, parents precede children.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.speculative.spec_info import SpecInput

# Parent of a root, absent child or sibling, unused entry of a fixed-shape list of nodes.
NO_NODE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFrontier:
    """One step of drafting: nodes just generated, and those of them to be expanded next.

    Generated nodes of all steps are numbered consecutively (their *candidate index*): k of step 0,
    k * k of each later step, child c of frontier node f being number f * k + c of its step.
    """

    candidate_scores: torch.Tensor  # float32 [b, m]: products of probabilities; m = k or k * k
    candidate_ids: torch.Tensor  # int64 [b, m]: tokens, in the target's vocabulary
    frontier: torch.Tensor  # int64 [b, k]: candidate indices of the nodes to expand
    scores: torch.Tensor  # float32 [b, k]
    token_ids: torch.Tensor  # int64 [b, k]: inputs of the next draft step
    # int64 [b, k]: which node of the previous frontier is the parent (0 in step 0, where it is the
    # root): the next step takes this branch's hidden state and keys.
    parent_branches: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """What will be verified. In a chain node i is the parent of node i + 1."""

    token_ids: torch.Tensor  # int64 [b, w]
    parents: torch.Tensor  # int64 [b, w]: node, NO_NODE for the root
    depths: torch.Tensor  # int64 [b, w]: edges to the root
    is_ancestor: torch.Tensor  # bool [b, w, w]: [i, j] = j lies on the path root..i, i included


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlaces:
    """Where the tokens of a decode step go: n of a request, from its committed length on.

    Twice, since passes over all nodes of a request want its places side by side, and a draft step
    those of all requests.
    """

    root_ids: torch.Tensor  # int64 [b]: the last known tokens, which take the first place
    lens: torch.Tensor  # int64 [n + 1, b]: of the sequences up to each place; first the committed
    positions: torch.Tensor  # int64 [b, n], within what the models know
    slots: torch.Tensor  # int64 [b, n]
    step_positions: torch.Tensor  # int64 [n, b]
    step_slots: torch.Tensor  # int64 [n, b]

    def first(self, num_reqs: int) -> StepPlaces:
        """Those of the first requests."""
        return StepPlaces(
            root_ids=self.root_ids[:num_reqs],
            lens=self.lens[:, :num_reqs],
            positions=self.positions[:num_reqs],
            slots=self.slots[:num_reqs],
            step_positions=self.step_positions[:, :num_reqs],
            step_slots=self.step_slots[:, :num_reqs],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptResult:
    """What the target agreed to, at least one token a request.

    A request's new tokens are `output_ids[:accept_len]`: the accepted drafts, then the bonus
    token. What lies behind them has no meaning (0 in `output_ids`).
    """

    # int64 [b, d]: the root and the accepted nodes, downwards; NO_NODE from accept_len on.
    accept_index: torch.Tensor
    accept_lens: torch.Tensor  # int64 [b] in 1..d, the bonus token included
    output_ids: torch.Tensor  # int64 [b, d]
    bonus_ids: torch.Tensor  # int64 [b]: the last of the new tokens, root of the next tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How the accepted path comes to the front of each request's w rows and slots.

    Entries from a request's accept length on move a slot to itself and read a row that exists, so
    that nothing depends on the lengths.
    """

    rows: torch.Tensor  # int64 [b, d]: rows, of b * w, of the path root..last accepted node
    from_slots: torch.Tensor  # int64 [b, d]: KV to be copied ...
    to_slots: torch.Tensor  # int64 [b, d]: ... to here; read all, then write
    is_all_rows: bool = False  # `rows` are all of the b * w, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    """Where requests are after a step."""

    committed_lens: torch.Tensor  # int64 [b]: known tokens whose KV the target has
    last_rows: torch.Tensor  # int64 [b]: the last accepted of each request's d rows, of b * d


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleExtendInput(SpecInput):
    """What the draft model catches up with: tokens, each beside the target's features before it.

    After a prefill n is the number of new tokens, `tokens_per_req` 0 (it varies); after a
    verification n is b * d and `tokens_per_req` is d, whatever was accepted.
    """

    token_ids: torch.Tensor  # int64 [n]: shifted left by one against the target's
    features: torch.Tensor | None  # [n, features], the target's; None: the draft reads none
    positions: torch.Tensor  # int64 [n]: the target's
    slots: torch.Tensor  # int64 [n]: where the draft's KV goes
    last_rows: torch.Tensor  # int64 [b]: the row of each request that drafting goes on from
    committed_lens: torch.Tensor  # int64 [b]: known tokens whose KV the target has, afterwards
