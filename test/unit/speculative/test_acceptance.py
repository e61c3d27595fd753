"""Acceptance rules: exact against loops, and in distribution against the target's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.layers.sampler import draw, hash_uniform
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
from sglang.srt.speculative.eagle_info import NO_NODE, AcceptResult, DraftTree
from sglang.srt.speculative.eagle_utils import chain_tree, tree_from_parents

NUM_DRAWS = 20_000
# 0.999 quantiles of chi-square, by degrees of freedom.
CHI_SQUARE_999 = {2: 13.82, 3: 16.27, 4: 18.47, 8: 26.12, 15: 37.70, 26: 54.05}


def random_tree(b: int, w: int, num_tokens: int, seed: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.full((b,), NO_NODE)]
    columns += [torch.randint(node, (b,), generator=generator) for node in range(1, w)]
    ids = torch.randint(num_tokens, (b, w), generator=generator)
    return tree_from_parents(ids, torch.stack(columns, dim=1))


def check(result: AcceptResult, row: int, nodes: list[int], ids: list[int], bonus: int) -> None:
    """`nodes` is the path from the root, `ids` the tokens of all nodes of the tree."""
    length, d = len(nodes), result.accept_index.shape[1]
    assert result.accept_lens[row] == length
    assert result.accept_index[row].tolist() == nodes + [NO_NODE] * (d - length)
    output = [ids[node] for node in nodes[1:]] + [bonus]
    assert result.output_ids[row].tolist() == output + [0] * (d - length)
    assert result.bonus_ids[row] == bonus


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_accepted_up_to_its_first_difference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, (40, 6), generator=generator)
    targets = torch.randint(2, (40, 6), generator=generator)
    result = accept_chain(ids, targets)
    for row in range(40):
        num_right = 0
        while num_right < 5 and ids[row, num_right + 1] == targets[row, num_right]:
            num_right += 1
        nodes = list(range(num_right + 1))
        check(result, row, nodes, ids[row].tolist(), int(targets[row, num_right]))


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_followed_along_the_targets_choices(seed: int) -> None:
    b, w = 60, 10
    tree = random_tree(b, w, 3, seed)
    targets = torch.randint(3, (b, w), generator=torch.Generator().manual_seed(seed + 100))
    result = accept_tree(tree, targets, max_accept_len=w)
    for row in range(b):
        ids, parents = tree.token_ids[row].tolist(), tree.parents[row].tolist()
        nodes = [0]
        while True:
            wanted = int(targets[row, nodes[-1]])
            found = [i for i in range(w) if parents[i] == nodes[-1] and ids[i] == wanted]
            if not found:
                break
            nodes.append(found[0])
        check(result, row, nodes, ids, wanted)


def test_chain_and_tree_agree_on_chains() -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, (50, 5), generator=generator)
    targets = torch.randint(2, (50, 5), generator=generator)
    chain, tree = accept_chain(ids, targets), accept_tree(chain_tree(ids), targets, 5)
    for name in ("accept_index", "accept_lens", "output_ids", "bonus_ids"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name


def random_probs(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(*shape, generator=generator) * 1.5, dim=-1)


def walk_with_thresholds(
    ids: list[int],
    parents: list[int],
    probs: torch.Tensor,
    coins: list[float],
    final_coins: list[float],
    single: float,
    acc: float,
) -> tuple[list[int], int]:
    nodes, left = [0], probs[0]
    for coin in coins + [2.0]:
        left, mass, seen = probs[nodes[-1]].clone(), torch.tensor(0.0), set()
        for node in (i for i, parent in enumerate(parents) if parent == nodes[-1]):
            p = probs[nodes[-1], ids[node]]
            mass = mass + (p if ids[node] not in seen else 0.0)
            if ids[node] not in seen and p > 0 and (coin < mass / acc or p >= single):
                nodes.append(node)
                break
            seen.add(ids[node])
            left[ids[node]] = 0.0
        else:
            break
    if left.sum() <= 0:
        left = probs[nodes[-1]]
    return nodes, int(draw(left.unsqueeze(0), torch.tensor([[final_coins[len(nodes) - 1]]])))


@pytest.mark.parametrize(("single", "acc"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.5), (0.3, 0.7)])
def test_the_walk_with_thresholds_follows_the_rule(single: float, acc: float) -> None:
    b, w, v = 80, 9, 5
    tree = random_tree(b, w, v, seed=5)
    probs = random_probs(b, w, v, seed=6)
    probs = probs.masked_fill(probs < 0.05, 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    generator = torch.Generator().manual_seed(7)
    coins = torch.rand((b, w - 1), generator=generator)
    final_coins = torch.rand((b, w), generator=generator)
    result = accept_by_thresholds(tree, probs, coins, final_coins, single, acc)
    for row in range(b):
        ids = tree.token_ids[row].tolist()
        nodes, bonus = walk_with_thresholds(
            ids,
            tree.parents[row].tolist(),
            probs[row],
            coins[row].tolist(),
            final_coins[row].tolist(),
            single,
            acc,
        )
        check(result, row, nodes, ids, bonus)


def test_rejection_follows_the_rule() -> None:
    b, w, v = 80, 5, 6
    p, q = random_probs(b, w, v, seed=1), random_probs(b, w - 1, v, seed=2)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(v, (b, w), generator=generator)
    coins = torch.rand((b, w - 1), generator=generator)
    final_coins = torch.rand((b, w), generator=generator)
    result = accept_by_rejection(ids, p, q, coins, final_coins)
    for row in range(b):
        tokens, at = ids[row].tolist(), 0
        while at < w - 1:
            token = tokens[at + 1]
            if not coins[row, at] * q[row, at, token] < p[row, at, token]:
                break
            at += 1
        left = p[row, at] - (q[row, at] if at < w - 1 else 0.0)
        bonus = int(draw(left.clamp(min=0).unsqueeze(0), final_coins[row : row + 1, at : at + 1]))
        check(result, row, list(range(at + 1)), tokens, bonus)


# ------------------------------------------------------------------------------------------------
# Distributions
# ------------------------------------------------------------------------------------------------

V = 3


def target_model(num_tokens: int, seed: int = 11) -> torch.Tensor:
    """[V, V]: distribution of the next token after each."""
    return random_probs(num_tokens, num_tokens, seed=seed)


def continue_to(result: AcceptResult, model: torch.Tensor, length: int, seed: int) -> torch.Tensor:
    """The first `length` tokens, what the step did not yield drawn from the model: [b, length]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.nn.functional.pad(result.output_ids, (0, length))[:, :length].clone()
    for place in range(1, length):
        coins = torch.rand((tokens.shape[0], 1), generator=generator)
        drawn = draw(model[tokens[:, place - 1]], coins)
        tokens[:, place] = torch.where(place < result.accept_lens, tokens[:, place], drawn)
    return tokens


