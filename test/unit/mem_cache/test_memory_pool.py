"""Request rows and KV buffers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import (
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)


def test_rows_are_taken_and_given_back_once() -> None:
    pool = ReqToTokenPool(4, 8, "cpu")
    assert pool.alloc(5) is None
    assert pool.alloc(3) == [0, 1, 2]
    pool.free([1, 0])
    pool.free(2)
    assert pool.available_size() == 4
    for bad in (1, 4, -1):
        with pytest.raises(RuntimeError, match="not taken"):
            pool.free(bad)
    pool.alloc(4)
    pool.clear()
    assert pool.available_size() == 4


def test_writes_reach_table_and_mirror() -> None:
    pool = ReqToTokenPool(3, 8, "cpu")
    assert pool.req_to_token is pool.req_to_token_cpu
    assert pool.req_to_token.dtype == torch.int32
    pool.write(1, 2, torch.tensor([5, 6, 7]))
    assert pool.read(1, 1, 6).tolist() == [0, 5, 6, 7, 0]
    pool.write_at(torch.tensor([0, 2]), torch.tensor([7, 0]), torch.tensor([9, 8]))
    assert pool.req_to_token[0, 7] == 9 and pool.req_to_token[2, 0] == 8
    with pytest.raises(ValueError, match="exceed"):
        pool.write(0, 6, torch.tensor([1, 2, 3]))
    copied = pool.read(1, 2, 5)
    pool.write(1, 2, torch.tensor([1, 1, 1]))
    assert copied.tolist() == [5, 6, 7]


def test_a_separate_device_table_follows_the_mirror() -> None:
    pool = ReqToTokenPool(3, 8, "meta")
    assert pool.req_to_token is not pool.req_to_token_cpu
    pool.req_to_token = torch.zeros_like(pool.req_to_token_cpu)  # stands in for a device
    pool.device = torch.device("cpu")
    pool.write(1, 0, torch.tensor([3, 4]))
    pool.write_at(torch.tensor([1, 2]), torch.tensor([2, 5]), torch.tensor([6, 7]))
    assert torch.equal(pool.req_to_token, pool.req_to_token_cpu)
    assert pool.req_to_token[1, :3].tolist() == [3, 4, 6]


class RecordingCounter:
    """Remembers which layers were waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def wait_until(self, layer_idx: int) -> None:
        self.waited.append(layer_idx)


def test_kv_rows_layers_and_sizes() -> None:
    pool = MHATokenToKVPool(
        size=8,
        page_size=4,
        dtype=torch.float16,
        head_num=2,
        head_dim=3,
        layer_num=2,
        device="cpu",
        v_head_dim=5,
        start_layer=10,
    )
    assert pool.get_key_buffer(10).shape == (12, 2, 3)
    assert pool.get_value_buffer(11).shape == (12, 2, 5)
    size = pool.get_kv_size_bytes()
    assert (size.key, size.value) == (2 * 12 * 2 * 3 * 2, 2 * 12 * 2 * 5 * 2)
    keys, values = torch.ones(2, 2, 3), torch.full((2, 2, 5), 2.0)
    pool.set_kv_buffer(SimpleNamespace(layer_id=11), torch.tensor([4, 11]), keys, values)
    buffers = pool.get_kv_buffer(11)
    assert buffers.key[[4, 11]].eq(1).all() and buffers.value[[4, 11]].eq(2).all()
    assert buffers.key.sum() == 12 and pool.get_key_buffer(10).sum() == 0
    assert buffers.key.data_ptr() == pool.k_data[1].data_ptr()
    for layer in (9, 12):
        with pytest.raises(IndexError, match="layer"):
            pool.get_key_buffer(layer)


def test_reads_wait_for_the_layer_and_writes_do_not() -> None:
    pool = MHATokenToKVPool(4, 1, torch.float32, 1, 1, 2, "cpu", start_layer=3)
    counter = RecordingCounter()
    pool.register_layer_transfer_counter(counter)
    pool.get_kv_buffer(4)
    one = torch.ones(1, 1, 1)
    pool.set_kv_buffer(SimpleNamespace(layer_id=3), torch.tensor([1]), one, one)
    assert counter.waited == [1, 1]
    pool.register_layer_transfer_counter(None)
    pool.get_key_buffer(3)
    assert counter.waited == [1, 1]


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_a_layer_can_be_a_pool_of_its_own_in_the_same_memory(kind: str) -> None:
    stack: KVCache
    if kind == "heads":
        stack = MHATokenToKVPool(8, 4, torch.float32, 2, 3, 3, "cpu")
    else:
        stack = MLATokenToKVPool(8, 4, torch.float32, 4, 2, 3, "cpu")
    view, counter = stack.layer_view(2), RecordingCounter()
    assert view.layer_num == 1 and view.stack is stack and view.size == stack.size
    view.register_layer_transfer_counter(counter)
    keys, values = view.get_kv_buffer(0)
    # Its rows come with those of its layer of the stack.
    assert counter.waited == [2, 2] and stack.layer_transfer_counter is None
    rows = torch.ones(1, *keys.shape[1:])
    layer = SimpleNamespace(layer_id=0)
    view.set_kv_buffer(layer, torch.tensor([5]), rows, rows)
    view.move(torch.tensor([5]), torch.tensor([6]))
    assert [buffer[5:7].any().item() for buffer in stack.buffers()[0]] == [False, False, True]
    assert keys[6].all() and values[6].all()
    assert sum(view.get_kv_size_bytes()) * 3 == sum(stack.get_kv_size_bytes())
    with pytest.raises(IndexError):
        stack.layer_view(3)
