"""Import name of trainers for `LocalSerializedTensor`."""

from __future__ import annotations

from sglang.srt.weight_sync.tensor_bucket import LocalSerializedTensor

__all__ = ["LocalSerializedTensor"]
