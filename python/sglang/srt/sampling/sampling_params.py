"""`SamplingParams`: how one request wants its tokens chosen and when it wants to stop.

Owns the parsing of the client's JSON object (`from_dict`), the range checks (`verify`) and the
derived fields (`normalize`). Does not sample: that is `layers.sampler`. Used by the front (which
parses and refuses), by `managers.ipc` (plain dataclass on the wire) and by the scheduler. Imports
neither torch nor a tokenizer. Instances are written once, by `normalize`, before they are shared.
"""

from __future__ import annotations

import json
import math
import re._parser as re_parser
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import regex

# Below this a temperature means greedy decoding (contract value).
GREEDY_TEMPERATURE = 1e-6
MAX_STOP_ENTRIES = 32
# A stop string longer than this cannot be watched cheaply, one token at a time.
MAX_STOP_STR_BYTES = 4096
MAX_STOP_REGEX_BYTES = 256
# Tokens of text watched for a regex whose matches have no upper length.
MAX_STOP_REGEX_WINDOW = 512
INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
# Largest magnitude that float32 arithmetic on logits survives with room to spare.
MAX_LOGIT_BIAS = 1e30


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping wishes of one request, under their native names.

    The fields after `stream_interval` are set by `normalize`; clients cannot send them.
    """

    max_new_tokens: int | None = 128  # None: up to the end of the context
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # accepted; text is never spaced by its tokens
    no_stop_trim: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None  # token id (as text) -> addend
    sampling_seed: int | None = None
    custom_params: dict[str, Any] | None = None
    beam_width: int | None = None
    watermark: dict[str, Any] | None = None
    stream_interval: int | None = None

    # Set by `normalize`.
    stop_strs: list[str] = field(default_factory=list)
    stop_regex_strs: list[str] = field(default_factory=list)
    # Upper bounds, in tokens, of the output text in which a match can lie.
    stop_str_max_len: int = 0
    stop_regex_max_len: int = 0

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any] | None, preferred: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Parse a client's object over the server's preferred values over the defaults.

        null means "not given", except for `max_new_tokens` (no limit). Does not check ranges.
        Raises ValueError with the contract's texts: unknown key, wrong JSON type, number that is
        not finite or beyond 64 bits.
        """
        merged: dict[str, Any] = {}
        for source in (preferred, values):
            if source is None:
                continue
            if not isinstance(source, Mapping):
                raise ValueError(_type_error(source, "a map", "sampling_params"))
            for key, value in source.items():
                parser = _PARSERS.get(key)
                if parser is None:
                    raise ValueError(_unknown_field(key))
                if value is not None:
                    merged[key] = parser(value, key)
                elif key == "max_new_tokens":
                    merged[key] = None
        return cls(**merged)

    def normalize(self) -> None:
        """Fill the derived fields and fold greedy decoding into `top_k` 1. Idempotent.

        Raises ValueError where a stop regex does not compile.
        """
        if 0 <= self.temperature < GREEDY_TEMPERATURE:
            # Temperature 1 keeps the reported logprobs those of the model's own distribution.
            self.temperature, self.top_k = 1.0, 1
        self.stop_strs = [text for text in _as_list(self.stop) if text]
        self.stop_regex_strs = [text for text in _as_list(self.stop_regex) if text]
        # Every token of the match adds at least one byte, however the text was tokenised.
        self.stop_str_max_len = max((len(s.encode()) for s in self.stop_strs), default=0)
        self.stop_regex_max_len = max(map(regex_window, self.stop_regex_strs), default=0)

    def verify(self, vocab_size: int) -> None:
        """Check every range. Raises ValueError with a sentence that names the field."""
        self._verify_numbers()
        self._verify_stops()
        self._verify_token_ids(vocab_size)
        grammars = [name for name in GRAMMAR_KINDS if getattr(self, name)]
        if len(grammars) > 1:
            raise ValueError(f"Only one of {', '.join(grammars)} can be set.")
        if self.beam_width not in (None, 1):
            raise ValueError("beam_width is not supported by this server.")
        if self.watermark:
            raise ValueError("watermark is not supported by this server.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.top_k == 1 or self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens generated so far."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def grammar(self) -> tuple[str, str] | None:
        """(kind, text) of the output constraint, or None."""
        for kind in GRAMMAR_KINDS:
            text = getattr(self, kind)
            if text:
                return kind, text
        return None

    def _verify_numbers(self) -> None:
        max_new, min_new = self.max_new_tokens, self.min_new_tokens
        limit = INT32_MAX if max_new is None else max_new
        checks = (
            (0 <= limit <= INT32_MAX, "max_new_tokens", f"an integer in [0, {INT32_MAX}]", max_new),
            (0 <= min_new <= limit, "min_new_tokens", f"in [0, max_new_tokens={max_new}]", min_new),
            (0 <= self.temperature < math.inf, "temperature", "finite and >= 0", self.temperature),
            (0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p),
            (self.top_k == -1 or self.top_k >= 1, "top_k", "-1 (all) or >= 1", self.top_k),
            (0 <= self.min_p <= 1, "min_p", "in [0, 1]", self.min_p),
            (
                -2 <= self.frequency_penalty <= 2,
                "frequency_penalty",
                "in [-2, 2]",
                self.frequency_penalty,
            ),
            (
                -2 <= self.presence_penalty <= 2,
                "presence_penalty",
                "in [-2, 2]",
                self.presence_penalty,
            ),
            (
                0 < self.repetition_penalty <= 2,
                "repetition_penalty",
                "in (0, 2]",
                self.repetition_penalty,
            ),
            (1 <= self.n <= INT32_MAX, "n", f"in [1, {INT32_MAX}]", self.n),
            (
                self.stream_interval is None or 1 <= self.stream_interval <= INT32_MAX,
                "stream_interval",
                f"in [1, {INT32_MAX}]",
                self.stream_interval,
            ),
            (
                self.sampling_seed is None or INT64_MIN <= self.sampling_seed <= INT64_MAX,
                "sampling_seed",
                "a 64-bit integer",
                self.sampling_seed,
            ),
        )
        for is_ok, name, wanted, got in checks:
            if not is_ok:
                raise ValueError(f"{name} must be {wanted}, got {got}.")

    def _verify_stops(self) -> None:
        for name, max_bytes in (("stop", MAX_STOP_STR_BYTES), ("stop_regex", MAX_STOP_REGEX_BYTES)):
            entries = _as_list(getattr(self, name))
            if len(entries) > MAX_STOP_ENTRIES:
                raise ValueError(
                    f"{name} must have at most {MAX_STOP_ENTRIES} entries, got {len(entries)}."
                )
            for text in entries:
                if len(text.encode(errors="surrogatepass")) > max_bytes:
                    raise ValueError(f"Each entry of {name} must have at most {max_bytes} bytes.")
        for pattern in _as_list(self.stop_regex):
            compile_stop_regex(pattern)

    def _verify_token_ids(self, vocab_size: int) -> None:
        for token_id in self.stop_token_ids or ():
            if not 0 <= token_id <= INT32_MAX:
                raise ValueError(f"stop_token_ids must hold token ids >= 0, got {token_id}.")
        for key, bias in (self.logit_bias or {}).items():
            if not 0 <= int(key) < vocab_size:
                raise ValueError(
                    f"logit_bias must be on token ids in [0, {vocab_size - 1}], got {key}."
                )
            if not abs(bias) <= MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias of token {key} is out of range, got {bias}.")


# Mutually exclusive output constraints, in the order in which they are looked up.
GRAMMAR_KINDS = ("json_schema", "regex", "ebnf", "structural_tag")


def compile_stop_regex(pattern: str) -> regex.Pattern[str]:
    """Compile a client's stop regex. Raises ValueError with the engine's reason.

    `regex` and not `re`, because its searches take a timeout: a pattern that backtracks
    exponentially must not hold the scheduler.
    """
    try:
        return regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as exc:
        raise ValueError(f"stop_regex {pattern!r} is not a valid pattern: {exc}") from exc


@lru_cache(maxsize=256)  # asked at every step of a request
def regex_window(pattern: str) -> int:
    """Tokens that can hold a match of `pattern`: its longest match, 4 bytes a character.

    Raises ValueError where it does not compile.
    """
    compile_stop_regex(pattern)
    try:
        max_chars = int(re_parser.parse(pattern).getwidth()[1])
    except (re_parser.error, OverflowError, RecursionError):
        # Syntax that only `regex` knows: assume that matches may be long.
        return MAX_STOP_REGEX_WINDOW
    return min(max(4 * max_chars, 1), MAX_STOP_REGEX_WINDOW)


def _as_list(value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


# ------------------------------------------------------------------------------------------------
# JSON values -> field values. Each parser gets (value, field name) and raises ValueError.
# ------------------------------------------------------------------------------------------------


def _describe(value: Any) -> str:
    """The value as an error message shows it: JSON type and, where short, the value itself."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, Integral):
        return f"integer `{value}`"
    if isinstance(value, Real):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f"string {json.dumps(value[:40])}"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "map"
    return "sequence" if isinstance(value, (list, tuple)) else type(value).__name__


def _type_error(value: Any, expected: str, name: str) -> str:
    return f"invalid type: {_describe(value)}, expected {expected} for `{name}`"


def _unknown_field(key: object) -> str:
    known = ", ".join(f"`{name}`" for name in _PARSERS)
    return f"unknown field `{str(key)[:80]}`, expected one of {known}"


def _parse_int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(_type_error(value, "an integer", name))
    number = int(value)
    if not INT64_MIN <= number <= INT64_MAX:
        raise ValueError(f"`{name}` is out of range: integers must fit in 64 bits")
    return number


def _parse_float(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(_type_error(value, "a number", name))
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number")
    return number


def _parse_bool(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(_type_error(value, "a boolean", name))
    return value


def _parse_str(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(_type_error(value, "a string", name))
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"`{name}` holds an unpaired surrogate, which is not text")
    return value


def _parse_grammar(value: Any, name: str) -> str | None:
    """A grammar's text; the empty string means unset."""
    return _parse_str(value, name) or None


def _parse_json_text(value: Any, name: str) -> str | None:
    """JSON as text, or the object itself, which many clients send."""
    if isinstance(value, (Mapping, bool)):
        return json.dumps(value)
    return _parse_grammar(value, name)


def _parse_strs(value: Any, name: str) -> str | list[str]:
    if isinstance(value, str):
        return _parse_str(value, name)
    if not isinstance(value, (list, tuple)):
        raise ValueError(_type_error(value, "a string or a list of strings", name))
    return [_parse_str(item, name) for item in value]


def _parse_ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise ValueError(_type_error(value, "a list of integers", name))
    return sorted({_parse_int(item, name) for item in value})


def _parse_bias(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(_type_error(value, "a map of token id to number", name))
    bias: dict[str, float] = {}
    for key, addend in value.items():
        text = str(key)
        digits = text.removeprefix("-")
        # 19 digits are all that 64 bits can hold; int() of a huge text would be slow.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 19):
            raise ValueError(f"`{name}` keys must be token ids, got {text[:40]!r}")
        bias[str(int(text))] = _parse_float(addend, name)
    return bias


def _parse_map(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(_type_error(value, "a map", name))
    return dict(value)


_SPECIAL_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "stop": _parse_strs,
    "stop_regex": _parse_strs,
    "stop_token_ids": _parse_ids,
    "json_schema": _parse_json_text,
    "structural_tag": _parse_json_text,
    "regex": _parse_grammar,
    "ebnf": _parse_grammar,
    "logit_bias": _parse_bias,
    "custom_params": _parse_map,
    "watermark": _parse_map,
    "max_new_tokens": _parse_int,
    "sampling_seed": _parse_int,
    "stream_interval": _parse_int,
    "beam_width": _parse_int,
}
_PARSERS_OF_DEFAULT: dict[type, Callable[[Any, str], Any]] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
}
# Client field -> parser, in declaration order. Derived fields (default factories) are left out.
_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    spec.name: _SPECIAL_PARSERS.get(spec.name) or _PARSERS_OF_DEFAULT[type(spec.default)]
    for spec in fields(SamplingParams)
    if spec.default_factory is MISSING
    and spec.name not in {"stop_str_max_len", "stop_regex_max_len"}
}
CLIENT_FIELDS = tuple(_PARSERS)
