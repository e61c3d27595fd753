"""Which drafted tokens the target agrees to: greedy, by its own draws, by thresholds, by rejection.

Pure functions on the device of their inputs; fixed shapes, nothing read back, all randomness
handed in as uniform numbers (*coins*) in [0, 1). Letters as in `eagle_info`.

Three ways of sampling, all with the target's distribution p (after temperature, top-k, top-p,
min-p) as outcome:

* The target draws a token at every node, and drafts count as far as they equal the draws
  (`verify_sampling.target_choices`, then `accept_chain` or `accept_tree`). Accepting a draft has
  the probability that p gives it, the most that is possible for drafts that were not drawn
  themselves. A seeded request gets the tokens that it would get without drafts, since a token's
  coin is that of its position. This is the walk below with thresholds of 1, only cheaper.
* `accept_by_thresholds`: walks the children with one coin a node. Thresholds below 1 accept more
  and are no longer exact.
* `accept_by_rejection`: for chains whose drafts were drawn from a known q; accepts with
  probability min(1, p / q). Source: Leviathan et al., arXiv 2211.17192.

A negative token is no draft: never accepted, and as if the tree ended above it.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from sglang.srt.layers.sampler import draw, hash_uniform
from sglang.srt.speculative.eagle_info import NO_NODE, AcceptResult, DraftTree
from sglang.srt.speculative.eagle_utils import first_true
from sglang.srt.speculative.fixed_tensors import counting


class CoinUse(IntEnum):
    """What a coin decides: coins of one position but of different use are independent."""

    TARGET = 0  # the token at a position is drawn from the target: the sampler's own coin
    ACCEPT = 1  # a draft is accepted
    DRAFT = 2  # a draft is drawn from the draft model


# Spreads the uses over the seeds; any odd number with mixed bits will do.
_USE_SALT = 0x5851F42D4C957F2D


def seeded_coins(
    coins: torch.Tensor,
    seeds: torch.Tensor,
    is_seeded: torch.Tensor,
    positions: torch.Tensor,
    use: CoinUse,
) -> torch.Tensor:
    """`coins` float32 [b, n], where a request has a seed replaced by a hash of (seed, position).

    seeds int64 [b], is_seeded bool [b]: as in `SamplingBatchInfo`. positions int64 [b, n]: place
    in its sequence of the token that the coin is about, for a child of a node its own position
    + 1. A coin may be used again in a later step for the same position: what it decided before
    was thrown away.
    """
    salted = seeds ^ (use * _USE_SALT % 2**63)
    return torch.where(is_seeded.unsqueeze(1), hash_uniform(salted.unsqueeze(1), positions), coins)


# ------------------------------------------------------------------------------------------------
# By equality with the target's choice
# ------------------------------------------------------------------------------------------------


def accept_chain(token_ids: torch.Tensor, target_ids: torch.Tensor) -> AcceptResult:
    """Accept the drafts of chains up to the first that is not the target's choice.

    token_ids int64 [b, w]: root and drafts; target_ids int64 [b, w]: the choice after each.
    """
    is_right = token_ids[:, 1:] == target_ids[:, :-1]
    num_right = is_right.to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)
    nodes = counting(token_ids.shape[1], token_ids.device)
    is_new = nodes <= num_right
    return AcceptResult(
        accept_index=torch.where(is_new, nodes, NO_NODE),
        accept_lens=num_right.squeeze(1) + 1,
        # What is accepted equals the target's choices, and its next one is the bonus.
        output_ids=target_ids * is_new,
        bonus_ids=target_ids.gather(1, num_right).squeeze(1),
    )


def accept_tree(tree: DraftTree, target_ids: torch.Tensor, max_accept_len: int) -> AcceptResult:
    """From the root on, step to the child that is the target's choice, as long as there is one.

    target_ids int64 [b, w]: the choice after each node. `max_accept_len` (d): more than any depth.
    """
    above = tree.parents.clamp(min=0)
    is_right = tree.token_ids == target_ids.gather(1, above)  # [b, w]
    walk = _Walk(tree)
    for _ in range(max_accept_len - 1):
        walk.step(first_true(walk.is_child() & is_right))
    return walk.result(target_ids.gather(1, walk.node))


# ------------------------------------------------------------------------------------------------
# By chance
# ------------------------------------------------------------------------------------------------


def accept_by_thresholds(
    tree: DraftTree,
    probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
) -> AcceptResult:
    """Walk down: the first child accepted whose accumulated probability exceeds the node's coin.

    probs float32 [b, w, V]: the target's, rows sum to 1. coins float32 [b, d - 1]: that of depth
    i decides among the children of the i-th node of the path; d - 1 is no less than any depth.
    A child with probability p, siblings before it included P: accepted if coin < P /
    `threshold_acc` or p >= `threshold_single`, and p > 0. Where no child is, the bonus token is
    drawn from what the children leave of the distribution, by the coin of its place among the new
    tokens: final_coins [b, d].
    """
    above = tree.parents.clamp(min=0)
    batch = torch.arange(probs.shape[0], device=probs.device)
    own = probs[batch.unsqueeze(1), above, tree.token_ids.clamp(min=0)]  # of each node's token
    # The same token twice below a node has its probability once.
    own = own.masked_fill(_repeats_sibling(tree) | (tree.token_ids < 0), 0.0)
    walk = _Walk(tree)
    for depth in range(coins.shape[1]):
        is_child = walk.is_child() & (own > 0)
        mass = own.masked_fill(~is_child, 0.0).cumsum(dim=1)
        is_in = (coins[:, depth : depth + 1] < mass / threshold_acc) | (own >= threshold_single)
        walk.step(first_true(is_child & is_in))
    last = probs[batch, walk.node.squeeze(1)]  # [b, V]
    is_rejected = (tree.parents == walk.node) & (tree.token_ids >= 0)
    rejected = torch.where(is_rejected, tree.token_ids, last.shape[1])
    # One column more, for what is no child.
    left = torch.cat([last, last[:, :1]], dim=1).scatter_(1, rejected, 0.0)[:, :-1]
    final_coin = final_coins.gather(1, walk.length() - 1)
    return walk.result(_draw_left(left, last, final_coin))


def accept_by_rejection(
    token_ids: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    coins: torch.Tensor,
    final_coins: torch.Tensor,
) -> AcceptResult:
    """Accept the drafts of chains with probability min(1, p / q) each, up to the first rejected.

    token_ids int64 [b, w]; target_probs (p) float32 [b, w, V] and draft_probs (q) [b, w - 1, V]:
    rows sum to 1, and the drafts were drawn from q. coins float32 [b, w - 1] decide on the drafts.
    The bonus token is drawn from max(p - q, 0) after a rejection, else from p, by the coin of its
    place among the new tokens: final_coins [b, w].
    Greedy requests: give a p of 1 for the argmax.
    """
    drafts = token_ids[:, 1:].clamp(min=0).unsqueeze(2)
    p = target_probs[:, :-1].gather(2, drafts).squeeze(2)
    q = draft_probs.gather(2, drafts).squeeze(2)
    num_drafts = draft_probs.shape[1]
    limit = (token_ids[:, 1:] >= 0).to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_right = (coins * q < p).to(torch.int64).cumprod(dim=1).sum(dim=1)
    num_right = torch.minimum(num_right, limit)
    batch = torch.arange(token_ids.shape[0], device=token_ids.device)
    last = target_probs[batch, num_right]  # [b, V]
    proposed = draft_probs[batch, num_right.clamp(max=num_drafts - 1)]
    # At the limit nothing was rejected.
    proposed = proposed.masked_fill((num_right == limit).unsqueeze(1), 0.0)
    left = (last - proposed).clamp_(min=0.0)
    final_coin = final_coins.gather(1, num_right.unsqueeze(1))
    return _chain_result(token_ids, num_right, _draw_left(left, last, final_coin))


def accept_simulated(
    token_ids: torch.Tensor, target_ids: torch.Tensor, num_drafts: torch.Tensor, max_accept_len: int
) -> AcceptResult:
    """Accept the first so many nodes, right or wrong: for measurements of a step's cost.

    token_ids, target_ids int64 [b, w]; num_drafts int64 [b], below `max_accept_len` (d).
    """
    bonus_ids = target_ids.gather(1, num_drafts.unsqueeze(1))
    return _chain_result(token_ids[:, :max_accept_len], num_drafts, bonus_ids)


def to_target_vocab(
    draft_probs: torch.Tensor, target_ids: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Probabilities [..., V_d] over a draft's own vocabulary, as [..., V] over the target's.

    target_ids int64 [V_d]: the target's number of each of the draft's tokens; all different.
    """
    probs = draft_probs.new_zeros(*draft_probs.shape[:-1], vocab_size)
    return probs.index_copy_(-1, target_ids, draft_probs)


