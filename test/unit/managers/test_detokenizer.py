"""Joined text deltas equal the decoding of the whole, wherever the tokens are cut."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from sglang.srt.cache_folder import small_model_folder
from sglang.srt.managers.detokenizer_manager import Detokenizer, StopPrefixTracker
from sglang.srt.managers.io_struct import BatchTokenIDOutput, DecodeParams, RequestOutput
from sglang.srt.utils.tokenizer import BaseTokenizer, LightTokenizer, WindowDecoder, get_tokenizer
from sglang.test.fakes.tiny_tokenizer import build_tiny_tokenizer

CACHED_MODEL = small_model_folder()
TINY = LightTokenizer(build_tiny_tokenizer(), {"eos_token": "<|end|>"})
END_ID = TINY.eos_token_id or 0
TEXTS = st.text(max_size=40) | st.sampled_from(
    [
        "A 世界 ab",
        "emoji 👩‍👩‍👧‍👦🏳️‍🌈 flags",
        "naïve café Ωμέγα",
        "\u0000\ufffd\u2028",
        "日本語のテキスト",
    ]
)


def params(
    stop: list[str] | None = None, *, no_stop_trim: bool = False, skip_special: bool = True
) -> DecodeParams:
    return DecodeParams(
        skip_special_tokens=skip_special,
        no_stop_trim=no_stop_trim,
        stop_strs=stop or [],
    )


def deltas(
    tokenizer: BaseTokenizer,
    messages: list[list[int]],
    decode: DecodeParams,
    finish: dict | None = None,
) -> list[str]:
    """`new_text` of every message of one request; the last carries the finish reason."""
    detokenizer = Detokenizer(tokenizer)
    texts = []
    for number, ids in enumerate(messages):
        is_last = number == len(messages) - 1
        output = RequestOutput(
            rid="r",
            new_token_ids=array("i", ids),
            finish_reason=(finish or {"type": "length", "length": 1}) if is_last else None,
            prompt_tokens=1,
            completion_tokens=1,
            decode=decode if number == 0 else None,
        )
        detokenizer.process(BatchTokenIDOutput(outputs=[output]))
        texts.append(output.new_text)
    assert len(detokenizer) == 0
    return texts


def split(ids: list[int], seed: int) -> list[list[int]]:
    """The ids as messages of 0 to 3 tokens."""
    rng = random.Random(seed)
    messages: list[list[int]] = []
    position = 0
    while position < len(ids):
        size = rng.randint(0, 3)
        messages.append(ids[position : position + size])
        position += size
    return messages or [[]]


def byte_ids(data: bytes) -> list[int]:
    """The data as one token a byte."""
    table = {bytes(v): k for k, v in ((i, TINY._token_bytes[i]) for i in range(256))}
    return [table[bytes([b])] for b in data]


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 10**6))
def test_any_text_in_any_split(text: str, seed: int) -> None:
    ids = byte_ids(text.encode())
    assert "".join(deltas(TINY, split(ids, seed), params())) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(-1, 330), max_size=30), seed=st.integers(0, 10**6))
def test_any_ids_equal_the_librarys_decoding(ids: list[int], seed: int) -> None:
    for skip in (True, False):
        joined = "".join(deltas(TINY, split(ids, seed), params(skip_special=skip)))
        assert joined == TINY.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_real_tokenizer(seed: int) -> None:
    if not (CACHED_MODEL / "tokenizer.json").is_file():
        pytest.skip("the small model is not in the cache")
    tokenizer = _real_tokenizer()
    rng = random.Random(seed)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 25))]
    joined = "".join(deltas(tokenizer, split(ids, seed), params()))
    assert joined == tokenizer.decode(ids, skip_special_tokens=True)


_REAL: list[BaseTokenizer] = []


def _real_tokenizer() -> BaseTokenizer:
    if not _REAL:
        _REAL.append(get_tokenizer(str(CACHED_MODEL)))
    return _REAL[0]


def test_part_of_a_character_is_held() -> None:
    ids = byte_ids("世a".encode())
    assert deltas(TINY, [[i] for i in ids], params()) == ["", "", "世", "a"]


def test_cut_character_at_the_end_becomes_a_replacement() -> None:
    ids = byte_ids("世".encode()[:2])
    assert "".join(deltas(TINY, [[i] for i in ids], params())) == "\ufffd"


# -- stop strings ----------------------------------------------------------------------------------


def stop_reason(matched: object) -> dict:
    return {"type": "stop", "matched": matched}


def test_beginning_of_a_stop_string_is_never_streamed() -> None:
    ids = byte_ids(b"abcDEFGHIJ")
    got = deltas(TINY, [[i] for i in ids], params(["DEFGHIJ"]), stop_reason("DEFGHIJ"))
    assert got == ["a", "b", "c", "", "", "", "", "", "", ""]


def test_held_text_is_released_when_the_match_fails() -> None:
    ids = byte_ids(b"DEFx")
    assert deltas(TINY, [[i] for i in ids], params(["DEFG"])) == ["", "", "", "DEFx"]


def test_held_text_is_released_at_another_end() -> None:
    ids = byte_ids(b"abDE")
    assert "".join(deltas(TINY, [ids], params(["DEFG"]))) == "abDE"


def test_stop_string_inside_a_token_cuts_the_rest() -> None:
    hello = TINY.encode("hello")
    assert len(hello) == 1
    got = deltas(TINY, [byte_ids(b"say "), hello], params(["ell"]), stop_reason("ell"))
    assert "".join(got) == "say h"


def test_no_stop_trim_keeps_everything_and_holds_nothing() -> None:
    ids = byte_ids(b"abSTOP")
    got = deltas(TINY, [[i] for i in ids], params(["STOP"], no_stop_trim=True), stop_reason("STOP"))
    assert got == ["a", "b", "S", "T", "O", "P"]


def test_occurrence_before_min_new_tokens_does_not_cut() -> None:
    """The stop string was not looked for at first: only the one that ended the request counts."""
    ids = byte_ids(b"xSTOPySTOP")
    one_message = deltas(TINY, [ids], params(["STOP"]), stop_reason("STOP"))
    assert "".join(one_message) == "xSTOPy"
    assert "".join(deltas(TINY, [[i] for i in ids], params(["STOP"]), stop_reason("STOP"))) == (
        "xSTOPy"
    )


@pytest.mark.parametrize("matched", [END_ID, [END_ID]])
def test_stop_token_is_no_text(matched: object) -> None:
    ids = [*byte_ids(b"ab"), END_ID]
    kept = params(skip_special=False)
    assert "".join(deltas(TINY, split(ids, 1), kept, stop_reason(matched))) == "ab"
    untrimmed = params(skip_special=False, no_stop_trim=True)
    assert "".join(deltas(TINY, [ids], untrimmed, stop_reason(matched))) == "ab<|end|>"


def test_other_matches_do_not_cut() -> None:
    ids = byte_ids(b"NaN happened ab")
    assert "".join(deltas(TINY, [ids], params(), stop_reason("NaN happened"))) == "NaN happened ab"


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=25),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=3),
    seed=st.integers(0, 10**6),
)
def test_streams_equal_the_whole_for_random_stops(text: str, stops: list[str], seed: int) -> None:
    """End the text at its first stop, as a scheduler would; nothing of the stop may leak."""
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if not ends:
        ids, finish, want = byte_ids(text.encode()), None, text
    else:
        ids = byte_ids(text[: min(ends)].encode())
        matched = next(s for s in stops if text[: min(ends)].endswith(s))
        finish, want = stop_reason(matched), text[: min(ends) - len(matched)]
    parts = deltas(TINY, split(ids, seed) + [[]] * (not ids), params(stops), finish)
    joined = "".join(parts)
    if finish is None:
        assert joined == want
    else:
        # A longer stop may have been under way too; what was held for it goes with the match.
        assert joined == want
    for number in range(len(parts)):
        assert want.startswith("".join(parts[:number]))


@settings(max_examples=200, deadline=None)
@given(stop=st.text(alphabet="ab", min_size=1, max_size=8), text=st.text(alphabet="ab"))
def test_tracker_equals_brute_force(stop: str, text: str) -> None:
    tracker = StopPrefixTracker(stop)
    got = 0
    for char in text:
        got = tracker.push(char)
    proper = [n for n in range(len(stop)) if text.endswith(stop[:n])]
    assert got == max(proper)


def test_long_stop_string_costs_no_more_than_linear_time() -> None:
    tracker = StopPrefixTracker("a" * 4000 + "b")
    for _ in range(50):
        tracker.push("a" * 3000)
    assert tracker.push("") == 4000


# -- other tokenizer families ----------------------------------------------------------------------


def byte_fallback_tokenizer() -> LightTokenizer:
    """Pieces with a visible space mark and one token a byte, as SentencePiece models have."""
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁a", "b", "▁", "世"]
    raw = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    raw.normalizer = normalizers.Replace(" ", "▁")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return LightTokenizer(raw, {})


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(1, 260), max_size=20), seed=st.integers(0, 10**6))
def test_byte_fallback_equals_the_librarys_decoding(ids: list[int], seed: int) -> None:
    tokenizer = byte_fallback_tokenizer()
    assert "".join(deltas(tokenizer, split(ids, seed), params())) == tokenizer.decode(ids)


def test_window_decoder_joins_to_the_whole() -> None:
    text = "A 世界 hello world"
    ids = byte_ids(text.encode())
    decoder = WindowDecoder(TINY, skip_special_tokens=True)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == text


def test_unknown_request_gives_no_text() -> None:
    output = RequestOutput(
        rid="never seen",
        new_token_ids=array("i"),
        finish_reason={"type": "abort", "message": "x"},
        prompt_tokens=0,
        completion_tokens=0,
    )
    detokenizer = Detokenizer(TINY)
    detokenizer.process(BatchTokenIDOutput(outputs=[output]))
    assert output.new_text == "" and len(detokenizer) == 0
