"""Which class runs which architecture. A new family is a module and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.models import llama, qwen2, qwen3, qwen3_moe
from sglang.srt.models.base import LanguageModel

_MODULES = (llama, qwen2, qwen3, qwen3_moe)

MODEL_CLASSES: dict[str, type[LanguageModel]] = {
    model_class.__name__: model_class for module in _MODULES for model_class in module.ENTRY_CLASSES
}


def resolve_model_class(architectures: Sequence[str]) -> type[LanguageModel]:
    """The class of the first supported architecture.

    Raises ValueError that lists what is supported.
    """
    for architecture in architectures:
        if architecture in MODEL_CLASSES:
            return MODEL_CLASSES[architecture]
    asked = ", ".join(architectures) or "none (config.json has no 'architectures')"
    raise ValueError(
        f"model architecture not supported: {asked}; "
        f"supported ones: {', '.join(sorted(MODEL_CLASSES))}"
    )
