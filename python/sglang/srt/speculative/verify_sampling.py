"""From the target's logits of a verification to its choices, or to distributions, at every node.

What the sampler does for one row a request, for w rows a request: bias, penalties, suppressed end
tokens, grammar masks, temperature, top-k, top-p and min-p, each as if the tokens on the path to
the node had been generated. Pure functions; scheduler thread. Letters as in `eagle_info`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.constrained.base_grammar_backend import GrammarMatcher, bitmask_width
from sglang.srt.layers.dispatch import argmax
from sglang.srt.layers.sampler import apply_vocab_mask, draw, sampling_probs
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo, forbid_unless_last
from sglang.srt.speculative.eagle_info import DraftTree

ALL_ALLOWED = np.int32(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndCells:
    """End tokens that may not come while a sequence is shorter than asked for: m of them."""

    rows: torch.Tensor  # int64 [m]: the request
    token_ids: torch.Tensor  # int64 [m]
    min_lens: torch.Tensor  # int64 [m]: of prompt and output together


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySampling:
    """Sampling wishes of a batch, w rows a request. Made when the batch's composition changes."""

    num_draft_tokens: int
    repeated: SamplingBatchInfo  # [b * w] rows; without penalties, grammars and end tokens
    base: SamplingBatchInfo  # [b] rows
    ends: _EndCells | None

    @classmethod
    def create(
        cls, info: SamplingBatchInfo, num_draft_tokens: int, prompt_lens: Sequence[int]
    ) -> VerifySampling:
        """`info` is kept: its penalties and grammars are read when logits are adjusted.

        prompt_lens [b]: tokens of each request that were not generated.
        """
        return cls(
            num_draft_tokens=num_draft_tokens,
            repeated=info.repeated(num_draft_tokens),
            base=info,
            ends=_end_cells(info, prompt_lens),
        )


def _end_cells(info: SamplingBatchInfo, prompt_lens: Sequence[int]) -> _EndCells | None:
    constrained = {row for row, _ in info.grammars}  # their masks say it
    triples = [
        (entry.row, token_id, prompt_lens[entry.row] + entry.min_new)
        for entry in info.min_new_tokens
        if entry.row not in constrained
        for token_id in entry.end_ids
    ]
    if not triples:
        return None
    cells = current_platform().to_device_async(torch.tensor(triples, dtype=torch.int64))
    rows, token_ids, min_lens = cells.unbind(1)
    return _EndCells(rows=rows, token_ids=token_ids, min_lens=min_lens)


def adjust_verify_logits(
    logits: torch.Tensor,
    sampling: VerifySampling,
    tree: DraftTree,
    root_positions: torch.Tensor,
    vocab_mask: np.ndarray | None,
) -> None:
    """Bias, penalties, end tokens and grammar masks, in place on float32 [b * w, V].

    root_positions int64 [b]: place of each root in its sequence. vocab_mask: of
    `fill_tree_masks`; None without grammars. With penalties or grammars the host must have seen
    every token up to the root.
    """
    base, bias, ends = sampling.base, sampling.repeated.logit_bias, sampling.ends
    if bias is not None:
        logits.index_put_((bias.rows, bias.token_ids), bias.values, accumulate=True)
    if base.penalties is not None:
        base.penalties.apply_to_tree(logits, tree.token_ids, tree.is_ancestor)
    w = sampling.num_draft_tokens
    nodes = torch.arange(w, device=logits.device)
    if ends is not None:
        lens = (root_positions.unsqueeze(1) + tree.depths + 1)[ends.rows]  # [m, w], node included
        is_early = lens < ends.min_lens.unsqueeze(1)
        rows = ends.rows.unsqueeze(1) * w + nodes
        addends = torch.zeros_like(is_early, dtype=logits.dtype).masked_fill(is_early, -torch.inf)
        cells = (rows, ends.token_ids.unsqueeze(1).expand_as(rows))
        logits.index_put_(cells, addends, accumulate=True)
    if vocab_mask is not None:
        all_rows = [row * w + node for row, _ in base.grammars for node in range(w)]
        apply_vocab_mask(logits, vocab_mask, all_rows)


