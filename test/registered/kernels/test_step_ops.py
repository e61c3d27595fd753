"""The fused bookkeeping of speculative steps against the reference.

Without a GPU in Triton's interpreter.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt import platforms
from sglang.srt.environ import envs
from sglang.srt.speculative import base_spec_worker, draft_runner
from sglang.srt.speculative.eagle_info import AcceptResult, StepEnds, StepPlaces
from sglang.srt.speculative.spec_graph_runner import GraphKind
from sglang.srt.speculative.step_ops import DraftTables, RowTables, TorchStepOps
from sglang.srt.speculative.triton_ops.step_ops import TritonStepOps
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.spec_rig import TinyPair, serve, worker_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OURS, TORCH = TritonStepOps(), TorchStepOps()
ROWS, COLUMNS, VOCAB, HIDDEN = 9, 40, 4100, 1030


def ids(limit: int, *shape: int) -> torch.Tensor:
    return torch.randint(limit, shape, device=DEVICE)


def some_rows(num_reqs: int) -> torch.Tensor:
    """Different rows, and the padding one."""
    rows = torch.randperm(ROWS - 1, device=DEVICE)[:num_reqs]
    return torch.cat([rows[:-1], torch.tensor([ROWS - 1], device=DEVICE)])


def row_tables() -> RowTables:
    committed_lens = ids(30, ROWS)
    committed_lens[-1] = 0
    return RowTables(
        req_to_token=ids(1000, ROWS, COLUMNS).to(torch.int32),
        committed_lens=committed_lens,
        last_token_ids=ids(VOCAB, ROWS),
        padding_row=ROWS - 1,
    )


def draft_tables(k: int, dtype: torch.dtype = torch.float32) -> DraftTables:
    hidden = torch.randn(ROWS, HIDDEN, device=DEVICE).to(dtype)
    return DraftTables(token_ids=ids(VOCAB, ROWS, k), hidden=hidden)


def copy_of(tables: DraftTables) -> DraftTables:
    return DraftTables(token_ids=tables.token_ids.clone(), hidden=tables.hidden.clone())


def same(got: object, expected: object) -> None:
    """All fields, types included."""
    for name in type(expected).__dataclass_fields__:  # type: ignore[attr-defined]
        ours, wanted = getattr(got, name), getattr(expected, name)
        if isinstance(wanted, torch.Tensor):
            assert ours.dtype == wanted.dtype, name
            assert torch.equal(ours, wanted), name


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("num_reqs", "num_places"), [(1, 4), (5, 4), (3, 7), (2, 1)])
def test_places(num_reqs: int, num_places: int) -> None:
    rows, tables = some_rows(num_reqs), row_tables()
    got = OURS.places(rows, tables, num_places, 28)
    same(got, TORCH.places(rows, tables, num_places, 28))
    assert isinstance(got, StepPlaces)
    assert got.positions.is_contiguous() and got.step_slots[0].is_contiguous()


@pytest.mark.parametrize("k", [1, 3])
def test_a_chain_starts_where_the_draft_has_stopped(k: int) -> None:
    rows, tables, roots = some_rows(4), draft_tables(k, torch.float16), ids(VOCAB, 4)
    tokens, states = OURS.start_chain(rows, roots, tables, 5)
    expected, wanted = TORCH.start_chain(rows, roots, tables, 5)
    assert torch.equal(tokens[:, :2], expected[:, :2])
    assert tokens.shape == expected.shape
    assert torch.equal(states, wanted)


def test_the_best_token_is_written_in_its_place() -> None:
    logits, hot = torch.randn(3, VOCAB, device=DEVICE), torch.randperm(VOCAB, device=DEVICE)
    for hot_token_id in (None, hot):
        got, expected = ids(9, 3, 4), ids(9, 3, 4)
        expected[:, [0, 1, 3]] = got[:, [0, 1, 3]]
        OURS.write_best(logits, hot_token_id, got[:, 2])
        TORCH.write_best(logits, hot_token_id, expected[:, 2])
        assert torch.equal(got, expected)


@pytest.mark.parametrize("is_picked", [False, True])
@pytest.mark.parametrize("is_hot", [False, True])
def test_a_draft_is_remembered(is_hot: bool, is_picked: bool) -> None:
    rows, logits = some_rows(4), torch.randn(4, VOCAB, device=DEVICE)
    hot = torch.randperm(VOCAB, device=DEVICE) if is_hot else None
    states = torch.randn(12 if is_picked else 4, HIDDEN + 6, device=DEVICE)[:, :HIDDEN]
    picked = ids(12, 4, 2)[:, 1] if is_picked else None
    before = draft_tables(2)
    ours, expected = copy_of(before), copy_of(before)
    OURS.remember(rows, logits, hot, states, picked, ours)
    TORCH.remember(rows, logits, hot, states, picked, expected)
    same(ours, expected)
    assert not torch.equal(ours.hidden, before.hidden)


def drafts_of(logits: torch.Tensor, num_right: list[int], num_nodes: int) -> torch.Tensor:
    """int64 [b, w]: chains of which so many drafts are right."""
    best = logits.argmax(-1).view(-1, num_nodes)
    tokens = torch.cat([ids(VOCAB, len(best), 1), best[:, :-1]], dim=1)
    for request, count in enumerate(num_right):
        if count + 1 < num_nodes:
            tokens[request, count + 1] += 1
    return tokens


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 5])
def test_drafts_are_accepted_up_to_the_first_wrong_one(num_nodes: int) -> None:
    counts = [*range(num_nodes), 0]
    logits = torch.randn(len(counts) * num_nodes, VOCAB, device=DEVICE)
    tokens = drafts_of(logits, counts, num_nodes)
    # A row that no accepted token comes from makes its request bad too.
    logits[num_nodes - 1, VOCAB - 1] = float("nan")
    logits[-1, 3] = float("inf")
    got, report = OURS.accept_best(logits, tokens, None)
    expected, wanted = TORCH.accept_best(logits, tokens, None)
    same(got, expected)
    assert torch.equal(report, wanted)
    assert report.dtype == wanted.dtype
    if num_nodes > 1:
        assert got.accept_lens.tolist()[:-1] == [count + 1 for count in counts[:-1]]
    bad = [0] * len(counts)
    bad[0] = bad[-1] = 1
    assert report[:, -1].tolist() == bad


def test_no_token_ends_a_chain() -> None:
    logits = torch.randn(3 * 4, VOCAB, device=DEVICE)
    tokens = drafts_of(logits, [3, 3, 1], 4)
    tokens[0, 2] = tokens[1, 1] = -1
    # Chains may lie within something wider.
    wide = torch.cat([tokens, tokens], dim=1)[:, :4]
    got, report = OURS.accept_best(logits, wide, None)
    expected, wanted = TORCH.accept_best(logits, tokens, None)
    same(got, expected)
    assert torch.equal(report, wanted)
    assert got.accept_lens.tolist() == [2, 1, 2]


def test_so_many_drafts_are_accepted_as_are_simulated() -> None:
    logits, tokens = torch.randn(3 * 4, VOCAB, device=DEVICE), ids(VOCAB, 3, 4)
    simulated = torch.tensor([3, 0, 2], device=DEVICE)
    got, report = OURS.accept_best(logits, tokens, simulated)
    expected, wanted = TORCH.accept_best(logits, tokens, simulated)
    same(got, expected)
    assert torch.equal(report, wanted)
    assert got.accept_lens.tolist() == [4, 1, 3]


def test_requests_advance_and_padding_does_not() -> None:
    rows, tables = some_rows(4), row_tables()
    lens = tables.committed_lens[rows]
    accept = AcceptResult(
        accept_index=ids(4, 4, 3),
        accept_lens=ids(3, 4) + 1,
        output_ids=ids(VOCAB, 4, 3),
        bonus_ids=ids(VOCAB, 4, 2)[:, 1],
    )
    results, after = [], []
    for ops in (OURS, TORCH):
        own = RowTables(
            req_to_token=tables.req_to_token,
            committed_lens=tables.committed_lens.clone(),
            last_token_ids=tables.last_token_ids.clone(),
            padding_row=tables.padding_row,
        )
        results.append(ops.advance(rows, lens, accept, own))
        after.append(own)
    assert isinstance(results[0], StepEnds)
    same(results[0], results[1])
    same(after[0], after[1])
    assert after[0].committed_lens[-1] == 0
    assert not torch.equal(after[0].committed_lens, tables.committed_lens)


@pytest.mark.skipif(DEVICE == "cuda", reason="engines on a GPU use these operations anyway")
@pytest.mark.parametrize(("algorithm", "accept_len"), [("EAGLE3", 2.5), ("STANDALONE", None)])
def test_served_tokens_are_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, accept_len: float | None
) -> None:
    """Whole steps by a stand-in for graphs, padding included; several drafts are accepted."""
    pair = TinyPair.make(tmp_path)
    pair.drafts["STANDALONE"] = pair.target  # always right
    answers, calls = [], 0

    class Counted(TritonStepOps):
        def advance(self, *inputs: Any) -> StepEnds:
            nonlocal calls
            calls += 1
            return super().advance(*inputs)

    for ops in (TorchStepOps(), Counted()):
        monkeypatch.setattr(platforms, "_current", None)
        use_eager_graphs(monkeypatch)
        for user in (base_spec_worker, draft_runner):
            monkeypatch.setattr(user, "step_ops", lambda device, ops=ops: ops)
        torch.manual_seed(0)
        with ExitStack() as stack:
            if accept_len is not None:
                stack.enter_context(envs.SGLANG_SIMULATE_ACC_LEN.override(accept_len))
            server = stack.enter_context(serve(pair, algorithm))
            worker = worker_of(server)
            worker.capture_graphs([1, 4], pad=True, show_progress=False)
            rids = [server.submit([5, 6 + n], 9 + 4 * n) for n in range(3)]
            server.run_until_idle()
            answers.append([server.answer_of(rid).tokens for rid in rids])
            assert worker.graphs is not None
            assert worker.graphs.num_steps[GraphKind.WHOLE] > 3
            assert worker.committed_lens[worker.target_runner.req_to_token_pool.padding_row] == 0
    assert answers[0] == answers[1]
    assert calls > 3
