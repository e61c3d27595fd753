"""The digest kernel against the CPU's sums: in the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.layers.cpu import ops as cpu_ops
from sglang.srt.layers.triton_ops import word_sums as kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PIECE_BYTES, BLOCK_BYTES = 8 * kernel._PIECE, 8 * kernel._BLOCK


def test_sums_equal_the_cpus() -> None:
    torch.manual_seed(0)
    sizes = [0, 1, 7, 8, 9, 100, BLOCK_BYTES, BLOCK_BYTES + 3, PIECE_BYTES + BLOCK_BYTES + 29]
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    data += [torch.full((4096,), 255, dtype=torch.uint8), data[-1][3:20003]]
    on_device = [each.to(DEVICE) for each in data]
    on_device[-1] = on_device[-3][3:20003]  # an address that is not aligned
    assert kernel.word_sums(on_device) == [cpu_ops.word_sums(each) for each in data]
    assert kernel.word_sums([]) == []
