"""`SamplingBatchInfo`: the sampling wishes of one batch as tensors.

Built when the composition of a batch changes and then used step after step; only what depends on
generated tokens (penalties, grammar masks, min_new_tokens) is refreshed before each step, by
`update_host_state`. Does not sample: `layers.sampler` reads it. Scheduler thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from sglang.srt.constrained.base_grammar_backend import GrammarMatcher, bitmask_width
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.penalties import PenaltyState
from sglang.srt.sampling.sampling_params import GREEDY_TEMPERATURE, SamplingParams

# Beyond this every distribution is flat already, and -inf / inf would be NaN.
MAX_TEMPERATURE = 1e30


class SamplableReq(Protocol):
    """What sampling reads of a request."""

    @property
    def sampling_params(self) -> SamplingParams: ...

    @property
    def output_ids(self) -> Sequence[int]:
        """Output tokens that the host has seen."""

    @property
    def num_pending_tokens(self) -> int:
        """Steps whose token the host has not seen, the one being prepared included."""

    @property
    def grammar(self) -> GrammarMatcher | None: ...

    @property
    def eos_token_ids(self) -> AbstractSet[int]: ...


@dataclass(frozen=True, slots=True)
class LogitCells:
    """Single logits of a batch, on its device: (row, token) pairs and what to do with each."""

    rows: torch.Tensor  # int64 [m]
    token_ids: torch.Tensor  # int64 [m]
    values: torch.Tensor  # float32 [m]


@dataclass(frozen=True, slots=True)
class _MinNewTokens:
    """A row that may not end yet: its end tokens are suppressed up to `min_new` tokens."""

    row: int
    min_new: int
    end_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class SamplingBatchInfo:
    """b requests, V tokens in the vocabulary. Row i belongs to the i-th request."""

    batch_size: int
    vocab_size: int
    device: torch.device

    # Per row, on the device. Greedy rows have temperature as asked for (1 for temperature 0).
    temperatures: torch.Tensor  # float32 [b, 1], > 0
    top_ps: torch.Tensor  # float32 [b, 1]
    top_ks: torch.Tensor  # int64 [b, 1], in [1, V]
    min_ps: torch.Tensor  # float32 [b, 1]
    sampling_seeds: torch.Tensor  # int64 [b], meaningful in `is_seeded` rows
    is_seeded: torch.Tensor  # bool [b]

    # The same on the host, where decisions are made without reading the device.
    sampled_rows: list[int]  # rows that are not greedy
    sampled_index: torch.Tensor  # int64, the same on the device
    # How many of the most likely tokens settle top-k and top-p of every row; None: unknown.
    head_size: int | None
    is_all_greedy: bool
    is_any_seeded: bool
    need_temperature: bool  # some temperature is not 1
    need_top_k: bool
    need_top_p: bool
    need_min_p: bool

    logit_bias: LogitCells | None = None  # added
    penalties: PenaltyState | None = None
    # Rows with a grammar and its state, in row order.
    grammars: list[tuple[int, GrammarMatcher]]
    min_new_tokens: list[_MinNewTokens]

    # Refreshed by `update_host_state`.
    vocab_mask: np.ndarray | None = None  # int32 [len(grammars), words]: allowed tokens
    suppressed: LogitCells | None = None  # set to -inf: end tokens that may not come yet
    suppressed_key: tuple[int, ...] = ()  # rows now suppressed; the pairs change only with it

    @classmethod
    def from_reqs(
        cls, reqs: Sequence[SamplableReq], vocab_size: int, device: torch.device | str
    ) -> SamplingBatchInfo:
        """Gather the parameters of `reqs`; two copies to the device, more with a logit bias.

        `update_host_state` must follow before the first step.
        """
        device = torch.device(device)
        params = [req.sampling_params for req in reqs]
        floats = _to_device([[_temperature(p), p.top_p, p.min_p] for p in params], device).view(
            -1, 3
        )
        ints = _to_device(
            [
                [_top_k(p, vocab_size), p.sampling_seed or 0, p.sampling_seed is not None]
                for p in params
            ],
            device,
            torch.int64,
        ).view(-1, 3)
        sampled = [row for row, p in enumerate(params) if not p.is_greedy]
        wishes = [params[row] for row in sampled]
        info = cls(
            batch_size=len(params),
            vocab_size=vocab_size,
            device=device,
            temperatures=floats[:, 0:1],
            top_ps=floats[:, 1:2],
            min_ps=floats[:, 2:3],
            top_ks=ints[:, 0:1],
            sampling_seeds=ints[:, 1],
            is_seeded=ints[:, 2] != 0,
            sampled_rows=sampled,
            sampled_index=_to_device(sampled, device, torch.int64),
            head_size=_head_size(wishes, vocab_size),
            is_all_greedy=not sampled,
            is_any_seeded=any(p.sampling_seed is not None for p in wishes),
            need_temperature=any(_temperature(p) != 1.0 for p in params),
            need_top_k=any(_top_k(p, vocab_size) < vocab_size for p in wishes),
            need_top_p=any(p.top_p < 1.0 for p in wishes),
            need_min_p=any(p.min_p > 0.0 for p in wishes),
            grammars=[
                (row, req.grammar) for row, req in enumerate(reqs) if req.grammar is not None
            ],
            min_new_tokens=_min_new_tokens(reqs, vocab_size),
        )
        info._init_bias(params)
        penalised = [row for row, p in enumerate(params) if p.has_penalties]
        if penalised:
            info.penalties = PenaltyState(penalised, [params[row] for row in penalised])
        return info

    @property
    def has_penalties(self) -> bool:
        return self.penalties is not None

    @property
    def has_grammar(self) -> bool:
        return bool(self.grammars)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether the next step's logits depend on tokens that the host must have seen."""
        return self.has_penalties or self.has_grammar

    def repeated(self, count: int) -> SamplingBatchInfo:
        """The wishes that no token changes, each row `count` times in a row."""

        def rows_of(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(count, dim=0)

        bias = self.logit_bias
        copies = torch.arange(count, device=self.device)
        if bias is not None:
            rows = (bias.rows.unsqueeze(1) * count + copies).flatten()
            bias = LogitCells(rows, rows_of(bias.token_ids), rows_of(bias.values))
        return replace(
            self,
            batch_size=self.batch_size * count,
            temperatures=rows_of(self.temperatures),
            top_ps=rows_of(self.top_ps),
            top_ks=rows_of(self.top_ks),
            min_ps=rows_of(self.min_ps),
            sampling_seeds=rows_of(self.sampling_seeds),
            is_seeded=rows_of(self.is_seeded),
            sampled_rows=[row * count + i for row in self.sampled_rows for i in range(count)],
            sampled_index=(self.sampled_index.unsqueeze(1) * count + copies).flatten(),
            logit_bias=bias,
            penalties=None,
            grammars=[],
            min_new_tokens=[],
            vocab_mask=None,
            suppressed=None,
            suppressed_key=(),
        )

    def update_host_state(self, reqs: Sequence[SamplableReq]) -> None:
        """Bring everything that depends on generated tokens up to date for the coming step.

        `reqs` are those of `from_reqs`. With `needs_host_tokens` every token sampled so far must
        be in their `output_ids`.
        """
        if len(reqs) != self.batch_size:
            raise RuntimeError(f"sampling info of {self.batch_size} rows, {len(reqs)} requests")
        if self.penalties is None and not self.grammars and not self.min_new_tokens:
            return
        if self.penalties is not None:
            self.penalties.update([reqs[row].output_ids for row in self.penalties.rows])
        waiting = [
            entry
            for entry in self.min_new_tokens
            if _num_generated(reqs[entry.row]) < entry.min_new
        ]
        if self.grammars:
            self._fill_vocab_mask(waiting)
        self._suppress_ends(waiting)

    def _init_bias(self, params: Sequence[SamplingParams]) -> None:
        triples = [
            (row, int(token_id), addend)
            for row, p in enumerate(params)
            for token_id, addend in (p.logit_bias or {}).items()
        ]
        if not triples:
            return
        self.logit_bias = _cells(triples, self.device)

    def _fill_vocab_mask(self, waiting: Sequence[_MinNewTokens]) -> None:
        if self.vocab_mask is None:
            width = bitmask_width(self.vocab_size)
            self.vocab_mask = np.empty((len(self.grammars), width), dtype=np.int32)
        end_ids_of_row = {entry.row: entry.end_ids for entry in waiting}
        for mask_row, (row, grammar) in zip(self.vocab_mask, self.grammars):
            grammar.fill_mask(mask_row)
            end_ids = end_ids_of_row.get(row)
            if end_ids:
                forbid_unless_last(mask_row, end_ids)

    def _suppress_ends(self, waiting: Sequence[_MinNewTokens]) -> None:
        # A grammar's own mask says where it may end.
        constrained = {row for row, _ in self.grammars}
        free = [entry for entry in waiting if entry.row not in constrained]
        key = tuple(entry.row for entry in free)
        if key == self.suppressed_key:
            return
        self.suppressed_key = key
        triples = [(entry.row, token_id, -math.inf) for entry in free for token_id in entry.end_ids]
        self.suppressed = _cells(triples, self.device) if triples else None


def _cells(triples: Sequence[tuple[int, int, float]], device: torch.device) -> LogitCells:
    rows, token_ids, values = zip(*triples)
    return LogitCells(
        _to_device(rows, device, torch.int64),
        _to_device(token_ids, device, torch.int64),
        _to_device(values, device),
    )


def _temperature(params: SamplingParams) -> float:
    """The divisor of the logits: 1 where greedy was asked for by temperature 0."""
    if params.temperature < GREEDY_TEMPERATURE:
        return 1.0
    return min(params.temperature, MAX_TEMPERATURE)


def _top_k(params: SamplingParams, vocab_size: int) -> int:
    return vocab_size if params.top_k == -1 else min(params.top_k, vocab_size)


def _head_size(params: Sequence[SamplingParams], vocab_size: int) -> int | None:
    """Largest top_k that limits a row; None where top-p acts on a row without one."""
    top_ks = [_top_k(p, vocab_size) for p in params]
    if any(p.top_p < 1.0 and top_k == vocab_size for p, top_k in zip(params, top_ks)):
        return None
    return max((top_k for top_k in top_ks if top_k < vocab_size), default=1)


def _num_generated(req: SamplableReq) -> int:
    """Tokens that precede the one the coming step samples."""
    return len(req.output_ids) + req.num_pending_tokens - 1


def _min_new_tokens(reqs: Sequence[SamplableReq], vocab_size: int) -> list[_MinNewTokens]:
    entries = []
    for row, req in enumerate(reqs):
        params = req.sampling_params
        if params.min_new_tokens <= 0 or params.ignore_eos:
            continue
        ends = req.eos_token_ids | set(params.stop_token_ids or ())
        end_ids = tuple(sorted(token_id for token_id in ends if 0 <= token_id < vocab_size))
        if end_ids:
            entries.append(_MinNewTokens(row, params.min_new_tokens, end_ids))
    return entries


def forbid_unless_last(mask_row: np.ndarray, token_ids: Sequence[int]) -> None:
    """Clear the bits of `token_ids`, unless nothing else would be allowed then."""
    trimmed = mask_row.copy()
    words = trimmed.view(np.uint32)
    for token_id in token_ids:
        words[token_id // 32] &= ~(np.uint32(1) << np.uint32(token_id % 32))
    if trimmed.any():
        mask_row[:] = trimmed


def _to_device(
    values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One copy to the device, asynchronous where it has its own memory."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else current_platform().to_device_async(tensor)
