"""Single tokens and pieces of sequences as text and as bytes."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from sglang.srt.utils.tokenizer import LightTokenizer
from sglang.test.fakes.byte_tokenizer import build_byte_fallback_tokenizer, build_byte_tokenizer

BYTE_LEVEL = LightTokenizer(build_byte_tokenizer(), {})
BYTE_FALLBACK = LightTokenizer(build_byte_fallback_tokenizer(), {})
# Beyond what any vocabulary holds: below zero, behind the last, of more than 32 bits.
ODD_IDS = [-1, -(2**40), 10**6, 2**31, 2**32, 2**40]


def fallback_ids(data: bytes) -> list[int]:
    return [1 + byte for byte in data]  # id 0 is unknown


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_ids_outside_the_vocabulary_are_dropped(tokenizer: LightTokenizer) -> None:
    known = tokenizer.encode("ab")
    assert tokenizer.decode_tail([*ODD_IDS, *known, *ODD_IDS]) == "ab"
    assert tokenizer.decode_tail(ODD_IDS) == tokenizer.decode_tail([]) == ""
    assert all(tokenizer.token_bytes(odd) == b"" for odd in ODD_IDS)


def test_a_tail_loses_only_the_characters_that_it_cuts() -> None:
    data = "é人🙂é".encode()  # 2, 3, 4 and 2 bytes
    whole = [2, 5, 9, 11]  # where characters end
    for start in range(len(data)):
        for end in range(start, len(data) + 1):
            first = min((e for e in (0, *whole) if e >= start), default=start)
            last = max((e for e in (0, *whole) if e <= end), default=0)
            wanted = data[first:last].decode() if first < last else ""
            assert BYTE_FALLBACK.decode_tail(fallback_ids(data[start:end])) == wanted, (start, end)


def test_every_decoder_that_falls_back_to_bytes_is_treated_alike() -> None:
    raw = build_byte_fallback_tokenizer()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    data = "人人".encode()
    assert LightTokenizer(raw, {}).decode_tail(fallback_ids(data[1:])) == "人"


def test_bytes_of_a_token_that_is_part_of_a_character() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode("a🙂")
        assert len(ids) == 5, "this tokenizer should know no such character"
        assert [tokenizer.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "a🙂".encode()]
