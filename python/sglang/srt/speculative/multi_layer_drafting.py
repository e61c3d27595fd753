"""Drafts of several layers, one for each step of a proposal: layer i predicts i + 2 tokens ahead.

Letters: x_0 .. x_n the known tokens of a request, KV of the first n is there; L layers, numbered
from 0. Layer j's entry at position p is made of token p + 1 + j and of layer j - 1's state at p
(layer 0: the target's), and attends to layer j's entries up to p; it predicts token p + 2 + j. So
all proposals are made while catching up: layer 0 ends with a draft of token n + 1, which is the
last input of layer 1, and so on. A proposal itself runs nothing.

    position     n-2    n-1  |  inputs of the last entries, n tokens committed
    layer 0      x_n-1  x_n  |
    layer 1      x_n    d_1  |  d_i: drafts, of token n + i
    layer 2      d_1    d_2  |

The last j entries of layer j are thus made of drafts. Once more tokens are known they are made
again (`lead` rows in front of the new ones), for which the state that the first of them reads is
kept a row of the request table and layer. What is older depends on known tokens alone: KV at p is
final when token p + L is known, and the prefix cache counts units of L + 1 tokens.

Each layer is a model with a runner and KV buffers of its own; slots are the target's. Chains only:
an entry is written before a tree could branch. Scheduler thread only; collective over TP ranks.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows, Drafting, PromptState
from sglang.srt.speculative.eagle_info import EagleExtendInput
from sglang.srt.speculative.eagle_utils import chain_tree
from sglang.srt.speculative.spec_info import NO_TOKEN, DraftShape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chains:
    """Tokens n + 1, n + 2, ... of each request, one after the other; NO_TOKEN where unknown."""

    token_ids: torch.Tensor  # int64 [total]; drafts are filled in
    ends: torch.Tensor  # int64 [b]: where the first draft belongs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """The rows of one layer's pass, m in all: consecutive positions of each request."""

    requests: torch.Tensor  # int64 [m], place in the batch
    tokens: torch.Tensor  # int64 [m], index into the chains
    # int64 [m]: what each row reads, of b kept states followed by the rows of the layer before.
    sources: torch.Tensor
    positions: torch.Tensor  # int64 [m]
    lens: torch.Tensor  # int64 [b]
    starts: torch.Tensor  # int64 [b], first position
    lens_cpu: list[int]
    starts_cpu: list[int]
    last_rows: torch.Tensor  # int64 [b]: whose logits give the draft
    kept_rows: torch.Tensor  # int64 [b]: whose state the next layer reads first, next time


