"""Nothing in drafting and acceptance reads a tensor's values: all of it runs without values."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from sglang.srt.speculative.acceptance import (
    CoinUse,
    accept_by_rejection,
    accept_by_thresholds,
    accept_chain,
    accept_simulated,
    accept_tree,
    seeded_coins,
    to_target_vocab,
)
from sglang.srt.speculative.eagle_info import AcceptResult, DraftTree
from sglang.srt.speculative.eagle_utils import (
    chain_tree,
    compact,
    compact_chain,
    extend_after_verify,
    extend_paths,
    organize_draft_results,
    parent_rows,
    select_top_k,
    tree_positions,
)
from sglang.srt.speculative.step_ops import RowTables, TorchStepOps
from sglang.srt.speculative.tree_attention import branch_visibility

pytestmark = pytest.mark.usefixtures("own_fixed_tensors")

B, K, W, V, D = 3, 2, 5, 7, 4


def draft_tree() -> DraftTree:
    first = select_top_k(0, torch.rand(B, K), torch.zeros(B, K, dtype=torch.int64), None)
    second = select_top_k(1, torch.rand(B * K, K), torch.zeros(B * K, K, dtype=torch.int64), first)
    assert parent_rows(1, second).shape == (B * K,)
    assert extend_paths(extend_paths(None, first), second).shape == (B, K, 2)
    return organize_draft_results([first, second], torch.zeros(B, dtype=torch.int64), W)


def check_after(accept: AcceptResult, d: int) -> None:
    assert accept.accept_index.shape == accept.output_ids.shape == (B, d)
    assert accept.accept_lens.shape == accept.bonus_ids.shape == (B,)
    compaction = compact(accept, torch.zeros(B * W, dtype=torch.int64), W)
    rows = torch.zeros(B, dtype=torch.int64)
    tables = RowTables(
        req_to_token=torch.zeros(2, 20, dtype=torch.int32),
        committed_lens=torch.zeros(2, dtype=torch.int64),
        last_token_ids=torch.zeros(2, dtype=torch.int64),
        padding_row=1,
    )
    places = TorchStepOps().places(rows, tables, W, max_position=9)
    ends = TorchStepOps().advance(rows, places.lens[0], accept, tables)
    extend = extend_after_verify(accept, compaction, torch.rand(B * W, 6), places, ends)
    assert extend.token_ids.shape == (B * d,)
    assert extend.features is not None and extend.features.shape == (B * d, 6)


def test_trees_are_built_and_accepted_without_their_values() -> None:
    with FakeTensorMode():
        tree = draft_tree()
        lens = torch.zeros(B, dtype=torch.int64)
        assert tree_positions(tree, lens).shape == (B * W,)
        paths = torch.zeros(B, K, 3, dtype=torch.int64)
        assert branch_visibility(paths).shape == (B, K, 3 * K)
        probs = torch.rand(B, W, V)
        targets = torch.zeros(B, W, dtype=torch.int64)
        check_after(accept_tree(tree, targets, D), D)
        coins = torch.rand(B, D - 1), torch.rand(B, D)
        check_after(accept_by_thresholds(tree, probs, *coins, 1.0, 1.0), D)


def test_chains_are_accepted_without_their_values() -> None:
    with FakeTensorMode():
        ids = torch.zeros(B, W, dtype=torch.int64)
        assert chain_tree(ids).is_ancestor.shape == (B, W, W)
        check_after(accept_chain(ids, ids), W)
        chain = compact_chain(torch.zeros(B * W, dtype=torch.int64), W, D)
        assert chain.rows.shape == chain.to_slots.shape == (B, D)
        check_after(accept_simulated(ids, ids, torch.zeros(B, dtype=torch.int64), D), D)
        seeds = torch.zeros(B, dtype=torch.int64)
        is_seeded = torch.zeros(B, dtype=torch.bool)
        coins = seeded_coins(torch.rand(B, W), seeds, is_seeded, ids, CoinUse.ACCEPT)
        p = torch.rand(B, W, V)
        q = to_target_vocab(torch.rand(B, W - 1, 4), torch.zeros(4, dtype=torch.int64), V)
        check_after(accept_by_rejection(ids, p, q, coins[:, 1:], coins), W)


def test_reading_values_would_be_noticed() -> None:
    with FakeTensorMode(), pytest.raises(DynamicOutputShapeException):
        values = torch.rand(4)
        values[values > 0.5]
