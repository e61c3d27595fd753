"""The table of algorithms, the registry of workers and the shapes of drafts."""

from __future__ import annotations

import pytest

from sglang.srt.speculative import spec_info
from sglang.srt.speculative.spec_info import (
    DraftFeatures,
    DraftShape,
    SpeculativeAlgorithm,
    register_worker,
)


def test_names_are_read_in_any_case_and_nextn_is_eagle() -> None:
    assert SpeculativeAlgorithm.from_string(None) is SpeculativeAlgorithm.NONE
    assert SpeculativeAlgorithm.from_string("eagle3") is SpeculativeAlgorithm.EAGLE3
    assert SpeculativeAlgorithm.from_string("NEXTN") is SpeculativeAlgorithm.EAGLE
    with pytest.raises(ValueError, match="unknown speculative algorithm 'FOO'.*NEXTN"):
        SpeculativeAlgorithm.from_string("FOO")


def test_every_algorithm_has_traits() -> None:
    by_name = {a.name: a.traits for a in SpeculativeAlgorithm}
    assert {n for n, t in by_name.items() if t.has_draft_model} == {"EAGLE", "EAGLE3", "STANDALONE"}
    assert {n for n, t in by_name.items() if t.needs_next_token} == {"EAGLE", "EAGLE3"}
    assert by_name["EAGLE3"].features is DraftFeatures.AUX
    assert SpeculativeAlgorithm.EAGLE3.is_eagle() and not SpeculativeAlgorithm.NGRAM.is_eagle()
    assert SpeculativeAlgorithm.NONE.is_none() and not SpeculativeAlgorithm.NGRAM.is_none()


def test_workers_are_made_by_the_registered_factory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec_info, "_FACTORIES", {})
    with pytest.raises(ValueError, match="no worker is registered for the algorithm NGRAM"):
        SpeculativeAlgorithm.NGRAM.create_worker()
    register_worker(SpeculativeAlgorithm.NGRAM, lambda **parts: ("ngram", parts))
    assert SpeculativeAlgorithm.NGRAM.create_worker(a=1) == ("ngram", {"a": 1})
    with pytest.raises(ValueError, match="already"):
        register_worker(SpeculativeAlgorithm.NGRAM, lambda **parts: None)


def test_shapes_of_drafts() -> None:
    chain = DraftShape(num_steps=7, topk=1, num_draft_tokens=8)
    assert (chain.is_chain, chain.num_candidates, chain.max_accept_len) == (True, 7, 8)
    tree = DraftShape(num_steps=5, topk=4, num_draft_tokens=8)
    assert (tree.is_chain, tree.num_candidates, tree.max_accept_len) == (False, 68, 6)
    flat = DraftShape(num_steps=5, topk=4, num_draft_tokens=3)
    assert flat.max_depth == 2


@pytest.mark.parametrize(
    ("steps", "topk", "tokens", "match"),
    [(0, 1, 1, "at least"), (3, 1, 5, "a chain of 3 steps"), (1, 2, 4, "make 2 nodes")],
)
def test_impossible_shapes_are_refused(steps: int, topk: int, tokens: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DraftShape(num_steps=steps, topk=topk, num_draft_tokens=tokens)
