"""The objects that HTTP handlers work with, set once before the application serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.entrypoints.openai.template_manager import TemplateManager
from sglang.srt.managers.health import HealthProbe
from sglang.srt.managers.tokenizer_manager import TokenizerManager


@dataclass
class _GlobalState:
    """Documented name and fields: code that embeds the server builds this itself."""

    tokenizer_manager: TokenizerManager
    template_manager: TemplateManager
    scheduler_info: Any
    start_seconds: float | None = None  # launch to ready
    health: HealthProbe = field(init=False)

    def __post_init__(self) -> None:
        self.health = HealthProbe(self.tokenizer_manager)


_state: _GlobalState | None = None


def set_global_state(state: _GlobalState) -> None:
    """Give the handlers their engine."""
    global _state
    _state = state


def get_global_state() -> _GlobalState:
    """Raises RuntimeError before `set_global_state`."""
    if _state is None:
        raise RuntimeError("the HTTP application has no engine: call set_global_state first")
    return _state


def get_manager() -> TokenizerManager:
    return get_global_state().tokenizer_manager
