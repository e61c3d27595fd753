"""Slots and window rows together, against a plain model; the pool's map follows."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator, swa_part
from sglang.srt.mem_cache.swa_pool import SWAKVPool

WINDOW = 5


def make_pool(size: int, size_swa: int, page_size: int) -> SWAKVPool:
    def heads(num_tokens: int, num_layers: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(num_tokens, page_size, torch.float32, 2, 3, num_layers, "cpu")

    return SWAKVPool(heads(size, 1), heads(size_swa, 2), [1], [0, 2], WINDOW)


def make(
    size: int = 32, size_swa: int = 16, page_size: int = 1
) -> tuple[SWATokenToKVPoolAllocator, SWAKVPool]:
    pool = make_pool(size, size_swa, page_size)
    allocator = SWATokenToKVPoolAllocator(size, size_swa, page_size, pool, WINDOW)
    return allocator, pool


def take(allocator: SWATokenToKVPoolAllocator, num_tokens: int) -> torch.Tensor:
    slots = allocator.alloc_extend([0], [num_tokens], [-1])
    assert slots is not None
    return slots


def check_map(allocator: SWATokenToKVPoolAllocator, pool: SWAKVPool) -> None:
    every_slot = torch.arange(allocator.size + allocator.page_size)
    rows = allocator.swa_rows(every_slot)
    mapped = pool.full_to_swa.long()
    assert torch.equal(mapped[rows > 0], rows[rows > 0])
    # Slots without a row are on the dummy page.
    assert (mapped[rows == 0] < allocator.page_size).all()
    taken = rows[rows > 0]
    assert len(taken.unique()) == len(taken)
    assert allocator.available_swa_size() + len(taken) == allocator.size_swa


def test_every_slot_of_a_request_has_a_row_until_it_is_given_back() -> None:
    allocator, pool = make()
    slots = take(allocator, 9)
    assert (allocator.swa_rows(slots) > 0).all()
    allocator.free_swa(slots[:4])
    assert allocator.swa_rows(slots).gt(0).tolist() == [False] * 4 + [True] * 5
    assert (allocator.available_size(), allocator.available_swa_size()) == (23, 11)
    check_map(allocator, pool)
    with pytest.raises(RuntimeError, match="without window rows"):
        allocator.free_swa(slots[3:5])
    allocator.free(slots)
    assert (allocator.available_size(), allocator.available_swa_size()) == (32, 16)
    check_map(allocator, pool)
    with pytest.raises(RuntimeError, match="without window rows"):
        allocator.free_swa(slots[:1])


@pytest.mark.parametrize("page_size", [1, 4])
def test_an_extend_takes_both_or_nothing(page_size: int) -> None:
    allocator, pool = make(page_size=page_size)
    first = take(allocator, 12)
    assert allocator.alloc_extend([0], [8], [-1]) is None
    assert (allocator.available_size(), allocator.available_swa_size()) == (20, 4)
    allocator.free_swa(first[:8])
    assert allocator.alloc_extend([0], [8], [-1]) is not None
    check_map(allocator, pool)


def test_slots_for_a_load_have_no_rows_of_their_own() -> None:
    allocator, pool = make(page_size=4)
    slots = allocator.alloc(8)
    assert slots is not None and not allocator.swa_rows(slots).any()
    assert allocator.available_swa_size() == 16
    rows = allocator.swa_allocator.alloc(4)
    assert rows is not None
    allocator.bind_swa(slots[4:], rows)
    assert torch.equal(allocator.swa_rows(slots[4:]), rows)
    with pytest.raises(RuntimeError, match="rows already"):
        allocator.bind_swa(slots[4:], rows)
    with pytest.raises(ValueError, match="whole pages"):
        allocator.bind_swa(slots[1:5], rows)
    check_map(allocator, pool)
    allocator.free(slots)
    assert allocator.available_swa_size() == 16


def test_rows_move_from_copies_to_the_slots_that_stay() -> None:
    allocator, pool = make()
    old, new = take(allocator, 4), take(allocator, 4)
    allocator.free_swa(old)
    rows = allocator.swa_rows(new)
    allocator.move_swa(new, old)
    assert torch.equal(allocator.swa_rows(old), rows) and not allocator.swa_rows(new).any()
    allocator.free(new)
    assert allocator.available_swa_size() == 12
    check_map(allocator, pool)


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_lives_keep_both_sides_exact(page_size: int) -> None:
    rng = random.Random(page_size)
    allocator, pool = make(24 * page_size, 14 * page_size, page_size)
    address = pool.full_to_swa.data_ptr()  # captured steps hold it
    held: list[torch.Tensor] = []
    freed_rows: list[int] = []  # of each, from its start, in tokens
    for _ in range(400):
        if rng.random() < 0.5:
            num_tokens = rng.randint(1, 6) * page_size
            enough = num_tokens <= min(allocator.available_size(), allocator.available_swa_size())
            slots = allocator.alloc_extend([0], [num_tokens], [-1])
            assert (slots is not None) == enough
            if slots is not None:
                held.append(slots)
                freed_rows.append(0)
        elif held:
            index = rng.randrange(len(held))
            slots, start = held[index], freed_rows[index]
            if rng.random() < 0.5:
                end = rng.randint(start // page_size, len(slots) // page_size) * page_size
                allocator.free_swa(slots[start:end])
                freed_rows[index] = end
            else:
                allocator.free(slots)
                del held[index], freed_rows[index]
        num_slots = sum(len(slots) for slots in held)
        assert allocator.available_size() == allocator.size - num_slots
        assert allocator.available_swa_size() == allocator.size_swa - num_slots + sum(freed_rows)
        check_map(allocator, pool)
    allocator.clear()
    assert allocator.available_swa_size() == allocator.size_swa
    check_map(allocator, pool)
    assert pool.full_to_swa.data_ptr() == address


def test_layers_are_kept_in_their_own_pool() -> None:
    allocator, pool = make()
    slots = take(allocator, 3)
    allocator.free_swa(slots[:1])
    k, v = torch.randn(2, 2, 2, 3)
    for layer_id in (0, 1, 2):
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), slots[1:], k + layer_id, v)
    assert pool.slot_map(1) is None and pool.slot_map(0) is pool.full_to_swa
    assert torch.equal(pool.get_key_buffer(1)[slots[1:]], k + 1)
    rows = allocator.swa_rows(slots[1:])
    for layer_id in (0, 2):
        assert torch.equal(pool.get_key_buffer(layer_id)[rows], k + layer_id)
        assert torch.equal(pool.rows_of(layer_id, slots[1:]), rows)
    moved = take(allocator, 2)
    pool.move(slots[1:], moved)
    assert torch.equal(pool.get_value_buffer(1)[moved], v)
    assert torch.equal(pool.get_value_buffer(2)[allocator.swa_rows(moved)], v)
    assert sum(pool.get_kv_size_bytes()) == 2 * 4 * 6 * (33 + 2 * 17)


def test_other_allocators_have_no_rows() -> None:
    allocator, _ = make()
    assert swa_part(allocator) is allocator
    assert swa_part(allocator.swa_allocator) is None
    assert allocator.swa_allocator.available_swa_size() is None
