"""Radix keys, page hashes and cache identities."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.page_key import CacheIdentity, RadixKey, pack_tokens

IDENTITY = CacheIdentity(
    model="m", weights_fingerprint="w", kv_dtype="float32", page_size=4, layout="layer_first"
)
SEED = IDENTITY.digest()

# Few distinct tokens: long common prefixes are likely.
token_lists = st.lists(st.integers(0, 2), max_size=24)
page_sizes = st.sampled_from([1, 2, 4])


lookaheads = st.integers(0, 3)


def units_of(tokens: list[int], lookahead: int) -> list[object]:
    """The logical units, written out."""
    if not lookahead:
        return list(tokens)
    return [tuple(tokens[i : i + lookahead + 1]) for i in range(len(tokens) - lookahead)]


@given(token_lists, lookaheads, st.integers(0, 30), st.integers(0, 30))
def test_slice_holds_the_units_of_the_slice(
    tokens: list[int], lookahead: int, start: int, stop: int
) -> None:
    key = RadixKey(tokens, "ns", weights_fingerprint="w", lookahead=lookahead)
    part = key[start:stop]
    assert list(part) == units_of(tokens, lookahead)[start:stop]
    assert len(part) == len(list(part))
    assert part.namespace == key.namespace


@given(token_lists, token_lists, lookaheads, page_sizes, st.integers(0, 8))
def test_match_counts_common_units_in_whole_pages(
    left: list[int], right: list[int], lookahead: int, page_size: int, offset: int
) -> None:
    a, b = RadixKey(left, lookahead=lookahead), RadixKey(right, lookahead=lookahead)
    common = 0
    for x, y in zip(units_of(left, lookahead)[offset:], units_of(right, lookahead)):
        if x != y:
            break
        common += 1
    assert a.match(b, page_size, offset) == common // page_size * page_size


@given(token_lists, lookaheads, page_sizes, st.integers(0, 6))
def test_hash_chain_continues_over_any_cut(
    tokens: list[int], lookahead: int, page_size: int, num_pages: int
) -> None:
    key = RadixKey(tokens, lookahead=lookahead)
    whole = key.page_hashes(page_size, SEED)
    assert len(whole) == len(key) // page_size
    cut = min(num_pages, len(whole))
    head, tail = key[: cut * page_size], key[cut * page_size :]
    prior = whole[cut - 1] if cut else None
    assert head.page_hashes(page_size, SEED) == whole[:cut]
    assert tail.page_hashes(page_size, SEED, prior) == whole[cut:]


def test_page_hash_is_sha256_over_seed_and_packed_tokens() -> None:
    first = hashlib.sha256(SEED + struct.pack("<2i", 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<2i", 9, 10)).hexdigest()
    assert RadixKey([7, 8, 9, 10, 11]).page_hashes(2, SEED) == [first.hex(), second]
    pair_page = hashlib.sha256(SEED + struct.pack("<4i", 7, 8, 8, 9)).hexdigest()
    assert RadixKey([7, 8, 9], lookahead=True).page_hashes(2, SEED) == [pair_page]


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("num_tokens", range(4 * 2, 4 * 2 + 6))
def test_short_remainders_have_no_child_key(num_tokens: int, lookahead: int) -> None:
    key = RadixKey(range(num_tokens), lookahead=lookahead)
    aligned = key.page_aligned(4)
    assert len(aligned) == max(num_tokens - lookahead, 0) // 4 * 4
    with pytest.raises(ValueError, match="no page"):
        aligned.child_key(4, len(aligned))
    if len(aligned) < len(key):
        with pytest.raises(ValueError, match="no page"):
            key.child_key(4, len(aligned))


def test_pairs_are_a_lookahead_of_one_and_hash_alike() -> None:
    pairs, other = RadixKey([7, 8, 9], is_bigram=True), RadixKey([7, 8, 9], lookahead=1)
    assert pairs == other and pairs.is_bigram and hash(pairs) == hash(other)
    triple = hashlib.sha256(SEED + struct.pack("<6i", 7, 8, 9, 8, 9, 5)).hexdigest()
    assert RadixKey([7, 8, 9, 5], lookahead=2).page_hashes(2, SEED) == [triple]


def test_bigram_units_stop_before_a_differing_next_token() -> None:
    key, other = (RadixKey([1, 2, 3, last], is_bigram=True) for last in (8, 9))
    assert key.match(other) == 2


def test_namespaces_never_compare() -> None:
    base = RadixKey([1, 2])
    others = [RadixKey([1, 2], "a"), RadixKey([1, 2], None, False, "w"), RadixKey([1, 2], "")]
    others.append(RadixKey([1, 2, 3], is_bigram=True))
    for other in others:
        assert base != other
        with pytest.raises(ValueError, match="never match"):
            base.match(other)
    child_keys = {key.child_key(2) for key in [base, *others[:3]]}
    assert len(child_keys) == 4


def test_every_field_of_the_identity_changes_the_digest() -> None:
    changes: dict[str, Any] = {"page_size": 8, "tp_rank": 1, "tp_size": 2}
    digests = {SEED}
    for field in fields(CacheIdentity):
        digests.add(replace(IDENTITY, **{field.name: changes.get(field.name, "other")}).digest())
    assert len(digests) == 1 + len(fields(CacheIdentity))
    assert IDENTITY.with_namespace("").digest() != IDENTITY.with_namespace(None).digest()
    shifted = replace(IDENTITY, model="mw", weights_fingerprint="")
    assert shifted.digest() != SEED
    assert (
        IDENTITY.with_weights("w2").digest() == replace(IDENTITY, weights_fingerprint="w2").digest()
    )


@settings(max_examples=30)
@given(token_lists)
def test_all_token_containers_pack_alike(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == struct.pack(f"<{len(tokens)}i", *tokens)
    assert packed == pack_tokens(array("i", tokens)) == pack_tokens(packed)
    assert packed == pack_tokens(np.array(tokens, dtype=np.int64))
    assert RadixKey(tokens).token_ids.tolist() == tokens


def test_tokens_beyond_int32_are_refused() -> None:
    for bad in ([1 << 31], np.array([1 << 31]), array("q", [1 << 40])):
        with pytest.raises(OverflowError):
            pack_tokens(bad)
    with pytest.raises(ValueError, match="whole int32"):
        pack_tokens(b"abc")


def test_hashes_are_equal_in_processes_with_different_hash_seeds() -> None:
    program = (
        "from sglang.srt.mem_cache.page_key import CacheIdentity, RadixKey\n"
        "i = CacheIdentity(model='m', weights_fingerprint='w', kv_dtype='float32', page_size=4,"
        " layout='layer_first', namespace='u')\n"
        "print(i.digest().hex(), RadixKey(range(9), 'u', True).page_hashes(4, i.digest()))\n"
    )
    outputs = set()
    for hash_seed in ("0", "1", "12345"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        outputs.add(result.stdout)
    identity = IDENTITY.with_namespace("u")
    hashes = RadixKey(range(9), "u", True).page_hashes(4, identity.digest())
    assert outputs == {f"{identity.digest().hex()} {hashes}\n"}
