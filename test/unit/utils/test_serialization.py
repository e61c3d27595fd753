"""Serialized tensors: round trips, and data that tries to do more than hold tensors."""

from __future__ import annotations

import base64
import builtins
import functools
import io
import operator
import os
import pickle
import pickletools
import subprocess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglang.srt.utils as documented
from sglang.srt.utils import patch_torch
from sglang.srt.utils.serialization import (
    MultiprocessingSerializer,
    SerializationError,
    UnsafePickleError,
)
from sglang.srt.weight_sync.tensor_bucket import (
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
)

read = MultiprocessingSerializer.deserialize


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
@pytest.mark.parametrize("text", [False, True])
def test_tensors_survive(dtype: torch.dtype, text: bool) -> None:
    tensors = [("a", torch.randn(3, 5).to(dtype)), ("b", torch.randn(8, 4).to(dtype)[::2, 1:].t())]
    data = MultiprocessingSerializer.serialize([*tensors, ("c", torch.empty(0, 4))], text)
    assert isinstance(data, str if text else bytes)
    back = read(data)
    for (name, expected), (got_name, got) in zip(tensors, back):
        assert name == got_name and got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert back[2][1].shape == (0, 4)
    back[0][1].zero_()  # writable


def test_a_view_carries_its_own_bytes_only() -> None:
    big = torch.zeros(1 << 20)
    assert len(MultiprocessingSerializer.serialize(big[:10])) < 1000


def test_bucket_classes_parameters_and_numbers_survive() -> None:
    bucket = FlattenedTensorBucket(named_tensors=[("a", torch.ones(2)), ("b", torch.zeros(3))])
    obj: dict[str, Any] = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
        "local": LocalSerializedTensor(values=[b"x", b"y"]),
        "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "device": torch.device("cpu"),
        "numbers": [np.int64(7), np.float32(0.5), np.bool_(True)],
        "more": ({1, 2}, frozenset({3}), 2.5, None, b"bytes", True),
    }
    back = read(MultiprocessingSerializer.serialize(obj))
    assert back["metadata"] == bucket.get_metadata()
    assert torch.equal(back["flattened_tensor"], obj["flattened_tensor"])
    assert back["local"] == obj["local"] and back["more"] == obj["more"]
    assert back["numbers"] == [7, 0.5, True]
    assert torch.equal(back["parameter"], torch.ones(2))


def test_other_modules_that_hold_the_same_classes_are_understood() -> None:
    meta = FlattenedTensorMetadata("w", torch.Size([2]), torch.float32, 0, 8, 2)
    data = pickle.dumps(meta, protocol=2)
    for module in (
        b"sglang.srt.model_executor.model_runner",
        b"nemo_rl.models.generation.sglang.utils.train_utils",
    ):
        assert read(data.replace(b"sglang.srt.weight_sync.tensor_bucket", module)) == meta


def test_what_torch_itself_writes_is_read() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(read(bytes(ForkingPickler.dumps([tensor])))[0], tensor)


def test_the_documented_names_are_found_without_loading_torch_first() -> None:
    assert documented.MultiprocessingSerializer is MultiprocessingSerializer
    assert callable(documented.init_custom_process_group)
    with pytest.raises(AttributeError):
        documented.nothing_of_this_name  # noqa: B018


class _Calls:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _chain() -> Any:
    return _Calls(getattr, _Calls(__import__, "os"), "system")


