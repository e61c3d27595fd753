"""From the name of a storage backend to an object: a lazy registry, and the user's own class.

Owns the list of names. Imports a backend's module only when it is asked for. Called by the
controller when a backend is attached, on the scheduler thread.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    StorageError,
)
from sglang.srt.mem_cache.storage.extra_config import parse_extra_config
from sglang.srt.mem_cache.storage.flat_page_adapter import FlatPageAdapter

DYNAMIC = "dynamic"
_DYNAMIC_KEYS = ("backend_name", "module_path", "class_name")


# What the code of a user may raise while it is loaded or makes an object: attaching fails, not the
# server. A program's `sys.exit` is no wish to end this one.
_OF_OTHERS = (Exception, SystemExit)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """``options``: module and function that read the extra config, None: the class does."""

    module_path: str
    class_name: str
    options: tuple[str, str] | None = None


_REGISTRY: dict[str, _Entry] = {
    "file": _Entry(
        module_path="sglang.srt.mem_cache.hicache_storage",
        class_name="HiCacheFile",
        options=("sglang.srt.mem_cache.storage.file_options", "file_options"),
    ),
    "mooncake": _Entry(
        module_path="sglang.srt.mem_cache.storage.mooncake_store",
        class_name="MooncakeStore",
        options=("sglang.srt.mem_cache.storage.mooncake_options", "mooncake_options"),
    ),
    "redis": _Entry(
        module_path="sglang.srt.mem_cache.storage.redis_store",
        class_name="RedisStore",
        options=("sglang.srt.mem_cache.storage.redis_store", "redis_options"),
    ),
}


def available_backends() -> list[str]:
    """Return the names that ``create_storage_backend`` takes."""
    return [*sorted(_REGISTRY), DYNAMIC]


def register_storage_backend(name: str, module_path: str, class_name: str) -> None:
    """Add a backend. Raises ValueError when the name is taken."""
    if name in _REGISTRY or name == DYNAMIC:
        raise ValueError(f"a storage backend {name!r} exists already")
    _REGISTRY[name] = _Entry(module_path=module_path, class_name=class_name)


def check_storage_options(name: str, extra_config: str | None) -> None:
    """Raise ValueError for options that ``create_storage_backend`` would refuse.

    Asks no store; what only a backend can know is found when it is made.
    """
    extra = parse_extra_config(extra_config).backend
    entry = _REGISTRY.get(name)
    if entry is not None and entry.options is not None:
        module_path, function = entry.options
        getattr(importlib.import_module(module_path), function)(extra)


def create_storage_backend(name: str, config: HiCacheStorageConfig) -> HiCacheStorage:
    """Make the backend ``name``.

    Raises ValueError for an unknown name or bad options, StorageError when the backend cannot be
    loaded or cannot work here. ``dynamic`` takes ``backend_name``, ``module_path`` and
    ``class_name`` from the extra config.
    """
    if name == DYNAMIC:
        return _create_dynamic(config)
    entry = _REGISTRY.get(name)
    if entry is None:
        raise ValueError(
            f"there is no storage backend {name!r}; available: {', '.join(available_backends())}"
        )
    backend = _load_class(entry.module_path, entry.class_name)(config)
    assert isinstance(backend, HiCacheStorage)
    return backend


def _create_dynamic(config: HiCacheStorageConfig) -> HiCacheStorage:
    extra = dict(config.extra_config)
    names = {key: extra.pop(key, None) for key in _DYNAMIC_KEYS}
    for key, value in names.items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"the dynamic backend needs {key} in the extra config, a text")
    uses_v1 = extra.pop("interface_v1", False)
    if not isinstance(uses_v1, bool | int):
        raise ValueError(f"interface_v1 must be true or false, not {uses_v1!r}")
    loaded = _load_class(names["module_path"] or "", names["class_name"] or "")
    config = replace(config, extra_config=extra)
    label = f"{loaded.__module__}.{loaded.__qualname__}"
    is_page_class = _is_implemented(loaded, "batch_get_v2", "batch_set_v2", "batch_exists")
    if not is_page_class and not FlatPageAdapter.accepts(loaded, uses_v1=bool(uses_v1)):
        raise StorageError(
            f"{label} has neither batch_get_v2, batch_set_v2 and batch_exists, nor get, set and "
            "exists, nor (with interface_v1) batch_get_v1, batch_set_v1 and exists"
        )
    if not is_page_class:
        user_object = _construct(_without_abstract(loaded), config, label)
        return FlatPageAdapter(config, user_object, uses_v1=bool(uses_v1))
    backend = _construct(loaded, config, label)
    if not isinstance(backend, HiCacheStorage):
        raise StorageError(f"{label} must derive from HiCacheStorage to move pages itself")
    if not hasattr(backend, "pools"):
        raise StorageError(f"{label}.__init__ must call super().__init__(config) of HiCacheStorage")
    return backend


def _load_class(module_path: str, class_name: str) -> type[Any]:
    try:
        module = importlib.import_module(module_path)
        loaded = getattr(module, class_name)
    except _OF_OTHERS as error:
        raise StorageError(
            f"{class_name} of {module_path} cannot be loaded: {_said(error)}"
        ) from error
    if not isinstance(loaded, type):
        raise StorageError(f"{class_name} of {module_path} is not a class")
    return loaded


def _said(error: BaseException) -> str:
    """What an error says; its kind where that alone would be little ("1", or nothing)."""
    text = str(error)
    return text if len(text) > 3 and not isinstance(error, SystemExit) else repr(error)


def _is_implemented(loaded: type[Any], *names: str) -> bool:
    abstract: frozenset[str] = getattr(loaded, "__abstractmethods__", frozenset())
    return all(callable(getattr(loaded, name, None)) and name not in abstract for name in names)


def _without_abstract(loaded: type[Any]) -> type[Any]:
    """A class that moves single pages may derive from our base without its page-batch methods: the
    adapter supplies them, so their absence must not forbid an object."""
    if not getattr(loaded, "__abstractmethods__", None):
        return loaded
    concrete = type(loaded.__name__, (loaded,), {"__module__": loaded.__module__})
    concrete.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return concrete


def _construct(loaded: type[Any], config: HiCacheStorageConfig, label: str) -> Any:
    """Call ``cls(config, extra)`` where it takes two arguments, else ``cls(config)``."""
    signature = inspect.signature(loaded)
    try:
        signature.bind(config, config.extra_config)
        arguments: tuple[Any, ...] = (config, config.extra_config)
    except TypeError:
        arguments = (config,)
    try:
        return loaded(*arguments)
    except _OF_OTHERS as error:
        raise StorageError(f"{label} could not be made: {_said(error)}") from error