def chi_square(tokens: torch.Tensor, model: torch.Tensor, root: int) -> tuple[float, int]:
    """Of token sequences [n, length] against the model's: (statistic, degrees of freedom)."""
    v, length = model.shape[0], tokens.shape[1]
    expected = torch.ones(1, dtype=torch.float64)
    last = torch.tensor([root])
    for _ in range(length):
        expected = (expected.unsqueeze(1) * model[last].double()).flatten()
        last = torch.arange(v).repeat(len(last))
    code = torch.zeros(len(tokens), dtype=torch.int64)
    for place in range(length):
        code = code * v + tokens[:, place]
    counts = torch.bincount(code, minlength=len(expected)).double()
    expected = expected * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def assert_distributed(tokens: torch.Tensor, model: torch.Tensor, root: int) -> None:
    statistic, degrees = chi_square(tokens, model, root)
    assert statistic < CHI_SQUARE_999[degrees]


def assert_not_distributed(tokens: torch.Tensor, model: torch.Tensor, root: int) -> None:
    statistic, degrees = chi_square(tokens, model, root)
    assert statistic > 3 * CHI_SQUARE_999[degrees]


def fixed_tree() -> DraftTree:
    """0 - (1: token 1 - (3: token 0, 4: token 2), 2: token 0 - 5: token 0); root token 2."""
    parents = torch.tensor([-1, 0, 0, 1, 1, 2]).expand(NUM_DRAWS, 6)
    ids = torch.tensor([2, 1, 0, 0, 2, 0]).expand(NUM_DRAWS, 6)
    return tree_from_parents(ids, parents)


