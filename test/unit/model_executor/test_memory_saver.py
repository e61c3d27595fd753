"""Memory that is given back: pages go, addresses stay, content survives where it should."""

from __future__ import annotations

import psutil
import pytest
import torch
from torch import nn

from sglang.srt.model_executor.memory_saver import MemoryOccupationError, MemorySaver
from sglang.srt.platforms import init_platform
from sglang.srt.platforms.regions import HostRegion

MB = 1 << 20


@pytest.fixture(autouse=True)
def platform() -> None:
    init_platform("cpu")


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_a_region_gives_its_pages_back_and_keeps_its_address() -> None:
    region = HostRegion(64 * MB)
    address = region.buffer.data_ptr()
    region.buffer.fill_(7)
    full = resident()
    region.release()
    assert full - resident() > 60 * MB
    region.resume()
    assert region.buffer.data_ptr() == address
    assert int(region.buffer[::4096].sum()) == 0
    region.buffer.fill_(3)
    assert resident() > full - 4 * MB


def make_models() -> tuple[nn.ModuleList, nn.ModuleList]:
    """A target, and a draft that borrows its first weight."""
    target = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 3)])
    draft = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    draft[0].weight = target[0].weight
    return target, draft


def test_weights_move_into_regions_in_place_and_come_back_as_agreed() -> None:
    saver = MemorySaver(enabled=True)
    target, draft = make_models()
    own = next(draft[1].parameters()).detach().clone()
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    saver.adopt_weights(target, keeps_content=False)
    saver.adopt_weights(draft, keeps_content=True)
    assert draft[0].weight is target[0].weight
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name])
    addresses = [p.data_ptr() for p in (*target.parameters(), *draft.parameters())]
    assert saver.release(["weights"]) == {"weights"}
    assert not saver.may_step and saver.why_no_weights()
    assert saver.resume(["weights"]) == {"weights"}
    assert saver.may_step and saver.why_no_weights() is None
    assert addresses == [p.data_ptr() for p in (*target.parameters(), *draft.parameters())]
    assert torch.equal(draft[1].weight, own)
    assert not target[1].weight.any()  # lost, and said to be
    assert saver.keeps_weights_of(draft) and not saver.keeps_weights_of(target)


def test_a_release_without_room_for_its_copies_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saver = MemorySaver(enabled=True)
    target, draft = make_models()
    saver.adopt_weights(target, keeps_content=True)
    saver.adopt_weights(draft, keeps_content=True)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    copies = []
    to_host = torch.Tensor.to

    def no_room(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        copies.append(self)
        if len(copies) > 1:
            raise RuntimeError("no memory")
        return to_host(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(torch.Tensor, "to", no_room)
    for action in (saver.release, saver.make_copies):
        copies.clear()
        with pytest.raises(MemoryOccupationError, match="no host memory for a copy: no memory"):
            action(["weights"])
        assert saver.may_step and len(copies) == 2
        assert all(held.backup is None for held in saver._held["weights"])
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name])
    monkeypatch.undo()
    saver.make_copies(["weights"])
    assert saver.release(["weights"]) == {"weights"} == saver.resume(["weights"])
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name])


def test_kv_buffers_are_zeros_of_the_wanted_form() -> None:
    saver = MemorySaver(enabled=True)
    allocate = saver.kv_allocator()
    assert allocate is not None
    buffer = allocate((2, 5, 3), torch.bfloat16)
    assert buffer.shape == (2, 5, 3) and buffer.dtype is torch.bfloat16 and not buffer.any()
    buffer.fill_(1)
    saver.release(["kv_cache"])
    saver.resume(["kv_cache"])
    assert not buffer.any()


@pytest.mark.parametrize(
    ("released", "action", "tags", "text"),
    [
        (["weights"], "release", ["weights", "kv_cache"], "weights is already released"),
        (None, "release", [], "already released"),
        ([], "resume", ["kv_cache"], "kv_cache is not currently released"),
        ([], "resume", None, "not currently released"),
        ([], "release", ["everything"], "unknown tag 'everything'"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    released: list[str] | None, action: str, tags: list[str] | None, text: str
) -> None:
    saver = MemorySaver(enabled=True)
    if released != []:
        saver.release(released)
    before = set(saver.released)
    with pytest.raises(MemoryOccupationError, match=text):
        getattr(saver, action)(tags)
    assert saver.released == before


def test_all_means_all_that_there_is_to_do() -> None:
    saver = MemorySaver(enabled=True)
    saver.release(["weights"])
    assert saver.resume(None) == {"weights"}
    saver.release(["kv_cache"])
    assert saver.release(None) == {"weights", "cuda_graph"}


def test_without_the_flag_nothing_happens_but_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    saver = MemorySaver()
    target, _ = make_models()
    address = next(target.parameters()).data_ptr()
    saver.adopt_weights(target, keeps_content=False)
    assert saver.kv_allocator() is None
    assert saver.release(None) == saver.release(None) == saver.resume(None) == set()
    assert sum("needs --enable-memory-saver" in message for message in caplog.messages) == 2
    assert next(target.parameters()).data_ptr() == address and saver.may_step
