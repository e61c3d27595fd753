"""Keys of cached tokens: the radix key, the page-hash chain and the identity of cached bytes.

Owns what makes two pieces of KV "the same": token ids, units of one or more, the namespace, and
the chained page hash that names a page outside the process. Owns no tree and no pool.
Called by every tree, the cache controller and the storage backends. Pure values: any thread.

Token ids are held as packed little-endian int32 bytes, so that slicing and comparing run at
memcpy/memcmp speed whatever the length.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NewType

import numpy as np

PageHash = NewType("PageHash", str)  # 64 hex digits

TOKEN_BYTES = 4
_HASH_VERSION = b"hispec-page-v1"


TokenIds = Sequence[int] | bytes | np.ndarray


def pack_tokens(token_ids: TokenIds) -> bytes:
    """Pack token ids as little-endian int32.

    ``bytes`` are taken as already packed. ``array('i')`` and int32 numpy arrays cost one memcpy;
    other sequences cost a conversion per element. Raises OverflowError beyond int32.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(f"{len(token_ids)} bytes are not whole int32 tokens")
        return token_ids
    if isinstance(token_ids, np.ndarray):
        if token_ids.size and (token_ids.max() > 0x7FFFFFFF or token_ids.min() < -0x80000000):
            raise OverflowError("token id beyond int32")
        return token_ids.astype("<i4", copy=False).tobytes()
    packed = (
        token_ids
        if isinstance(token_ids, array) and token_ids.typecode == "i"
        else array("i", token_ids)
    )
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """Everything besides the tokens that cached bytes are a function of.

    Two identities that differ in any field have different digests, so that a change of the model,
    its weights, the byte format or the sharding can only miss.
    """

    model: str
    weights_fingerprint: str
    kv_dtype: str
    page_size: int
    layout: str
    tp_rank: int = 0
    tp_size: int = 1
    draft_id: str | None = None
    namespace: str | None = None  # the user's extra_key / cache_salt

    def digest(self) -> bytes:
        """Return the 32-byte seed of the page-hash chain; the same in every process."""
        fields: tuple[str | int | None, ...] = (
            self.model,
            self.weights_fingerprint,
            self.kv_dtype,
            self.page_size,
            self.layout,
            self.tp_rank,
            self.tp_size,
            self.draft_id,
            self.namespace,
        )
        hasher = hashlib.sha256(_HASH_VERSION)
        for field in fields:
            # Tag and length before each value: no two field lists share one byte string, and
            # an absent value differs from an empty one.
            if field is None:
                hasher.update(b"n")
                continue
            tag = b"i" if isinstance(field, int) else b"s"
            data = str(field).encode("utf-8")
            hasher.update(tag + struct.pack("<Q", len(data)) + data)
        return hasher.digest()

    def with_namespace(self, namespace: str | None) -> CacheIdentity:
        """Return this identity in another user namespace."""
        return replace(self, namespace=namespace)

    def with_weights(self, weights_fingerprint: str) -> CacheIdentity:
        """Return this identity for other weights."""
        return replace(self, weights_fingerprint=weights_fingerprint)


