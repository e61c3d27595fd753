"""Small index tensors that never change, made once for each size and device.

A captured step is hundreds of tiny kernels; those that would only count up from zero are spared.
Never write to what these functions return. They must not be called for the first time during a
capture, which is why a step runs before it is captured.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def counting(stop: int, device: torch.device) -> torch.Tensor:
    """int64 [stop]: 0 .. stop - 1."""
    return torch.arange(stop, device=device)


@functools.cache
def filled(size: int, value: int, device: torch.device) -> torch.Tensor:
    """int64 [size], all `value`."""
    return torch.full((size,), value, dtype=torch.int64, device=device)


@functools.cache
def block_rows(num_blocks: int, block: int, count: int, device: torch.device) -> torch.Tensor:
    """int64 [num_blocks, count]: the first `count` rows of blocks of `block` rows."""
    starts = torch.arange(num_blocks, device=device) * block
    return starts.unsqueeze(1) + torch.arange(count, device=device)


@functools.cache
def chain_links(num_nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(parents int64 [w], ancestors bool [w, w]) of a chain; -1 is the root's parent."""
    nodes = torch.arange(num_nodes, device=device)
    return nodes - 1, nodes <= nodes.unsqueeze(1)
