"""Which decode batches are captured, and which prefill steps are tried out at start."""

from __future__ import annotations

import pytest

from sglang.srt.model_executor.cuda_graph_runner import capture_batch_sizes
from sglang.srt.model_executor.prefill_warm_up import PrefillShape, warm_up_shapes


@pytest.mark.parametrize("max_batch_size", [1, 3, 6, 48, 100, 256, 300, 513])
def test_the_ladder_ends_with_the_greatest_batch(max_batch_size: int) -> None:
    sizes = capture_batch_sizes(max_batch_size)
    assert sizes[0] == 1
    assert sizes[-1] == max_batch_size
    assert sizes == sorted(set(sizes))
    # Padding never more than doubles a batch, nor adds more than 32 rows.
    for smaller, larger in zip(sizes, sizes[1:]):
        assert larger <= max(2 * smaller, smaller + 4) and larger - smaller <= 32


def test_a_users_list_wins_within_the_limit() -> None:
    assert capture_batch_sizes(16, [32, 4, 8, 4, 0]) == [4, 8]
    assert capture_batch_sizes(2, [32]) == [2]


def test_warm_up_covers_few_and_many_prompts_and_every_planned_length() -> None:
    shapes = warm_up_shapes(2500, [1024, 2048])
    assert shapes == [
        PrefillShape(1, 64),
        PrefillShape(2, 64),
        PrefillShape(9, 64),
        PrefillShape(1, 1024),
        PrefillShape(1, 2048),
        PrefillShape(1, 2500),
    ]
    assert warm_up_shapes(100, []) == [PrefillShape(1, 64), PrefillShape(1, 100)]
    assert warm_up_shapes(8, []) == [PrefillShape(1, 8)]


def test_warm_up_of_long_prompts_is_bounded() -> None:
    shapes = warm_up_shapes(1 << 20, list(range(1024, 1 << 20, 1024)))
    assert sum(n * length for n, length in shapes) <= 160_000
    assert len(shapes) > 15
