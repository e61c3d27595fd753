"""Grammars end to end on random logits, with a small byte-level tokenizer."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits

from sglang.srt.constrained.base_grammar_backend import (
    MAX_CACHED_GRAMMARS,
    MAX_GRAMMAR_BYTES,
    BaseGrammarBackend,
    GrammarError,
    GrammarMatcher,
    bitmask_width,
    create_grammar_backend,
)
from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers.sampler import Sampler, apply_vocab_mask
from sglang.srt.speculative.verify_sampling import fill_tree_masks
from sglang.test.fakes.byte_tokenizer import END_IDS, build_byte_tokenizer, write_byte_tokenizer
from sglang.test.fakes.sampling_reqs import FakeOutput, FakeReq, batch_info, params

# Wider than the tokenizer and no multiple of 32, as the logits of many models are.
VOCAB_SIZE = 301
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-c]{1,5}$"},
        "kind": {"enum": ["x", "yy", None, True]},
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
EBNF = """root ::= "[" item ("," item)* "]"
item ::= "abc" | [0-9] [0-9]? | root
"""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BaseGrammarBackend]:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    created = create_grammar_backend("llguidance", path.read_text(), VOCAB_SIZE, [*END_IDS, 10**6])
    assert created is not None
    yield created
    created.shutdown()


TOKENIZER = build_byte_tokenizer()


def compiled(backend: BaseGrammarBackend, kind: str, text: str) -> GrammarMatcher:
    return backend.compile_async(kind, text).result(timeout=30).copy()


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def allowed(matcher: GrammarMatcher) -> set[int]:
    row = np.full(bitmask_width(VOCAB_SIZE), -1, dtype=np.int32)
    matcher.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(np.flatnonzero(bits).tolist())


def generate(
    backend: BaseGrammarBackend, kind: str, text: str, seed: int, **wish: Any
) -> tuple[str, bool]:
    """Sample random logits under a grammar: (text, whether it ended by itself)."""
    req = FakeReq(
        params(**wish), grammar=compiled(backend, kind, text), eos_token_ids=frozenset(END_IDS)
    )
    free = FakeReq(params())
    info = batch_info([free, req], VOCAB_SIZE)
    assert info.has_grammar and info.needs_host_tokens and req.grammar is not None
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(seed)
    # Brackets and quotes are made likely, so that random documents come to an end.
    closing = torch.zeros(VOCAB_SIZE)
    closing[[TOKENIZER.token_to_id(char) for char in '"]}']] = 4.0
    for _ in range(400):
        info.update_host_state([free, req])
        logits = torch.randn((2, VOCAB_SIZE), generator=generator) + closing
        output = FakeOutput(logits.clone())
        tokens = sampler.forward(output, info, None, torch.zeros(2, dtype=torch.int64))
        assert torch.equal(output.next_token_logits[0], logits[0])  # the free row is untouched
        token = int(tokens[1])
        assert req.grammar.accept_token(token), token
        if req.grammar.is_terminated():
            return TOKENIZER.decode(req.output_ids), True
        req.output_ids.append(token)
    return TOKENIZER.decode(req.output_ids), False


def is_valid_document(document: Any) -> bool:
    return (
        set(document) == {"name", "kind", "counts"}
        and re.fullmatch("[a-c]{1,5}", document["name"]) is not None
        and document["kind"] in ("x", "yy", None, True)
        and 1 <= len(document["counts"]) <= 3
        and all(isinstance(count, int) for count in document["counts"])
    )


@pytest.mark.parametrize("seed", range(12))
def test_json_schema_always_gives_a_valid_document(backend: BaseGrammarBackend, seed: int) -> None:
    text, is_ended = generate(backend, "json_schema", json.dumps(SCHEMA), seed)
    if is_ended:
        assert is_valid_document(json.loads(text)), text


def test_most_random_documents_come_to_an_end(backend: BaseGrammarBackend) -> None:
    ends = [generate(backend, "json_schema", json.dumps(SCHEMA), seed)[1] for seed in range(12)]
    assert sum(ends) >= 9


@pytest.mark.parametrize("pattern", ["[0-9]{2,4}(px|em)", "(abc|true)+", "héllo|世界", "a?"])
def test_regex_always_gives_a_match(backend: BaseGrammarBackend, pattern: str) -> None:
    for seed in range(6):
        text, is_ended = generate(backend, "regex", pattern, seed)
        assert not is_ended or re.fullmatch(pattern, text), text
        assert is_ended or "+" in pattern


def test_ebnf_always_gives_a_sentence(backend: BaseGrammarBackend) -> None:
    for seed in range(8):
        text, is_ended = generate(backend, "ebnf", EBNF, seed)
        if is_ended:
            json.loads(text.replace("abc", "1").replace("[0", "[1").replace(",0", ",1"))
            assert re.fullmatch(r"[\[\]0-9abc,]+", text)


def test_random_tokens_without_the_grammar_are_no_document() -> None:
    """The other tests would notice if the masks did nothing."""
    generator = np.random.default_rng(0)
    text = TOKENIZER.decode(generator.integers(2, 269, size=60).tolist())
    with pytest.raises(ValueError):
        json.loads(text)


def test_structural_tag_constrains_only_the_tagged_span(backend: BaseGrammarBackend) -> None:
    spec = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=one>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=two>", "schema": {"type": "boolean"}, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    for text, is_good in (
        ("any text at all", True),
        ("hm <f=one>12</f> then <f=two>true</f>.", True),
        ("hm <f=one>true</f>", False),
        ("<f=three>", False),
    ):
        matcher = compiled(backend, "structural_tag", json.dumps(spec))
        is_accepted = all(matcher.accept_token(token_id) for token_id in ids_of(text))
        assert is_accepted is is_good, text


def test_end_token_is_accepted_exactly_where_the_text_is_complete(
    backend: BaseGrammarBackend,
) -> None:
    matcher = compiled(backend, "regex", "1[0-9]?")
    assert not matcher.accept_token(END_IDS[0])
    assert allowed(matcher).isdisjoint(END_IDS)
    assert matcher.accept_token(ids_of("1")[0])
    assert allowed(matcher) == {*END_IDS, *(ids_of(digit)[0] for digit in "0123456789")}
    longer = matcher.copy()
    assert matcher.accept_token(END_IDS[1]) and matcher.is_terminated()
    assert not matcher.accept_token(ids_of("2")[0])
    # Nothing can follow two digits: only the end tokens are left.
    assert longer.accept_token(ids_of("2")[0]) and not longer.is_terminated()
    assert allowed(longer) == set(END_IDS)


def test_refused_token_leaves_the_state_alone(backend: BaseGrammarBackend) -> None:
    matcher = compiled(backend, "regex", "ab")
    assert not matcher.accept_token(ids_of("z")[0])
    assert matcher.error is None
    assert matcher.accept_token(ids_of("ab")[0]) and matcher.accept_token(END_IDS[0])


def test_rollback_undoes_any_number_of_tokens(backend: BaseGrammarBackend) -> None:
    tokens = [*ids_of("[12,[abc,7]]"), END_IDS[0]]
    matcher = compiled(backend, "ebnf", EBNF)
    masks = []
    for token_id in tokens:
        masks.append(allowed(matcher))
        assert matcher.accept_token(token_id)
    assert matcher.is_terminated()
    for num_back in (1, 2, len(tokens)):
        twin = matcher.copy()
        twin.rollback(num_back)
        assert not twin.is_terminated()
        assert allowed(twin) == masks[len(tokens) - num_back]
        for token_id in tokens[len(tokens) - num_back :]:
            assert twin.accept_token(token_id)
        assert twin.is_terminated()
    with pytest.raises(ValueError, match="cannot roll back"):
        matcher.rollback(len(tokens) + 1)


def test_rollback_over_an_end_that_had_to_come(backend: BaseGrammarBackend) -> None:
    matcher = compiled(backend, "regex", "[0-9]{2}")
    for token_id in (*ids_of("34"), END_IDS[0]):
        assert matcher.accept_token(token_id)
    matcher.rollback(2)
    assert ids_of("5")[0] in allowed(matcher)
    assert matcher.accept_token(ids_of("5")[0]) and matcher.accept_token(END_IDS[0])


def test_copies_are_independent(backend: BaseGrammarBackend) -> None:
    first = compiled(backend, "regex", "a[bc]")
    second = first.copy()
    assert first.accept_token(ids_of("a")[0])
    assert second.accept_token(ids_of("a")[0]) and second.accept_token(ids_of("c")[0])
    assert first.accept_token(ids_of("b")[0])


def test_min_new_tokens_keeps_the_end_away_while_text_can_follow(
    backend: BaseGrammarBackend,
) -> None:
    for seed in range(5):
        text, _ = generate(backend, "regex", "[0-9]+", seed, min_new_tokens=6)
        assert len(text) >= 6
    # Where nothing can follow the end comes nevertheless.
    assert generate(backend, "regex", "[0-9]", 0, min_new_tokens=6)[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{not json"),
        ("json_schema", "[1]"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("json_schema", '{"type": "array", "uniqueItems": true}'),
        ("json_schema", '{"not":' * 3000 + "{}" + "}" * 3000),
        ("regex", "[a"),
        ("regex", "(?=a)b"),
        ("ebnf", 'root ::= "a" missing'),
        ("ebnf", ")( %%"),
        ("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
        ("structural_tag", "{"),
        ("structural_tag", "[]"),
        ("structural_tag", '{"structures": [], "triggers": ["a"]}'),
        ("structural_tag", '{"structures": [{"begin": "x"}], "triggers": ["a"]}'),
        ("structural_tag", '{"structures": [{"begin": 3}], "triggers": ["a"]}'),
        ("regex", "a" * (MAX_GRAMMAR_BYTES["regex"] + 1)),
        ("poem", "roses"),
    ],
    ids=lambda value: value[:30],
)
def test_bad_grammar_fails_soon_with_a_short_reason(
    backend: BaseGrammarBackend, kind: str, text: str
) -> None:
    start = time.monotonic()
    error = backend.compile_async(kind, text).exception(timeout=30)
    assert isinstance(error, GrammarError)
    assert 10 < len(str(error)) < 500
    assert "\n" not in str(error)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "Invalid json_schema: not JSON: .*: line 1 column 2 "),
        ("json_schema", '{"a": 1,\n]', "Invalid json_schema: not JSON: .*: line 2 column 1 "),
        ("regex", "(", r"Invalid regex: at 1\(8\) of the compiled grammar: .* unclosed group"),
        ("ebnf", "root ::= root", "Invalid ebnf: no text fits the grammar"),
        ("ebnf", 'root ::= root "a"', "Invalid ebnf: no text fits the grammar"),
    ],
)
def test_reasons_are_in_terms_of_the_clients_text(
    backend: BaseGrammarBackend, kind: str, text: str, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        backend.compile_async(kind, text).result(timeout=30)


def test_panic_of_the_engine_becomes_a_grammar_error(
    backend: BaseGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def fail(kind: str, text: str) -> GrammarMatcher:
        raise Panic("index out of bounds")

    monkeypatch.setattr(backend, "_compile", fail)
    with pytest.raises(GrammarError, match="engine failed"):
        backend.compile_async("regex", "panic").result(timeout=10)
    backend.reset()


def test_grammar_that_hits_a_limit_later_ends_the_request(
    backend: BaseGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(step_max_items=30, verbose_errors=False)
    monkeypatch.setattr(backend, "_limits", limits)
    backend.reset()
    matcher = compiled(backend, "ebnf", 'root ::= "[" | "[" root root')
    for _ in range(200):
        allowed(matcher)
        if not matcher.accept_token(ids_of("[")[0]):
            break
    assert matcher.error is not None and len(matcher.error) < 400
    assert allowed(matcher) == set(END_IDS)
    # The end token is sampled, refused, and the request is ended with the reason.
    assert not matcher.accept_token(END_IDS[0])
    assert matcher.copy().error == matcher.error
    backend.reset()


def test_drafts_that_hit_a_limit_do_not_end_the_request(
    backend: BaseGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The branch behind "b" is too much for the engine; the target goes on with "a"."""
    limits = LLParserLimits(max_items_in_row=60, verbose_errors=False)
    monkeypatch.setattr(backend, "_limits", limits)
    backend.reset()
    names = [f"r{i}" for i in range(100)]
    rules = "".join(f'{name}: "x{name}" "y"\n' for name in names)
    text = f'start: "a" start | "ac" | "b" many\nmany: {" | ".join(names)}\n{rules}'
    a, b, c = (ids_of(char)[0] for char in "abc")
    plain = compiled(backend, "ebnf", text)
    matcher = compiled(backend, "ebnf", text)
    for wanted in (a, a, a):
        assert plain.accept_token(wanted) and matcher.accept_token(wanted)
        reqs = [FakeReq(params(), grammar=matcher)]
        info = batch_info(reqs, VOCAB_SIZE)
        masks = fill_tree_masks(info, [[wanted, a, b, c, b]], [[-1, 0, 0, 0, 1]], [0])
        assert masks is not None
        own = np.empty(bitmask_width(VOCAB_SIZE), dtype=np.int32)
        plain.fill_mask(own)
        assert np.array_equal(masks[0], own)
        assert matcher.error is None
        assert allowed(matcher) == allowed(plain)
    # The target's own choice is another matter.
    assert not matcher.accept_token(b)
    assert matcher.error is not None
    assert matcher.copy().error is not None
    matcher.rollback(1)
    assert matcher.error is None
    assert matcher.accept_token(a)
    backend.reset()


