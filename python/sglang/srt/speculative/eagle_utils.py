"""Trees of drafted tokens as tensors: growing, choosing and linking them, and what is kept.

Pure functions on the device of their inputs. Shapes never follow from values and nothing is read
back, so every function can be captured in a CUDA graph and costs the same on every rank. Used by
the speculative workers, scheduler thread. Which drafts the target agrees to: `acceptance`.

Letters as in `eagle_info`: b requests, w verified tokens a request, k branches, d most tokens that
one step adds, V tokens in the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.speculative.eagle_info import (
    NO_NODE,
    AcceptResult,
    Compaction,
    DraftFrontier,
    DraftTree,
    EagleExtendInput,
    StepEnds,
    StepPlaces,
)
from sglang.srt.speculative.fixed_tensors import block_rows, chain_links, counting

# ------------------------------------------------------------------------------------------------
# Drafting
# ------------------------------------------------------------------------------------------------


def select_top_k(
    step: int, topk_probs: torch.Tensor, topk_ids: torch.Tensor, previous: DraftFrontier | None
) -> DraftFrontier:
    """Score the children that draft step `step` (from 0) proposes, and keep the k best.

    topk_probs float32 and topk_ids int64: the k most likely tokens, [b, k] of the root in step 0,
    else [b * k, k] of `previous`'s frontier. A score is the product of the probabilities along
    the path. Equal scores: the smaller candidate index first.
    """
    k = topk_ids.shape[1]
    if previous is None:
        branches = counting(k, topk_ids.device).expand_as(topk_ids)
        return DraftFrontier(
            candidate_scores=topk_probs,
            candidate_ids=topk_ids,
            frontier=branches,
            scores=topk_probs,
            token_ids=topk_ids,
            parent_branches=torch.zeros_like(branches),
        )
    candidate_scores = (previous.scores.unsqueeze(2) * topk_probs.view(-1, k, k)).flatten(1)
    candidate_ids = topk_ids.reshape(-1, k * k)
    # Not `topk`, which breaks ties as it likes: ranks and devices must agree.
    choice = candidate_scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return DraftFrontier(
        candidate_scores=candidate_scores,
        candidate_ids=candidate_ids,
        frontier=choice + (k + (step - 1) * k * k),
        scores=candidate_scores.gather(1, choice),
        token_ids=candidate_ids.gather(1, choice),
        parent_branches=choice // k,
    )


def parent_rows(step: int, frontier: DraftFrontier) -> torch.Tensor:
    """Rows of the pass that proposed this frontier, one a branch: int64 [b * k].

    Row r of that pass's hidden states is what branch i takes along (rows [b] of the extend in
    step 0, else [b * k]).
    """
    batch_size, k = frontier.parent_branches.shape
    width = 1 if step == 0 else k
    starts = block_rows(batch_size, width, 1, frontier.parent_branches.device)
    return (starts + frontier.parent_branches).flatten()


def extend_paths(paths: torch.Tensor | None, frontier: DraftFrontier) -> torch.Tensor:
    """Which branch of each earlier step lies above each branch: int64 [b, k, steps so far].

    `paths` is that of the step before (None in step 0). The last column is the branch itself.
    A draft step's attention may see the scratch KV of exactly these (step, branch) pairs.
    """
    batch_size, k = frontier.parent_branches.shape
    own = counting(k, frontier.parent_branches.device).view(1, k, 1)
    own = own.expand(batch_size, k, 1)
    if paths is None:
        return own
    index = frontier.parent_branches.unsqueeze(2).expand(-1, -1, paths.shape[2])
    return torch.cat([paths.gather(1, index), own], dim=2)


def organize_draft_results(
    steps: Sequence[DraftFrontier], root_ids: torch.Tensor, num_draft_tokens: int
) -> DraftTree:
    """The w - 1 best scored of all generated nodes, in order of their index, below the root.

    root_ids int64 [b]. Raises ValueError where the steps generated fewer than w - 1 nodes.
    """
    scores = torch.cat([step.candidate_scores for step in steps], dim=1)  # [b, n]
    token_ids = torch.cat([step.candidate_ids for step in steps], dim=1)
    num_drafts = num_draft_tokens - 1
    if scores.shape[1] < num_drafts:
        raise ValueError(f"{scores.shape[1]} nodes were drafted, {num_drafts} are to be verified")
    # A stable sort: a parent, never worse and of a smaller index, is chosen before its child.
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :num_drafts]
    chosen = best.sort(dim=1).values  # [b, w - 1] candidate indices, rising
    k = steps[0].candidate_ids.shape[1]
    # The parent of candidate c >= k is number (c - k) // k of the expanded nodes.
    expanded = torch.cat([step.frontier for step in steps], dim=1)
    parent = expanded.gather(1, ((chosen - k) // k).clamp(min=0))
    node = torch.searchsorted(chosen, parent) + 1
    parents = torch.where(chosen < k, 0, node)
    root = torch.full_like(root_ids, NO_NODE).unsqueeze(1)
    return tree_from_parents(
        torch.cat([root_ids.unsqueeze(1), token_ids.gather(1, chosen)], dim=1),
        torch.cat([root, parents], dim=1),
        max_depth=min(len(steps), num_drafts),
    )


# ------------------------------------------------------------------------------------------------
# Trees
# ------------------------------------------------------------------------------------------------


def tree_from_parents(
    token_ids: torch.Tensor, parents: torch.Tensor, max_depth: int | None = None
) -> DraftTree:
    """Depths and ancestors of trees given by their parents, int64 [b, w] both.

    parents[:, 0] is NO_NODE, parents[:, i] < i. `max_depth`: a bound of the depth that the caller
    knows, to save work; w - 1 without one.
    """
    w = parents.shape[1]
    nodes = torch.arange(w, device=parents.device)
    # reach[i, j]: j is i or at most 2^n - 1 edges above it. Each product doubles the distance.
    reach = (parents.unsqueeze(2) == nodes).float() + torch.eye(w, device=parents.device)
    distance, bound = 1, w - 1 if max_depth is None else max_depth
    while distance < bound:
        reach = torch.bmm(reach, reach).clamp_(max=1.0)
        distance *= 2
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        depths=reach.sum(dim=2).to(torch.int64) - 1,
        is_ancestor=reach > 0,
    )


def root_tree(root_ids: torch.Tensor) -> DraftTree:
    """Trees without drafts: their verification is a plain decode step. root_ids int64 [b]."""
    return chain_tree(root_ids.unsqueeze(1))


def chain_tree(token_ids: torch.Tensor) -> DraftTree:
    """The tree of chains int64 [b, w]: node i hangs on node i - 1. Costs no kernel per request."""
    batch_size, w = token_ids.shape
    parents, is_ancestor = chain_links(w, token_ids.device)
    return DraftTree(
        token_ids=token_ids,
        parents=parents.expand(batch_size, w),
        depths=counting(w, token_ids.device).expand(batch_size, w),
        is_ancestor=is_ancestor.expand(batch_size, w, w),
    )


def tree_positions(tree: DraftTree, committed_lens: torch.Tensor) -> torch.Tensor:
    """Position of each verified token in its sequence: int64 [b * w]. committed_lens int64 [b]."""
    return (committed_lens.unsqueeze(1) + tree.depths).flatten()


def first_true(is_wanted: torch.Tensor) -> torch.Tensor:
    """Index of the first True along the last dimension, NO_NODE where there is none: int64."""
    w = is_wanted.shape[-1]
    nodes = counting(w, is_wanted.device)
    first = torch.where(is_wanted, nodes, w).amin(dim=-1)
    return torch.where(first == w, NO_NODE, first)


# ------------------------------------------------------------------------------------------------
# After acceptance
# ------------------------------------------------------------------------------------------------


def compact(accept: AcceptResult, out_cache_loc: torch.Tensor, num_draft_tokens: int) -> Compaction:
    """Where the accepted path lies and where it goes. out_cache_loc int64 [b * w]: KV slots."""
    batch_size, d = accept.accept_index.shape
    device = out_cache_loc.device
    slots = out_cache_loc.view(batch_size, num_draft_tokens)
    places = counting(d, device)
    is_kept = places < accept.accept_lens.unsqueeze(1)
    nodes = torch.where(is_kept, accept.accept_index, places)
    return Compaction(
        rows=block_rows(batch_size, num_draft_tokens, 1, device) + nodes,
        from_slots=slots.gather(1, nodes),
        to_slots=slots[:, :d],
    )


def compact_chain(
    out_cache_loc: torch.Tensor, num_draft_tokens: int, max_accept_len: int
) -> Compaction:
    """The same where accepted drafts are the first ones in any case: nothing moves."""
    slots = out_cache_loc.view(-1, num_draft_tokens)[:, :max_accept_len]
    rows = block_rows(slots.shape[0], num_draft_tokens, max_accept_len, slots.device)
    return Compaction(
        rows=rows,
        from_slots=slots,
        to_slots=slots,
        is_all_rows=max_accept_len == num_draft_tokens,
    )


def extend_after_verify(
    accept: AcceptResult,
    compaction: Compaction,
    features: torch.Tensor | None,
    places: StepPlaces,
    ends: StepEnds,
) -> EagleExtendInput:
    """The draft's catching up, d rows a request: a token and the features one position before.

    features [b * w, F]: the target's, of the verification at `places`. Rows from a request's
    accept length on are computed and never read.
    """
    d = accept.output_ids.shape[1]
    if features is not None and not compaction.is_all_rows:
        features = features.index_select(0, compaction.rows.flatten())
    return EagleExtendInput(
        tokens_per_req=d,
        token_ids=accept.output_ids.flatten(),
        features=features,
        positions=places.positions[:, :d].flatten(),
        slots=compaction.to_slots.flatten(),
        last_rows=ends.last_rows,
        committed_lens=ends.committed_lens,
    )
