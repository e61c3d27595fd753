"""Typed options of a backend out of several sources, the first that names a key before the rest.

Owns the types and the messages. Called once when a backend is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.environ import parse_bytes


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

    def text(self, key: str, default: str) -> str:
        """Return a text."""
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ValueError(f"{self.name(key)} must be a text, not {value!r}")
        return value

    def size(self, key: str, default: int) -> int:
        """Return bytes, written as a number or as ``64GB`` or ``60GiB``."""
        value = self._value(key)
        if value is None:
            return default
        try:
            if isinstance(value, str):
                return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{self.name(key)}={value!r} is not valid: {error}") from error
        if type(value) is not int or value < 0:
            raise ValueError(
                f"{self.name(key)} must be bytes or a text such as '64GB', not {value!r}"
            )
        return value

    def number(self, key: str, default: float, *, least: float = 0.0) -> float:
        """Return a finite number of at least ``least``."""
        value = self._value(key)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < least:
            raise ValueError(f"{self.name(key)} must be a number >= {least:g}, not {value!r}")
        return float(value)

    def integer(self, key: str, default: int, *, least: int = 0) -> int:
        """Return an integer of at least ``least``."""
        value = self._value(key)
        if value is None:
            return default
        if type(value) is not int or value < least:
            raise ValueError(f"{self.name(key)} must be an integer >= {least}, not {value!r}")
        return value
