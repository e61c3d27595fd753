"""Slot allocators against a plain set of pages."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
    create_token_to_kv_pool_allocator,
)


def make(size: int, page_size: int) -> BaseTokenToKVPoolAllocator:
    return create_token_to_kv_pool_allocator(size, page_size)


def test_class_follows_the_page_size() -> None:
    assert type(make(4, 1)) is TokenToKVPoolAllocator
    assert type(make(4, 2)) is PagedTokenToKVPoolAllocator
    with pytest.raises(ValueError, match="Paged"):
        TokenToKVPoolAllocator(4, 2)
    with pytest.raises(ValueError, match="multiple"):
        make(6, 4)


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_reserved_page_is_never_handed_out(page_size: int) -> None:
    allocator = make(16, page_size)
    slots = allocator.alloc(16)
    assert slots is not None and slots.dtype == torch.int64
    assert sorted(slots.tolist()) == list(range(page_size, 16 + page_size))
    assert allocator.available_size() == 0
    assert allocator.alloc(page_size) is None
    assert len(allocator.alloc(0)) == 0  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="double free"):
        allocator.free(torch.tensor([0]))


@pytest.mark.parametrize("page_size", [1, 4])
def test_double_free_raises_with_the_slots_and_changes_nothing(page_size: int) -> None:
    allocator = make(16, page_size)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free(slots[:page_size])
    before = allocator.available_size()
    with pytest.raises(RuntimeError, match=rf"double free.*{int(slots[0])}"):
        allocator.free(slots)
    assert allocator.available_size() == before
    for bad in (-1, 16 + page_size):
        with pytest.raises(RuntimeError, match="do not exist"):
            allocator.free(torch.tensor([bad]))
    allocator.free(slots[page_size:])
    assert allocator.available_size() == 16


def test_repeats_within_a_call() -> None:
    token = make(8, 1)
    slots = token.alloc(2)
    assert slots is not None
    with pytest.raises(RuntimeError, match="double free of 1 slots"):
        token.free(torch.cat([slots, slots[:1]]))
    paged = make(16, 4)
    slots = paged.alloc(8)
    assert slots is not None
    paged.free(slots[[1, 2, 6, 1]])
    assert paged.available_size() == 16


def test_free_group_is_one_free() -> None:
    allocator = make(8, 1)
    slots = allocator.alloc(8)
    assert slots is not None
    allocator.free_group_begin()
    with pytest.raises(RuntimeError, match="open already"):
        allocator.free_group_begin()
    allocator.free(slots[:2])
    allocator.free(slots[4:])
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 6
    with pytest.raises(RuntimeError, match="no free group"):
        allocator.free_group_end()
    allocator.free_group_begin()
    allocator.free(slots[2:4])
    allocator.free(slots[3:4])
    with pytest.raises(RuntimeError, match="double free"):
        allocator.free_group_end()


def test_extend_fills_the_open_page_first() -> None:
    allocator = make(32, 4)
    first = allocator.alloc_extend([0, 0], [6, 3], [-1, -1])
    assert first is not None
    assert first.tolist() == [4, 5, 6, 7, 8, 9, 12, 13, 14]
    more = allocator.alloc_extend([6, 3, 4], [7, 9, 4], [9, 14, 7])
    assert more is not None
    assert more.tolist() == [10, 15, 16, 17, 18, 19, 20]
    assert allocator.available_size() == 12
    with pytest.raises(RuntimeError, match="do not fit"):
        allocator.alloc_extend([6], [8], [8])
    with pytest.raises(ValueError, match="shorter"):
        allocator.alloc_extend([4], [2], [7])


def test_extend_is_all_or_nothing() -> None:
    allocator = make(16, 4)
    assert allocator.alloc_extend([0, 0], [12, 5], [-1, -1]) is None
    assert allocator.available_size() == 16
    assert allocator.alloc_extend([0, 0], [12, 4], [-1, -1]) is not None


def test_decode_takes_a_page_only_at_its_start() -> None:
    allocator = make(32, 4)
    start = allocator.alloc_extend([0, 0], [4, 6], [-1, -1])
    assert start is not None
    slots = allocator.alloc_decode([5, 7], [7, 13])
    assert slots is not None
    assert slots.tolist() == [16, 14]
    assert allocator.available_size() == 16
    token = make(4, 1)
    assert token.alloc_decode([1, 1, 1], [0, 0, 0]) is not None
    assert token.alloc_decode([1, 1], [0, 0]) is None
    assert token.available_size() == 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_against_a_set(page_size: int, seed: int) -> None:
    """Sequences grow, share nothing, and every slot is where its position says."""
    rng = random.Random(seed)
    num_pages = 24
    allocator = make(num_pages * page_size, page_size)
    sequences: list[list[int]] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.35:
            grown = [rng.randint(0, 2 * page_size + 1) for _ in range(rng.randint(1, 3))]
            chosen: list[list[int]] = [[] for _ in grown]
            if sequences and rng.random() < 0.5:
                chosen[0] = sequences.pop(rng.randrange(len(sequences)))
            lens = [len(seq) for seq in chosen]
            ends = [n + g for n, g in zip(lens, grown)]
            slots = allocator.alloc_extend(lens, ends, [s[-1] if s else -1 for s in chosen])
            taken = iter(slots.tolist() if slots is not None else [])
            for seq, count in zip(chosen, grown):
                if slots is not None:
                    seq.extend(next(taken) for _ in range(count))
                if seq:
                    sequences.append(seq)
        elif action < 0.7 and sequences:
            batch = sequences[: rng.randint(1, len(sequences))]
            slots = allocator.alloc_decode([len(s) + 1 for s in batch], [s[-1] for s in batch])
            for seq, slot in zip(batch, slots.tolist() if slots is not None else []):
                seq.append(slot)
        elif sequences:
            seq = sequences.pop(rng.randrange(len(sequences)))
            allocator.free(torch.tensor(seq))
        used = [slot for seq in sequences for slot in seq]
        assert len(set(used)) == len(used)
        pages = {slot // page_size for slot in used}
        assert 0 not in pages
        assert allocator.available_size() == (num_pages - len(pages)) * page_size
        for seq in sequences:
            assert [slot % page_size for slot in seq] == [i % page_size for i in range(len(seq))]
            starts = seq[::page_size]
            assert seq == [starts[i // page_size] + i % page_size for i in range(len(seq))]
