"""Both CPU implementations of `torch_native` against attention written out in a few lines."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.registry import attention_backend_names, create_attention_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, LAYER_ID, NUM_SLOTS = 6, 2, 10, 1, 400
SCALING = 0.3


@dataclass
class TreeInput:
    """The part of a verify input that attention reads."""

    custom_mask: torch.Tensor | None


def make_backend(name: str) -> AttentionBackend:
    return create_attention_backend(
        name,
        RunnerFacts(
            device="cpu",
            dtype=torch.float32,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=1,
            max_context_len=128,
            max_running_requests=8,
        ),
    )


class Case:
    """A batch of requests whose keys and values lie at random slots of the pool."""

    def __init__(self, prefix_lens: list[int], new_lens: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        slots = list(range(1, NUM_SLOTS))
        rng.shuffle(slots)
        rows = list(range(len(prefix_lens) + 2))
        rng.shuffle(rows)
        self.rows = rows[: len(prefix_lens)]
        self.prefix_lens, self.new_lens = prefix_lens, new_lens
        self.table = ReqToTokenPool(len(rows), 128, "cpu")
        # Cells behind a request's end hold what an earlier request left there.
        self.table.req_to_token.fill_(slots.pop())
        self.pool = MHATokenToKVPool(
            NUM_SLOTS, 1, torch.float32, NUM_KV_HEADS, HEAD_DIM, LAYER_ID + 1, "cpu"
        )
        self.pool.k_data.fill_(1e4)
        self.pool.v_data.fill_(1e4)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.out_cache_loc: list[int] = []
        layer = self.layer()
        for row, prefix_len, new_len in zip(self.rows, prefix_lens, new_lens):
            total = prefix_len + new_len
            own = torch.tensor([slots.pop() for _ in range(total)])
            self.table.write(row, 0, own)
            keys, values = torch.randn(2, total, NUM_KV_HEADS, HEAD_DIM)
            self.pool.set_kv_buffer(layer, own[:prefix_len], keys[:prefix_len], values[:prefix_len])
            self.keys.append(keys)
            self.values.append(values)
            self.out_cache_loc.extend(own[prefix_len:].tolist())
        self.queries = torch.randn(sum(new_lens), NUM_HEADS * HEAD_DIM)

    def layer(self, window: int | None = None) -> RadixAttention:
        return RadixAttention(NUM_HEADS, HEAD_DIM, SCALING, NUM_KV_HEADS, LAYER_ID, window)

    def batch(self, mode: ForwardMode, mask: torch.Tensor | None = None) -> ForwardBatch:
        seq_lens = [p + n for p, n in zip(self.prefix_lens, self.new_lens)]
        positions = [
            pos for p, n in zip(self.prefix_lens, self.new_lens) for pos in range(p, p + n)
        ]
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.rows),
            input_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            req_pool_indices=torch.tensor(self.rows, dtype=torch.int64),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
            seq_lens_cpu=seq_lens,
            out_cache_loc=torch.tensor(self.out_cache_loc, dtype=torch.int64),
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            spec_info=TreeInput(mask),
        )
        if mode is not ForwardMode.DECODE:
            batch.extend_seq_lens = torch.tensor(self.new_lens)
            batch.extend_prefix_lens = torch.tensor(self.prefix_lens)
            batch.extend_seq_lens_cpu = self.new_lens
            batch.extend_prefix_lens_cpu = self.prefix_lens
        return batch

    def run(
        self,
        backend: AttentionBackend,
        mode: ForwardMode,
        window: int | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        new = [slice(p, p + n) for p, n in zip(self.prefix_lens, self.new_lens)]
        k = torch.cat([keys[part] for keys, part in zip(self.keys, new)])
        v = torch.cat([values[part] for values, part in zip(self.values, new)])
        batch = self.batch(mode, mask)
        backend.init_forward_metadata(batch)
        return backend.forward(self.queries, k, v, self.layer(window), batch)

    def expected(self, window: int | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Softmax attention row by row, straight from the definition."""
        rows, start = [], 0
        group = NUM_HEADS // NUM_KV_HEADS
        requests = zip(self.keys, self.values, self.prefix_lens, self.new_lens)
        for index, (keys, values, p, n) in enumerate(requests):
            for i in range(n):
                visible = torch.arange(p + n) <= p + i
                if mask is not None:
                    before = torch.ones(p + n - mask.shape[2], dtype=torch.bool)
                    visible = torch.cat((before, mask[index, i]))
                if window is not None:
                    visible = visible & (torch.arange(p + n) > p + i - window)
                query = self.queries[start + i].view(NUM_HEADS, HEAD_DIM)
                heads = []
                for head in range(NUM_HEADS):
                    scores = keys[visible, head // group] @ query[head] * SCALING
                    heads.append(scores.softmax(0) @ values[visible, head // group])
                rows.append(torch.cat(heads))
            start += n
        return torch.stack(rows)


BACKENDS = ["torch_native", "torch_reference"]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", BACKENDS)
def test_extend_equals_definition(name: str, window: int | None) -> None:
    case = Case(prefix_lens=[0, 17, 3, 0], new_lens=[9, 1, 12, 1])
    got = case.run(make_backend(name), ForwardMode.EXTEND, window)
    torch.testing.assert_close(got, case.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", BACKENDS)
def test_decode_equals_definition(name: str, window: int | None) -> None:
    case = Case(prefix_lens=[1, 40, 8, 0, 23], new_lens=[1] * 5)
    got = case.run(make_backend(name), ForwardMode.DECODE, window)
    torch.testing.assert_close(got, case.expected(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_new_keys_are_written_to_their_slots_only(name: str) -> None:
    case = Case(prefix_lens=[4], new_lens=[3])
    before = case.pool.k_buffer[LAYER_ID].clone()
    case.run(make_backend(name), ForwardMode.EXTEND)
    after = case.pool.k_buffer[LAYER_ID]
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(case.out_cache_loc)
    assert torch.equal(after[case.out_cache_loc], case.keys[0][4:])


@pytest.mark.parametrize("name", BACKENDS)
def test_verify_without_mask_is_causal(name: str) -> None:
    case = Case(prefix_lens=[6, 15], new_lens=[4, 4])
    got = case.run(make_backend(name), ForwardMode.TARGET_VERIFY)
    torch.testing.assert_close(got, case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_verify_obeys_the_tree_mask(name: str) -> None:
    case = Case(prefix_lens=[6, 15], new_lens=[4, 4])
    # Root, two children of the root, a child of the second: siblings do not see each other.
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    mask = torch.stack((tree, tree.flip(0) | torch.eye(4, dtype=torch.bool)))
    got = case.run(make_backend(name), ForwardMode.TARGET_VERIFY, mask=mask)
    torch.testing.assert_close(got, case.expected(mask=mask), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, case.expected(), atol=1e-3)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_mask_may_reach_behind_the_new_tokens(name: str) -> None:
    # Third draft step of two branches: each sees its own path through the four keys before.
    case = Case(prefix_lens=[4, 15], new_lens=[2, 2])
    mask = torch.tensor([[[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1]]] * 2, dtype=torch.bool)
    got = case.run(make_backend(name), ForwardMode.TARGET_VERIFY, mask=mask)
    torch.testing.assert_close(got, case.expected(mask=mask), atol=1e-5, rtol=1e-5)


def test_idle_batch_is_empty() -> None:
    for name in BACKENDS:
        case = Case(prefix_lens=[], new_lens=[])
        case.queries = torch.empty(0, NUM_HEADS * HEAD_DIM)
        backend = make_backend(name)
        batch = case.batch(ForwardMode.IDLE)
        backend.init_forward_metadata(batch)
        empty = torch.empty(0, NUM_KV_HEADS, HEAD_DIM)
        out = backend.forward(case.queries, empty, empty, case.layer(), batch)
        assert out.shape == (0, NUM_HEADS * HEAD_DIM)


def test_unknown_backend_lists_the_known_ones() -> None:
    assert "torch_native" in attention_backend_names()
    with pytest.raises(ValueError, match="flashfoo.*torch_native"):
        make_backend("flashfoo")