HOSTILE = {
    "system": lambda mark: _Calls(os.system, f"touch {mark}"),
    "eval": lambda mark: _Calls(eval, f"open({str(mark)!r}, 'w')"),
    "exec": lambda mark: _Calls(builtins.exec, f"open({str(mark)!r}, 'w')"),
    "getattr": lambda mark: _chain(),
    "partial": lambda mark: functools.partial(os.system, f"touch {mark}"),
    "attrgetter": lambda mark: operator.attrgetter("system"),
    "subprocess": lambda mark: _Calls(subprocess.Popen, ["touch", str(mark)]),
    "array": lambda mark: np.arange(3),
    "object array": lambda mark: np.array([os.system], dtype=object),
    "torch.load": lambda mark: _Calls(torch.storage._load_from_bytes, b"x"),
    "path": lambda mark: _Calls(Path.touch, mark),
    "function": lambda mark: operator.itemgetter,
    "own module": lambda mark: SerializationError,
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("kind", HOSTILE)
def test_calls_are_blocked_and_not_run(kind: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = pickle.dumps([torch.Size([1]), HOSTILE[kind](mark)], protocol=protocol)
    with pytest.raises(UnsafePickleError, match=r"Blocked unsafe global \(.+\..+\)"):
        read(data)
    assert not mark.exists()
    with pytest.raises(RuntimeError, match="Blocked unsafe global"):
        read(base64.b64encode(data).decode())


def test_dotted_names_do_not_reach_into_allowed_modules() -> None:
    for module, name in (("torch", "Tensor.storage"), ("torch", "os.system"), ("builtins", "eval")):
        data = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
        data += b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        with pytest.raises(UnsafePickleError, match="Blocked"):
            read(data)


def test_classes_and_functions_cannot_be_changed() -> None:
    # BUILD with a pair sets attributes of whatever lies under it.
    name = b"csglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n"
    state = b"(N}S'__init__'\nctorch\nSize\nst."
    data = name + state + b"b."
    data = data.replace(b"t.b.", b"tb.")
    pickletools.dis(data, out=io.StringIO())
    before = FlattenedTensorMetadata.__init__
    with pytest.raises(UnsafePickleError):
        read(data)
    assert FlattenedTensorMetadata.__init__ is before


def test_extension_codes_are_blocked() -> None:
    with pytest.raises(UnsafePickleError):
        read(b"\x80\x02\x82\x01.")


@pytest.mark.parametrize("cut", [0, 1, 20, 200, -1])
def test_truncated_data_is_refused(cut: int) -> None:
    data = MultiprocessingSerializer.serialize([("w", torch.ones(100))])
    with pytest.raises(SerializationError):
        read(data[:cut])


def test_damaged_data_never_does_worse_than_an_error() -> None:
    data = bytearray(MultiprocessingSerializer.serialize([("w", torch.ones(3))]))  # type: ignore
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data)
        for position in generator.integers(0, len(data), 3):
            damaged[position] = generator.integers(0, 256)
        try:
            read(bytes(damaged))
        except (SerializationError, UnsafePickleError):
            pass


def test_claimed_sizes_do_not_take_memory() -> None:
    huge = (1 << 36).to_bytes(8, "little")
    with pytest.raises(SerializationError, match="are claimed"):
        read(b"\x80\x05\x96" + huge + b".")  # a bytearray
    with pytest.raises(SerializationError):
        read(b"\x80\x04\x8e" + huge + b".")  # bytes
    assert read(b"\x80\x04]r\xff\xff\xff\x7f.") == []  # a place in the memo table
    with pytest.raises(SerializationError):
        read("not base64!")


@pytest.mark.parametrize("data", ["AAAA", "not base64!", "", b"\0", b""])
def test_what_is_no_serialized_data_is_told_what_is(data: str | bytes) -> None:
    expected = "MultiprocessingSerializer.serialize(named_tensors, output_str=True)"
    with pytest.raises(SerializationError) as caught:
        read(data)
    assert expected in str(caught.value) and "base64" in str(caught.value)


def test_numbers_of_other_types_are_blocked() -> None:
    for value in (np.str_("x"), np.datetime64("2020-01-01"), np.complex64(1)):
        with pytest.raises(UnsafePickleError):
            read(pickle.dumps(value))


def test_gpu_identities_travel_instead_of_ordinals(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = ["aaaa", "bbbb"]
    monkeypatch.setattr(patch_torch.cuda, "uuid_of_device", lambda index: uuids[index])
    monkeypatch.setattr(patch_torch.cuda, "device_of_uuid", lambda uuid: uuids[::-1].index(uuid))
    arguments = tuple(range(15))
    original = patch_torch.reductions.rebuild_cuda_tensor
    monkeypatch.setattr(
        patch_torch,
        "_torch_reduce_tensor",
        lambda tensor: (original, (*arguments[:6], 1, *arguments[7:])),
    )
    rebuild, sent = patch_torch._reduce_tensor_modified(torch.ones(1))
    assert f"{rebuild.__module__}.{rebuild.__name__}" == (
        "sglang.srt.utils.patch_torch._rebuild_cuda_tensor_modified"
    )
    assert sent[6] == "bbbb"
    monkeypatch.setattr(patch_torch.reductions, "rebuild_cuda_tensor", lambda *args: args)
    assert rebuild(*sent)[6] == 0  # the receiver counts its GPUs the other way round
    assert rebuild(*arguments)[6] == 6  # a sender without the patch


def test_patching_twice_is_patching_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reductions = patch_torch.reductions
    monkeypatch.setattr(reductions, "reduce_tensor", reductions.reduce_tensor)
    patch_torch.monkey_patch_torch_reductions()
    first = reductions.reduce_tensor
    patch_torch.monkey_patch_torch_reductions()
    assert reductions.reduce_tensor is first is patch_torch._reduce_tensor_modified
    tensor = torch.arange(3.0)
    assert torch.equal(read(bytes(ForkingPickler.dumps(tensor))), tensor)
    monkeypatch.undo()
    reductions.init_reductions()
