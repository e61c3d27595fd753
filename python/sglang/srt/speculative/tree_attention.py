"""Which keys drafted tokens may see: the `spec_info` of forward passes over trees.

Everything up to the first key that belongs to a tree is visible; the last m keys of a sequence are
visible as a mask says. Pure functions on the device; shapes follow from host bounds only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.speculative.spec_info import SpecInput


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeAttention(SpecInput):
    """A `layers.attention.base.TreeMaskInput`."""

    custom_mask: torch.Tensor | None


def window_mask(is_visible: torch.Tensor, seq_lens: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """The flat mask of q new tokens a request whose sight is limited over the last m keys.

    is_visible bool [b, q, m]; seq_lens int64 [b]: keys in all; `max_tokens`: their sum, or more.
    Returns bool [q * max_tokens].
    """
    b, q, m = is_visible.shape
    device = is_visible.device
    mask = torch.ones(q * max_tokens, dtype=torch.bool, device=device)
    starts = (seq_lens.cumsum(0) - seq_lens).unsqueeze(1) * q  # [b, 1]
    rows = starts + seq_lens.unsqueeze(1) * torch.arange(q, device=device)  # [b, q]
    columns = (seq_lens - m).unsqueeze(1) + torch.arange(m, device=device)  # [b, m]
    return mask.index_put_((rows.unsqueeze(2) + columns.unsqueeze(1),), is_visible)


def branch_visibility(paths: torch.Tensor) -> torch.Tensor:
    """bool [b, k, s * k]: of the k nodes of each of s draft steps, those on a branch's path.

    paths int64 [b, k, s]: see `eagle_utils.extend_paths`.
    """
    b, k, num_steps = paths.shape
    cells = paths + torch.arange(num_steps, device=paths.device) * k
    visible = torch.zeros((b, k, num_steps * k), dtype=torch.bool, device=paths.device)
    return visible.scatter_(2, cells, True)


def branch_attention(paths: torch.Tensor, seq_lens: torch.Tensor, max_tokens: int) -> TreeAttention:
    """What the branches of a draft step see; arguments as in the functions above."""
    mask = window_mask(branch_visibility(paths), seq_lens, max_tokens)
    return TreeAttention(tokens_per_req=paths.shape[1], custom_mask=mask)