class _Walk:
    """A path down from each root. A request stays at its node once it finds no child."""

    def __init__(self, tree: DraftTree) -> None:
        batch_size = tree.parents.shape[0]
        device = tree.parents.device
        self._tree = tree
        self.node = torch.zeros((batch_size, 1), dtype=torch.int64, device=device)
        self._is_over = torch.zeros((batch_size, 1), dtype=torch.bool, device=device)
        self._path = [self.node]  # NO_NODE after the end

    def is_child(self) -> torch.Tensor:
        """bool [b, w]: children of the last node; none once the walk is over."""
        return (self._tree.parents == self.node) & ~self._is_over

    def step(self, child: torch.Tensor) -> None:
        """Go to `child` int64 [b]; NO_NODE ends the walk for good."""
        child = child.unsqueeze(1)
        self._is_over = child == NO_NODE
        self.node = torch.where(self._is_over, self.node, child)
        self._path.append(child)

    def length(self) -> torch.Tensor:
        """int64 [b, 1]: nodes of the path, the root included."""
        return (torch.cat(self._path, dim=1) != NO_NODE).sum(dim=1, keepdim=True)

    def result(self, bonus_ids: torch.Tensor) -> AcceptResult:
        """The path and, behind it, `bonus_ids` int64 [b, 1]."""
        path = torch.cat(self._path, dim=1)  # [b, d]
        accept_lens = self.length().squeeze(1)
        drafts = self._tree.token_ids.gather(1, path.clamp(min=0))[:, 1:]
        return _result(path, accept_lens, drafts, bonus_ids)


