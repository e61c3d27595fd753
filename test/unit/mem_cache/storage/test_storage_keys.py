"""Names of pages in storage: one function makes them, one reads them, the same in each process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.mem_cache.page_key import (
    PageHash,
    draft_page_key,
    make_storage_key,
    parse_storage_key,
    state_page_key,
)
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.storage.page_file import (
    SHARED_RANK,
    PageOwner,
    file_name,
    model_part,
    parse_file_name,
)

ROOT = Path(__file__).resolve().parents[4]

hashes = st.binary(min_size=32, max_size=32).map(lambda data: PageHash(data.hex()))
suffixes = st.none() | st.binary(min_size=8, max_size=8).map(bytes.hex)
pools = st.sampled_from(list(PoolName))
owners = st.builds(
    PageOwner,
    model=st.text(max_size=300).map(model_part),
    tp_rank=st.integers(0, 63),
    tp_size=st.integers(1, 64),
    pp_rank=st.integers(0, 3),
    pp_size=st.integers(1, 4),
) | st.builds(
    PageOwner,
    model=st.text(max_size=60).map(model_part),
    tp_rank=st.just(SHARED_RANK),
    tp_size=st.just(SHARED_RANK),
)


@settings(max_examples=40, deadline=None)
@given(pools, hashes, suffixes)
def test_reading_a_key_gives_what_it_was_made_of(
    pool: PoolName, page_hash: PageHash, suffix: str | None
) -> None:
    key = make_storage_key(pool, page_hash, suffix)
    assert parse_storage_key(key) == (pool, page_hash, suffix)
    assert PoolName(parse_storage_key(key).pool) is pool


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(pools, hashes, suffixes), unique=True, min_size=2, max_size=20))
def test_different_pages_have_different_keys(parts: list[tuple[PoolName, PageHash, str]]) -> None:
    assert len({make_storage_key(*part) for part in parts}) == len(parts)


@settings(max_examples=40, deadline=None)
@given(pools, hashes, suffixes, owners)
def test_a_file_name_gives_back_key_and_owner_and_fits(
    pool: PoolName, page_hash: PageHash, suffix: str | None, owner: PageOwner
) -> None:
    key = make_storage_key(pool, page_hash, suffix)
    name = file_name(key, owner)
    parsed = parse_file_name(name)
    assert parsed is not None
    assert (parsed.key, parsed.pool, parsed.owner) == (key, pool, owner.file_suffix)
    assert len(name.encode()) <= 255
    assert "/" not in name


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=90))
def test_other_texts_are_no_keys(text: str) -> None:
    if set(text) <= set("0123456789abcdef") and len(text) == 64:
        return
    with pytest.raises(ValueError, match="not a storage key"):
        parse_storage_key(text)


def test_the_documented_forms() -> None:
    page_hash = PageHash("ab" * 32)
    assert make_storage_key("kv", page_hash) == page_hash
    assert draft_page_key(page_hash, bytes(range(32))) == f"d:{page_hash}@0001020304050607"
    assert state_page_key(page_hash) == f"m:{page_hash}"
    owner = PageOwner(model=model_part("org/name"), tp_rank=1, tp_size=2)
    assert file_name(page_hash, owner) == f"{page_hash}_org-name_1_2.bin"
    draft = file_name(draft_page_key(page_hash, bytes(32)), owner)
    assert draft == f"{page_hash}.draft_{'0' * 16}_org-name_1_2.bin"
    shared = PageOwner(model="m", tp_rank=SHARED_RANK, tp_size=SHARED_RANK)
    assert file_name(page_hash, shared) == f"{page_hash}_m.bin"
    staged = PageOwner(model="m", pp_rank=1, pp_size=2)
    assert file_name(page_hash, staged) == f"{page_hash}_m_0_1_2_1.bin"


@pytest.mark.parametrize(
    ("pool", "page_hash", "suffix"),
    [
        ("kv", "ab" * 31, None),
        ("kv", "AB" * 32, None),
        ("draft", "ab" * 32, "12"),
        ("indexer", "ab" * 32, None),
    ],
)
def test_malformed_parts_are_refused(pool: str, page_hash: str, suffix: str | None) -> None:
    with pytest.raises(ValueError):
        make_storage_key(pool, PageHash(page_hash), suffix)
    with pytest.raises(ValueError, match="at least 8 bytes"):
        draft_page_key(PageHash("ab" * 32), b"short")


def test_long_model_names_stay_apart() -> None:
    names = [f"{'x' * 200}{end}" for end in ("a", "b")]
    assert model_part(names[0]) != model_part(names[1])
    assert max(len(model_part(name).encode()) for name in [*names, "ü" * 200]) <= 128


# Run here and in other processes; imports nothing but the module under test.
_PROGRAM = """
from sglang.srt.mem_cache.page_key import CacheIdentity, RadixKey, draft_page_key

identity = CacheIdentity(model="m", weights_fingerprint="f", kv_dtype="float16", page_size=4,
                         layout="page_first", namespace="tenant")
hashes = RadixKey(list(range(12)), "tenant").page_hashes(4, identity.digest())
keys = [draft_page_key(page_hash, identity.digest()) for page_hash in hashes]
print(keys, {str(number) for number in range(20)})
"""


def test_keys_are_the_same_under_any_hash_seed() -> None:
    outputs = []
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        result = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**environment, "PYTHONPATH": str(ROOT / "python")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout.partition("] "))
    assert len({keys for keys, _, _ in outputs}) == 1
    # The order of a set shows that the seeds did differ.
    assert len({order for _, _, order in outputs}) > 1
