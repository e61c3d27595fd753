"""MiMo: Qwen2, with layers in its files that predict further tokens (`mimo_mtp`).

Source: MiMo (arXiv 2505.07608) and the published names.
"""

from __future__ import annotations

from sglang.srt.models.mimo_mtp import MTP_PREFIX
from sglang.srt.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """See the module docstring."""

    def is_foreign_weight(self, name: str) -> bool:
        return name.startswith(MTP_PREFIX)


ENTRY_CLASSES = (MiMoForCausalLM,)
