"""When a request ends: the precedence table, several tokens a step, and text matches."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from sglang.srt.managers.finish_check import (
    NAN_MATCHED,
    FinishAbort,
    FinishLength,
    FinishReason,
    FinishResult,
    FinishStop,
    StepVerdicts,
    check_finish,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.tokenizer import LightTokenizer, _byte_of_char
from sglang.test.fakes.byte_tokenizer import build_byte_fallback_tokenizer, build_byte_tokenizer

EOS = 2
STOP_ID = 3


@dataclass
class View:
    sampling_params: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    eos_token_ids: frozenset[int] = frozenset({EOS})

    @property
    def max_new_tokens(self) -> int:
        return self.sampling_params.max_new_tokens or 0


def view(output_ids: Sequence[int], **values: Any) -> View:
    params = SamplingParams.from_dict({"stop_token_ids": [STOP_ID], **values})
    params.normalize()
    return View(params, list(output_ids))


def letters(ids: Sequence[int]) -> str:
    """Token 10 is A, 11 is B, …; others are silent."""
    return "".join(chr(ord("A") + i - 10) for i in ids if 10 <= i < 36)


def check(
    output_ids: Sequence[int], num_new: int, verdicts: StepVerdicts | None = None, **values: Any
) -> FinishResult:
    checked = view(output_ids, **values)
    return check_finish(checked, num_new, letters, verdicts or StepVerdicts())


# -- shapes -------------------------------------------------------------------------------------


def test_reasons_have_the_documented_shapes() -> None:
    assert FinishStop(7).to_json() == {"type": "stop", "matched": 7}
    assert FinishStop("x").to_json() == {"type": "stop", "matched": "x"}
    assert FinishLength(5).to_json() == {"type": "length", "length": 5}
    assert FinishAbort().to_json() == {
        "type": "abort",
        "message": "Aborted",
        "status_code": None,
        "err_type": None,
    }


# -- precedence in one position -----------------------------------------------------------------

A, B, C = 10, 11, 12
LAST_TOKEN_CASES: list[tuple[str, list[int], dict[str, Any], StepVerdicts, FinishReason | None]] = [
    ("nothing", [A, B], {}, StepVerdicts(), None),
    ("eos", [A, EOS], {}, StepVerdicts(), FinishStop(EOS)),
    ("stop id", [A, STOP_ID], {}, StepVerdicts(), FinishStop(STOP_ID)),
    ("stop string", [A, B], {"stop": "AB"}, StepVerdicts(), FinishStop("AB")),
    ("regex", [A, B], {"stop_regex": "A[BC]"}, StepVerdicts(), FinishStop("A[BC]")),
    ("length", [A, B], {"max_new_tokens": 2}, StepVerdicts(), FinishLength(2)),
    ("grammar", [A, B], {}, StepVerdicts(grammar_end=0), FinishStop(B)),
    ("nan", [A, B], {}, StepVerdicts(nan=0), FinishStop(NAN_MATCHED)),
    ("eos at length", [A, EOS], {"max_new_tokens": 2}, StepVerdicts(), FinishStop(EOS)),
    (
        "string at length",
        [A, B],
        {"max_new_tokens": 2, "stop": ["B"]},
        StepVerdicts(),
        FinishStop("B"),
    ),
    (
        "string over stop id",
        [A, B],
        {"stop": "B", "stop_token_ids": [B]},
        StepVerdicts(),
        FinishStop("B"),
    ),
    (
        "regex over stop id",
        [A, B],
        {"stop_regex": "B", "stop_token_ids": [B]},
        StepVerdicts(),
        FinishStop("B"),
    ),
    (
        "length over grammar",
        [A, B],
        {"max_new_tokens": 2},
        StepVerdicts(grammar_end=0),
        FinishLength(2),
    ),
    (
        "grammar at ignored eos",
        [A, EOS],
        {"ignore_eos": True},
        StepVerdicts(grammar_end=0),
        FinishStop(EOS),
    ),
    ("ignored eos", [A, EOS], {"ignore_eos": True}, StepVerdicts(), None),
    ("ignored stop id", [A, STOP_ID], {"ignore_eos": True}, StepVerdicts(), None),
    (
        "ignore_eos does not ignore strings",
        [A, B],
        {"ignore_eos": True, "stop": "B"},
        StepVerdicts(),
        FinishStop("B"),
    ),
    ("nan over string", [A, B], {"stop": "B"}, StepVerdicts(nan=0), FinishStop(NAN_MATCHED)),
]


@pytest.mark.parametrize(
    ("output_ids", "values", "verdicts", "reason"),
    [case[1:] for case in LAST_TOKEN_CASES],
    ids=[case[0] for case in LAST_TOKEN_CASES],
)
def test_precedence_at_one_token(
    output_ids: list[int],
    values: dict[str, Any],
    verdicts: StepVerdicts,
    reason: FinishReason | None,
) -> None:
    assert check(output_ids, 1, verdicts, **values) == FinishResult(reason, 1)


def test_pending_abort_wins_over_everything() -> None:
    abort = FinishAbort("because")
    verdicts = StepVerdicts(abort=abort, nan=0, grammar_end=0)
    assert check([A, EOS], 2, verdicts, stop="A") == FinishResult(abort, 0)


def test_zero_new_tokens() -> None:
    assert check([], 0, max_new_tokens=0) == FinishResult(FinishLength(0), 0)
    assert check([A], 0) == FinishResult(None, 0)


# -- several tokens in one step -----------------------------------------------------------------


def test_stop_inside_the_budget_beats_the_cap_behind_it() -> None:
    result = check([A, B, STOP_ID, 20, 21, 22], 6, max_new_tokens=5)
    assert result == FinishResult(FinishStop(STOP_ID), 3)


def test_stop_behind_the_budget_is_a_length_finish() -> None:
    result = check([A, B, C, C, STOP_ID, C], 6, max_new_tokens=4)
    assert result == FinishResult(FinishLength(4), 4)


def test_text_stop_in_the_middle_cuts_the_rest() -> None:
    for stop, num_kept in (("AB", 2), ("BCD", 4), ("A", 1)):
        result = check([A, B, C, 13, 14], 5, stop=stop)
        assert result == FinishResult(FinishStop(stop), num_kept)


def test_match_may_begin_before_the_new_tokens() -> None:
    output_ids = [20, 20, *range(10, 20)]  # .. A B C D E F G H I J
    for num_new in range(1, 7):
        result = check(output_ids, num_new, stop="ABCDEFGHIJ")
        assert result == FinishResult(FinishStop("ABCDEFGHIJ"), num_new)


def test_earliest_match_wins_over_the_order_of_the_list() -> None:
    # C completes both; the text would have been read up to B.
    assert check([A, B, C], 3, stop=["C", "BC"]).reason == FinishStop("BC")
    assert check([A, B, C], 3, stop=["C", "AB"]) == FinishResult(FinishStop("AB"), 2)


def test_grammar_end_in_the_middle() -> None:
    result = check([A, B, C], 3, StepVerdicts(grammar_end=1))
    assert result == FinishResult(FinishStop(B), 2)


def test_nan_in_the_middle() -> None:
    assert check([A, B, C], 3, StepVerdicts(nan=1)) == FinishResult(FinishStop(NAN_MATCHED), 2)
    # What ended before the bad logits ended well.
    assert check([EOS, B, C], 3, StepVerdicts(nan=1)) == FinishResult(FinishStop(EOS), 1)


def test_regex_is_judged_after_every_token() -> None:
    # `$` matches at the end of what one-by-one decoding would have seen.
    assert check([A, B, C], 3, stop_regex="B$") == FinishResult(FinishStop("B$"), 2)


def one_by_one(output_ids: Sequence[int], num_before: int, **values: Any) -> FinishResult:
    """The same tokens, one step each."""
    for end in range(num_before + 1, len(output_ids) + 1):
        result = check(output_ids[:end], 1, **values)
        if result.reason is not None:
            return FinishResult(result.reason, end - num_before)
    return FinishResult(None, len(output_ids) - num_before)


def test_any_split_into_steps_ends_at_the_same_token() -> None:
    rng = random.Random(7)
    num_ended = 0
    for _ in range(600):
        output_ids = [rng.choice([10, 11, 12, 13, EOS]) for _ in range(12)]
        values: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 16),
            "stop": rng.sample(["AB", "CC", "DAB", "BBB", "ABCD"], 2),
            "min_new_tokens": 0,
            "ignore_eos": rng.random() < 0.5,
        }
        values["min_new_tokens"] = rng.randint(0, min(6, values["max_new_tokens"]))
        if rng.random() < 0.3:
            values["stop_regex"] = rng.choice(["A.C", "DD+$", "B{2,}"])
        expected = one_by_one(output_ids, 0, **values)
        start = 0
        while start < len(output_ids):
            num_new = min(rng.randint(1, 5), len(output_ids) - start)
            result = check(output_ids[: start + num_new], num_new, **values)
            if result.reason is not None:
                num_ended += 1
                assert (result.reason, start + result.num_kept) == (
                    expected.reason,
                    expected.num_kept,
                ), (output_ids, values)
                break
            start += num_new
        else:
            assert expected.reason is None, (output_ids, values)
    assert num_ended > 300


# -- min_new_tokens -----------------------------------------------------------------------------


def test_nothing_but_the_length_stops_before_min_new_tokens() -> None:
    values: dict[str, Any] = {"min_new_tokens": 3, "stop": "B"}
    assert check([EOS, B, STOP_ID], 3, **values) == FinishResult(None, 3)
    assert check([A, A, A, EOS], 1, **values) == FinishResult(FinishStop(EOS), 1)
    assert check([A, A, A], 1, min_new_tokens=3, max_new_tokens=3).reason == FinishLength(3)


def test_match_from_before_min_new_tokens_is_history() -> None:
    values: dict[str, Any] = {"min_new_tokens": 3, "stop": ["BC"], "stop_regex": "CB?"}
    assert check([A, B, C, 13], 1, **values).reason is None
    assert check([A, B, C, 13, B, C], 3, **values) == FinishResult(FinishStop("BC"), 3)


# -- text and tokenizers ------------------------------------------------------------------------


def test_stop_strings_with_a_real_decoder_and_any_tokenisation() -> None:
    tokenizer = build_byte_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    rng = random.Random(3)
    for stop in ("true", "世界", "é1", "null\n", "<|turn|>"):
        text = f"abc 12 tru 世 é nul {stop} after"
        for is_bytewise in (False, True):
            if is_bytewise and stop != "<|turn|>":
                ids = [i for byte in text for i in tokenizer.encode(byte).ids]
            else:
                ids = tokenizer.encode(text).ids
            first = next(end for end in range(1, len(ids) + 1) if stop in decode(ids[:end]))
            for _ in range(10):
                start = 0
                while True:
                    num_new = rng.randint(1, 6)
                    checked = view(ids[: start + num_new], stop=stop)
                    result = check_finish(checked, min(num_new, len(ids) - start), decode)
                    if result.reason is not None:
                        break
                    start += num_new
                assert result.reason == FinishStop(stop)
                assert start + result.num_kept == first


def test_without_a_tokenizer_only_tokens_and_lengths_count() -> None:
    assert check_finish(view([A, B], stop="B"), 1, None) == FinishResult(None, 1)
    assert check_finish(view([A, EOS], stop="B"), 1, None).reason == FinishStop(EOS)


def test_text_is_decoded_in_a_window_and_only_when_asked_for() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return letters(ids)

    long_output = [20] * 5000
    check_finish(view(long_output), 1, decode)
    assert lengths == []
    check_finish(view(long_output, stop="ABC", max_new_tokens=9999), 2, decode)
    assert len(lengths) == 1 and lengths[0] < 20


def test_exploding_regex_ends_the_request_and_not_the_server() -> None:
    start = time.monotonic()
    output_ids = [A] * 400 + [B]
    result = check(output_ids, 1, stop_regex="(A|AA)+C", max_new_tokens=999)
    assert time.monotonic() - start < 2
    assert isinstance(result.reason, FinishAbort)
    assert result.reason.status_code == 400 and "too long" in result.reason.message


def test_many_slow_patterns_share_the_time_of_one() -> None:
    # None takes too long alone; one after the other they would hold the server for a second.
    slow = next(n for n in range(10, 40) if _seconds_to_search("(A|AA)+C", "A" * n) > 0.02)
    start = time.monotonic()
    result = check([A] * slow, 1, stop_regex=["(A|AA)+C"] * 32, max_new_tokens=999)
    assert time.monotonic() - start < 0.4
    assert isinstance(result.reason, FinishAbort) and result.reason.status_code == 400


def _seconds_to_search(pattern: str, text: str) -> float:
    start = time.monotonic()
    assert regex.search(pattern, text) is None
    return time.monotonic() - start


# -- tokens that are bytes ------------------------------------------------------------------------


def write_bytes(text: str) -> list[int]:
    """Ids of `text`, a token for each byte of a character that is not ASCII."""
    tokenizer = build_byte_fallback_tokenizer()
    tokens = [chr(byte) if 32 < byte < 127 else f"<0x{byte:02X}>" for byte in text.encode()]
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in tokens]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("aሰላም።bb", "።"),  # the window begins in a character
        ("ሰላምሰላም።ሰላም", "።"),  # the step ends in one
        ("a🙂🙂🙂😀🙂bb", "😀"),
        ("人丂丄丅。人", "丅。"),
        ("aé\u00a0b ab", "b"),
    ],
)
def test_stop_strings_among_characters_of_single_bytes(text: str, stop: str, chunk: int) -> None:
    tokenizer = LightTokenizer(build_byte_fallback_tokenizer(), {})
    ids = write_bytes(text)
    first = len(write_bytes(text[: text.index(stop) + len(stop)]))
    for end in [*range(chunk, len(ids), chunk), len(ids)]:
        num_new = min(chunk, end)
        checked = view(ids[:end], stop=stop, stop_token_ids=[], max_new_tokens=999)
        result = check_finish(checked, num_new, tokenizer.decode_tail)
        if result.reason is not None:
            break
    assert result.reason == FinishStop(stop)
    assert end - num_new + result.num_kept == first


def test_a_stop_string_before_broken_bytes_of_the_same_step_counts() -> None:
    """To the decoder a run of bytes that is no UTF-8 as a whole holds no character at all."""
    tokenizer = LightTokenizer(build_byte_fallback_tokenizer(), {})
    ids = write_bytes("a።") + [1 + 0x80, 1 + 0x80]
    checked = view(ids, stop="።", stop_token_ids=[], max_new_tokens=99)
    assert check_finish(checked, 5, tokenizer.decode_tail) == FinishResult(FinishStop("።"), 3)


def test_history_among_characters_of_single_bytes_is_no_news() -> None:
    tokenizer = LightTokenizer(build_byte_fallback_tokenizer(), {})
    ids = write_bytes("።ሰ")
    values: dict[str, Any] = {"stop": "።", "min_new_tokens": 4, "stop_token_ids": []}
    checked = view(ids, max_new_tokens=99, **values)
    assert check_finish(checked, 1, tokenizer.decode_tail).reason is None


# -- the cut of the window ------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["^L", r"\AL", "(?<!K)L", r"\bL", "^L.*"])
def test_the_windows_cut_is_no_beginning_of_the_output(pattern: str) -> None:
    """Every letter comes to lie at the cut once; no L begins a word or the output."""
    output_ids = [10 + i % 26 for i in range(600)]  # A, B, … Z, A, …
    for end in range(1, len(output_ids) + 1):
        result = check(output_ids[:end], 1, stop_regex=pattern, max_new_tokens=9999)
        assert result.reason is None, end


def test_a_match_at_the_beginning_of_the_output_counts() -> None:
    assert check([A], 1, stop_regex="^A").reason == FinishStop("^A")
    assert check([A, B, C], 1, stop_regex="^AB?C").reason == FinishStop("^AB?C")


def byte_ids(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The token of one byte."""
    (char,) = (c for c, b in _byte_of_char().items() if b == byte)
    token_id = tokenizer.token_to_id(char)
    assert token_id is not None
    return [token_id]


def test_a_match_of_full_length_lies_within_the_window() -> None:
    tokenizer = build_byte_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    ids = [i for byte in ("x" * 40 + "🙂🙃🙂").encode() for i in byte_ids(tokenizer, byte)]
    for num_new in (1, 2, 5):
        checked = view(ids, stop_regex="🙂🙃🙂", stop_token_ids=[], max_new_tokens=999)
        assert check_finish(checked, num_new, decode).reason == FinishStop("🙂🙃🙂")


def test_half_a_character_is_nothing_to_a_pattern() -> None:
    tokenizer = build_byte_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    ids = [i for byte in "人a人".encode() for i in byte_ids(tokenizer, byte)]
    for end in range(1, len(ids) + 1):
        checked = view(ids[:end], stop_regex=r"\W", stop_token_ids=[], max_new_tokens=99)
        assert check_finish(checked, 1, decode).reason is None, end
