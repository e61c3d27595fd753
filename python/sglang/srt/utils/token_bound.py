"""How few tokens a text can have: a bound that needs no tokenising.

Front processes refuse a text that cannot fit the context before they spend seconds and hundreds of
megabytes on its tokens. The bound is only given for tokenizers of which it is certain that every
token stands for at most so many bytes of the text: byte-level and byte-fallback BPE without steps
that throw text away. Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# NFC makes a text shorter, at most by this factor (in UTF-8).
_NFC_SHRINKS_BY = 4
# Bytes that no UTF-8 text holds: a vocabulary may lack them.
_NEVER_IN_UTF8 = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Split", "Metaspace")


@dataclass(frozen=True, slots=True)
class TokenBound:
    """What is known of a tokenizer.

    Attributes:
        max_token_bytes: text bytes that one token can stand for, at most.
        dropped: bytes that the tokenizer leaves out because its vocabulary lacks them.
    """

    max_token_bytes: int
    dropped: bytes = b""

    def min_tokens(self, text: str) -> int:
        """The fewest tokens that `text` can have."""
        data = text.encode("utf-8", "surrogatepass")
        if self.dropped:
            data = data.translate(None, self.dropped)
        return -(-len(data) // self.max_token_bytes)

    def may_exceed(self, text: str, num_tokens: int) -> bool:
        """False where `min_tokens` is `num_tokens` or less for sure; costs nothing."""
        return 4 * len(text) > num_tokens * self.max_token_bytes


def token_bound(spec: Mapping[str, Any], byte_of_char: Mapping[str, int]) -> TokenBound | None:
    """The bound of a `tokenizer.json`, None where none is certain.

    `byte_of_char`: the alphabet of byte-level vocabularies, character to byte.
    """
    model = spec.get("model") or {}
    added = spec.get("added_tokens") or []
    # An added token that swallows the blanks around it has no greatest length.
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    steps = _flat(spec.get("pre_tokenizer"), "pretokenizers")
    if any(not _keeps_text(step) for step in steps):
        return None
    shrink = _normalizer_shrinks_by(_flat(spec.get("normalizer"), "normalizers"))
    if shrink is None:
        return None
    vocab: Mapping[str, int] = model["vocab"]
    longest_added = max((len(token["content"].encode()) for token in added), default=0)
    if any(step["type"] == "ByteLevel" for step in steps):
        lacking = {byte for char, byte in byte_of_char.items() if char not in vocab}
        if model.get("unk_token") is not None and lacking - _NEVER_IN_UTF8:
            return None
        longest = max(map(len, vocab))  # one character a byte
        dropped = bytes(sorted(lacking))
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest, dropped = max(len(piece.encode()) for piece in vocab), b""
    else:
        return None
    return TokenBound(max(longest, longest_added) * shrink, dropped if shrink == 1 else b"")


def _flat(step: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence or absent."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[key] for inner in _flat(part, key)]
    return [step]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING_PRE_TOKENIZERS and step.get("behavior") != "Removed"


def _normalizer_shrinks_by(steps: list[dict[str, Any]]) -> int | None:
    """How much shorter normalising can make a text; None where that is unknown."""
    shrink = 1
    for step in steps:
        if step["type"] == "NFC":
            shrink = _NFC_SHRINKS_BY
        elif step["type"] == "Replace":
            pattern, content = step.get("pattern", {}).get("String"), step.get("content", "")
            if pattern is None or len(content.encode()) < len(pattern.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return shrink
