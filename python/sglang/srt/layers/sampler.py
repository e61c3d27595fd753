"""`Sampler`: from logits to the next token of every request, and its logprobs.

Order of what shapes a row: logit bias, penalties, suppressed end tokens (min_new_tokens), grammar
mask, temperature, top-k, top-p, min-p, draw. Owns the random generator of rows without a seed.
Called by `model_executor.model_runner` on the scheduler thread; not a collective, but every rank
must call it in the same order, because every rank draws the same numbers.

Reported logprobs are those of softmax(logits / temperature) after bias, penalties and masks and
before top-k, top-p and min-p: what the model would have said, given the wishes that change its
opinion. Greedy by temperature 0 divides by 1.

A draw is one uniform number a row, located in the cumulative distribution in vocabulary order.
With `sampling_seed` that number is a hash of (seed, position): the choice is the same whatever
else is in the batch. Greedy rows take the argmax.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from sglang.srt.layers.dispatch import argmax, checked_argmax
from sglang.srt.model_executor.forward_batch_info import LogprobRequest
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

# Reported in the place of -inf, which JSON cannot carry.
MIN_LOGPROB = -9999.0
# Sorted head of the vocabulary that top-p is tried on before all of it (CPU only).
QUICK_HEAD_SIZE = 4096
# top_p values from here on keep everything; comparing sums with 1 would cut rounding dust.
KEEP_ALL_TOP_P = 2.0

# Constants of the splitmix64 generator, as signed 64-bit numbers.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


class SamplerInput(Protocol):
    """The part of `LogitsProcessorOutput` that the sampler reads and fills."""

    next_token_logits: torch.Tensor
    next_token_logprobs: torch.Tensor | None
    next_token_top_logprobs_val: list[list[float]] | None
    next_token_top_logprobs_idx: list[list[int]] | None
    next_token_token_ids_logprobs_val: list[list[float]] | None
    next_token_token_ids_logprobs_idx: list[list[int]] | None
    greedy_token_ids: torch.Tensor | None
    unusable_rows: torch.Tensor | None


class Sampler:
    """Draws tokens. One per model runner; equal seeds on equal ranks draw equal tokens."""

    def __init__(self, random_seed: int | None = None) -> None:
        """`random_seed` None: follow torch's global seed, which all ranks set alike."""
        seed = torch.initial_seed() if random_seed is None else random_seed
        self._generator = torch.Generator()
        self._generator.manual_seed(seed % 2**63)

    def forward(
        self,
        logits_output: SamplerInput,
        sampling_info: SamplingBatchInfo,
        logprobs: LogprobRequest | None,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the next token of each row: int64 [b], on the device.

        `positions` int64 [b]: place of the new token in its sequence (or any number that is fixed
        by it), for seeded rows. Changes `next_token_logits` [b, V] in place (bias, penalties,
        masks) and fills the output logprobs where `logprobs` asks for them.
        """
        logits = logits_output.next_token_logits
        adjust_logits(logits, sampling_info)
        next_token_ids = self._choose(logits_output, sampling_info, positions)
        if logprobs is not None:
            fill_logprobs(logits_output, sampling_info, logprobs, next_token_ids)
        return next_token_ids

    def _choose(
        self, logits_output: SamplerInput, info: SamplingBatchInfo, positions: torch.Tensor
    ) -> torch.Tensor:
        logits = logits_output.next_token_logits
        if info.is_all_greedy:
            known = logits_output.greedy_token_ids
            if known is not None and not adjusts_logits(info):
                return known
            next_token_ids, logits_output.unusable_rows = checked_argmax(logits)
            return next_token_ids
        is_mixed = len(info.sampled_rows) < info.batch_size
        rows = info.sampled_index if is_mixed else None
        probs = sampling_probs(logits, info)
        # Drawn on the host for every sampled row, seeded or not: ranks stay in step.
        uniform = torch.rand((len(info.sampled_rows), 1), generator=self._generator)
        if logits.device.type != "cpu":
            uniform = current_platform().to_device_async(uniform)
        if info.is_any_seeded:
            hashed = hash_uniform(_pick(info.sampling_seeds, rows), _pick(positions, rows))
            seeded = _pick(info.is_seeded, rows).unsqueeze(1)
            uniform = torch.where(seeded, hashed.unsqueeze(1), uniform)
        drawn = draw(probs, uniform)
        if not is_mixed:
            return drawn
        next_token_ids = argmax(logits)
        next_token_ids[info.sampled_index] = drawn
        return next_token_ids


def adjust_logits(logits: torch.Tensor, info: SamplingBatchInfo) -> None:
    """Bias, penalties, suppressed end tokens and grammar masks, in place on [b, V]."""
    bias, suppressed = info.logit_bias, info.suppressed
    if bias is not None:
        logits.index_put_((bias.rows, bias.token_ids), bias.values, accumulate=True)
    if info.penalties is not None:
        info.penalties.apply(logits)
    if suppressed is not None:
        logits.index_put_((suppressed.rows, suppressed.token_ids), suppressed.values)
    if info.vocab_mask is not None:
        apply_vocab_mask(logits, info.vocab_mask, [row for row, _ in info.grammars])


def adjusts_logits(info: SamplingBatchInfo) -> bool:
    """Whether `adjust_logits` changes anything."""
    return (
        info.logit_bias is not None
        or info.penalties is not None
        or info.suppressed is not None
        or info.vocab_mask is not None
    )


def apply_vocab_mask(logits: torch.Tensor, vocab_mask: np.ndarray, rows: list[int]) -> None:
    """Set to -inf what `vocab_mask` int32 [len(rows), words] forbids in these rows of [b, V]."""
    unpack = _unpack_on_host if logits.device.type == "cpu" else _unpack_on_device
    is_allowed = unpack(vocab_mask, logits.device)[:, : logits.shape[1]]
    index = torch.tensor(rows, device=logits.device)
    logits[index] = logits[index].masked_fill_(~is_allowed, -torch.inf)


def _unpack_on_host(vocab_mask: np.ndarray, device: torch.device) -> torch.Tensor:
    """int32 [r, words] -> bool [r, 32 words], by numpy: ten times faster than torch on a CPU."""
    bits = np.unpackbits(vocab_mask.view(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(bits).view(torch.bool).to(device)


def _unpack_on_device(vocab_mask: np.ndarray, device: torch.device) -> torch.Tensor:
    """The same, but the bits cross the bus packed."""
    words = torch.from_numpy(vocab_mask).to(device)
    shifts = torch.arange(32, device=device, dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & 1).flatten(1).bool()


def sampling_probs(logits: torch.Tensor, info: SamplingBatchInfo) -> torch.Tensor:
    """What the sampled (not greedy) rows are drawn from: float32 [len(sampled_rows), V].

    Temperature, top-k, top-p and min-p are applied; rows are not renormalised.
    """
    rows = info.sampled_index if len(info.sampled_rows) < info.batch_size else None
    part = _pick(logits, rows)
    if info.need_temperature:
        part = part / _pick(info.temperatures, rows)
    probs = torch.softmax(part, dim=-1)
    floor = None
    if info.need_top_k or info.need_top_p:
        floor = top_k_top_p_floor(
            probs,
            _pick(info.top_ks, rows),
            _pick(info.top_ps, rows),
            head_size=info.head_size,
        )
    if info.need_min_p:
        min_p_floor = _pick(info.min_ps, rows) * probs.amax(dim=-1, keepdim=True)
        floor = min_p_floor if floor is None else torch.maximum(floor, min_p_floor)
    if floor is None:
        return probs
    return probs.masked_fill_(probs < floor, 0.0)


def top_k_top_p_floor(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, head_size: int | None = None
) -> torch.Tensor:
    """The smallest probability that top-k, then top-p of what it left, keep: float32 [r, 1].

    probs [r, V]; top_ks int64 [r, 1] in [1, V]; top_ps float32 [r, 1]. Top-p keeps the fewest
    most likely tokens whose share reaches p; tokens as likely as the last kept are kept too.
    `head_size`: how many of the most likely tokens settle every row, where the caller knows.
    """
    vocab_size = probs.shape[1]
    if head_size is None and probs.device.type == "cpu" and vocab_size > QUICK_HEAD_SIZE:
        # Reading the answer is free here, and most distributions are settled by their head.
        floor, is_settled = _floor_of_head(probs, top_ks, top_ps, QUICK_HEAD_SIZE)
        if bool(is_settled.all()):
            return floor
    size = vocab_size if head_size is None else min(head_size, vocab_size)
    return _floor_of_head(probs, top_ks, top_ps, size)[0]


def _floor_of_head(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(floor float32 [r, 1], whether the `size` most likely tokens settle it bool [r, 1])."""
    head = _largest(probs, size)  # [r, size], falling
    ranks = torch.arange(size, device=probs.device)
    kept = head.masked_fill(ranks >= top_ks, 0.0)
    sums = kept.cumsum(dim=-1)
    # Shares are of what top-k has left; comparing sums with 1 would cut rounding dust.
    is_unlimited = top_ks >= probs.shape[1]
    total = torch.where(is_unlimited, 1.0, sums[:, -1:])
    goals = torch.where(top_ps >= 1.0, KEEP_ALL_TOP_P, top_ps) * total
    is_in = (sums - kept < goals) & (ranks < top_ks)
    num_kept = is_in.sum(dim=-1, keepdim=True).clamp_(min=1)
    # A row without either wish keeps everything, also what lies behind the head.
    keeps_all = is_unlimited & (top_ps >= 1.0)
    floor = head.gather(1, num_kept - 1).masked_fill_(keeps_all, 0.0)
    return floor, keeps_all | (top_ks <= size) | (is_unlimited & (sums[:, -1:] >= goals))


def _largest(probs: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` largest values of each row of [r, V], falling."""
    vocab_size = probs.shape[1]
    if probs.device.type != "cpu":
        if size < vocab_size:
            return probs.topk(size, dim=-1).values
        return probs.sort(dim=-1, descending=True).values
    # numpy sorts with vector instructions: 0.2 ms for 49k values, 11 ms by torch.
    values = probs.numpy()
    if size < vocab_size:
        values = np.partition(values, vocab_size - size, axis=-1)[:, vocab_size - size :]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token a row from weights float32 [r, V], by uniform numbers [r, 1] in [0, 1): int64 [r].

    Never a token of weight 0 where the row has another.
    """
    sums = probs.cumsum(dim=-1)
    goals = uniform * sums[:, -1:]
    # The first token whose cumulative weight exceeds the goal has a weight itself.
    drawn = torch.searchsorted(sums, goals, right=True).squeeze(1)
    # Rows of NaN (ended by `nan_rows`) would point behind the vocabulary.
    return drawn.clamp_(max=probs.shape[1] - 1)


def hash_uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A uniform float32 in [0, 1) from each (seed, position): int64 [r] both; splitmix64."""
    state = _mix(seeds + _GOLDEN) + positions.to(torch.int64) * _GOLDEN
    bits = _shift_right(_mix(state), 40)
    # 24 bits are what float32 resolves below 1.
    return bits.to(torch.float32) * 2.0**-24


def _mix(state: torch.Tensor) -> torch.Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(state: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift; torch's own carries the sign along."""
    return (state >> num_bits) & ((1 << (64 - num_bits)) - 1)


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """bool [b]: rows of [b, V] that no token can be drawn from, because they hold NaN or +inf."""
    sums = logits.sum(dim=-1)
    return sums.isnan() | sums.isposinf()


def _pick(values: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return values if rows is None else values.index_select(0, rows)


# ------------------------------------------------------------------------------------------------
# Logprobs
# ------------------------------------------------------------------------------------------------


def fill_logprobs(
    output: SamplerInput,
    info: SamplingBatchInfo,
    request: LogprobRequest,
    next_token_ids: torch.Tensor,
) -> None:
    """Output logprobs of the rows that want any; the other rows hold 0.

    `next_token_ids` int64 [b]: the token chosen in each row of the adjusted logits.
    """
    wanted = [row for row, is_on in enumerate(request.enabled) if is_on]
    if not wanted:
        return
    logits = output.next_token_logits
    rows = torch.tensor(wanted, device=logits.device)
    part = logits.index_select(0, rows)
    if info.need_temperature:
        part = part / info.temperatures.index_select(0, rows)
    part = torch.log_softmax(part, dim=-1).clamp_(min=MIN_LOGPROB)
    chosen = part.gather(1, next_token_ids.index_select(0, rows).unsqueeze(1)).squeeze(1)
    output.next_token_logprobs = torch.zeros(
        len(request.enabled), dtype=torch.float32, device=logits.device
    ).index_copy_(0, rows, chosen)
    if any(request.top_nums[row] > 0 for row in wanted):
        _fill_top(output, request, wanted, part)
    if any(request.token_ids[row] for row in wanted):
        _fill_token_ids(output, request, wanted, part)


def _fill_top(
    output: SamplerInput, request: LogprobRequest, wanted: list[int], part: torch.Tensor
) -> None:
    """`part` float32 [len(wanted), V]: logprobs of the wanted rows."""
    width = min(max(request.top_nums[row] for row in wanted), part.shape[1])
    values, indices = part.topk(width, dim=-1)
    all_values: list[list[float]] = [[] for _ in request.enabled]
    all_indices: list[list[int]] = [[] for _ in request.enabled]
    for row, row_values, row_indices in zip(wanted, values.tolist(), indices.tolist()):
        all_values[row] = row_values[: request.top_nums[row]]
        all_indices[row] = row_indices[: request.top_nums[row]]
    output.next_token_top_logprobs_val = all_values
    output.next_token_top_logprobs_idx = all_indices


def _fill_token_ids(
    output: SamplerInput, request: LogprobRequest, wanted: list[int], part: torch.Tensor
) -> None:
    all_values: list[list[float]] = [[] for _ in request.enabled]
    all_indices: list[list[int]] = [[] for _ in request.enabled]
    for index, row in enumerate(wanted):
        ids = request.token_ids[row]
        if ids:
            columns = torch.tensor(ids, device=part.device)
            all_values[row] = part[index].index_select(0, columns).tolist()
            all_indices[row] = list(ids)
    output.next_token_token_ids_logprobs_val = all_values
    output.next_token_token_ids_logprobs_idx = all_indices
