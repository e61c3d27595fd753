"""Typed options of a backend out of several sources, the first that names a key before the rest.

Owns the types and the messages. Called once when a backend is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.environ import parse_bytes

MOST_SECONDS = 86_400.0  # of a time limit: what asks for more means something else
_MOST_BYTES = (1 << 63) - 1
_MOST_SHOWN = 60


def shown(value: object) -> str:
    """Return a value as a message quotes it: one line, however long it is."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


class BackendOptions:
    """Reads keys from ``sources``, most important first; every getter raises ValueError that names
    the key and what is wrong with it.

    ``variables``: by key, the variable of the environment; the last source is what these said.
    """

    def __init__(
        self,
        backend: str,
        sources: Sequence[Mapping[str, Any]],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._sources = sources
        self._variables = variables or {}

    def check_known(self, names: frozenset[str]) -> None:
        """Raise ValueError when a source names a key that the backend does not know."""
        unknown = sorted({key for source in self._sources for key in source} - names)
        if unknown:
            raise ValueError(
                f"the {self._backend} backend knows no option {', '.join(map(repr, unknown))}; "
                f"it takes {', '.join(sorted(names))}"
            )

    def _value(self, key: str) -> Any:
        return next((source[key] for source in self._sources if source.get(key) is not None), None)

    def name(self, key: str) -> str:
        """Return the key, with the variable of the environment where the value is from there."""
        variable = self._variables.get(key)
        if variable is None or any(source.get(key) is not None for source in self._sources[:-1]):
            return key
        return f"{key} ({variable} in the environment)"

    def text(self, key: str, default: str, *, is_secret: bool = False) -> str:
        """Return a text; what is wrong with a secret one is never quoted."""
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            found = type(value).__name__ if is_secret else shown(value)
            raise ValueError(f"{self.name(key)} must be a text, not {found}")
        return value

    def size(self, key: str, default: int, *, least: int = 0, most: int = _MOST_BYTES) -> int:
        """Return bytes, written as a number or as ``64GB`` or ``60GiB``."""
        value = self._value(key)
        if value is None:
            return default
        try:
            size = parse_bytes(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ValueError(f"{self.name(key)}={shown(value)} is not valid: {error}") from error
        if type(size) is not int or size < 0:
            raise ValueError(
                f"{self.name(key)} must be bytes or a text such as '64GB', not {shown(value)}"
            )
        if not least <= size <= most:
            raise ValueError(
                f"{self.name(key)} must be from {least} to {most} bytes, not {shown(value)}"
            )
        return size

    def number(
        self, key: str, default: float, *, least: float = 0.0, most: float = MOST_SECONDS
    ) -> float:
        """Return a number from ``least`` to ``most``."""
        value = self._value(key)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not a number (nan) lies nowhere; an integer too large for a float may still be compared.
        if not is_number or not least <= value <= most:
            raise ValueError(
                f"{self.name(key)} must be a number from {least:g} to {most:g}, not {shown(value)}"
            )
        return float(value)

    def integer(self, key: str, default: int, *, least: int = 0, most: int = 1 << 31) -> int:
        """Return an integer from ``least`` to ``most``."""
        value = self._value(key)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{self.name(key)} must be an integer from {least} to {most}, not {shown(value)}"
            )
        return value
