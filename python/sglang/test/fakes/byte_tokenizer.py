"""A small real tokenizer file: byte-level BPE with a few merges and two end tokens.

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


def write_byte_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json` into `folder` and return its path."""
    path = folder / "tokenizer.json"
    build_byte_tokenizer().save(str(path))
    return path
