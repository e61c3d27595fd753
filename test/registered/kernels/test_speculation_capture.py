"""Drafting and acceptance in a CUDA graph: captured once, replayed on other values, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang.srt.layers.sampler import draw
from sglang.srt.speculative.acceptance import (
    CoinUse,
    accept_by_rejection,
    accept_by_thresholds,
    accept_chain,
    accept_tree,
    seeded_coins,
)
from sglang.srt.speculative.eagle_info import DraftFrontier
from sglang.srt.speculative.eagle_utils import (
    chain_tree,
    compact,
    extend_after_verify,
    extend_paths,
    organize_draft_results,
    parent_rows,
    select_top_k,
    tree_positions,
)
from sglang.srt.speculative.step_ops import DraftTables, RowTables, step_ops
from sglang.srt.speculative.tree_attention import branch_visibility

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

B, K, W, V, STEPS, D = 6, 4, 12, 1000, 4, 5
Inputs = dict[str, torch.Tensor]


def make_inputs(seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    def ids(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(limit, shape, generator=generator)

    probs = torch.softmax(torch.randn(B, W, V, generator=generator), dim=-1)
    inputs = {
        "roots": ids(3, B),
        "lens": ids(50, B),
        "slots": torch.randperm(B * W, generator=generator),
        "features": rand(B * W, 6),
        "probs": probs,
        "targets": ids(3, B, W),
        "q": probs.flip(0)[:, 1:],
        "coins": rand(B, W),
        "final_coins": rand(B, W),
        "seeds": ids(1000, B),
        "is_seeded": ids(2, B) > 0,
        "chain": ids(2, B, W),
    }
    for step in range(STEPS):
        rows = B if step == 0 else B * K
        inputs[f"probs{step}"] = rand(rows, K).sort(dim=1, descending=True).values / K
        inputs[f"ids{step}"] = rand(rows, V).topk(K, dim=1).indices % 3
    inputs["rows"] = torch.randperm(B + 1, generator=generator)[:B]
    inputs["table"] = ids(1000, B + 1, 80).to(torch.int32)
    inputs["logits"] = torch.randn(B * W, V, generator=generator)
    inputs["hidden"] = torch.randn(B + 1, 70, generator=generator)
    inputs["order"] = torch.arange(B)
    inputs["hot"] = torch.randperm(V, generator=generator)
    return inputs


def row_tables(x: Inputs) -> RowTables:
    committed_lens = torch.zeros(B + 1, dtype=torch.int64, device=x["lens"].device)
    return RowTables(
        req_to_token=x["table"],
        committed_lens=committed_lens.index_copy(0, x["rows"], x["lens"]),
        last_token_ids=x["rows"].new_zeros(B + 1),
        padding_row=B,
    )


def draft_and_accept_tree(x: Inputs) -> list[torch.Tensor]:
    steps: list[DraftFrontier] = []
    paths, outputs = None, []
    for step in range(STEPS):
        previous = steps[-1] if steps else None
        frontier = select_top_k(step, x[f"probs{step}"], x[f"ids{step}"], previous)
        paths = extend_paths(paths, frontier)
        outputs.append(parent_rows(step, frontier))
        steps.append(frontier)
    assert paths is not None
    tree = organize_draft_results(steps, x["roots"], W)
    outputs += [paths, tree.token_ids, tree.parents, tree.is_ancestor]
    outputs.append(tree_positions(tree, x["lens"]))
    outputs.append(branch_visibility(paths))
    ops, tables = step_ops(x["lens"].device), row_tables(x)
    places = ops.places(x["rows"], tables, W, 60)
    outputs += [places.lens, places.positions, places.slots, places.step_slots]
    greedy = accept_tree(tree, x["targets"], D)
    coins, final_coins = x["coins"][:, : D - 1], x["final_coins"][:, :D]
    walked = accept_by_thresholds(tree, x["probs"], coins, final_coins, 0.9, 0.01)
    for accept in (greedy, walked):
        compaction = compact(accept, x["slots"], W)
        ends = ops.advance(x["rows"], x["lens"], accept, tables)
        extend = extend_after_verify(accept, compaction, x["features"], places, ends)
        outputs += [accept.accept_index, accept.output_ids, compaction.from_slots]
        outputs += [extend.token_ids, extend.positions, extend.last_rows, extend.committed_lens]
    return outputs


def accept_chains(x: Inputs) -> list[torch.Tensor]:
    tree = chain_tree(x["chain"])
    positions = x["lens"].unsqueeze(1) + tree.depths + 1
    coins = seeded_coins(x["coins"], x["seeds"], x["is_seeded"], positions, CoinUse.TARGET)
    greedy = accept_chain(x["chain"], x["targets"])
    drawn = draw(x["probs"].flatten(0, 1), coins.reshape(-1, 1)).view(B, W)
    rejected = accept_by_rejection(x["chain"], x["probs"], x["q"], coins[:, 1:], x["final_coins"])
    outputs = [drawn]
    for accept in (greedy, rejected, accept_chain(x["chain"], drawn)):
        outputs += [accept.accept_index, accept.accept_lens, accept.output_ids, accept.bonus_ids]
    return outputs


def step_of_chains(x: Inputs) -> list[torch.Tensor]:
    ops, tables, rows = step_ops(x["lens"].device), row_tables(x), x["rows"]
    drafts = DraftTables(token_ids=rows.new_zeros(B + 1, 1), hidden=x["hidden"].clone())
    places = ops.places(rows, tables, W, 60)
    logits = x["logits"].view(B, W, V)
    ops.remember(rows, logits[:, 0], None, x["logits"][:, :70], x["targets"][:, 1], drafts)
    token_ids, hidden = ops.start_chain(rows, places.root_ids, drafts, W)
    for node in range(2, W):
        hot = None if node < B + 2 else x["hot"]
        ops.write_best(logits[:, node - 1], hot, token_ids[:, node])
        # One request more goes wrong.
        token_ids[:, node] += x["order"] == node
    outputs = [places.lens, places.positions, places.slots, token_ids, hidden]
    for simulated in (None, x["targets"][:, 0]):
        accept, report = ops.accept_best(x["logits"], token_ids, simulated)
        ends = ops.advance(rows, places.lens[0], accept, tables)
        outputs += [accept.accept_index, accept.output_ids, report]
        outputs += [ends.last_rows, ends.committed_lens]
    return [*outputs, tables.committed_lens, tables.last_token_ids[rows], drafts.hidden]


@pytest.mark.parametrize("function", [draft_and_accept_tree, accept_chains, step_of_chains])
def test_a_replay_equals_the_cpu(function: Callable[[Inputs], list[torch.Tensor]]) -> None:
    static = {name: value.cuda() for name, value in make_inputs(0).items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        function(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(static)
    for seed in range(1, 6):
        inputs = make_inputs(seed)
        for name, value in inputs.items():
            static[name].copy_(value)
        graph.replay()
        for number, (found, wanted) in enumerate(zip(outputs, function(inputs), strict=True)):
            assert torch.equal(found.cpu(), wanted), f"output {number}, seed {seed}"
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(100):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    print(f"{function.__name__}: {start.elapsed_time(end) * 10:.1f} us a replay")