def draw_targets(probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """A draw at each node: probs [b, w, V], coins [b, w]."""
    return draw(probs.flatten(0, 1), coins.reshape(-1, 1)).view(coins.shape)


def coins_of(*shape: int, seed: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_target_draws_in_a_chain_have_the_targets_distribution() -> None:
    model = target_model(V)
    ids = torch.tensor([2, 1, 0]).expand(NUM_DRAWS, 3)
    targets = draw_targets(model[ids], coins_of(NUM_DRAWS, 3, seed=1))
    tokens = continue_to(accept_chain(ids, targets), model, 3, seed=2)
    assert_distributed(tokens, model, root=2)


def test_target_draws_in_a_tree_have_the_targets_distribution() -> None:
    model, tree = target_model(V), fixed_tree()
    targets = draw_targets(model[tree.token_ids], coins_of(NUM_DRAWS, 6, seed=3))
    result = accept_tree(tree, targets, max_accept_len=3)
    assert_distributed(continue_to(result, model, 3, seed=4), model, root=2)


def test_the_walk_with_thresholds_of_one_has_the_targets_distribution() -> None:
    model, tree = target_model(V), fixed_tree()
    result = accept_by_thresholds(
        tree,
        model[tree.token_ids],
        coins_of(NUM_DRAWS, 2, seed=5),
        coins_of(NUM_DRAWS, 3, seed=6),
        1.0,
        1.0,
    )
    assert_distributed(continue_to(result, model, 3, seed=7), model, root=2)


def test_padding_that_repeats_a_child_does_not_count_twice() -> None:
    model = target_model(V)
    parents = torch.tensor([-1, 0, 0, 0]).expand(NUM_DRAWS, 4)
    ids = torch.tensor([2, 0, 0, 0]).expand(NUM_DRAWS, 4)
    tree = tree_from_parents(ids, parents)
    coins = coins_of(NUM_DRAWS, 1, seed=8), coins_of(NUM_DRAWS, 2, seed=9)
    result = accept_by_thresholds(tree, model[ids], *coins, 1.0, 1.0)
    assert_distributed(result.output_ids[:, :1], model, root=2)


def test_a_threshold_below_one_changes_the_distribution() -> None:
    model, tree = target_model(V), fixed_tree()
    coins = coins_of(NUM_DRAWS, 2, seed=5), coins_of(NUM_DRAWS, 3, seed=6)
    result = accept_by_thresholds(tree, model[tree.token_ids], *coins, 1.0, 0.6)
    assert_not_distributed(continue_to(result, model, 3, seed=7), model, root=2)


def rejection_step(
    drafts_from: torch.Tensor,
    claimed: torch.Tensor,
    model: torch.Tensor,
    first_invalid: int = 3,
) -> AcceptResult:
    """Two drafts by `drafts_from` [V, V], accepted as if they came from `claimed`."""
    ids = torch.full((NUM_DRAWS, 3), 2)
    for place in range(2):
        coins = coins_of(NUM_DRAWS, 1, seed=20 + place)
        ids[:, place + 1] = draw(drafts_from[ids[:, place]], coins)
    coins, final_coins = coins_of(NUM_DRAWS, 2, seed=22), coins_of(NUM_DRAWS, 3, seed=23)
    q, p = claimed[ids[:, :2]], model[ids]
    ids[:, first_invalid:] = -1
    return accept_by_rejection(ids, p, q, coins, final_coins)


def test_rejection_sampling_has_the_targets_distribution() -> None:
    model, q = target_model(V), target_model(V, seed=12)
    result = rejection_step(q, q, model)
    assert_distributed(continue_to(result, model, 3, seed=24), model, root=2)
    # As many drafts pass as min(p, q) sums to.
    share = float((result.accept_lens > 1).float().mean())
    assert share == pytest.approx(float(torch.minimum(model[2], q[2]).sum()), abs=0.015)


def test_rejection_with_a_wrong_draft_distribution_is_noticed() -> None:
    model = target_model(V)
    result = rejection_step(target_model(V, seed=12), target_model(V, seed=13), model)
    assert_not_distributed(continue_to(result, model, 3, seed=24), model, root=2)


def test_drafts_from_the_target_itself_are_all_accepted() -> None:
    model = target_model(V)
    result = rejection_step(model, model, model)
    assert bool((result.accept_lens == 3).all())


def test_a_greedy_request_among_rejections_gets_its_argmax() -> None:
    v = 4
    best = torch.tensor([[1, 2, 3]])
    p = torch.nn.functional.one_hot(best, v).float()
    q = random_probs(1, 2, v, seed=4)
    for drafts, length in (([1, 2], 3), ([1, 0], 2), ([3, 2], 1)):
        ids = torch.tensor([[0, *drafts]])
        result = accept_by_rejection(
            ids, p, q, torch.tensor([[0.99, 0.99]]), torch.full((1, 3), 0.5)
        )
        assert result.output_ids[0, :length].tolist() == best[0, :length].tolist()
        assert result.accept_lens.tolist() == [length]


# ------------------------------------------------------------------------------------------------
# What is no draft
# ------------------------------------------------------------------------------------------------


def test_simulated_acceptance_takes_what_it_is_told() -> None:
    ids = torch.arange(6).repeat(3, 1)
    targets = torch.arange(10, 16).repeat(3, 1)
    result = accept_simulated(ids, targets, torch.tensor([0, 2, 3]), 4)
    for row, count in enumerate([0, 2, 3]):
        check(result, row, list(range(count + 1)), list(range(6)), 10 + count)


@pytest.mark.parametrize("first", [1, 2])
def test_negative_tokens_are_no_drafts_and_do_not_change_the_distribution(first: int) -> None:
    model, tree = target_model(V), fixed_tree()
    ids = tree.token_ids.clone()
    ids[:, first:] = -1
    marked = replace(tree, token_ids=ids)
    coins = coins_of(NUM_DRAWS, 2, seed=5), coins_of(NUM_DRAWS, 3, seed=6)
    walked = accept_by_thresholds(marked, model[tree.token_ids], *coins, 1.0, 1.0)
    q = target_model(V, seed=12)
    rejected = rejection_step(q, q, model, first_invalid=first)
    for result in (walked, rejected):
        assert int(result.accept_lens.max()) == first
        assert_distributed(continue_to(result, model, 3, seed=7), model, root=2)


# ------------------------------------------------------------------------------------------------
# Seeds
# ------------------------------------------------------------------------------------------------


def test_seeded_requests_get_the_tokens_of_one_by_one_sampling() -> None:
    model = target_model(16, seed=30)
    seeds, is_seeded = torch.tensor([5, 5, 123456789012345]), torch.tensor([True, True, True])
    plain = torch.tensor([[3], [3], [3]])
    for position in range(1, 25):
        coins = hash_uniform(seeds, torch.full((3,), position)).unsqueeze(1)
        plain = torch.cat([plain, draw(model[plain[:, -1]], coins).unsqueeze(1)], dim=1)
    generator = torch.Generator().manual_seed(0)
    tokens = [[3], [3], [3]]
    while min(map(len, tokens)) < 25:
        tokens = [row[:25] for row in tokens]
        committed = torch.tensor([len(row) - 1 for row in tokens])
        roots = torch.tensor([[row[-1]] for row in tokens])
        # Half of the drafts are right.
        wanted = torch.cat([plain, roots.expand(-1, 3)], dim=1)
        right = torch.stack([wanted[i, len(row) :][:2] for i, row in enumerate(tokens)])
        guess = torch.randint(16, right.shape, generator=generator)
        drafts = torch.where(torch.rand(right.shape, generator=generator) < 0.7, right, guess)
        ids = torch.cat([roots, drafts], dim=1)
        positions = committed.unsqueeze(1) + torch.arange(3) + 1
        coins = torch.rand((3, 3), generator=generator)
        coins = seeded_coins(coins, seeds, is_seeded, positions, CoinUse.TARGET)
        result = accept_chain(ids, draw_targets(model[ids], coins))
        for row in range(3):
            tokens[row] += result.output_ids[row, : result.accept_lens[row]].tolist()
    for row in range(3):
        assert tokens[row][:25] == plain[row, :25].tolist()


def test_coins_of_unseeded_requests_stay_and_uses_differ() -> None:
    coins = coins_of(2, 3, seed=1)
    args = (torch.tensor([7, 7]), torch.tensor([False, True]), torch.arange(6).view(2, 3))
    by_use = [seeded_coins(coins, *args, use) for use in CoinUse]
    for made in by_use:
        assert torch.equal(made[0], coins[0])
        assert not torch.equal(made[1], coins[1])
    assert len({tuple(made[1].tolist()) for made in by_use}) == 3


@pytest.mark.parametrize("use", [CoinUse.ACCEPT, CoinUse.DRAFT])
def test_coins_of_one_position_and_different_use_are_independent(use: CoinUse) -> None:
    positions = torch.arange(NUM_DRAWS).unsqueeze(0)
    seeds, is_seeded = torch.tensor([42]), torch.tensor([True])
    first, second = (
        seeded_coins(torch.zeros(1, NUM_DRAWS), seeds, is_seeded, positions, which)[0]
        for which in (CoinUse.TARGET, use)
    )
    counts = torch.bincount((first * 4).long() * 4 + (second * 4).long(), minlength=16).double()
    expected = NUM_DRAWS / 16
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_999[15]


def test_seeded_rejection_sampling_over_steps_has_the_targets_distribution() -> None:
    """Coins of a position are used again after a rejection before it: it must not matter."""
    model, q = target_model(V), target_model(V, seed=12)
    seeds = torch.arange(NUM_DRAWS) * 7919
    is_seeded = torch.ones(NUM_DRAWS, dtype=torch.bool)
    unused = torch.zeros(NUM_DRAWS, 3)
    tokens, lens = torch.full((NUM_DRAWS, 8), 2), torch.ones(NUM_DRAWS, dtype=torch.int64)
    while int(lens.min()) < 4:
        ids = tokens.gather(1, lens.unsqueeze(1) - 1).expand(-1, 3).clone()
        positions = lens.unsqueeze(1) + torch.arange(3)
        coins = {use: seeded_coins(unused, seeds, is_seeded, positions, use) for use in CoinUse}
        for place in range(2):
            own = coins[CoinUse.DRAFT][:, place : place + 1]
            ids[:, place + 1] = draw(q[ids[:, place]], own)
        result = accept_by_rejection(
            ids,
            model[ids],
            q[ids[:, :2]],
            coins[CoinUse.ACCEPT][:, :2],
            coins[CoinUse.TARGET],
        )
        active = lens < 4
        for place in range(3):
            at = (lens + place).clamp(max=7)
            is_on = active & (place < result.accept_lens)
            old = tokens.gather(1, at.unsqueeze(1)).squeeze(1)
            new = torch.where(is_on, result.output_ids[:, place], old)
            tokens.scatter_(1, at.unsqueeze(1), new.unsqueeze(1))
        lens = torch.where(active, lens + result.accept_lens, lens)
    assert_distributed(tokens[:, 1:4], model, root=2)


def test_a_draft_vocabulary_is_spread_over_the_targets() -> None:
    probs = random_probs(2, 3, 4, seed=1)
    ids = torch.tensor([1, 4, 5, 8])
    spread = to_target_vocab(probs, ids, 10)
    assert spread.shape == (2, 3, 10)
    assert torch.equal(spread[..., ids], probs)
    torch.testing.assert_close(spread.sum(dim=-1), torch.ones(2, 3))
