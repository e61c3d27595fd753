"""The tokenizer that the server's arguments name, the same in every process that needs it.

Called once at start-up by the front, the detokenizer and the schedulers. How a tokenizer is read
is `utils.tokenizer`'s. No torch, no transformers.
"""

from __future__ import annotations

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.tokenizer import BaseTokenizer, get_tokenizer, read_tokenizer_json


def load_tokenizer(server_args: ServerArgs) -> BaseTokenizer | None:
    """The tokenizer; None where only token ids are served. Raises ValueError where none is."""
    if server_args.skip_tokenizer_init:
        return None
    return get_tokenizer(
        _path(server_args),
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
    )


def load_tokenizer_json(server_args: ServerArgs) -> str | None:
    """Text of its tokenizer.json, where it has one. Raises ValueError where it is not found."""
    return read_tokenizer_json(_path(server_args), revision=server_args.revision)


def _path(server_args: ServerArgs) -> str:
    return server_args.tokenizer_path or server_args.model_path
