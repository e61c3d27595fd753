"""The queue of requests whose grammar is being compiled; compilations end on command."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BitmaskRow,
    GrammarError,
    GrammarMatcher,
)
from sglang.srt.managers.grammar_manager import GrammarManager
from sglang.srt.sampling.sampling_params import SamplingParams


class FakeMatcher(GrammarMatcher):
    def __init__(self, text: str) -> None:
        self.text = text

    def accept_token(self, token_id: int) -> bool:
        return True

    def fill_mask(self, row: BitmaskRow) -> None:
        row[:] = -1

    def is_terminated(self) -> bool:
        return False

    def rollback(self, num_tokens: int) -> None:
        pass

    def copy(self) -> FakeMatcher:
        return FakeMatcher(self.text)

    @property
    def error(self) -> str | None:
        return None


class HandBackend(BaseGrammarBackend):
    """Compilations end when the test says so."""

    def __init__(self) -> None:
        super().__init__(8, [0])
        self.futures: dict[str, Future[GrammarMatcher]] = {}

    def _submit(self, kind: str, text: str) -> Future[GrammarMatcher]:
        return self.futures.setdefault(text, Future())

    def _compile(self, kind: str, text: str) -> GrammarMatcher:
        raise NotImplementedError

    def finish(self, text: str) -> None:
        self.futures.pop(text).set_result(FakeMatcher(text))

    def fail(self, text: str) -> None:
        self.futures.pop(text).set_exception(GrammarError(f"bad {text}"))


@dataclass(eq=False)
class FakeReq:
    rid: str
    sampling_params: SamplingParams
    grammar: GrammarMatcher | None = None


def req(rid: str, pattern: str) -> FakeReq:
    return FakeReq(rid, SamplingParams(regex=pattern))


@pytest.fixture
def backend() -> Iterator[HandBackend]:
    created = HandBackend()
    yield created
    created.shutdown()


def test_requests_come_out_when_their_grammar_is_done(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend)
    slow, quick, bad = req("a", "slow"), req("b", "quick"), req("c", "bad")
    for each in (slow, quick, bad):
        manager.add(each)
    assert manager.poll_ready() == [] and len(manager) == 3
    backend.finish("quick")
    backend.fail("bad")
    ready, failed = manager.take(manager.poll_ready())
    assert ready == [quick] and failed == [(bad, "bad bad")]
    assert isinstance(quick.grammar, FakeMatcher) and quick.grammar.text == "quick"
    assert manager.pending() == [slow]
    backend.finish("slow")
    assert manager.take(manager.poll_ready()) == ([slow], [])
    assert len(manager) == 0


def test_requests_with_one_grammar_get_matchers_of_their_own(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend)
    twins = [req("a", "same"), req("b", "same")]
    for each in twins:
        manager.add(each)
    backend.finish("same")
    ready, _ = manager.take(manager.poll_ready())
    assert ready == twins
    assert twins[0].grammar is not twins[1].grammar


def test_every_rank_follows_rank_0(backend: HandBackend) -> None:
    slower_backend = HandBackend()
    rank0: GrammarManager[FakeReq] = GrammarManager(backend, compile_timeout_s=0.0)
    rank1: GrammarManager[FakeReq] = GrammarManager(slower_backend, compile_timeout_s=1e9)
    for manager in (rank0, rank1):
        for rid in ("late", "done"):
            manager.add(req(rid, rid))
    backend.finish("done")
    # Rank 1 has finished what rank 0 gave up, and both what rank 0 finished.
    slower_backend.finish("late")
    slower_backend.finish("done")
    names = rank0.poll_ready()
    outcomes: list[Any] = []
    for manager in (rank0, rank1):
        ready, failed = manager.take(names)
        outcomes.append(([r.rid for r in ready], [(r.rid, text) for r, text in failed]))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == (["done"], [("late", "Compiling the grammar took too long.")])
    slower_backend.shutdown()


def test_timed_out_grammar_is_compiled_afresh_next_time(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend, compile_timeout_s=0.0)
    manager.add(req("a", "x"))
    stuck = backend.compile_async("regex", "x")
    manager.take(manager.poll_ready())
    backend.futures.clear()
    assert backend.compile_async("regex", "x") is not stuck


def test_removed_request_does_not_come_back(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend)
    gone, again, other = req("a", "x"), req("a", "y"), req("b", "x")
    manager.add(gone)
    manager.add(other)
    backend.finish("x")
    names = manager.poll_ready()
    # Between polling and taking, the abort arrives and its id is used again.
    assert manager.remove(lambda r: r.rid == "a") == [gone]
    manager.add(again)
    assert manager.take(names) == ([other], [])
    assert gone.grammar is None
    assert manager.pending() == [again]


def test_without_a_backend_requests_fail_with_a_reason() -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(None)
    refused = req("a", "x")
    manager.add(refused)
    ready, failed = manager.take(manager.poll_ready())
    assert ready == [] and failed[0][0] is refused
    assert "regex is not available" in failed[0][1]
    manager.reset()


def test_request_without_a_grammar_is_a_mistake(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend)
    with pytest.raises(RuntimeError, match="no grammar"):
        manager.add(FakeReq("a", SamplingParams()))


def test_reset_forgets_compiled_grammars(backend: HandBackend) -> None:
    manager: GrammarManager[FakeReq] = GrammarManager(backend)
    first = backend.compile_async("regex", "x")
    manager.reset()
    backend.futures.clear()
    assert backend.compile_async("regex", "x") is not first
