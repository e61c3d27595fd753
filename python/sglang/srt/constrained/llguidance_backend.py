"""Grammars by llguidance: JSON schema, regex, EBNF (GBNF or Lark), structural tags.

Owns the engine's view of the tokenizer. No torch: masks are numpy rows, applied by the sampler.
Compiled on worker threads, matched on the scheduler thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from
from llguidance.numpy import fill_next_token_bitmask

from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    BitmaskRow,
    GrammarError,
    GrammarMatcher,
    bitmask_width,
)

# Fuel for building the lexer, a third of the engine's default: hostile patterns such as
# (a{1000}){1000} then stall one step for some 0.2 s instead of seconds, while schemas with a
# thousand enumerated properties still compile.
INITIAL_LEXER_FUEL = 300_000
# Parser items a position; the engine's default of 2,000 fails on 500 optional properties.
MAX_ITEMS_IN_ROW = 10_000
MAX_ERROR_CHARS = 300
# How the engine's reasons begin where they are about a place in the text that it made of a grammar.
_ENGINE_POSITION = re.compile(r"^(at \d+\(\d+\)):")

T = TypeVar("T")


class LLGuidanceMatcher(GrammarMatcher):
    """One request's position in a grammar.

    End tokens are handled here and not by the engine, whose rollback does not count an end token
    that follows a text that could not be continued anyway.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: frozenset[int],
        eos_row: BitmaskRow,
        current: LLMatcher | None = None,
    ) -> None:
        self._start = matcher  # at the beginning; never advanced, shared with copies
        self._matcher = matcher.deep_copy() if current is None else current
        self._eos_token_ids = eos_token_ids
        self._eos_row = eos_row
        self._accepted: list[int] = []  # tokens in `_matcher`, without the end token
        self._is_ended = False
        self._dead_end: str | None = None

    def accept_token(self, token_id: int) -> bool:
        if self._is_ended or self.error is not None:
            return False
        if token_id in self._eos_token_ids and self._matcher.is_accepting():
            self._is_ended = True
            return True
        # `consume_token` would put the engine into its error state for good.
        if self._matcher.try_consume_tokens([token_id]) != 1:
            return False
        self._accepted.append(token_id)
        return True

    def fill_mask(self, row: BitmaskRow) -> None:
        row[:] = self._eos_row
        if self._is_ended or self.error is not None or self._matcher.is_stopped():
            return
        fill_next_token_bitmask(self._matcher, row.reshape(1, -1), 0)
        if not self._matcher.is_error() and row.any():
            return
        if not self._matcher.is_error():
            self._dead_end = "The grammar allows no token of this model's vocabulary here."
        row[:] = self._eos_row

    def is_terminated(self) -> bool:
        return self._is_ended

    def rollback(self, num_tokens: int) -> None:
        total = len(self._accepted) + int(self._is_ended)
        if not 0 <= num_tokens <= total:
            raise ValueError(f"cannot roll back {num_tokens} of {total} tokens")
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        self._dead_end = None
        num_left = len(self._accepted) - num_tokens
        del self._accepted[num_left:]
        if self._matcher.is_error():
            # The engine never leaves that state: the same way once more.
            self._matcher = self._start.deep_copy()
            self._matcher.try_consume_tokens(self._accepted)
        elif num_tokens:
            self._matcher.rollback(num_tokens)

    def copy(self) -> LLGuidanceMatcher:
        current = self._matcher.deep_copy()
        twin = LLGuidanceMatcher(self._start, self._eos_token_ids, self._eos_row, current)
        twin._accepted = list(self._accepted)
        twin._is_ended = self._is_ended
        twin._dead_end = self._dead_end
        return twin

    @property
    def error(self) -> str | None:
        if self._matcher.is_error():
            return _shorten(self._matcher.get_error())
        return self._dead_end


