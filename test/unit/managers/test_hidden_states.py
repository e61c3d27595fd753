"""One hidden state a position, also where positions are computed a second time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode


def collect(req: Any, mode: ForwardMode, positions: range, neighbour: int = 0) -> None:
    """A step over `positions` of `req`, behind `neighbour` rows of another request."""
    batch: Any = SimpleNamespace(
        forward_mode=mode,
        prefix_lens=[0, positions.start],
        extend_lens=[neighbour, len(positions)],
    )
    rows = [-1.0] * (neighbour if mode is ForwardMode.EXTEND else 1) + [float(p) for p in positions]
    logits: Any = SimpleNamespace(hidden_states=torch.tensor(rows).unsqueeze(1))
    BatchResultProcessor._collect_hidden(req, batch, 1, logits)


@pytest.mark.parametrize("num_kept", [0, 2, 5, 8])
def test_after_a_retraction_no_position_comes_twice(num_kept: int) -> None:
    """5 prompt tokens in two chunks, 3 decode steps, a retraction that leaves `num_kept` cached."""
    req: Any = SimpleNamespace(num_hidden=0, hidden_states=[])
    collect(req, ForwardMode.EXTEND, range(0, 2), neighbour=3)
    collect(req, ForwardMode.EXTEND, range(2, 5))
    for position in (5, 6, 7):
        collect(req, ForwardMode.DECODE, range(position, position + 1))
    collect(req, ForwardMode.EXTEND, range(num_kept, 9), neighbour=2)
    collect(req, ForwardMode.DECODE, range(9, 10))
    assert req.hidden_states == [[float(position)] for position in range(10)]


def test_a_prompt_that_is_computed_again_in_chunks_brings_no_position_twice() -> None:
    """5 prompt tokens, 3 decode steps, a retraction that leaves nothing, chunks of 3 tokens."""
    req: Any = SimpleNamespace(num_hidden=0, hidden_states=[])
    collect(req, ForwardMode.EXTEND, range(0, 5))
    for position in (5, 6, 7):
        collect(req, ForwardMode.DECODE, range(position, position + 1))
    for start in (0, 3, 6):
        collect(req, ForwardMode.EXTEND, range(start, start + 3), neighbour=2)
    collect(req, ForwardMode.DECODE, range(9, 10))
    assert req.hidden_states == [[float(position)] for position in range(10)]


def test_what_the_cache_had_at_first_stays_out() -> None:
    req: Any = SimpleNamespace(num_hidden=0, hidden_states=[])
    collect(req, ForwardMode.EXTEND, range(3, 5))
    collect(req, ForwardMode.EXTEND, range(0, 6))  # the cache was emptied meanwhile
    assert req.hidden_states == [[3.0], [4.0], [5.0]]
