"""Growing, choosing, linking and compacting draft trees, each against a loop over Python lists."""

from __future__ import annotations

import itertools

import pytest
import torch

from sglang.srt.speculative.acceptance import accept_chain, accept_simulated, accept_tree
from sglang.srt.speculative.eagle_info import NO_NODE, DraftFrontier, DraftTree
from sglang.srt.speculative.eagle_utils import (
    chain_tree,
    compact,
    compact_chain,
    extend_after_verify,
    extend_paths,
    organize_draft_results,
    parent_rows,
    select_top_k,
    tree_from_parents,
    tree_positions,
)
from sglang.srt.speculative.step_ops import RowTables, TorchStepOps

VOCAB = 50


def row_tables(lens: dict[int, int], num_rows: int) -> RowTables:
    """Tables in which these rows hold sequences of these lengths."""
    committed_lens = torch.zeros(num_rows, dtype=torch.int64)
    for row, length in lens.items():
        committed_lens[row] = length
    return RowTables(
        req_to_token=torch.arange(num_rows * 40, dtype=torch.int32).view(num_rows, 40),
        committed_lens=committed_lens,
        last_token_ids=torch.zeros(num_rows, dtype=torch.int64),
        padding_row=num_rows - 1,
    )


def top_k_after(path: tuple[int, ...], k: int, is_tied: bool) -> list[tuple[float, int]]:
    """A draft model: (probability, token), best first, as a function of the path's tokens."""
    generator = torch.Generator().manual_seed(hash(path) % 2**31)
    probs = torch.softmax(torch.randn(VOCAB, generator=generator) * 3, dim=0)
    if is_tied:
        probs = torch.where(torch.arange(VOCAB) == probs.argmax(), 1.0, 0.0)
    values, tokens = probs.topk(k)
    return list(zip(values.tolist(), tokens.tolist()))


def draft(
    roots: list[int], num_steps: int, k: int, is_tied: bool
) -> tuple[list[DraftFrontier], torch.Tensor]:
    """Run `select_top_k` step by step; paths of tokens travel as hidden states would."""
    rows: list[tuple[int, ...]] = [(root,) for root in roots]
    steps: list[DraftFrontier] = []
    paths = None
    for step in range(num_steps):
        tops = torch.tensor([top_k_after(row, k, is_tied) for row in rows])
        frontier = select_top_k(
            step, tops[..., 0], tops[..., 1].long(), steps[-1] if steps else None
        )
        paths = extend_paths(paths, frontier)
        above = [rows[row] for row in parent_rows(step, frontier).tolist()]
        tokens = frontier.token_ids.flatten().tolist()
        rows = [(*path, token) for path, token in zip(above, tokens)]
        steps.append(frontier)
    assert paths is not None
    return steps, paths


def best_nodes(
    root: int, num_steps: int, k: int, num_drafts: int, is_tied: bool
) -> list[tuple[int, ...]]:
    """Paths of the chosen nodes in order of generation."""
    nodes: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(1.0, (root,))]
    for _ in range(num_steps):
        below = []
        for score, path in frontier:
            for prob, token in top_k_after(path, k, is_tied):
                product = float(torch.tensor(score) * torch.tensor(prob))
                below.append((product, (*path, token)))
        nodes += below
        frontier = sorted(below, key=lambda node: -node[0])[:k]
    best = sorted(range(len(nodes)), key=lambda i: (-nodes[i][0], i))[:num_drafts]
    return [nodes[i][1] for i in sorted(best)]


def paths_of(tree: DraftTree, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids[row].tolist(), tree.parents[row].tolist()):
        paths.append((token,) if parent == NO_NODE else (*paths[parent], token))
    return paths


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("num_steps", "k", "w"), [(1, 3, 4), (2, 2, 6), (5, 4, 8), (4, 3, 31), (3, 1, 4), (7, 2, 12)]
)
def test_the_best_scored_nodes_become_the_tree(
    num_steps: int, k: int, w: int, is_tied: bool
) -> None:
    roots = [1, 2, 3]
    steps, paths = draft(roots, num_steps, k, is_tied)
    tree = organize_draft_results(steps, torch.tensor(roots), w)
    for row, root in enumerate(roots):
        expected = [(root,), *best_nodes(root, num_steps, k, w - 1, is_tied)]
        assert paths_of(tree, row) == expected
        assert tree.depths[row].tolist() == [len(path) - 1 for path in expected]
    assert paths.shape == (3, k, num_steps)


def test_more_nodes_than_were_drafted_are_refused() -> None:
    steps, _ = draft([1], 2, 2, False)
    with pytest.raises(ValueError, match="6 nodes were drafted, 7"):
        organize_draft_results(steps, torch.tensor([1]), 8)


def test_the_paths_of_branches_lead_through_their_parents() -> None:
    steps, paths = draft([4, 5], 4, 3, False)
    for row, branch in itertools.product(range(2), range(3)):
        expected, at = [], branch
        for step in reversed(steps):
            expected.append(at)
            at = int(step.parent_branches[row, at])
        assert paths[row, branch].tolist() == expected[::-1]


def random_parents(batch_size: int, w: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.full((batch_size,), NO_NODE)]
    columns += [torch.randint(node, (batch_size,), generator=generator) for node in range(1, w)]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("w", [2, 3, 9, 17])