def test_large_schema_still_compiles(backend: BaseGrammarBackend) -> None:
    properties = {f"p{i}": {"enum": [f"e{j}" for j in range(20)]} for i in range(1000)}
    matcher = compiled(
        backend, "json_schema", json.dumps({"type": "object", "properties": properties})
    )
    for token_id in ids_of('{"p3":"e1","p998":"e19"}'):
        assert token_id in allowed(matcher)
        assert matcher.accept_token(token_id), matcher.error


def test_equal_grammars_are_compiled_once_and_old_ones_forgotten(
    backend: BaseGrammarBackend,
) -> None:
    backend.reset()
    first = backend.compile_async("regex", "abc")
    assert backend.compile_async("regex", "abc") is first
    others = [backend.compile_async("regex", f"x{i}") for i in range(MAX_CACHED_GRAMMARS - 1)]
    assert backend.compile_async("regex", "abc") is first  # touched: not the oldest any more
    others.append(backend.compile_async("regex", "one more"))
    assert backend.compile_async("regex", "abc") is first
    assert backend.compile_async("regex", "x0") is not others[0]
    wait(others, timeout=60)
    backend.reset()
    assert backend.compile_async("regex", "abc") is not first


def test_factory_knows_its_names(tmp_path: Path) -> None:
    assert create_grammar_backend("none", None, VOCAB_SIZE, END_IDS) is None
    with pytest.raises(ValueError, match="Unknown grammar backend 'magic'"):
        create_grammar_backend("magic", None, VOCAB_SIZE, END_IDS)
    with pytest.raises(ValueError, match=r"needs the model's tokenizer\.json"):
        create_grammar_backend("llguidance", None, VOCAB_SIZE, END_IDS)
    path = write_byte_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="end token"):
        create_grammar_backend("llguidance", path.read_text(), VOCAB_SIZE, [VOCAB_SIZE])