class LLGuidanceBackend(BaseGrammarBackend):
    """The engine and its tokenizer tables (some 0.4 s to build)."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        end_ids = sorted(token_id for token_id in set(eos_token_ids) if 0 <= token_id < vocab_size)
        if not end_ids:
            raise ValueError("grammars need a model with an end token")
        super().__init__(vocab_size, end_ids)
        self._tokenizer = LLTokenizer(
            tokenizer_json, n_vocab=vocab_size, eos_token=list(self.eos_token_ids)
        )
        self._limits = LLParserLimits(
            initial_lexer_fuel=INITIAL_LEXER_FUEL,
            max_items_in_row=MAX_ITEMS_IN_ROW,
            verbose_errors=False,
        )
        self._eos_set = frozenset(self.eos_token_ids)
        self._eos_row = np.zeros(bitmask_width(vocab_size), dtype=np.int32)
        view = self._eos_row.view(np.uint32)
        for token_id in self.eos_token_ids:
            view[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)

    def _compile(self, kind: str, text: str) -> GrammarMatcher:
        try:
            if kind == "structural_tag":
                grammar = self._structural_tag_grammar(text)
            else:
                if kind == "json_schema":
                    _check_json(kind, text)  # the engine would count from the start of its own text
                grammar = grammar_from(kind, text)  # type: ignore[arg-type]
        except GrammarError:
            raise
        except (ValueError, RecursionError) as exc:
            raise GrammarError(f"Invalid {kind}: {_shorten(str(exc))}") from exc
        matcher = LLGuidanceMatcher(
            LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits),
            self._eos_set,
            self._eos_row,
        )
        if matcher.error is None:
            # The first mask builds most of the lexer; better here than in the scheduler's loop.
            matcher.fill_mask(np.empty_like(self._eos_row))
        if matcher.error is not None:
            raise GrammarError(f"Invalid {kind}: {_readable(matcher.error)}")
        return matcher

    def _structural_tag_grammar(self, text: str) -> str:
        """Free text in which each trigger starts a tagged span that obeys a JSON schema."""
        spec = _check_json("structural_tag", text)
        spec = spec if isinstance(spec, dict) else {}
        structures = _list_of(spec.get("structures"), dict)
        triggers = _list_of(spec.get("triggers"), str)
        if not structures or not triggers:
            raise GrammarError(
                "Invalid structural_tag: expected an object with non-empty lists `structures` "
                "(each with begin, schema, end) and `triggers`."
            )
        tags = [self._struct_tag(structure, triggers) for structure in structures]
        return StructTag.to_grammar(tags, assume_special=False)

    def _struct_tag(self, structure: dict[str, Any], triggers: list[str]) -> StructTag:
        begin, end = structure.get("begin"), structure.get("end", "")
        schema = structure.get("schema", {})
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
            raise GrammarError(
                "Invalid structural_tag: `begin` and `end` must be strings, `schema` an object."
            )
        trigger = next((t for t in triggers if t and begin.startswith(t)), None)
        if trigger is None:
            raise GrammarError(f"Invalid structural_tag: no trigger starts {begin[:80]!r}.")
        return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _check_json(kind: str, text: str) -> Any:
    """The value of a JSON text. Raises GrammarError with the position of a mistake."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise GrammarError(f"Invalid {kind}: not JSON: {exc}") from exc


def _list_of(value: Any, kind: type[T]) -> list[T]:
    """`value` where it is a list of `kind`, else the empty list."""
    if isinstance(value, list) and all(isinstance(item, kind) for item in value):
        return value
    return []


def _readable(reason: str) -> str:
    """The engine's reason for refusing a grammar, for somebody who does not know the engine."""
    if reason == "NoExtensionBias":
        return "no text fits the grammar."
    return _ENGINE_POSITION.sub(r"\1 of the compiled grammar:", reason)


def _shorten(message: str) -> str:
    """One line without the engine's state dump, which may quote other parts of the grammar."""
    text = " ".join(message.split("<non-verbose/>")[0].split())
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "…"