def test_ancestors_depths_and_positions_of_random_trees(w: int) -> None:
    parents = random_parents(5, w, seed=w)
    tree = tree_from_parents(torch.zeros_like(parents), parents)
    lens = torch.tensor([0, 3, 10, 100, 7])
    positions = tree_positions(tree, lens).view(5, w)
    for row in range(5):
        above = parents[row].tolist()
        for node in range(w):
            line, at = [], node
            while at != NO_NODE:
                line.append(at)
                at = above[at]
            assert tree.is_ancestor[row, node].nonzero().flatten().tolist() == line[::-1]
            assert tree.depths[row, node] == len(line) - 1
            assert positions[row, node] == lens[row] + len(line) - 1


def test_a_known_depth_bounds_the_work_and_not_the_result() -> None:
    parents = torch.tensor([[-1, 0, 1, 2, 0, 4]])
    ids = torch.zeros_like(parents)
    full, bounded = tree_from_parents(ids, parents), tree_from_parents(ids, parents, max_depth=3)
    assert torch.equal(full.is_ancestor, bounded.is_ancestor)


def test_a_chain_is_a_tree_without_branches() -> None:
    ids = torch.arange(10).view(2, 5)
    chain = chain_tree(ids)
    parents = torch.tensor([[-1, 0, 1, 2, 3]] * 2)
    tree = tree_from_parents(ids, parents)
    for name in ("token_ids", "parents", "depths", "is_ancestor"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name


def test_compaction_moves_the_accepted_path_to_the_front() -> None:
    # Root 0 with children 1 and 2; 2 has child 4; the target wants 2, then 4, then 30.
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 0, 1, 2]])
    ids = torch.tensor([[5, 10, 11, 12, 13], [5, 10, 11, 12, 13]])
    target_ids = torch.tensor([[11, 0, 13, 0, 30], [99, 0, 13, 0, 30]])
    tree = tree_from_parents(ids, parents)
    accept = accept_tree(tree, target_ids, max_accept_len=3)
    slots = torch.tensor([40, 41, 42, 43, 44, 70, 71, 72, 73, 74])
    compaction = compact(accept, slots, num_draft_tokens=5)
    assert compaction.rows.tolist() == [[0, 2, 4], [5, 6, 7]]
    assert compaction.from_slots.tolist() == [[40, 42, 44], [70, 71, 72]]
    assert compaction.to_slots.tolist() == [[40, 41, 42], [70, 71, 72]]
    kv = torch.arange(100)
    kv[compaction.to_slots] = kv[compaction.from_slots]
    assert kv[40:43].tolist() == [40, 42, 44]
    assert kv[70:75].tolist() == [70, 71, 72, 73, 74]

    features = torch.arange(10.0).unsqueeze(1)
    ops, tables, rows = TorchStepOps(), row_tables({4: 20, 1: 8}, num_rows=6), torch.tensor([4, 1])
    places = ops.places(rows, tables, 5, max_position=99)
    ends = ops.advance(rows, places.lens[0], accept, tables)
    extend = extend_after_verify(accept, compaction, features, places, ends)
    assert extend.token_ids.view(2, 3)[0].tolist() == [11, 13, 30]
    assert extend.token_ids.view(2, 3)[1, 0] == 99
    assert extend.features is not None
    assert extend.features.flatten()[:4].tolist() == [0, 2, 4, 5]
    assert extend.positions.view(2, 3)[0].tolist() == [20, 21, 22]
    assert extend.last_rows.tolist() == [2, 3]
    assert extend.committed_lens.tolist() == [23, 9]
    assert tables.committed_lens.tolist() == [0, 9, 0, 0, 23, 0]
    assert tables.last_token_ids[rows].tolist() == [30, 99]


@pytest.mark.parametrize(("w", "d"), [(5, 5), (5, 3), (1, 1)])
def test_chains_are_compacted_like_trees_and_cheaper(w: int, d: int) -> None:
    ids = torch.arange(3 * w).view(3, w)
    targets = torch.where(torch.arange(w) < torch.tensor([[0], [1], [w]]), ids + 1, -5)
    simulated = torch.tensor([0, min(1, d - 1), d - 1])
    for accept in (accept_chain(ids, targets), accept_simulated(ids, targets, simulated, d)):
        own = accept.accept_index.shape[1]
        slots = torch.randperm(3 * w) + 100
        general, chain = compact(accept, slots, w), compact_chain(slots, w, own)
        for name in ("rows", "from_slots", "to_slots"):
            assert torch.equal(getattr(general, name), getattr(chain, name)), name
        assert chain.is_all_rows == (own == w)


@pytest.mark.parametrize("seed", range(5))
def test_compaction_of_random_trees(seed: int) -> None:
    b, w = 4, 8
    parents = random_parents(b, w, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, (b, w), generator=generator)
    tree = tree_from_parents(ids, parents)
    accept = accept_tree(tree, torch.randint(3, (b, w), generator=generator), max_accept_len=w)
    slots = torch.randperm(b * w, generator=generator) + 100
    compaction = compact(accept, slots, w)
    kv = {int(slot): f"{i // w}.{i % w}" for i, slot in enumerate(slots)}
    moved = dict(kv)
    for to, source in zip(compaction.to_slots.flatten(), compaction.from_slots.flatten()):
        moved[int(to)] = kv[int(source)]
    for row in range(b):
        length = int(accept.accept_lens[row])
        own = slots[row * w : (row + 1) * w].tolist()
        path = accept.accept_index[row, :length].tolist()
        assert [moved[slot] for slot in own[:length]] == [f"{row}.{node}" for node in path]