def target_choices(
    logits: torch.Tensor, sampling: VerifySampling, coins: torch.Tensor | None
) -> torch.Tensor:
    """The token that the target itself chooses at each node: int64 [b, w].

    logits float32 [b * w, V], adjusted; coins float32 [b, w] in [0, 1), None where all requests
    are greedy. Greedy requests get the argmax.
    """
    info, w = sampling.repeated, sampling.num_draft_tokens
    if info.is_all_greedy:
        return argmax(logits).view(-1, w)
    if coins is None:
        raise ValueError("sampling requests need coins")
    drawn = draw(sampling_probs(logits, info), coins.flatten()[info.sampled_index].unsqueeze(1))
    if len(info.sampled_rows) < info.batch_size:
        drawn = argmax(logits).index_copy_(0, info.sampled_index, drawn)
    return drawn.view(-1, w)


def target_probs(logits: torch.Tensor, sampling: VerifySampling) -> torch.Tensor:
    """What the target's token at each node is drawn from: float32 [b, w, V], rows sum to 1.

    logits float32 [b * w, V], adjusted. Greedy requests: 1 for the argmax.
    """
    info = sampling.repeated
    if len(info.sampled_rows) == info.batch_size:
        probs = sampling_probs(logits, info)
    else:
        probs = torch.zeros_like(logits).scatter_(1, argmax(logits).unsqueeze(1), 1.0)
        if info.sampled_rows:
            probs.index_copy_(0, info.sampled_index, sampling_probs(logits, info))
    probs = probs / probs.sum(dim=1, keepdim=True)
    return probs.view(-1, sampling.num_draft_tokens, logits.shape[1])


# ------------------------------------------------------------------------------------------------
# Grammars
# ------------------------------------------------------------------------------------------------


def fill_tree_masks(
    info: SamplingBatchInfo,
    token_ids: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    num_generated: Sequence[int],
) -> np.ndarray | None:
    """What each node's grammar allows next: int32 [rows with a grammar * w, words], or None.

    token_ids, parents: [b][w] on the host; num_generated [b]: output tokens up to the root. The
    matchers have accepted the tokens up to the root, and are left in that state. Nodes that the
    grammar forbids are never reached: theirs allow everything.
    """
    if not info.grammars:
        return None
    w = len(token_ids[0])
    masks = np.full((len(info.grammars) * w, bitmask_width(info.vocab_size)), ALL_ALLOWED)
    waiting = {entry.row: entry for entry in info.min_new_tokens}
    for number, (row, matcher) in enumerate(info.grammars):
        own = masks[number * w : (number + 1) * w]
        depths = _fill_tree(matcher, token_ids[row], parents[row], own)
        entry = waiting.get(row)
        if entry is None:
            continue
        for mask, depth in zip(own, depths):
            if depth is not None and num_generated[row] + depth < entry.min_new:
                forbid_unless_last(mask, entry.end_ids)
    return masks


def _fill_tree(
    matcher: GrammarMatcher, token_ids: Sequence[int], parents: Sequence[int], masks: np.ndarray
) -> list[int | None]:
    """Walk the tree with the matcher, depth first. The depth of each node; None: not reached."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    depths: list[int | None] = [None] * len(parents)

    def visit(node: int, depth: int) -> None:
        depths[node] = depth
        matcher.fill_mask(masks[node])
        if matcher.error is not None:
            return
        for child in children[node]:
            if matcher.accept_token(token_ids[child]):
                visit(child, depth + 1)
                matcher.rollback(1)
            elif matcher.error is not None:
                # A draft that the target may never choose must not end the request.
                matcher.rollback(0)

    visit(0, 0)
    return depths
