"""Build a `tokenizers` tokenizer from the vocabulary of a SentencePiece BPE model.

Such a model has scored pieces and no list of merges: of all neighbouring pieces whose union is a
piece, the union with the highest score is made first. Every way to divide a piece in two pieces is
therefore a merge, ranked by the score of the whole. Owns nothing. Used by `gguf_file`.

Source: SentencePiece (arXiv 1808.06226) and its documentation of piece types.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

# Values of tokenizer.ggml.token_type.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_SPACE = "▁"  # stands for a space in pieces


def rank_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the highest score first."""
    known = set(pieces)
    ranked = sorted(range(len(pieces)), key=lambda index: -scores[index])
    merges: list[tuple[str, str]] = []
    for index in ranked:
        piece = pieces[index]
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


def build_sentencepiece_bpe(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: str
) -> Tokenizer:
    """A tokenizer with byte fallback that adds no space in front. Token ids are list positions.

    User-defined pieces (runs of spaces or line ends, markup) are matched as a whole before any
    merge, on text whose spaces are written as in pieces; control pieces only in the text as given.
    """
    pieces = [
        token.replace(" ", _SPACE) if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types)
    ]
    normal = [index for index, kind in enumerate(types) if kind == NORMAL]
    merges = rank_merges([pieces[i] for i in normal], [scores[i] for i in normal])
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind in zip(pieces, types)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=False, normalized=True)
            for piece, kind in zip(pieces, types)
            if kind == USER_DEFINED
        ]
    )
    return tokenizer
