"""The user's extra configuration of storage: text or file to typed options and the backend's own.

Owns the keys that the cache itself reads; every other key is the backend's. Called at start and
when a backend is attached. Pure but for reading the file.
"""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sglang.srt.mem_cache.storage.backend_options import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOptions:
    """What the cache reads. ``prefetch_threshold``: fewest tokens of a hit worth fetching.

    The ``timeout`` policy waits ``base + per_ki_token * tokens / 1024`` seconds, at most ``max``.
    """

    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    prefetch_timeout_max: float = 30.0
    hicache_storage_pass_prefix_keys: bool = False


class ExtraConfig(NamedTuple):
    """The cache's options and what is left for the backend."""

    options: PrefetchOptions
    backend: dict[str, Any]


def parse_extra_config(
    text: str | None, defaults: PrefetchOptions = PrefetchOptions()
) -> ExtraConfig:
    """Read a JSON object, or ``@`` and the path of a .json, .toml or .yaml file.

    ``defaults`` holds for options that the text does not name. Raises ValueError that names the
    key, or the file, and what is wrong with it.
    """
    raw = _load(text.strip()) if text and text.strip() else {}
    values = {}
    for field in fields(PrefetchOptions):
        if field.name in raw:
            values[field.name] = _typed(field.name, raw.pop(field.name), field.default)
    return ExtraConfig(replace(defaults, **values), raw)


def _load(text: str) -> dict[str, Any]:
    source = "the extra config"
    try:
        if text.startswith("@"):
            path = Path(text[1:])
            source = str(path)
            value = _parse_file(path)
        else:
            value = json.loads(text)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error}") from error
    except RecursionError:
        raise ValueError(f"{source} is not valid: it is nested too deep") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{source} is not valid: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{source} must be an object with names as keys")
    return value


def _parse_file(path: Path) -> Any:
    kind = path.suffix.lower()
    if kind not in (".json", ".toml", ".yaml", ".yml"):
        raise ValueError("the file's name must end in .json, .toml, .yaml or .yml")
    content = path.read_text(encoding="utf-8")
    if kind == ".json":
        return json.loads(content)
    if kind == ".toml":
        return tomllib.loads(content)
    return yaml.safe_load(content) or {}


def _typed(key: str, value: Any, default: Any) -> Any:
    kind = type(default)
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{key} must be true or false, not {shown(value)}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        if isinstance(value, int) and is_number and value >= 0:
            return value
        raise ValueError(f"{key} must be an integer >= 0, not {shown(value)}")
    # Not a number (nan) lies nowhere; an integer too large for a float may still be compared.
    if is_number and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ValueError(f"{key} must be a number >= 0, not {shown(value)}")
