"""Names of backends, the user's own classes, and what is refused."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.backend_opening import BackendOpening
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolName,
    StorageError,
)
from sglang.srt.mem_cache.storage import backend_factory
from sglang.srt.mem_cache.storage.backend_factory import (
    available_backends,
    check_storage_options,
    create_storage_backend,
    register_storage_backend,
)
from sglang.srt.utils.attempt import AttemptState
from sglang.test.fakes.fault_store import FaultStore
from sglang.test.fakes.host_pages import fill_page, holds, make_host_pool, page_hash, transfer


class FlatStore:
    """One tensor a key, no base class."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        self.config = config
        self.tensors: dict[str, torch.Tensor] = {}

    def get(self, key: str, target: torch.Tensor | None = None) -> torch.Tensor | None:
        return self.tensors.get(key)

    def set(self, key: str, value: torch.Tensor) -> bool:
        self.tensors[key] = value
        return True

    def exists(self, key: str) -> bool:
        return key in self.tensors


class FillingStore(HiCacheStorage):
    """Derives from our base, fills the target in place, never calls the base's constructor."""

    def __init__(self, config: HiCacheStorageConfig, extra: dict[str, Any]) -> None:
        self.extra = extra
        self.stored: dict[str, bytes] = {}
        self.closed = False

    def get(self, key: str, target: torch.Tensor) -> bool:
        if key in self.stored:
            data = torch.frombuffer(bytearray(self.stored[key]), dtype=target.dtype)
            target.view(-1).copy_(data)
        return key in self.stored

    def set(self, key: str, value: torch.Tensor) -> bool:
        self.stored[key] = value.numpy().tobytes()
        return True

    def exists(self, key: str) -> bool:
        return key in self.stored

    def clear(self) -> bool:
        self.stored.clear()
        return True

    def close(self) -> None:
        self.closed = True


class BatchStore(FlatStore):
    """Moves KV by itself."""

    def register_mem_pool_host(self, pool: Any) -> None:
        self.pool = pool

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra: Any) -> list[bool]:
        for key, index in zip(keys, host_indices[:: self.pool.page_size].tolist()):
            self.tensors[key] = self.pool.get_data_page(index).clone()
        return [True] * len(keys)

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra: Any) -> list[bool]:
        for key, index in zip(keys, host_indices[:: self.pool.page_size].tolist()):
            self.pool.set_from_flat_data_page(index, self.tensors[key])
        return [True] * len(keys)


class BrokenStore(FlatStore):
    """Raises, or returns what is no page."""

    def get(self, key: str, target: torch.Tensor | None = None) -> torch.Tensor | None:
        if key == page_hash(0):
            raise OSError("connection lost")
        return torch.zeros(3)

    def set(self, key: str, value: torch.Tensor) -> bool:
        raise OSError("connection lost")


class Forgetful(BatchStore):
    """Answers for fewer pages than it was asked about."""

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra: Any) -> list[bool]:
        return super().batch_set_v1(keys, host_indices, extra)[:-1]


class Unbuildable(FlatStore):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        raise RuntimeError("no server")


class Exiting(FlatStore):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        sys.exit(1)


class Cancelled(FlatStore):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        raise asyncio.CancelledError


class NotAStore:
    pass


class Unprepared(FaultStore):
    def __init__(self, config: HiCacheStorageConfig) -> None:
        self.mine = config


@pytest.fixture(autouse=True)
def user_module() -> Iterator[None]:
    module = types.ModuleType("a_users_module")
    classes: tuple[type, ...] = (FlatStore, FillingStore, BatchStore, BrokenStore, Unbuildable)
    classes += (Exiting, Cancelled, Forgetful, NotAStore, FaultStore, Unprepared)
    for user_class in classes:
        setattr(module, user_class.__name__, user_class)
    sys.modules["a_users_module"] = module
    yield
    del sys.modules["a_users_module"]


