"""Older import name of `sglang.srt.utils.patch_torch`."""

from __future__ import annotations

from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

__all__ = ["monkey_patch_torch_reductions"]
