"""Text <-> token ids for the front processes, without transformers or torch.

`get_tokenizer` reads a model folder's `tokenizer.json` with the `tokenizers` library (0.1 s). Only
a folder without one, or `tokenizer_mode="slow"`, falls back to transformers' AutoTokenizer, which
is imported then and not before. Both kinds offer the same small interface, `BaseTokenizer`.

Also here: `IncrementalDecoder`, which turns a stream of token ids into text deltas whose
concatenation equals the decoding of the whole, for the byte-level and the byte-fallback families.

Used by the tokenizer manager, the OpenAI layer and the detokenizer. Encoding is safe from several
threads (the library releases the interpreter lock in the batch calls used here); a decoder object
belongs to one request.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from sglang.srt.utils.gguf_file import open_gguf
from sglang.srt.utils.token_bound import TokenBound, token_bound

logger = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"
# The `tokenizers` library takes ids of 32 bits.
_ID_LIMIT = 2**32


class BaseTokenizer(ABC):
    """What the front asks of a tokenizer.

    Attributes:
        vocab_size: ids the tokenizer knows, added tokens included.
        bos_token_id, eos_token_id: or None.
        special_ids: ids dropped by `skip_special_tokens`.
        special_tokens_map: "bos_token" and the like to their text, for chat templates.
        chat_template: Jinja source, or a dict of named sources, or None.
        bound: how few tokens a text can have; None where nothing is certain.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]
    special_tokens_map: dict[str, str]
    chat_template: str | dict[str, str] | None
    bound: TokenBound | None = None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text."""

    @abstractmethod
    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts; may run in parallel and without the interpreter lock."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence. Ids outside the vocabulary are dropped."""

    def decode_tail(self, token_ids: Sequence[int]) -> str:
        """Text of a piece of a longer sequence, special tokens included.

        A character that the piece cuts hides no other one. Ids outside the vocabulary are dropped.
        """
        return self.decode(token_ids)

    @abstractmethod
    def make_decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """A fresh decoder for one request."""

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; partial characters appear as U+FFFD."""
        cached = self._token_texts.get(token_id)
        if cached is None:
            cached = self._token_texts[token_id] = self.decode([token_id])
        return cached

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token on its own, also where they are part of a character."""
        return self.token_text(token_id).encode("utf-8")

    def __init__(self) -> None:
        self._token_texts: dict[int, str] = {}


# ------------------------------------------------------------------------------------------------
# Incremental decoding
# ------------------------------------------------------------------------------------------------


class IncrementalDecoder(ABC):
    """Token ids in, text deltas out, one request."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Text that is certain after this token; parts of a character are held."""

    @abstractmethod
    def flush(self) -> str:
        """What is still held, at the end; incomplete characters become U+FFFD."""


