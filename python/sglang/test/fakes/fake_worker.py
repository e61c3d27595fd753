"""A model worker without a model: the next token is a checksum of the KV that the step can see.

`FakeModelWorker` keeps, instead of keys and values, the token id that was written to each slot. A
step computes the next token from the tokens found *through the request table and the slots*, so
any mistake in slots, rows, prefix reuse, retraction or chunking changes the output. `next_token`
over the plain token list is the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch, StepShape
from sglang.srt.managers.tp_worker import GenerationBatchResult
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    create_token_to_kv_pool_allocator,
)
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator, swa_part
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.kv_cache_sizing import num_window_tokens

FAKE_VOCAB = 1000
_MULTIPLIER = 6364136223846793005


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows `tokens`: order matters, every token matters."""
    state = len(tokens)
    for token in tokens:
        state = (state * _MULTIPLIER + int(token) + 1442695040888963407) & (2**64 - 1)
    return (state >> 33) % FAKE_VOCAB


def oracle(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What any schedule must produce for `prompt`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeModelWorker:
    """Stands in for `TpModelWorker`. `num_tokens_computed` counts prefill work.

    With a `window` there are as few window rows beside the slots as a server may have.
    """

    step_shape = StepShape()

    def __init__(
        self,
        *,
        num_slots: int,
        page_size: int,
        max_requests: int,
        context_len: int,
        window: int | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        extra = 1 + 2 * self.step_shape.max_tokens + self.step_shape.num_slots
        self.req_to_token_pool = ReqToTokenPool(max_requests, context_len + extra, "cpu")
        self.allocator = self._make_allocator(num_slots, page_size, window)
        self.slot_tokens = np.full(num_slots + page_size, -1, dtype=np.int64)
        self.last_token_ids = np.zeros(max_requests, dtype=np.int64)
        self.num_tokens_computed = 0
        self.num_steps = 0

    def _make_allocator(
        self, num_slots: int, page_size: int, window: int | None
    ) -> BaseTokenToKVPoolAllocator:
        if window is None:
            return create_token_to_kv_pool_allocator(num_slots, page_size)
        num_rows = num_window_tokens(
            num_slots,
            ratio=0.0,
            window=window,
            page_size=page_size,
            step_slots=self.step_shape.num_slots,
        )
        return SWATokenToKVPoolAllocator(num_slots, num_rows, page_size, None, window)

    def get_memory_pool(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        return self.req_to_token_pool, self.allocator

    def clear_cache_pool(self) -> None:
        return

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Write the new tokens to their slots and derive each next token from its slots."""
        self.num_steps += 1
        rows = batch.req_pool_indices
        if batch.forward_mode is ForwardMode.EXTEND:
            ids = batch.extend_input_ids()
            self.num_tokens_computed += len(ids)
        else:
            ids = self.last_token_ids[rows]
        self.slot_tokens[batch.out_cache_loc.numpy()] = ids
        ends = zip(rows.tolist(), batch.seq_lens.tolist())
        tokens = [self._next_token(row, seq_len) for row, seq_len in ends]
        self.last_token_ids[rows] = tokens
        return GenerationBatchResult(
            next_token_ids=torch.tensor(tokens, dtype=torch.int64),
            logits_output=LogitsProcessorOutput(next_token_logits=torch.empty(0)),
        )

    def _next_token(self, row: int, seq_len: int) -> int:
        """The token behind the first `seq_len` of a row, whose window must be there."""
        slots = self.req_to_token_pool.read(row, 0, seq_len)
        windows = swa_part(self.allocator)
        if windows is not None:
            assert (windows.swa_rows(slots[-windows.window :]) > 0).all(), "a window lacks rows"
        return next_token(self.slot_tokens[slots.numpy()])


class FakeSpeculativeWorker(FakeModelWorker):
    """A worker whose decode steps add 1 to 4 tokens, drawn from a seed.

    What it rejects and its scratch stay as wrong tokens in the slots behind the accepted ones, and
    the lengths are known to it alone until the result is read, as with a real speculative worker.
    """

    step_shape = StepShape(max_tokens=4, num_slots=6, num_draft_tokens=4)

    def __init__(
        self,
        *,
        num_slots: int,
        page_size: int,
        max_requests: int,
        context_len: int,
        window: int | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            num_slots=num_slots,
            page_size=page_size,
            max_requests=max_requests,
            context_len=context_len,
            window=window,
        )
        self._lens = np.zeros(max_requests, dtype=np.int64)  # committed tokens of each row
        self._rng = np.random.default_rng(seed)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """See the class."""
        rows = batch.req_pool_indices
        if batch.forward_mode is ForwardMode.EXTEND:
            result = super().forward_batch_generation(batch)
            self._lens[rows] = batch.seq_lens
            return result
        self.num_steps += 1
        tokens: list[list[int]] = []
        accept_lens = self._rng.integers(1, self.step_shape.max_tokens + 1, len(rows))
        for row, num_accepted in zip(rows.tolist(), accept_lens.tolist()):
            accepted = self._step(row, num_accepted)
            tokens.append(accepted + [0] * (self.step_shape.max_tokens - len(accepted)))
        return GenerationBatchResult(
            next_token_ids=torch.tensor(tokens, dtype=torch.int64),
            accept_lens=torch.from_numpy(accept_lens),
            logits_output=LogitsProcessorOutput(next_token_logits=torch.empty(0)),
        )

    def _step(self, row: int, num_accepted: int) -> list[int]:
        """Write the step's slots of one request; return the accepted tokens."""
        start = int(self._lens[row])
        slots = self.req_to_token_pool.req_to_token_cpu[row].numpy()
        assert len(set(slots[: start + self.step_shape.num_slots].tolist())) == (
            start + self.step_shape.num_slots
        ), "a slot stands twice in a row"
        self.slot_tokens[slots[start : start + self.step_shape.num_slots]] = -7
        accepted = []
        for offset in range(num_accepted):
            self.slot_tokens[slots[start + offset]] = self.last_token_ids[row]
            token = self._next_token(row, start + offset + 1)
            self.last_token_ids[row] = token
            accepted.append(token)
        self._lens[row] = start + num_accepted
        return accepted