@pytest.mark.parametrize("unpack", ["_unpack_on_host", "_unpack_on_device"])
def test_mask_reaches_exactly_the_given_rows(unpack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    is_allowed = generator.random((2, VOCAB_SIZE)) < 0.5
    padded = np.zeros((2, bitmask_width(VOCAB_SIZE) * 32), dtype=np.uint8)
    padded[:, :VOCAB_SIZE] = is_allowed
    packed = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    monkeypatch.setattr(sampler_module, "_unpack_on_host", getattr(sampler_module, unpack))
    logits = torch.randn((4, VOCAB_SIZE))
    masked = logits.clone()
    apply_vocab_mask(masked, packed, [3, 1])
    for row, keep in ((3, is_allowed[0]), (1, is_allowed[1])):
        assert torch.equal(masked[row].isfinite(), torch.from_numpy(keep))
    for row in (0, 2):
        assert torch.equal(masked[row], logits[row])


def test_real_vocabulary(small_model: Path) -> None:
    """The tokenizer of the small real model, at its full size."""
    created = create_grammar_backend(
        "xgrammar", (small_model / "tokenizer.json").read_text(), 49152, [2, 0]
    )
    assert created is not None
    matcher = created.compile_async("json_schema", json.dumps(SCHEMA)).result(timeout=60).copy()
    row = np.empty((1, bitmask_width(49152)), dtype=np.int32)
    generator = torch.Generator().manual_seed(5)
    tokens: list[int] = []
    while not matcher.is_terminated() and len(tokens) < 120:
        matcher.fill_mask(row[0])
        logits = torch.randn((1, 49152), generator=generator)
        apply_vocab_mask(logits, row, [0])
        tokens.append(int(logits.argmax()))
        assert matcher.accept_token(tokens[-1])
    assert matcher.error is None
    # Tokens such as "aaaa" make this lexer explode: the engine's limits must end it soon.
    hostile = created.compile_async("regex", "(a{1000}){1000}").result(timeout=60).copy()
    start = time.monotonic()
    for _ in range(20):
        hostile.fill_mask(row[0])
        hostile.accept_token(int(np.flatnonzero(row.view(np.uint32))[0] * 32))
    assert time.monotonic() - start < 2
    created.shutdown()
