"""The bookkeeping of a decode step on the device, as operations of one launch or two each.

A step of a small model is a few hundred launches, and index arithmetic made a quarter of them.
Here is what it comes to, each operation with one meaning whichever set it is from: `TorchStepOps`
defines them, plain PyTorch on any device; on CUDA `triton_ops.step_ops` has one kernel for each.
Chosen once by whoever owns the tables. Nothing is read back, shapes follow from the number of
requests. Scheduler thread only. Letters as in `eagle_info`; R rows of the request table.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from sglang.srt.layers.dispatch import argmax, checked_argmax
from sglang.srt.speculative.acceptance import accept_chain, accept_simulated
from sglang.srt.speculative.eagle_info import AcceptResult, StepEnds, StepPlaces
from sglang.srt.speculative.fixed_tensors import block_rows, counting


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """What is known of the request in each row; written in place."""

    req_to_token: torch.Tensor  # int32 [R, columns]: slots
    committed_lens: torch.Tensor  # int64 [R]: tokens whose KV is there
    last_token_ids: torch.Tensor  # int64 [R]: the token behind them, root of the next tree
    padding_row: int  # of requests that only fill up a captured batch; it is always empty


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTables:
    """The outcome of a draft's last catching up by row of the request table; written in place."""

    token_ids: torch.Tensor  # int64 [R, k]: the best tokens, of the target's vocabulary
    hidden: torch.Tensor  # [R, H]: the state that they came from


class StepOps(Protocol):
    """See the module docstring.

    `hot_token_id` int64 [V_d]: the token that each id of a draft's vocabulary stands for; None
    where it is the id itself.
    """

    def places(
        self, rows: torch.Tensor, tables: RowTables, num_places: int, max_position: int
    ) -> StepPlaces:
        """Where the tokens of a step go, for the requests in `rows`, int64 [b].

        `num_places` (n): slots behind the committed ones that the requests have. `max_position`:
        the last one that the models know; drafts behind it are never accepted, but must not break
        a table.
        """
        ...

    def start_chain(
        self, rows: torch.Tensor, root_ids: torch.Tensor, tables: DraftTables, num_draft_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [b, w] with roots and first drafts in the first two columns, states [b, H]).

        The other columns are still to be written.
        """
        ...

    def write_best(
        self, logits: torch.Tensor, hot_token_id: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """The token of the largest of logits [b, V_d] to `out`, int64 [b], which may be strided."""
        ...

    def remember(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        hot_token_id: torch.Tensor | None,
        states: torch.Tensor,
        state_rows: torch.Tensor | None,
        tables: DraftTables,
    ) -> None:
        """Keep the best token of each request, of logits [b, V_d], and the state it came from.

        states [n, H], contiguous rows; state_rows int64 [b]: which of them, None where n is b.
        """
        ...

    def accept_best(
        self, logits: torch.Tensor, token_ids: torch.Tensor, simulated_drafts: torch.Tensor | None
    ) -> tuple[AcceptResult, torch.Tensor]:
        """Accept the drafts of chains as far as they are the target's most likely tokens.

        logits float32 [b * w, V]; token_ids int64 [b, w]: root and drafts. `simulated_drafts`
        int64 [b]: accept so many instead. Also the report of the step, see `pack_report`, where a
        request is bad if any of its w rows of logits is.
        """
        ...

    def advance(
        self,
        rows: torch.Tensor,
        committed_lens: torch.Tensor,
        accept: AcceptResult,
        tables: RowTables,
    ) -> StepEnds:
        """Make what was accepted part of the requests. committed_lens int64 [b]: before it."""
        ...


class TorchStepOps:
    """The reference, on any device."""

    def places(
        self, rows: torch.Tensor, tables: RowTables, num_places: int, max_position: int
    ) -> StepPlaces:
        """See `StepOps`."""
        committed_lens = tables.committed_lens[rows]
        lens = committed_lens + counting(num_places + 1, rows.device).unsqueeze(1)
        columns = lens[:-1]
        positions = columns.clamp(max=max_position)
        slots = tables.req_to_token[rows, columns].to(torch.int64)
        return StepPlaces(
            root_ids=tables.last_token_ids[rows],
            lens=lens,
            positions=positions.t().contiguous(),
            slots=slots.t().contiguous(),
            step_positions=positions,
            step_slots=slots,
        )

    def start_chain(
        self, rows: torch.Tensor, root_ids: torch.Tensor, tables: DraftTables, num_draft_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StepOps`."""
        token_ids = root_ids.new_empty((rows.shape[0], num_draft_tokens))
        token_ids[:, 0] = root_ids
        token_ids[:, 1] = tables.token_ids[rows, 0]
        return token_ids, tables.hidden[rows]

    def write_best(
        self, logits: torch.Tensor, hot_token_id: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """See `StepOps`."""
        out.copy_(_best(logits, hot_token_id))

    def remember(
        self,
        rows: torch.Tensor,
        logits: torch.Tensor,
        hot_token_id: torch.Tensor | None,
        states: torch.Tensor,
        state_rows: torch.Tensor | None,
        tables: DraftTables,
    ) -> None:
        """See `StepOps`."""
        tables.token_ids[rows, 0] = _best(logits, hot_token_id)
        tables.hidden[rows] = states if state_rows is None else states[state_rows]

    def accept_best(
        self, logits: torch.Tensor, token_ids: torch.Tensor, simulated_drafts: torch.Tensor | None
    ) -> tuple[AcceptResult, torch.Tensor]:
        """See `StepOps`."""
        best, is_unusable = checked_argmax(logits)
        target_ids = best.view(token_ids.shape)
        if simulated_drafts is None:
            accept = accept_chain(token_ids, target_ids)
        else:
            width = token_ids.shape[1]
            accept = accept_simulated(token_ids, target_ids, simulated_drafts, width)
        return accept, pack_report(accept, is_unusable.view(token_ids.shape).any(dim=1))

    def advance(
        self,
        rows: torch.Tensor,
        committed_lens: torch.Tensor,
        accept: AcceptResult,
        tables: RowTables,
    ) -> StepEnds:
        """See `StepOps`."""
        b, d = accept.output_ids.shape
        lens = committed_lens + accept.accept_lens
        tables.last_token_ids[rows] = accept.bonus_ids
        tables.committed_lens[rows] = lens
        tables.committed_lens[tables.padding_row].zero_()
        first_rows = block_rows(b, d, 1, rows.device).view(-1)
        return StepEnds(committed_lens=lens, last_rows=first_rows + accept.accept_lens - 1)


def pack_report(accept: AcceptResult, is_bad: torch.Tensor) -> torch.Tensor:
    """What the host is told of a step, in one tensor: int64 [b, d + 2].

    The new tokens, how many of them count, and whether the logits on their path hold NaN or +inf
    (1) or not (0): is_bad bool [b].
    """
    flags = torch.stack((accept.accept_lens, is_bad.to(torch.int64)), dim=1)
    return torch.cat((accept.output_ids, flags), dim=1)


@functools.cache
def step_ops(device: torch.device) -> StepOps:
    """The operations of this device."""
    if device.type != "cuda":
        return TorchStepOps()
    # By name: Triton is installed where there is a GPU only.
    module = importlib.import_module("sglang.srt.speculative.triton_ops.step_ops")
    return cast(StepOps, module.TritonStepOps())


def _best(logits: torch.Tensor, hot_token_id: torch.Tensor | None) -> torch.Tensor:
    draft_ids = argmax(logits)
    return draft_ids if hot_token_id is None else hot_token_id[draft_ids]
