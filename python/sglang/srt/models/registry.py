"""Which class runs which architecture. A new family is a module and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.models import (
    deepseek_nextn,
    deepseek_v2,
    gemma3,
    llama,
    llama_eagle,
    llama_eagle3,
    mimo,
    mimo_mtp,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
)
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.eagle_draft import EagleDraftModel

_MODULES = (deepseek_v2, gemma3, llama, mimo, qwen2, qwen3, qwen3_moe, qwen3_next)
_DRAFT_MODULES = (deepseek_nextn, llama_eagle, llama_eagle3, mimo_mtp)

MODEL_CLASSES: dict[str, type[LanguageModel]] = {
    model_class.__name__: model_class for module in _MODULES for model_class in module.ENTRY_CLASSES
}

# Not to be served: they need a target's hidden states, embedding and often its head.
DRAFT_CLASSES: dict[str, type[EagleDraftModel]] = {
    model_class.__name__: model_class
    for module in _DRAFT_MODULES
    for model_class in module.ENTRY_CLASSES
}


def resolve_model_class(architectures: Sequence[str]) -> type[LanguageModel]:
    """The class of the first supported architecture, a model's or a draft's.

    Raises ValueError that lists what can be served.
    """
    for architecture in architectures:
        if architecture in MODEL_CLASSES:
            return MODEL_CLASSES[architecture]
        if architecture in DRAFT_CLASSES:
            return DRAFT_CLASSES[architecture]
    asked = ", ".join(architectures) or "none (config.json has no 'architectures')"
    raise ValueError(
        f"model architecture not supported: {asked}; "
        f"supported ones: {', '.join(sorted(MODEL_CLASSES))}"
    )
