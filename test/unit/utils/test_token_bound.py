"""The bound on a text's tokens: never more than the tokenizer makes of it, and useful."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sglang.srt.utils.token_bound import TokenBound, token_bound
from sglang.srt.utils.tokenizer import LightTokenizer, _byte_of_char
from sglang.test.fakes.tiny_tokenizer import build_tiny_tokenizer


def byte_level(lacking: str = "", normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer whose alphabet does not have the `lacking` characters."""
    alphabet = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c not in lacking]
    merges = [("a", "a"), ("aa", "aa"), ("Ã", "©")]
    tokens = alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581", "a", "b", "ab", "\u2581ab"]
    merges = [("a", "b"), ("\u2581", "ab")]
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(pieces)}, merges=merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


TOKENIZERS = {
    "plain": byte_level(),
    "tiny": build_tiny_tokenizer(),
    # As in real vocabularies: some control characters and rare lead bytes have no token.
    "lacking": byte_level(lacking="\u0104ñ"),
    "nfc": byte_level(normalizer=normalizers.NFC()),
    "fallback": byte_fallback(),
}
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="a <|end>\u0301e\u0345\u1fbe\u0341\u03b9\u0308\x04ñ🙂", max_size=200),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=TEXTS, repeats=st.integers(1, 30))
def test_never_more_than_the_real_number(name: str, text: str, repeats: int) -> None:
    text = text * repeats
    tokenizer = LightTokenizer(TOKENIZERS[name], {})
    bound = tokenizer.bound
    assert bound is not None
    fewest = bound.min_tokens(text)
    assert fewest <= len(tokenizer.encode(text))
    assert bound.may_exceed(text, fewest - 1) or fewest == 0


def test_the_bound_is_as_tight_as_the_longest_token() -> None:
    assert LightTokenizer(TOKENIZERS["plain"], {}).bound == TokenBound(len("<|end|>"))
    bound = TokenBound(4, b"\x04")
    assert bound.min_tokens("a" * 9) == 3
    assert bound.min_tokens("\x04" * 900) == 0
    assert bound.may_exceed("a" * 9, 2) and not bound.may_exceed("a" * 9, 9)


def _spec(tokenizer: Tokenizer) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    return spec


def test_no_bound_where_text_can_vanish() -> None:
    spec = _spec(byte_level())
    alphabet = _byte_of_char()
    assert token_bound(spec, alphabet) is not None
    swallowing = {**spec, "added_tokens": [{**spec["added_tokens"][0], "lstrip": True}]}
    assert token_bound(swallowing, alphabet) is None
    removing = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}
    steps = [removing, *spec["pre_tokenizer"]["pretokenizers"]]
    sequence = {"type": "Sequence", "pretokenizers": steps}
    assert token_bound({**spec, "pre_tokenizer": sequence}, alphabet) is None
    assert token_bound({**spec, "pre_tokenizer": {"type": "Whitespace"}}, alphabet) is None
    for normalizer in ({"type": "Strip"}, {"type": "NFKC"}, {"type": "StripAccents"}):
        assert token_bound({**spec, "normalizer": normalizer}, alphabet) is None
    unknown = {**spec, "model": {**spec["model"], "type": "WordPiece"}}
    assert token_bound(unknown, alphabet) is None
    fallback = _spec(byte_fallback())
    incomplete = {k: v for k, v in fallback["model"]["vocab"].items() if k != "<0x41>"}
    model = {**fallback["model"], "vocab": incomplete}
    assert token_bound({**fallback, "model": model}, alphabet) is None