class MultiLayerDrafting(Drafting):
    """See the module docstring. `runners[j]` has layer j."""

    def __init__(
        self, runners: Sequence[ModelRunner], shape: DraftShape, max_position: int
    ) -> None:
        """`max_position`: the last one that the models know.

        Raises ValueError unless there is a layer for each step of a chain.
        """
        if not shape.is_chain or len(runners) != shape.num_steps:
            raise ValueError(
                f"{len(runners)} draft layers make chains of {len(runners)} steps, not "
                f"{shape.num_steps} steps of top {shape.topk}"
            )
        super().__init__(runners[0], shape)
        self._max_position = max_position
        self._runners = tuple(runners)
        self._table = runners[0].req_to_token_pool.req_to_token
        rows, first = self._table.shape[0], runners[0]
        # By row of the request table: the last proposals, and what layer j + 1 reads first of
        # layer j the next time, [L - 1, rows, hidden].
        self._ids = torch.zeros((rows, len(runners)), dtype=torch.int64, device=self.device)
        self._kept = torch.zeros(
            (len(runners) - 1, rows, first.model_config.hidden_size),
            dtype=first.dtype,
            device=self.device,
        )

    @property
    def runners(self) -> tuple[ModelRunner, ...]:
        return self._runners

    @property
    def lookahead(self) -> int:
        return len(self._runners)

    @property
    def num_slots(self) -> int:
        # Shorter than `lead`, a context has the same number of rows, all from position 0 on.
        return self.shape.max_accept_len + max(len(self._runners) - 2, 0)

    def propose(
        self, drafted: DraftedRows, coins: Coins | None, info: SamplingBatchInfo | None
    ) -> Drafted:
        """See the base class. Raises RuntimeError where drafts are to be drawn."""
        if coins is not None:
            raise RuntimeError("drafts of several layers are made before anybody could draw them")
        roots = drafted.root_ids.unsqueeze(1)
        return Drafted(tree=chain_tree(torch.cat([roots, self._ids[drafted.rows]], dim=1)))

    def after_verify(self, drafted: DraftedRows, path: EagleExtendInput) -> None:
        """See the base class: every layer, d rows a request and `lead` in front of them."""
        b, d = drafted.rows.shape[0], path.tokens_per_req
        accept_lens = path.committed_lens - drafted.committed_lens
        width = d + len(self._runners)
        places = torch.arange(width, device=self.device)
        output_ids = path.token_ids.view(b, d)
        chains = torch.cat([output_ids, output_ids.new_zeros((b, width - d))], dim=1)
        chains.masked_fill_(places >= accept_lens.unsqueeze(1), NO_TOKEN)
        offsets = torch.arange(b, device=self.device) * width
        windows = [
            self._verify_window(drafted, accept_lens, d, layer)
            for layer in range(len(self._runners))
        ]
        self._run(
            ForwardMode.DRAFT_EXTEND,
            drafted.rows,
            _Chains(token_ids=chains.flatten(), ends=offsets + accept_lens),
            windows,
            path.features,
        )

    def _verify_window(
        self, drafted: DraftedRows, accept_lens: torch.Tensor, d: int, layer: int
    ) -> _Window:
        """Of fixed shape; rows behind the accepted ones are scratch."""
        committed, b, m = drafted.committed_lens, drafted.rows.shape[0], d + layer
        width = d + len(self._runners)
        lead = committed.clamp(max=layer).unsqueeze(1)
        lead_before = committed.clamp(max=max(layer - 1, 0)).unsqueeze(1)
        requests = torch.arange(b, device=self.device).unsqueeze(1)
        places = torch.arange(m, device=self.device)
        starts = committed - lead.squeeze(1)
        tokens = (places - lead + layer).clamp(max=width - 1) + requests * width
        before = (places - lead + lead_before).clamp(max=max(m - 2, 0))
        sources = torch.where(before < 0, requests, before + requests * (m - 1) + b)
        first_rows = requests.squeeze(1) * m
        ends = accept_lens - 1 + lead.squeeze(1)
        return _Window(
            requests=requests.expand(b, m).flatten(),
            tokens=tokens.flatten(),
            sources=sources.flatten(),
            positions=(starts.unsqueeze(1) + places).flatten(),
            lens=torch.full((b,), m, dtype=torch.int64, device=self.device),
            starts=starts,
            lens_cpu=[m] * b,
            starts_cpu=[max(bound - layer, 0) for bound in drafted.bounds],
            last_rows=first_rows + ends,
            kept_rows=first_rows + (ends - layer).clamp(min=0),
        )

    def after_prefill(
        self,
        batch: ForwardBatch,
        next_ids: torch.Tensor,
        features: torch.Tensor | None,
        prompt: PromptState | None = None,
    ) -> None:
        """See the base class: every layer, over the new tokens and `lead` rows of chunks before."""
        if batch.extend_seq_lens_cpu is None or prompt is None or features is None:
            raise RuntimeError("a prefill step with states and prompts of the target is needed")
        plan = _PrefillPlan(batch, prompt.num_own, len(self._runners))
        windows = [plan.window(layer) for layer in range(len(self._runners))]
        self._run(
            ForwardMode.EXTEND,
            batch.req_pool_indices,
            plan.chains(batch.input_ids, prompt.following_ids),
            windows,
            features,
            hicache_consumer_index=batch.hicache_consumer_index,
        )

    def _run(
        self,
        mode: ForwardMode,
        rows: torch.Tensor,
        chains: _Chains,
        windows: Sequence[_Window],
        features: torch.Tensor | None,
        **fields: Any,
    ) -> None:
        """One pass of every layer; remembers the proposals. `fields`: further ones of batches."""
        states, kept = features, self._kept[:, rows]
        token_ids = chains.token_ids
        for layer, (runner, window) in enumerate(zip(self._runners, windows)):
            if layer and states is not None:
                states = torch.cat([kept[layer - 1], states]).index_select(0, window.sources)
            batch = self._batch(mode, runner, rows, window, fields)
            # Rows behind the accepted ones may have no token.
            batch.input_ids = token_ids[window.tokens].clamp_(min=0)
            batch.input_hidden_states = states
            output = runner.forward(batch)
            states = output.hidden_states
            if states is None:
                raise RuntimeError("the draft returned no hidden states")
            if layer + 1 < len(self._runners):
                self._kept[layer, rows] = states[window.kept_rows]
            # In a chunk of a prompt the next tokens are known, as far as it goes on.
            place = chains.ends + layer
            known, best = token_ids[place], output.next_token_logits.argmax(dim=-1)
            token_ids[place] = torch.where(known == NO_TOKEN, best, known)
            self._ids[rows, layer] = token_ids[place]

    def _batch(
        self,
        mode: ForwardMode,
        runner: ModelRunner,
        rows: torch.Tensor,
        window: _Window,
        fields: dict[str, Any],
    ) -> ForwardBatch:
        num_rows = window.lens_cpu
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(num_rows),
            input_ids=window.tokens,
            # Drafts behind the end of the context are never accepted, but must not break a table.
            positions=window.positions.clamp(max=self._max_position),
            req_pool_indices=rows,
            seq_lens=window.starts + window.lens,
            seq_lens_cpu=[start + count for start, count in zip(window.starts_cpu, num_rows)],
            out_cache_loc=self._table[rows[window.requests], window.positions].to(torch.int64),
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            extend_seq_lens=window.lens,
            extend_prefix_lens=window.starts,
            extend_seq_lens_cpu=num_rows,
            extend_prefix_lens_cpu=window.starts_cpu,
            logits_rows=window.last_rows,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            **fields,
        )


