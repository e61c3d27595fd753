"""Tokenizers rebuilt from scored pieces merge as SentencePiece does."""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer

from sglang.srt.utils.sentencepiece_bpe import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    build_sentencepiece_bpe,
    rank_merges,
)

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = ["ab", "▁a", "bc", "abc", "▁ab", "a", "b", "c", "▁"]
_TOKENS = ["<pad>", "<unk>", "  ", "\n", "<b>", *_BYTES, *_PIECES]
_TYPES = [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED, *[6] * 256, *[NORMAL] * 9]
# Of the pieces the earlier is the better one.
_SCORES = [0.0] * 5 + [0.0] * 256 + [-float(rank) for rank in range(9)]


def make() -> Tokenizer:
    return build_sentencepiece_bpe(_TOKENS, _SCORES, _TYPES, "<unk>")


def by_definition(text: str) -> list[str]:
    """Merge the pair whose union scores highest, the leftmost of equals, until none is a piece."""
    score = dict(zip(_PIECES, _SCORES[-len(_PIECES) :]))
    symbols = list(text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        known = [(-score[pair], place) for place, pair in enumerate(pairs) if pair in score]
        if not known:
            return symbols
        _, place = min(known)
        symbols[place : place + 2] = [pairs[place]]


def test_merges_are_ranked_by_the_score_of_the_whole() -> None:
    merges = rank_merges(_PIECES, _SCORES[-len(_PIECES) :])
    assert merges[:3] == [("a", "b"), ("▁", "a"), ("b", "c")]
    assert set(merges[3:5]) == {("a", "bc"), ("ab", "c")}
    assert set(merges[5:]) == {("▁", "ab"), ("▁a", "b")}


def test_every_short_text_is_divided_as_the_definition_says() -> None:
    tokenizer = make()
    for length in range(1, 7):
        for letters in itertools.product("abc ", repeat=length):
            text = "".join(letters)
            if "  " not in text:  # matched as a whole, before
                assert tokenizer.encode(text).tokens == by_definition(text), text


def test_user_defined_pieces_come_first() -> None:
    tokenizer = make()
    assert tokenizer.encode("a  b\na").tokens == ["a", "▁▁", "b", "\n", "a"]
    assert tokenizer.encode("<b>ab").tokens == ["<b>", "ab"]
    assert tokenizer.decode(tokenizer.encode("ab  c\n<b>abc").ids) == "ab  c\n<b>abc"


def test_unknown_text_falls_back_to_bytes() -> None:
    tokenizer = make()
    encoded = tokenizer.encode("aé")
    assert encoded.tokens == ["a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "aé"


def test_no_space_is_added_in_front() -> None:
    tokenizer = make()
    assert tokenizer.encode("ab").tokens == ["ab"]
    assert tokenizer.encode(" ab").tokens == by_definition(" ab")
