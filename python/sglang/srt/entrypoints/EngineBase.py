"""What an engine offers to its users, in process or over HTTP. (A documented import path.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self


class EngineBase(ABC):
    """The part that every kind of engine has."""

    @abstractmethod
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Generate for one prompt or a batch of them."""

    @abstractmethod
    def flush_cache(self) -> Any:
        """Forget all cached KV; the answer tells whether it was possible."""

    @abstractmethod
    def shutdown(self) -> None:
        """End all processes of the engine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()
