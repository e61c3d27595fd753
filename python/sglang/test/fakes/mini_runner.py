"""Drive a model step by step on a real KV pool, without scheduler, allocator or sampler.

Builds each `ForwardBatch` by hand. Pages are dealt out in random order so that a mistake in slot
arithmetic shows. For unit tests of models, attention backends and speculation.
"""

from __future__ import annotations

import random

import torch

from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.attention.base import RunnerFacts
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    LogprobRequest,
)
from sglang.srt.model_executor.forward_context import use_attention_backend
from sglang.srt.model_executor.kv_pools import KVPoolShape, make_kv_pool
from sglang.srt.models.base import LanguageModel


class MiniRunner:
    """A pool and the requests in it. `lengths[row]` is the number of tokens of a request."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        page_size: int = 1,
        max_requests: int = 4,
        max_len: int = 256,
        backend: str = "torch_native",
        seed: int = 0,
    ) -> None:
        config = model.config
        self.model = model
        self.page_size = page_size
        parameter = next(model.parameters())
        device, dtype = parameter.device, parameter.dtype
        num_pages = max_requests * -(-max_len // page_size)
        tp_size = get_tp_group().size
        self.req_to_token_pool = ReqToTokenPool(max_requests, max_len, device)
        self.kv_pool = make_kv_pool(
            config,
            KVPoolShape(
                num_tokens=num_pages * page_size,
                page_size=page_size,
                dtype=dtype,
                tp_size=tp_size,
                num_snapshots=4,
                num_rows=self.req_to_token_pool.num_rows,
            ),
            device,
        )
        self.backend = create_attention_backend(
            backend,
            RunnerFacts(
                device=str(device),
                dtype=dtype,
                num_heads=config.get_num_attention_heads(tp_size),
                num_kv_heads=config.get_num_kv_heads(tp_size),
                head_dim=config.kv_key_dim,
                v_head_dim=config.kv_value_dim if config.mla is not None else None,
                page_size=page_size,
                max_context_len=max_len,
                max_running_requests=max_requests,
            ),
        )
        self.device = device
        self.lengths: dict[int, int] = {}
        self._free_pages = list(range(1, num_pages + 1))  # page 0 is the dummy page
        random.Random(seed).shuffle(self._free_pages)

    def new_request(self) -> int:
        """Row of a new, empty request."""
        rows = self.req_to_token_pool.alloc(1)
        if rows is None:
            raise RuntimeError("no free request row")
        self.lengths[rows[0]] = 0
        return rows[0]

    def rewind(self, row: int, length: int) -> None:
        """Forget a request's tokens from position `length` on. Their pages are not dealt out again.

        With pages of several tokens the last kept page is written on.
        """
        self.lengths[row] = length

    def extend(
        self,
        rows: list[int],
        tokens: list[list[int]],
        logprobs: LogprobRequest | None = None,
        capture: CaptureHiddenMode = CaptureHiddenMode.NULL,
        mode: ForwardMode = ForwardMode.EXTEND,
        hidden_states: torch.Tensor | None = None,
        logits_rows: list[int] | None = None,
    ) -> LogitsProcessorOutput:
        """Append tokens to each request in one step; earlier ones are the cached prefix.

        `hidden_states` are a draft model's input; `logits_rows` see `ForwardBatch`.
        """
        prefix_lens = [self.lengths[row] for row in rows]
        batch = self._batch(mode, rows, tokens)
        batch.extend_prefix_lens = self._ids(prefix_lens)
        batch.extend_prefix_lens_cpu = prefix_lens
        batch.extend_seq_lens_cpu = [len(new) for new in tokens]
        batch.extend_seq_lens = self._ids(batch.extend_seq_lens_cpu)
        batch.logprobs = logprobs
        batch.capture_hidden_mode = capture
        batch.input_hidden_states = hidden_states
        batch.logits_rows = None if logits_rows is None else self._ids(logits_rows)
        return self.run(batch)

    def decode(
        self,
        rows: list[int],
        tokens: list[int],
        capture: CaptureHiddenMode = CaptureHiddenMode.NULL,
        hidden_states: torch.Tensor | None = None,
    ) -> LogitsProcessorOutput:
        """One token for each request; `hidden_states` are a draft model's input."""
        batch = self._batch(ForwardMode.DECODE, rows, [[token] for token in tokens])
        batch.capture_hidden_mode = capture
        batch.input_hidden_states = hidden_states
        return self.run(batch)

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """One forward pass of a prepared batch."""
        with torch.inference_mode():
            self.backend.init_forward_metadata(batch)
            with use_attention_backend(self.backend):
                output: LogitsProcessorOutput = self.model(batch.input_ids, batch.positions, batch)
                return output

    def greedy(
        self, prompts: list[list[int]], num_tokens: int, chunk_size: int | None = None
    ) -> list[list[int]]:
        """Greedy continuations; prompts are fed in chunks where `chunk_size` is given."""
        rows = [self.new_request() for _ in prompts]
        last: list[int] = []
        for row, prompt in zip(rows, prompts, strict=True):
            step = chunk_size or len(prompt)
            for begin in range(0, len(prompt), step):
                output = self.extend([row], [prompt[begin : begin + step]])
            last.append(int(output.next_token_logits[0].argmax()))
        answers = [[token] for token in last]
        for _ in range(num_tokens - 1):
            output = self.decode(rows, [answer[-1] for answer in answers])
            for answer, token in zip(answers, output.next_token_logits.argmax(-1).tolist()):
                answer.append(token)
        return answers

    def _batch(self, mode: ForwardMode, rows: list[int], tokens: list[list[int]]) -> ForwardBatch:
        positions: list[int] = []
        slots: list[int] = []
        for row, new in zip(rows, tokens, strict=True):
            start = self.lengths[row]
            positions.extend(range(start, start + len(new)))
            slots.extend(self._grow(row, len(new)))
        seq_lens = [self.lengths[row] for row in rows]
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=self._ids([token for new in tokens for token in new]),
            positions=self._ids(positions),
            req_pool_indices=self._ids(rows),
            seq_lens=self._ids(seq_lens),
            seq_lens_cpu=seq_lens,
            out_cache_loc=self._ids(slots),
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool=self.kv_pool,
        )

    def _grow(self, row: int, num_tokens: int) -> list[int]:
        """Slots of the next `num_tokens` tokens of a request, entered in the table."""
        start = self.lengths[row]
        table = self.req_to_token_pool.req_to_token_cpu[row]
        slots: list[int] = []
        for position in range(start, start + num_tokens):
            if position % self.page_size == 0:
                page = self._free_pages.pop()
            else:
                page = int(table[position - 1]) // self.page_size
            slot = page * self.page_size + position % self.page_size
            table[position] = slot
            slots.append(slot)
        self.req_to_token_pool.write(row, start, torch.tensor(slots))
        self.lengths[row] = start + num_tokens
        return slots

    def _ids(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