class _PrefillPlan:
    """Windows of a prefill step, of the lengths that the host knows."""

    def __init__(self, batch: ForwardBatch, num_own: Sequence[int], num_layers: int) -> None:
        """`num_own`: see `PromptState`."""
        self._prefixes = np.array(batch.extend_prefix_lens_cpu, dtype=np.int64)
        self._counts = np.array(batch.extend_seq_lens_cpu, dtype=np.int64)
        self._own = np.array(num_own, dtype=np.int64)
        self._num_layers = num_layers
        self._chain_starts = _starts(self._counts + num_layers)

    def chains(self, input_ids: torch.Tensor, following_ids: torch.Tensor) -> _Chains:
        """input_ids int64 [n], of the step; following_ids int64 [b, L], what comes after them."""
        starts, counts = self._chain_starts, self._counts
        is_later = np.ones(int(counts.sum()), dtype=np.bool_)
        is_later[_starts(counts)] = False
        shift = np.repeat(starts - _starts(counts) - 1, counts)
        targets = (np.arange(len(is_later)) + shift)[is_later]
        behind = (starts + counts - 1)[:, None] + np.arange(self._num_layers)
        ids = torch.full(
            (int(counts.sum()) + len(counts) * self._num_layers,),
            NO_TOKEN,
            dtype=torch.int64,
            device=input_ids.device,
        )
        ids[_on_device(targets)] = input_ids[_on_device(np.flatnonzero(is_later))]
        ids[_on_device(behind.ravel())] = following_ids.flatten()
        return _Chains(token_ids=ids, ends=_on_device(starts + counts))

    def window(self, layer: int) -> _Window:
        """The rows of one layer."""
        lead, lead_before = self._lead(layer), self._lead(layer - 1)
        lens, lens_before = self._counts + lead, self._counts + lead_before
        starts = self._prefixes - lead
        num_requests = len(lens)
        places = np.arange(int(lens.sum())) - np.repeat(_starts(lens), lens)
        before = places + np.repeat(lead_before - lead, lens)
        rows_before = np.repeat(_starts(lens_before), lens) + before + num_requests
        requests = np.repeat(np.arange(num_requests), lens)
        ends = self._counts - 1 + lead
        # In one copy: each costs a launch.
        tensors = _on_device_together(
            requests,
            np.repeat(self._chain_starts - lead + layer, lens) + places,
            np.where(before < 0, requests, rows_before),
            np.repeat(starts, lens) + places,
            lens,
            starts,
            _starts(lens) + ends,
            _starts(lens) + np.maximum(ends - layer, 0),
        )
        return _Window(
            requests=tensors[0],
            tokens=tensors[1],
            sources=tensors[2],
            positions=tensors[3],
            lens=tensors[4],
            starts=tensors[5],
            last_rows=tensors[6],
            kept_rows=tensors[7],
            lens_cpu=lens.tolist(),
            starts_cpu=starts.tolist(),
        )

    def _lead(self, layer: int) -> np.ndarray:
        """Rows in front of the new ones: int64 [b]."""
        return np.minimum(max(layer, 0), self._own)


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.cumsum(counts) - counts


def _on_device(values: np.ndarray) -> torch.Tensor:
    return current_platform().to_device_async(torch.from_numpy(values))


def _on_device_together(*values: np.ndarray) -> tuple[torch.Tensor, ...]:
    return _on_device(np.concatenate(values)).split([len(value) for value in values])
