"""`TritonStepOps`: the bookkeeping of a decode step on CUDA, one small kernel an operation.

Chosen by `speculative.step_ops.step_ops`, where the meaning of every operation is stated. Programs
are one a request (and block of a state); the largest logits are found as in `layers.triton_ops.
argmax`, whose second half is part of the kernel that goes on with them.

Order (`layers.triton_ops.device.launch_early`): attention reads lengths and slots before it waits.
`places` writes them, as an ordinary launch, and between it and attention must come another one, or
a kernel that lets others start only after its own wait: a model's embedding does (`take_rows`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_ops.argmax import block_maxima, merge_maxima
from sglang.srt.layers.triton_ops.device import launch_early
from sglang.srt.speculative.eagle_info import AcceptResult, StepEnds, StepPlaces
from sglang.srt.speculative.step_ops import DraftTables, RowTables

# Elements of a state that a program copies.
_STATE_BLOCK = 1024


@triton.jit(do_not_specialize=["num_reqs", "max_position"])
def _places_kernel(
    rows: tl.tensor,
    last_token_ids: tl.tensor,
    committed_lens: tl.tensor,
    table: tl.tensor,
    root_ids: tl.tensor,
    lens: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    step_positions: tl.tensor,
    step_slots: tl.tensor,
    num_reqs: tl.tensor,
    table_stride: tl.tensor,
    max_position: tl.tensor,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    place = tl.arange(0, BLOCK)
    inside = place < PLACES
    length = tl.load(committed_lens + row) + place
    position = tl.minimum(length, max_position)
    slot = tl.load(table + row * table_stride + length, mask=inside, other=0).to(tl.int64)
    by_request = request * PLACES + place
    by_step = place * num_reqs + request
    tl.store(root_ids + request, tl.load(last_token_ids + row))
    tl.store(lens + by_step, length, mask=place <= PLACES)
    tl.store(positions + by_request, position, mask=inside)
    tl.store(slots + by_request, slot, mask=inside)
    tl.store(step_positions + by_step, position, mask=inside)
    tl.store(step_slots + by_step, slot, mask=inside)


@triton.jit
def _copy_state(
    source: tl.tensor, target: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


@triton.jit
def _start_chain_kernel(
    rows: tl.tensor,
    root_ids: tl.tensor,
    first_ids: tl.tensor,
    hidden: tl.tensor,
    token_ids: tl.tensor,
    states: tl.tensor,
    width: tl.tensor,
    first_stride: tl.tensor,
    hidden_stride: tl.tensor,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (requests, blocks of a state)."""
    if EARLY:
        # In this order: see the module docstring.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    _copy_state(hidden + row * hidden_stride, states + request * width, width, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(token_ids + request * NODES, tl.load(root_ids + request))
        tl.store(token_ids + request * NODES + 1, tl.load(first_ids + row * first_stride))


@triton.jit(do_not_specialize=["num_blocks"])
def _write_best_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    hot_token_id: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    out_stride: tl.tensor,
    HOT: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token_id, _ = merge_maxima(best, best_index, request, num_blocks, width, BLOCKS)
    if HOT:
        token_id = tl.load(hot_token_id + token_id)
    tl.store(out + request * out_stride, token_id)