def create(class_name: str, **extra: object) -> HiCacheStorage:
    names = {"backend_name": "mine", "module_path": "a_users_module", "class_name": class_name}
    return create_storage_backend("dynamic", HiCacheStorageConfig(extra_config=names | extra))


def test_a_class_that_leaves_out_its_base_is_told_so() -> None:
    with pytest.raises(StorageError, match=r"Unprepared.__init__ must call super\(\).__init__"):
        create("Unprepared")


def test_file_is_made_by_name(tmp_path: Path) -> None:
    config = HiCacheStorageConfig(extra_config={"file_storage_path": str(tmp_path)})
    backend = create_storage_backend("file", config)
    assert type(backend) is HiCacheFile
    backend.close()


@pytest.mark.parametrize("name", ["hf3fs", "", "File"])
def test_unknown_names_are_refused_with_the_list(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no storage backend '{name}'; available: .*file.*dyn"):
        create_storage_backend(name, HiCacheStorageConfig())


def test_more_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_factory, "_REGISTRY", dict(backend_factory._REGISTRY))
    register_storage_backend("fault", "a_users_module", "FaultStore")
    assert "fault" in available_backends()
    assert isinstance(create_storage_backend("fault", HiCacheStorageConfig()), FaultStore)
    for name in ("fault", "file", "dynamic"):
        with pytest.raises(ValueError, match="exists already"):
            register_storage_backend(name, "m", "C")