class RadixKey:
    """An immutable run of token ids in one namespace, counted in logical units.

    Plain mode: unit i is token i. Bigram mode (EAGLE): unit i is (token i, token i+1), since draft
    KV at position i depends on token i+1. In general unit i is token i and the ``lookahead`` tokens
    after it (a draft of L layers, each reading one token further: L); N tokens make N-lookahead
    units, and the slice [a, b) of units holds tokens [a, b+lookahead). Length, slicing, matching,
    paging and hashing all count units.

    ``weights_fingerprint`` is part of the namespace: KV of old weights can never be matched by a
    key of new ones.
    """

    __slots__ = ("raw", "extra_key", "lookahead", "weights_fingerprint", "_num_units")

    def __init__(
        self,
        token_ids: TokenIds,
        extra_key: str | None = None,
        is_bigram: bool = False,
        weights_fingerprint: str | None = None,
        lookahead: int | None = None,
    ) -> None:
        """`lookahead` None: 1 with `is_bigram`, else 0."""
        self.raw: bytes = pack_tokens(token_ids)
        self.extra_key = extra_key
        self.lookahead = int(is_bigram) if lookahead is None else lookahead
        self.weights_fingerprint = weights_fingerprint
        self._num_units = max(len(self.raw) // TOKEN_BYTES - self.lookahead, 0)

    @property
    def is_bigram(self) -> bool:
        """Whether a unit holds more than its own token."""
        return self.lookahead > 0

    @property
    def token_ids(self) -> array[int]:
        """The raw tokens (`lookahead` more than units), a copy."""
        tokens = array("i")
        tokens.frombytes(self.raw)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens

    @property
    def namespace(self) -> tuple[str | None, str | None]:
        """(weights fingerprint, extra key): keys that differ here never share a node."""
        return (self.weights_fingerprint, self.extra_key)

    def __len__(self) -> int:
        return self._num_units

    def __iter__(self) -> Iterator[int] | Iterator[tuple[int, ...]]:
        tokens = self.token_ids
        if not self.lookahead:
            return iter(tokens)
        return zip(*(tokens[place:] for place in range(self.lookahead + 1)))

    def __getitem__(self, units: slice) -> RadixKey:
        start, stop, step = units.indices(self._num_units)
        if step != 1:
            raise ValueError("a radix key is sliced contiguously")
        end = stop + self.lookahead if stop > start else start
        return self._like(self.raw[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def _like(self, raw: bytes) -> RadixKey:
        return RadixKey(
            raw,
            self.extra_key,
            weights_fingerprint=self.weights_fingerprint,
            lookahead=self.lookahead,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return (
            self.raw == other.raw
            and self.lookahead == other.lookahead
            and self.namespace == other.namespace
        )

    def __hash__(self) -> int:
        return hash((self.raw, self.lookahead, self.namespace))

    def __repr__(self) -> str:
        head = list(self.token_ids[:8])
        return f"RadixKey({self._num_units} units, {head}, namespace={self.namespace})"

    def retargeted(self, *, lookahead: int, weights_fingerprint: str | None) -> RadixKey:
        """Return the same tokens as a key of a tree with these properties."""
        if self.lookahead == lookahead and self.weights_fingerprint == weights_fingerprint:
            return self
        return RadixKey(
            self.raw,
            self.extra_key,
            weights_fingerprint=weights_fingerprint,
            lookahead=lookahead,
        )

    def page_aligned(self, page_size: int) -> RadixKey:
        """Return the longest prefix of whole pages."""
        aligned_len = self._num_units // page_size * page_size
        return self if aligned_len == self._num_units else self[:aligned_len]

    def child_key(self, page_size: int, offset: int = 0) -> Hashable:
        """Return what a child at unit ``offset`` is found under: its first page + namespace.

        Raises ValueError when less than one page remains.
        """
        if self._num_units - offset < page_size:
            raise ValueError(
                f"{self._num_units - offset} units remain at {offset}: no page of {page_size}"
            )
        stop = offset + page_size + self.lookahead
        page = self.raw[offset * TOKEN_BYTES : stop * TOKEN_BYTES]
        # One namespace is the common case: a bare key hashes faster than a tuple.
        if self.extra_key is None and self.weights_fingerprint is None:
            return page
        return (self.weights_fingerprint, self.extra_key, page)

    def match(self, other: RadixKey, page_size: int = 1, offset: int = 0) -> int:
        """Return how many leading units of ``other`` equal this key's from ``offset`` on.

        Rounded down to whole pages. Raises ValueError between different namespaces or modes.
        """
        if (
            self.lookahead != other.lookahead
            or self.extra_key != other.extra_key
            or self.weights_fingerprint != other.weights_fingerprint
        ):
            raise ValueError(f"keys of different kinds never match: {self!r}, {other!r}")
        start = offset * TOKEN_BYTES
        other_raw = other.raw
        if self.raw[start : start + len(other_raw)] == other_raw:
            return other._num_units // page_size * page_size
        mine = np.frombuffer(self.raw, dtype="<i4", offset=min(start, len(self.raw)))
        theirs = np.frombuffer(other_raw, dtype="<i4")
        num_tokens = min(len(mine), len(theirs))
        differs = mine[:num_tokens] != theirs[:num_tokens]
        first = int(differs.argmax()) if num_tokens else 0
        if num_tokens and not differs[first]:
            first = num_tokens
        return max(first - self.lookahead, 0) // page_size * page_size

    def without_lookahead(self) -> RadixKey:
        """Return the same units as single tokens: each unit's first."""
        raw = self.raw[: len(self) * TOKEN_BYTES]
        return RadixKey(raw, self.extra_key, weights_fingerprint=self.weights_fingerprint)

    def page_hashes(
        self, page_size: int, seed: bytes, prior: PageHash | None = None
    ) -> list[PageHash]:
        """Hash each whole page, chained: SHA-256(previous hash or seed, tokens of the page).

        ``seed`` is ``CacheIdentity.digest()`` of this key's namespace; ``prior`` is the hash of the
        page just before this key, where the key continues a longer one. A unit contributes all of
        its tokens. Writing and looking up use this one method.
        """
        data = self.raw
        unit_bytes = (self.lookahead + 1) * TOKEN_BYTES
        if self.lookahead:
            tokens, count = np.frombuffer(self.raw, dtype="<i4"), self._num_units
            places = [tokens[place : place + count] for place in range(self.lookahead + 1)]
            data = np.stack(places, axis=1).tobytes()
        link = seed if prior is None else bytes.fromhex(prior)
        page_bytes = page_size * unit_bytes
        hashes: list[PageHash] = []
        for start in range(0, self._num_units // page_size * page_bytes, page_bytes):
            link = hashlib.sha256(link + data[start : start + page_bytes]).digest()
            hashes.append(PageHash(link.hex()))
        return hashes


_DRAFT_MARK = "+"


def kv_namespace(target: str, drafts: Sequence[str] = ()) -> str:
    """Return the weights fingerprint of radix keys: that of the target, then those of its drafts.

    KV of a prefix is reused for target and drafts together, so other weights of either must miss.
    """
    return _DRAFT_MARK.join((target, *drafts))


def target_fingerprint(namespace: str) -> str:
    """Return the target's part of a `kv_namespace`: all that the bytes of its pages depend on.

    Draft pages name the draft's weights in their own storage keys (`draft_page_key`).
    """
    return namespace.partition(_DRAFT_MARK)[0]


# Prefix of a storage key by pool. Hex digits hold no colon: keys of two pools never collide.
_POOL_PREFIXES = {"kv": "", "draft": "d:", "mamba": "m:", "swa": "s:"}
_SUFFIX_DIGITS = 16
_STORAGE_KEY = re.compile(r"(?:([a-z]):)?([0-9a-f]{64})(?:@([0-9a-f]{16}))?", re.ASCII)
_POOLS_BY_LETTER = {prefix[:1]: pool for pool, prefix in _POOL_PREFIXES.items()}


class StorageKey(NamedTuple):
    """What a storage key says. ``pool``: value of a ``PoolName``; ``suffix``: 16 hex or None."""

    pool: str
    page_hash: PageHash
    suffix: str | None


def make_storage_key(pool: str, page_hash: PageHash, suffix: str | None = None) -> str:
    """Return the name of a page of ``pool`` in storage; ``parse_storage_key`` is the inverse.

    KV pages are named by the bare hash. ``suffix`` tells apart what depends on more than the hash
    says. Raises ValueError for an unknown pool, a malformed hash or a malformed suffix.
    """
    prefix = _POOL_PREFIXES.get(pool)
    if prefix is None:
        raise ValueError(f"pool {pool!r} has no storage keys; known: {sorted(_POOL_PREFIXES)}")
    key = f"{prefix}{page_hash}" if suffix is None else f"{prefix}{page_hash}@{suffix}"
    if not _STORAGE_KEY.fullmatch(key):
        raise ValueError(f"not a page hash and suffix: {page_hash!r}, {suffix!r}")
    return key


def draft_page_key(page_hash: PageHash, draft_digest: bytes) -> str:
    """Return the storage key of the draft's page beside the target's page ``page_hash``.

    ``draft_digest``: digest of the draft's own ``CacheIdentity`` (at least 8 bytes), so that other
    draft weights miss while the target's pages still hit. Raises ValueError when it is shorter.
    """
    suffix = draft_digest.hex()[:_SUFFIX_DIGITS]
    if len(suffix) != _SUFFIX_DIGITS:
        raise ValueError(f"a draft digest has at least 8 bytes, not {len(draft_digest)}")
    return make_storage_key("draft", page_hash, suffix)


def state_page_key(page_hash: PageHash) -> str:
    """Return the storage key of the recurrent state at the end of page ``page_hash``."""
    return make_storage_key("mamba", page_hash)


def parse_storage_key(key: str) -> StorageKey:
    """Read what ``make_storage_key`` made. Raises ValueError for anything else."""
    match = _STORAGE_KEY.fullmatch(key)
    pool = _POOLS_BY_LETTER.get(match[1] or "") if match else None
    if match is None or pool is None:
        raise ValueError(f"not a storage key: {key!r}")
    return StorageKey(pool, PageHash(match[2]), match[3])
