"""Which keys drafted tokens may see: the `spec_info` of forward passes over trees.

Everything up to the first key that belongs to a tree is visible; the last m keys of a sequence are
visible as a mask says. Pure functions on the device; all shapes are known to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.speculative.spec_info import SpecInput


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention(SpecInput):
    """A `layers.attention.base.TreeMaskInput`."""

    custom_mask: torch.Tensor | None  # bool [b, tokens_per_req, m]


def branch_visibility(paths: torch.Tensor) -> torch.Tensor:
    """bool [b, k, s * k]: of the k nodes of each of s draft steps, those on a branch's path.

    paths int64 [b, k, s]: see `eagle_utils.extend_paths`.
    """
    b, k, num_steps = paths.shape
    cells = paths + torch.arange(num_steps, device=paths.device) * k
    visible = torch.zeros((b, k, num_steps * k), dtype=torch.bool, device=paths.device)
    return visible.scatter_(2, cells, True)


def branch_attention(paths: torch.Tensor) -> TreeAttention:
    """What the branches of a draft step see: the keys of the steps so far are the last ones."""
    return TreeAttention(tokens_per_req=paths.shape[1], custom_mask=branch_visibility(paths))