@pytest.mark.parametrize("class_name", ["FlatStore", "FillingStore", "BatchStore", "FaultStore"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_user_classes_move_pages(class_name: str, layout: str) -> None:
    backend = create(class_name, interface_v1=1 if class_name == "BatchStore" else 0)
    pool, draft = make_host_pool(layout=layout), make_host_pool(layer_num=1, layout=layout)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    keys = [page_hash(seed) for seed in range(3)]
    transfers = [
        transfer(draft, range(3), [f"d:{key}@{'0' * 16}" for key in keys], PoolName.DRAFT),
        transfer(pool, range(3), keys),
    ]
    for page in range(3):
        fill_page(pool, page, page)
        fill_page(draft, page, f"draft {page}")
    everything = {PoolName.DRAFT: [True] * 3, PoolName.KV: [True] * 3}
    assert backend.batch_set_v2(transfers) == everything
    assert backend.batch_exists([*keys, page_hash(9)]) == 3
    for page in range(3):
        fill_page(pool, page, "stale")
        fill_page(draft, page, "stale")
    assert backend.batch_get_v2(transfers) == everything
    assert all(holds(pool, page, page) for page in range(3))
    assert all(holds(draft, page, f"draft {page}") for page in range(3))
    backend.close()


def test_the_users_class_gets_its_own_options_only() -> None:
    backend = create("FillingStore", server="a:1")
    user_object = backend.user_object  # type: ignore[attr-defined]
    assert user_object.extra == {"server": "a:1"}
    assert backend.clear() is True
    backend.close()
    assert user_object.closed


def test_what_the_users_class_raises_is_a_failed_page() -> None:
    backend = create("BrokenStore")
    pool = make_host_pool()
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    pages = [transfer(pool, range(2), [page_hash(0), page_hash(1)])]
    assert backend.batch_get_v2(pages) == {PoolName.KV: [False, False]}
    assert backend.batch_set_v2(pages) == {PoolName.KV: [False, False]}
    assert backend.clear() is False  # it has none
    assert backend.get_stats() == {}


@pytest.mark.parametrize(
    ("class_name", "extra", "error", "message"),
    [
        ("NotAStore", {}, StorageError, "has neither"),
        ("FlatStore", {"interface_v1": True}, StorageError, "has neither"),
        ("FlatStore", {"interface_v1": "yes"}, ValueError, "interface_v1 must be"),
        ("Missing", {}, StorageError, "cannot be loaded"),
        ("Unbuildable", {}, StorageError, "no server"),
        ("Exiting", {}, StorageError, r"Exiting could not be made: SystemExit\(1\)"),
        ("FlatStore", {"module_path": "a_module_that_exits"}, StorageError, "SystemExit"),
        ("FlatStore", {"module_path": "a_module_that_is_wrong"}, StorageError, "cannot be loaded"),
        ("FlatStore", {"module_path": "no.such.module"}, StorageError, "cannot be loaded"),
        ("FlatStore", {"module_path": None}, ValueError, "needs module_path"),
        ("FlatStore", {"backend_name": ""}, ValueError, "needs backend_name"),
    ],
)
def test_what_cannot_be_used_is_refused(
    class_name: str,
    extra: dict[str, object],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_module_that_exits.py").write_text("import sys; sys.exit('usage: ...')")
    (tmp_path / "a_module_that_is_wrong.py").write_text("1 +")
    with pytest.raises(error, match=message):
        create(class_name, **extra)


@pytest.mark.parametrize(
    ("name", "extra", "reason"),
    [
        ("file", '{"folder": "/x"}', "knows no option 'folder'"),
        ("redis", '{"ttl": "long"}', "ttl must be a number"),
        ("mooncake", '{"master_server_address": "127.0.0.1:1", "replica_num": 0}', "replica_num"),
        ("redis", "{", "is not valid"),
    ],
)
def test_options_are_checked_without_a_store(name: str, extra: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_storage_options(name, extra)
    check_storage_options("redis", '{"url": "redis://nowhere", "prefetch_threshold": 1}')
    check_storage_options("file", None)
    check_storage_options("dynamic", "{}")  # whatever the class makes of it


def test_a_class_that_leaves_out_answers_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = create("Forgetful", interface_v1=True)
    pool = make_host_pool()
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    pages = [transfer(pool, range(2), [page_hash(0), page_hash(1)])]
    assert backend.batch_set_v2(pages) == {PoolName.KV: [False, False]}
    assert "batch_set_v1 gave 1 answers for 2 keys" in caplog.text


@pytest.mark.parametrize("class_name", ["Exiting", "Cancelled"])
def test_a_class_that_would_end_the_thread_fails_to_attach(class_name: str) -> None:
    opening = BackendOpening("mine", lambda: create(class_name))
    deadline = time.monotonic() + 5
    while opening.state is AttemptState.PENDING:
        assert time.monotonic() < deadline, "nobody ever hears of it"
        time.sleep(0.005)
    assert opening.state is AttemptState.FAILED
    assert "could not be made" in str(opening.failure)


def test_a_class_that_fails_at_every_page_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = create("BrokenStore")
    pool = make_host_pool()
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    keys = [page_hash(seed) for seed in range(8)]
    for _ in range(3):
        backend.batch_get_v2([transfer(pool, range(8), keys)])
        backend.batch_set_v2([transfer(pool, range(8), keys)])
        backend.batch_exists(keys)
    said = [record.getMessage() for record in caplog.records]
    assert sum("connection lost" in line for line in said) <= 3, "get, set, exists"
    assert sum("no page of" in line for line in said) == 1
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_page_may_be_any_part_of_a_users_buffer(offset: int) -> None:
    pool = make_host_pool()
    fill_page(pool, 0, 0)
    store = create("FlatStore")
    store.register_mem_host_pool_v2(pool, PoolName.KV)
    moved = transfer(pool, [0], [page_hash(0)])
    assert store.batch_set_v2([moved])[PoolName.KV] == [True]
    tensors = store.user_object.tensors  # type: ignore[attr-defined]
    page = tensors[page_hash(0)].contiguous().view(-1).view(torch.uint8)
    blob = torch.cat([torch.zeros(offset, dtype=torch.uint8), page])
    tensors[page_hash(0)] = blob[offset:]
    fill_page(pool, 0, 1)
    assert store.batch_get_v2([moved])[PoolName.KV] == [True]
    assert holds(pool, 0, 0)
    tensors[page_hash(0)] = page.to_sparse()
    assert store.batch_get_v2([moved])[PoolName.KV] == [False]
