"""When does a request end, and after which of its newly accepted tokens: pure functions.

Owns the finish reasons and the order in which they win. Knows nothing of requests, caches or
tokenizers: the caller hands over a view of the request, a function that decodes a few tokens, and
what the grammar and the sampler said. Called by `managers.batch_result_processor` once a request
and step, on the scheduler thread.

A step may accept several tokens. They are judged one by one, as if each had come in a step of its
own, so that output does not depend on how many were accepted together: the first position at
which anything ends the request wins; at one position a stop text wins over an EOS or stop token,
that over the length, that over the end of the grammar. Tokens after that position are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from sglang.srt.sampling.sampling_params import (
    MAX_STOP_REGEX_WINDOW,
    SamplingParams,
    compile_stop_regex,
    regex_window,
)

# Decodes a short run of output tokens as text, special tokens included.
DecodeTail = Callable[[Sequence[int]], str]

NAN_MATCHED = "NaN happened"
# Tokens decoded beyond the longest match, so that a match is never at the very start of the
# decoded text, where some tokenizers strip a space or lack the first bytes of a character.
TAIL_MARGIN = 4
# A search of at most a few KB of text takes microseconds unless the pattern explodes. Of all
# patterns and new tokens of a request together: nothing else runs meanwhile.
REGEX_TIMEOUT_S = 0.05
# What a search gets that begins when the time is up; the engine takes no timeout of 0.
_LEAST_TIMEOUT_S = 0.001


@dataclass(frozen=True, slots=True)
class FinishStop:
    """A stop string, a stop regex (its source), an EOS or stop token id, or several ids."""

    matched: int | str | list[int]

    def to_json(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.matched}


@dataclass(frozen=True, slots=True)
class FinishLength:
    """The token budget is used up; `length` is the number of output tokens."""

    length: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "length", "length": self.length}


@dataclass(frozen=True, slots=True)
class FinishAbort:
    """Ended by the user, by the server or by a fault of the request."""

    message: str = "Aborted"
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "abort",
            "message": self.message,
            "status_code": self.status_code,
            "err_type": self.err_type,
        }


FinishReason = FinishStop | FinishLength | FinishAbort


class FinishView(Protocol):
    """What the checks read of a request."""

    @property
    def sampling_params(self) -> SamplingParams: ...

    @property
    def output_ids(self) -> Sequence[int]:
        """Output tokens including the new ones."""

    @property
    def eos_token_ids(self) -> AbstractSet[int]:
        """The model's end tokens."""

    @property
    def max_new_tokens(self) -> int:
        """Output tokens allowed, the limit of the context considered."""


@dataclass(frozen=True, slots=True)
class FinishResult:
    """`reason` None: goes on. `num_kept`: how many of the new tokens stay (all if it goes on)."""

    reason: FinishReason | None
    num_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdicts:
    """What other parts say of the new tokens, as indices into them; None = nothing to say."""

    grammar_end: int | None = None  # the grammar was complete with this token
    nan: int | None = None  # sampled from logits that were not numbers
    abort: FinishAbort | None = None  # pending abort: wins over everything, keeps no new token


NO_VERDICTS = StepVerdicts()


def is_nan_stop(reason: FinishReason | None) -> bool:
    """Whether a request was ended since its logits were not numbers."""
    return isinstance(reason, FinishStop) and reason.matched == NAN_MATCHED


def agreed_result(result: FinishResult, *, is_abort: bool, num_kept: int) -> FinishResult:
    """One rank's result once all ranks have told whether theirs is an abort, and what they keep.

    `is_abort`: of some rank; `num_kept`: the fewest tokens of all. Up to the first search that
    takes too long somewhere, all have come to the same.
    """
    if not is_abort:
        return result
    reason = result.reason if isinstance(result.reason, FinishAbort) else _too_slow("A stop_regex")
    return FinishResult(reason, num_kept)


def _too_slow(what: str) -> FinishAbort:
    return FinishAbort(f"{what} takes too long to match.", 400, "BadRequestError")