def _chain_result(
    token_ids: torch.Tensor, num_right: torch.Tensor, bonus_ids: torch.Tensor
) -> AcceptResult:
    nodes = counting(token_ids.shape[1], token_ids.device)
    path = torch.where(nodes <= num_right.unsqueeze(1), nodes, NO_NODE)
    return _result(path, num_right + 1, token_ids[:, 1:], bonus_ids)


def _result(
    path: torch.Tensor, accept_lens: torch.Tensor, drafts: torch.Tensor, bonus_ids: torch.Tensor
) -> AcceptResult:
    """path int64 [b, d]; drafts int64 [b, d - 1]: tokens of path[:, 1:]; bonus_ids int64 [b, 1]."""
    places = counting(path.shape[1], path.device)
    bonus_place = accept_lens.unsqueeze(1) - 1
    output_ids = torch.nn.functional.pad(drafts, (0, 1)).masked_fill(places > bonus_place, 0)
    return AcceptResult(
        accept_index=path,
        accept_lens=accept_lens,
        output_ids=output_ids.scatter(1, bonus_place, bonus_ids),
        bonus_ids=bonus_ids.squeeze(1),
    )


def _repeats_sibling(tree: DraftTree) -> torch.Tensor:
    """bool [b, w]: a sibling before the node has its token."""
    w = tree.parents.shape[1]
    is_same = (tree.parents.unsqueeze(1) == tree.parents.unsqueeze(2)) & (
        tree.token_ids.unsqueeze(1) == tree.token_ids.unsqueeze(2)
    )
    is_earlier = torch.ones((w, w), dtype=torch.bool, device=is_same.device).tril(-1)
    return (is_same & is_earlier).any(dim=2)


def _draw_left(left: torch.Tensor, whole: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    """Draw by `coin` [b, 1] from `left` [b, V]; from `whole` where rounding has left nothing."""
    is_empty = left.sum(dim=1, keepdim=True) <= 0
    return draw(torch.where(is_empty, whole, left), coin).unsqueeze(1)
