"""The random numbers of a speculative step.

Drawn on the host from a generator that all ranks seed alike, so that every rank accepts the same
drafts; requests with a seed of their own get hashes of (seed, position) instead, as in the plain
sampler. Scheduler thread only.
"""

from __future__ import annotations

import torch

from sglang.srt.platforms import current_platform
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.acceptance import CoinUse, seeded_coins


class Coins:
    """Uniform numbers in [0, 1) for one step of the requests of `info`."""

    def __init__(self, generator: torch.Generator, info: SamplingBatchInfo) -> None:
        self._generator = generator
        self._info = info

    def at(self, positions: torch.Tensor, use: CoinUse) -> torch.Tensor:
        """float32 [b, n] for tokens at these positions, int64 [b, n] or [b] (then n is 1)."""
        if positions.dim() == 1:
            positions = positions.unsqueeze(1)
        # Drawn for every request, seeded or not: ranks stay in step.
        drawn = torch.rand(positions.shape, generator=self._generator)
        coins = current_platform().to_device_async(drawn)
        if not self._info.is_any_seeded:
            return coins
        info = self._info
        return seeded_coins(coins, info.sampling_seeds, info.is_seeded, positions, use)