def check_finish(
    view: FinishView,
    num_new: int,
    decode_tail: DecodeTail | None,
    verdicts: StepVerdicts = NO_VERDICTS,
) -> FinishResult:
    """Judge the last `num_new` of the view's output tokens.

    Pure but for the time that a search of a stop regex takes, which ranks must agree on.

    `decode_tail` None (no tokenizer in the server): stop strings and regexes cannot match.
    `num_new` 0 is legal: only an abort, or a budget that was used up before, can end the request.
    """
    if verdicts.abort is not None:
        return FinishResult(verdicts.abort, 0)
    params = view.sampling_params
    num_before = len(view.output_ids) - num_new
    if num_before >= view.max_new_tokens:
        return FinishResult(FinishLength(num_before), 0)

    watcher = _TextWatcher(view, num_new, decode_tail)
    for index in range(num_new):
        num_output = num_before + index + 1
        if verdicts.nan is not None and index >= verdicts.nan:
            return FinishResult(FinishStop(NAN_MATCHED), index + 1)
        if num_output > params.min_new_tokens:
            reason = watcher.check(index) or _check_token(view, num_before + index)
            if reason is not None:
                return FinishResult(reason, index + 1)
        if num_output >= view.max_new_tokens:
            return FinishResult(FinishLength(num_output), index + 1)
        if verdicts.grammar_end is not None and index >= verdicts.grammar_end:
            matched = int(view.output_ids[num_before + index])
            return FinishResult(FinishStop(matched), index + 1)
    return FinishResult(None, num_new)


def _check_token(view: FinishView, position: int) -> FinishReason | None:
    """The EOS and stop token rule for the output token at `position`."""
    params = view.sampling_params
    token_id = int(view.output_ids[position])
    if params.ignore_eos:
        return None
    if token_id in view.eos_token_ids or token_id in (params.stop_token_ids or ()):
        return FinishStop(token_id)
    return None


class _TextWatcher:
    """Stop strings and regexes over the tail of the output. One step, one request."""

    def __init__(self, view: FinishView, num_new: int, decode_tail: DecodeTail | None) -> None:
        params = view.sampling_params
        self._strs = params.stop_strs
        self._patterns = params.stop_regex_strs
        self._must_be_new = params.min_new_tokens > 0
        self._num_new = num_new
        self._decode: DecodeTail | None = None
        self._searched_s = 0.0  # for patterns, in all
        if decode_tail is None or not (self._strs or self._patterns):
            return
        # The window reaches back over the longest match that may end with the first new token.
        max_len = max(params.stop_str_max_len, params.stop_regex_max_len)
        self._tail = list(view.output_ids[-(num_new + max_len + TAIL_MARGIN) :])
        self._is_cut = len(self._tail) < len(view.output_ids)
        # One decode settles the common case, in which no string occurs anywhere. Broken
        # characters may hide what was there before they came.
        whole_text = decode_tail(self._tail)
        is_whole = "\ufffd" not in whole_text
        if self._patterns or not is_whole or any(text in whole_text for text in self._strs):
            self._decode = decode_tail

    def check(self, index: int) -> FinishReason | None:
        """The match that is complete with new token `index` but was not before it, if any."""
        if self._decode is None:
            return None
        end = len(self._tail) - self._num_new + index + 1
        text = self._decode(self._tail[:end])
        # A match from the time when min_new_tokens forbade stopping is history, not news.
        num_old = 0
        if self._must_be_new:
            num_old = len(self._decode(self._tail[: end - 1]).rstrip("\ufffd"))
        candidates = []
        for stop_str in self._strs:
            start = text.find(stop_str, max(0, num_old - len(stop_str) + 1))
            if start >= 0:
                candidates.append((start, stop_str))
        if candidates:
            # The earliest match is where a reader of the text would have stopped.
            return FinishStop(min(candidates, key=lambda match: match[0])[1])
        return self._check_patterns(text, num_old)

    def _check_patterns(self, text: str, num_old: int) -> FinishReason | None:
        # Part of a character is not what a pattern means.
        text = text.rstrip("\ufffd")
        for pattern in self._patterns:
            started = time.monotonic()
            try:
                if self._matches(pattern, text, num_old):
                    return FinishStop(pattern)
            except TimeoutError:
                return _too_slow(f"stop_regex {pattern!r}")
            self._searched_s += time.monotonic() - started
        return None

    def _matches(self, pattern: str, text: str, num_old: int) -> bool:
        """Whether the pattern matches what is news. Raises TimeoutError."""
        rest_s = max(REGEX_TIMEOUT_S - self._searched_s, _LEAST_TIMEOUT_S)
        start = self._first_start(pattern)
        found = compile_stop_regex(pattern).finditer(text, start, timeout=rest_s)
        return any(match.end() > num_old or not self._must_be_new for match in found)

    def _first_start(self, pattern: str) -> int:
        """Where matches may begin: not at the cut, which is no beginning of the output.

        The window is made so that no match of its length begins in the margin. One of a pattern
        without an upper length may begin anywhere but at the very cut.
        """
        if not self._is_cut or self._decode is None:
            return 0
        if regex_window(pattern) >= MAX_STOP_REGEX_WINDOW:
            return 1
        return max(1, len(self._decode(self._tail[:TAIL_MARGIN]).rstrip("\ufffd")))
