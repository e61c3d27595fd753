"""The platform interface on CPU, and the choice of it."""

from __future__ import annotations

import threading

import pytest
import torch

from sglang.srt import platforms
from sglang.srt.model_executor.graph_capture import GraphMemory, capture
from sglang.srt.platforms.base import Platform
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.srt.platforms.cuda import CudaPlatform


@pytest.fixture
def no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current", None)


def test_the_platform_is_chosen_once(no_platform: None) -> None:
    chosen = platforms.init_platform("cpu")
    assert platforms.init_platform("cpu") is chosen
    assert platforms.current is chosen and platforms.current_platform() is chosen
    with pytest.raises(RuntimeError, match="already runs on cpu"):
        platforms.init_platform("cuda", 0)


def test_detection_without_initialisation(no_platform: None) -> None:
    assert platforms.current.name == ("cuda" if torch.cuda.is_available() else "cpu")


def test_unknown_devices_and_attributes_are_refused(no_platform: None) -> None:
    with pytest.raises(ValueError, match="no platform for device 'tpu'"):
        platforms.init_platform("tpu")
    with pytest.raises(AttributeError):
        platforms.nothing  # noqa: B018


def test_cpu_facts() -> None:
    platform = CpuPlatform()
    assert platform.device == torch.device("cpu")
    assert platform.default_dtype is torch.float32
    assert platform.default_attention_backend == "torch_native"
    assert platform.collective_backend == "gloo"
    assert not platform.graph_capture_supported
    memory = platform.memory_info()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert 0 < platform.held_bytes() < memory.total_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="^--device cuda: [^\n]+\\.$"):
        CudaPlatform().configure_process(None)


@pytest.mark.cuda
def test_a_gpu_that_is_not_there_is_named() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"no GPU {count}, torch sees {count}"):
        CudaPlatform(count).configure_process(None)


def test_cpu_streams_and_events_are_done_at_once() -> None:
    platform: Platform = CpuPlatform()
    stream, event = platform.stream(), platform.event()
    with platform.use_stream(stream):
        value = torch.ones(3) + 1
    stream.wait_stream(platform.current_stream())
    assert stream.record_event(event) is event
    event.wait()
    event.synchronize()
    platform.synchronize()
    assert event.query() and stream.query()
    assert value.tolist() == [2, 2, 2]
    assert platform.pin(value) is value


def test_a_cpu_stream_waits_for_events_of_worker_threads() -> None:
    done = threading.Event()

    class ThreadEvent:
        def synchronize(self) -> None:
            done.wait(5)

    threading.Timer(0.05, done.set).start()
    CpuPlatform().stream().wait_event(ThreadEvent())
    assert done.is_set()


def test_container_limits_count(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    from sglang.srt.platforms import cpu

    folder = Path(str(tmp_path))
    (folder / "memory.max").write_text("1000000\n")
    (folder / "memory.current").write_text("600000\n")
    (folder / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    monkeypatch.setattr(cpu, "_CGROUP", folder)
    memory = CpuPlatform().memory_info()
    assert (memory.total_bytes, memory.free_bytes) == (1_000_000, 600_000)
    (folder / "memory.max").write_text("max\n")
    assert CpuPlatform().memory_info().total_bytes > 1_000_000


def test_seeding_makes_draws_repeat() -> None:
    platform = CpuPlatform()
    platform.manual_seed(7)
    first = torch.rand(4)
    platform.manual_seed(7)
    assert torch.equal(first, torch.rand(4))


def test_both_platforms_are_complete() -> None:
    for cls in (CpuPlatform, CudaPlatform):
        assert not cls.__abstractmethods__
        for name in Platform.__annotations__:
            assert name in vars(cls), f"{cls.__name__}.{name}"


@pytest.mark.cuda
def test_cuda_streams_and_memory() -> None:
    platform = CudaPlatform(0)
    stream, event = platform.stream(), platform.event()
    with platform.use_stream(stream):
        value = torch.ones(1 << 20, device=platform.device) * 2
        event.record(stream)
    event.synchronize()
    assert event.query() and float(value.sum()) == 2 << 20
    memory = platform.memory_info()
    assert 0 < memory.free_bytes <= memory.total_bytes
    assert platform.pin(torch.ones(2)).is_pinned()


@pytest.mark.cuda
def test_memory_that_only_graphs_may_use_again_is_held() -> None:
    platform, size = CudaPlatform(0), 1 << 28
    before = platform.held_bytes()
    idle = torch.empty(size, dtype=torch.uint8, device=platform.device)
    assert platform.held_bytes() - before >= size
    del idle
    assert platform.held_bytes() - before < size // 2
    memory = GraphMemory(platform.device)
    graph, _ = capture(
        lambda: torch.ones(size, dtype=torch.uint8, device=platform.device).sum(), memory
    )
    assert platform.held_bytes() - before >= size
    del graph