@triton.jit(do_not_specialize=["num_blocks"])
def _remember_kernel(
    rows: tl.tensor,
    best: tl.tensor,
    best_index: tl.tensor,
    hot_token_id: tl.tensor,
    states: tl.tensor,
    state_rows: tl.tensor,
    first_ids: tl.tensor,
    hidden: tl.tensor,
    num_blocks: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    state_stride: tl.tensor,
    first_stride: tl.tensor,
    hidden_stride: tl.tensor,
    HOT: tl.constexpr,
    PICK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid: (requests, blocks of a state)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    source = request
    if PICK:
        source = tl.load(state_rows + request)
    _copy_state(states + source * state_stride, hidden + row * hidden_stride, width, BLOCK)
    if tl.program_id(1) == 0:
        one = tl.arange(0, 1)
        token_id, _ = merge_maxima(best, best_index, request + one, num_blocks, vocab_size, BLOCKS)
        if HOT:
            token_id = tl.load(hot_token_id + token_id)
        tl.store(first_ids + row * first_stride + one, token_id)


@triton.jit(do_not_specialize=["num_blocks"])
def _accept_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    token_ids: tl.tensor,
    simulated_drafts: tl.tensor,
    accept_index: tl.tensor,
    accept_lens: tl.tensor,
    output_ids: tl.tensor,
    bonus_ids: tl.tensor,
    report: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    token_stride: tl.tensor,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    SIMULATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    # Behind the end the last node is looked at again.
    logit_rows = request * NODES + tl.minimum(node, NODES - 1)
    target, is_bad = merge_maxima(best, best_index, logit_rows, num_blocks, width, BLOCKS)
    has_draft = node + 1 < NODES
    draft = tl.load(token_ids + request * token_stride + node + 1, mask=has_draft, other=-1)
    if SIMULATED:
        num_right = tl.load(simulated_drafts + request)
    else:
        # The last node has no draft behind it, so there is always one that is not right.
        num_right = tl.min(tl.where(draft == target, BLOCK, node), 0).to(tl.int64)
    bonus = tl.sum(tl.where(node == num_right, target, 0), 0)
    token = tl.where(node < num_right, draft, tl.where(node == num_right, bonus, 0))
    place = request * NODES + node
    line = report + request * (NODES + 2)
    tl.store(accept_index + place, tl.where(node <= num_right, node, -1).to(tl.int64), mask=inside)
    tl.store(output_ids + place, token, mask=inside)
    tl.store(line + node, token, mask=inside)
    tl.store(line + NODES, num_right + 1)
    tl.store(line + NODES + 1, tl.max(is_bad.to(tl.int32), 0).to(tl.int64))
    tl.store(accept_lens + request, num_right + 1)
    tl.store(bonus_ids + request, bonus)


@triton.jit(do_not_specialize=["padding_row"])
def _advance_kernel(
    rows: tl.tensor,
    committed_lens: tl.tensor,
    accept_lens: tl.tensor,
    bonus_ids: tl.tensor,
    table_lens: tl.tensor,
    table_ids: tl.tensor,
    new_lens: tl.tensor,
    last_rows: tl.tensor,
    padding_row: tl.tensor,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    count = tl.load(accept_lens + request)
    length = tl.load(committed_lens + request) + count
    tl.store(new_lens + request, length)
    tl.store(last_rows + request, request * WIDTH + count - 1)
    tl.store(table_ids + row, tl.load(bonus_ids + request))
    tl.store(table_lens + row, tl.where(row == padding_row, 0, length))


class TritonStepOps:
    """See the module docstring."""

    def places(
        self, rows: torch.Tensor, tables: RowTables, num_places: int, max_position: int
    ) -> StepPlaces:
        """See `StepOps`."""
        b, n = rows.shape[0], num_places
        places = StepPlaces(
            root_ids=rows.new_empty(b),
            lens=rows.new_empty((n + 1, b)),
            positions=rows.new_empty((b, n)),
            slots=rows.new_empty((b, n)),
            step_positions=rows.new_empty((n, b)),
            step_slots=rows.new_empty((n, b)),
        )
        _places_kernel[(b,)](
            rows,
            tables.last_token_ids,
            tables.committed_lens,
            tables.req_to_token,
            places.root_ids,
            places.lens,
            places.positions,
            places.slots,
            places.step_positions,
            places.step_slots,
            b,
            tables.req_to_token.stride(0),
            max_position,
            PLACES=n,
            BLOCK=triton.next_power_of_2(n + 1),
            num_warps=1,
        )
        return places

    def start_chain(
        self, rows: torch.Tensor, root_ids: torch.Tensor, tables: DraftTables, num_draft_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepOps`."""
        b, width = rows.shape[0], tables.hidden.shape[1]
        token_ids = rows.new_empty((b, num_draft_tokens))
        states = tables.hidden.new_empty((b, width))
        _start_chain_kernel[(b, triton.cdiv(width, _STATE_BLOCK))](
            rows,
            root_ids.contiguous(),
            tables.token_ids,
            tables.hidden,
            token_ids,
            states,
            width,
            tables.token_ids.stride(0),
            tables.hidden.stride(0),
            NODES=num_draft_tokens,
            BLOCK=_STATE_BLOCK,
            **_launch(rows),
        )
        return token_ids, states

    def write_best(
        self, logits: torch.Tensor, hot_token_id: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """See `StepOps`."""
        maxima = block_maxima(logits)
        _write_best_kernel[(out.shape[0],)](
            maxima.values,
            maxima.places,
            out if hot_token_id is None else hot_token_id,
            out,
            maxima.num_blocks,
            maxima.width,
            out.stride(0),
            HOT=hot_token_id is not None,
            BLOCKS=maxima.padded_blocks,
            **_launch(out),
        )

    def remember(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        hot_token_id: torch.Tensor | None,
        states: torch.Tensor,
        state_rows: torch.Tensor | None,
        tables: DraftTables,
    ) -> None:
        """See `StepOps`. Raises ValueError where a state is not contiguous."""
        if states.stride(1) != 1:
            raise ValueError("states must be contiguous")
        maxima, width = block_maxima(logits), tables.hidden.shape[1]
        _remember_kernel[(rows.shape[0], triton.cdiv(width, _STATE_BLOCK))](
            rows,
            maxima.values,
            maxima.places,
            rows if hot_token_id is None else hot_token_id,
            states,
            rows if state_rows is None else state_rows.contiguous(),
            tables.token_ids,
            tables.hidden,
            maxima.num_blocks,
            maxima.width,
            width,
            states.stride(0),
            tables.token_ids.stride(0),
            tables.hidden.stride(0),
            HOT=hot_token_id is not None,
            PICK=state_rows is not None,
            BLOCKS=maxima.padded_blocks,
            BLOCK=_STATE_BLOCK,
            **_launch(rows),
        )

    def accept_best(
        self, logits: torch.Tensor, token_ids: torch.Tensor, simulated_drafts: torch.Tensor | None
    ) -> tuple[AcceptResult, torch.Tensor]:
        """See `StepOps`. Raises ValueError where the tokens of a request are not contiguous."""
        if token_ids.stride(1) != 1:
            raise ValueError("tokens of a request must be contiguous")
        maxima, (b, w) = block_maxima(logits), token_ids.shape
        accept = AcceptResult(
            accept_index=token_ids.new_empty((b, w)),
            accept_lens=token_ids.new_empty(b),
            output_ids=token_ids.new_empty((b, w)),
            bonus_ids=token_ids.new_empty(b),
        )
        report = token_ids.new_empty((b, w + 2))
        _accept_kernel[(b,)](
            maxima.values,
            maxima.places,
            token_ids,
            token_ids if simulated_drafts is None else simulated_drafts.contiguous(),
            accept.accept_index,
            accept.accept_lens,
            accept.output_ids,
            accept.bonus_ids,
            report,
            maxima.num_blocks,
            maxima.width,
            token_ids.stride(0),
            NODES=w,
            BLOCK=triton.next_power_of_2(w),
            SIMULATED=simulated_drafts is not None,
            BLOCKS=maxima.padded_blocks,
            **_launch(token_ids),
        )
        return accept, report

    def advance(
        self,
        rows: torch.Tensor,
        committed_lens: torch.Tensor,
        accept: AcceptResult,
        tables: RowTables,
    ) -> StepEnds:
        """See `StepOps`."""
        b, d = accept.output_ids.shape
        ends = StepEnds(committed_lens=rows.new_empty(b), last_rows=rows.new_empty(b))
        _advance_kernel[(b,)](
            rows,
            committed_lens.contiguous(),
            accept.accept_lens.contiguous(),
            accept.bonus_ids.contiguous(),
            tables.committed_lens,
            tables.last_token_ids,
            ends.committed_lens,
            ends.last_rows,
            tables.padding_row,
            WIDTH=d,
            **_launch(rows),
        )
        return ends


def _launch(of_requests: torch.Tensor) -> dict[str, Any]:
    """Options of a launch with one program a request; the tensor has a row for each."""
    early = launch_early(of_requests.device, of_requests.shape[0])
    return {"EARLY": early, "num_warps": 1, **({"launch_pdl": True} if early else {})}
