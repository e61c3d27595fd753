"""Small real tokenizers: byte-level BPE with a few merges and two end tokens; byte fallback.

Built in memory, so that tests of text and grammars need no downloaded model.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_IDS = (0, 1)
END_TEXTS = ("<|end|>", "<|turn|>")
_MERGES = ["t r", "tr u", "tru e", "1 2", '" :', 'a "', "n u", "nu l", "nul l", "a b", "ab c"]


def build_byte_tokenizer() -> Tokenizer:
    """Ids: 0 and 1 end tokens, then the 256 bytes, then the merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*END_TEXTS, *alphabet, *(merge.replace(" ", "") for merge in _MERGES)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split() for merge in _MERGES)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in END_TEXTS])
    return tokenizer


def build_byte_fallback_tokenizer() -> Tokenizer:
    """ASCII characters as pieces, U+2581 for the space, and a token `<0xNN>` for every byte."""
    pieces = [chr(code) for code in range(33, 127)] + ["\u2581"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def write_byte_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json` into `folder` and return its path."""
    path = folder / "tokenizer.json"
    build_byte_tokenizer().save(str(path))
    return path