class ByteLevelDecoder(IncrementalDecoder):
    """For tokens that are byte strings: an incremental UTF-8 decoder does all the work, O(1)."""

    def __init__(self, token_bytes: TokenBytes, skip_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip_ids = skip_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteFallbackDecoder(IncrementalDecoder):
    """For pieces with U+2581 as space and `<0xNN>` tokens for raw bytes.

    A run of byte tokens is one unit: valid UTF-8 gives its text, anything else one U+FFFD a
    byte. It is therefore held until a piece that is no byte, or the end, closes it.
    The leading space of the first piece is kept: the text continues a prompt.
    """

    def __init__(self, token_pieces: TokenPieces, skip_ids: frozenset[int]) -> None:
        self._pieces = token_pieces
        self._skip_ids = skip_ids
        self._run = bytearray()

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        if not self._run:
            return piece
        return self.flush() + piece

    def flush(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


class WindowDecoder(IncrementalDecoder):
    """For any tokenizer: decodes a short window and emits what its end adds.

    The window starts at the last place where the text was complete, so the cost per token is
    bounded. A character that stays invalid for `_MAX_HELD_TOKENS` tokens is given up on and
    emitted as U+FFFD.
    """

    _MAX_HELD_TOKENS = 8

    def __init__(self, tokenizer: BaseTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []  # emitted tokens that give the new ones their spacing
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        if after.endswith(REPLACEMENT) and len(self._held) < self._MAX_HELD_TOKENS:
            return ""
        if len(after) <= len(before):
            return ""
        self._context, self._held = self._held, []
        return after[len(before) :]

    def flush(self) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._held)
        self._held = []
        return after[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip) if token_ids else ""


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The printable alphabet in which byte-level vocabularies spell bytes, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {chr(b): b for b in printable}
    for extra, byte in enumerate(b for b in range(256) if b not in set(printable)):
        chars[chr(256 + extra)] = byte
    return chars


class TokenBytes(dict[int, bytes]):
    """Token id -> its bytes, filled on demand; unknown ids have none."""

    def __init__(self, raw: RawTokenizer) -> None:
        super().__init__()
        self._raw = raw

    def __missing__(self, token_id: int) -> bytes:
        token = self._raw.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None
        alphabet = _byte_of_char()
        if token is None:
            data = b""
        elif all(c in alphabet for c in token):
            data = bytes(alphabet[c] for c in token)
        else:  # an added token, spelt as plain text
            data = token.encode("utf-8")
        self[token_id] = data
        return data


class TokenPieces(dict[int, str | int]):
    """Token id -> its text, or the byte (an int) that it stands for."""

    def __init__(self, raw: RawTokenizer) -> None:
        super().__init__()
        self._raw = raw

    def __missing__(self, token_id: int) -> str | int:
        token = self._raw.id_to_token(token_id) if 0 <= token_id < _ID_LIMIT else None
        piece: str | int
        if token is None:
            piece = ""
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            piece = int(token[3:5], 16)
        else:
            piece = token.replace("\u2581", " ")
        self[token_id] = piece
        return piece


def _decoder_steps(tokenizer_spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the tokenizer's own decoder; one that is no sequence is one step."""
    spec = tokenizer_spec.get("decoder") or {}
    return spec.get("decoders", [spec]) if spec.get("type") == "Sequence" else [spec]


def _decoder_family(tokenizer_spec: Mapping[str, Any]) -> str:
    """`byte_level`, `byte_fallback` or `other`, from the tokenizer's own decoder."""
    steps = _decoder_steps(tokenizer_spec)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaces = [s for s in steps if s["type"] == "Replace"]
        plain = all(
            s.get("pattern") == {"String": "\u2581"} and s.get("content") == " " for s in replaces
        )
        return "byte_fallback" if plain else "other"
    return "other"


# ------------------------------------------------------------------------------------------------
# The light tokenizer
# ------------------------------------------------------------------------------------------------


class LightTokenizer(BaseTokenizer):
    """A `tokenizer.json` read with the `tokenizers` library."""

    def __init__(self, raw: RawTokenizer, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._raw = raw
        # Truncation or padding baked into the file would silently change prompts.
        raw.no_truncation()
        raw.no_padding()
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        added = raw.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens_map = _special_tokens(config)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.chat_template = _chat_template_of(config)
        spec = json.loads(raw.to_str())
        self._family = _decoder_family(spec)
        self._falls_back_to_bytes = any(
            step.get("type") == "ByteFallback" for step in _decoder_steps(spec)
        )
        self.bound = token_bound(spec, _byte_of_char())
        self._token_bytes = TokenBytes(raw)
        self._token_pieces = TokenPieces(raw)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens_map.get(name)
        return None if text is None else self._raw.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        # The batch call, also for one text: it releases the interpreter lock, `encode` does not.
        encodings = self._raw.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        known = [t for t in token_ids if 0 <= t < _ID_LIMIT]
        return self._raw.decode(known, skip_special_tokens=skip_special_tokens)

    def decode_tail(self, token_ids: Sequence[int]) -> str:
        if not self._falls_back_to_bytes:
            return self.decode(token_ids)
        # To the decoder a run of bytes with part of a character in it is no text at all.
        pieces = [self._token_pieces[token_id] for token_id in token_ids]
        start = 0
        while start < len(pieces) and _is_continuation(pieces[start]):
            start += 1
        return self.decode(token_ids[start : len(pieces) - _num_incomplete(pieces)])

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._token_pieces[token_id] if self._falls_back_to_bytes else None
        if isinstance(piece, int):
            return bytes([piece])
        if self._family == "byte_level":
            return self._token_bytes[token_id]
        return super().token_bytes(token_id)

    def make_decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        skip = self.special_ids if skip_special_tokens else frozenset()
        if self._family == "byte_level":
            return ByteLevelDecoder(self._token_bytes, skip)
        if self._family == "byte_fallback":
            return ByteFallbackDecoder(self._token_pieces, skip)
        return WindowDecoder(self, skip_special_tokens)


def _is_continuation(piece: str | int) -> bool:
    """Whether this is a byte of a UTF-8 character, but not its first."""
    return isinstance(piece, int) and 0x80 <= piece < 0xC0


def _num_incomplete(pieces: Sequence[str | int]) -> int:
    """How many bytes at the end are the beginning of a UTF-8 character without its end."""
    for count, piece in enumerate(reversed(pieces[-3:]), start=1):
        if not _is_continuation(piece):
            # The first byte says how long its character is.
            is_short = isinstance(piece, int) and piece >= (0xC0, 0xE0, 0xF0)[count - 1]
            return count if is_short else 0
    return 0


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"):
        value = config.get(name)
        if isinstance(value, Mapping):  # an AddedToken written out
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _chat_template_of(config: Mapping[str, Any]) -> str | dict[str, str] | None:
    template = config.get("chat_template")
    if isinstance(template, list):  # [{"name": "default", "template": "..."}, ...]
        return {entry["name"]: entry["template"] for entry in template}
    return template


# ------------------------------------------------------------------------------------------------
# Fall-back through transformers
# ------------------------------------------------------------------------------------------------


class TransformersTokenizer(BaseTokenizer):
    """AutoTokenizer behind our interface, for tokenizers without a `tokenizer.json`."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner
        self.vocab_size = len(inner)
        self.bos_token_id = inner.bos_token_id
        self.eos_token_id = inner.eos_token_id
        self.special_ids = frozenset(inner.all_special_ids)
        self.special_tokens_map = {
            k: v for k, v in inner.special_tokens_map.items() if isinstance(v, str)
        }
        self.chat_template = inner.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        known = [t for t in token_ids if 0 <= t < self.vocab_size]
        return self._inner.decode(known, skip_special_tokens=skip_special_tokens)

    def make_decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        return WindowDecoder(self, skip_special_tokens)


# ------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return data


def _resolve_folder(path: str, revision: str | None) -> Path:
    """A local folder for `path`, which may be a folder, a `tokenizer.json` or a hub name."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.is_file():
        return local.parent
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the tokenizer {path} is no local folder and cannot be fetched: {first}"
        ) from error


def _load_transformers(folder: Path, use_fast: bool, trust_remote_code: bool) -> BaseTokenizer:
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(
        str(folder), use_fast=use_fast, trust_remote_code=trust_remote_code
    )
    return TransformersTokenizer(inner)


def get_tokenizer(
    path: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> BaseTokenizer:
    """Load the tokenizer of a model folder, tokenizer.json, GGUF file or hub name.

    Raises ValueError when the folder holds none that can be read.
    """
    # The library warns when a process forks after a parallel encode; ours never fork then.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if path.endswith(".gguf"):
        # The file carries its own tokenizer and chat template.
        source = open_gguf(path)
        return LightTokenizer(source.tokenizer(), source.tokenizer_config())
    folder = _resolve_folder(path, revision)
    fast_file = folder / "tokenizer.json"
    if tokenizer_mode != "slow" and fast_file.is_file():
        config = _read_json(folder / "tokenizer_config.json")
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            config["chat_template"] = template_file.read_text(encoding="utf-8")
        try:
            raw = RawTokenizer.from_file(str(fast_file))
        except Exception as exc:  # the library raises bare Exception for a malformed file
            raise ValueError(f"cannot read the tokenizer {fast_file}: {exc}") from exc
        return LightTokenizer(raw, config)
    logger.info("No tokenizer.json in %s: loading the tokenizer through transformers", folder)
    try:
        return _load_transformers(folder, tokenizer_mode != "slow", trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ValueError(f"no usable tokenizer in {folder}: {exc}") from exc


def read_tokenizer_json(path: str, *, revision: str | None = None) -> str | None:
    """Text of the tokenizer.json of what `get_tokenizer` would load; None where it has none.

    Raises ValueError for a hub name that cannot be fetched.
    """
    if path.endswith(".gguf"):
        return str(open_gguf(path).tokenizer().to_str())
    file = _resolve_folder(path, revision) / "tokenizer.json"
    return file.read_text(encoding="utf-8") if file.is_file() else None
