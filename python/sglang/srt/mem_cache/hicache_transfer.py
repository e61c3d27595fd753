"""Copies between device and host pools: operations, acknowledgements, per-layer load events.

Owns how copies are merged, on what they run (a device stream, or a thread where the device is the
CPU) and how their end is seen. Does not own slots, nodes nor what is copied: ``HiCacheController``
queues operations and reads acknowledgements, all on the scheduler thread. Only copy threads and
``ThreadEvent`` know other threads.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.srt.platforms.base import Event, Platform, Stream

LOAD_RING_SIZE = 3  # loads whose batches have not all run: this step's, the last one's, one spare

CopyHook = Callable[[str, int], None]
"""Called before each piece of a copy with ("write" | "load", layer; -1 for all layers)."""


@dataclass(slots=True, kw_only=True)
class CacheOperation:
    """One queued copy. Slots int64 CPU, whole pages; ``pool_transfers``: pools with own slots."""

    host_indices: torch.Tensor
    device_indices: torch.Tensor
    node_ids: list[int]
    pool_transfers: list[PoolTransfer] = field(default_factory=list)


def _join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _merge_transfers(transfers: Sequence[PoolTransfer]) -> list[PoolTransfer]:
    """One transfer a pool, in order of first appearance."""
    by_name: dict[PoolName, list[PoolTransfer]] = {}
    for transfer in transfers:
        by_name.setdefault(transfer.name, []).append(transfer)
    return [
        PoolTransfer(
            name=name,
            host_indices=_join([part.host_indices for part in parts]),
            device_indices=_join([part.device_indices for part in parts]),
            keys=[key for part in parts for key in part.keys or ()] or None,
            rule=parts[0].rule,
        )
        for name, parts in by_name.items()
    ]


def merge_ops(operations: Sequence[CacheOperation]) -> CacheOperation:
    """Make one copy of many, their slots and node ids in order."""
    if len(operations) == 1:
        return operations[0]
    return CacheOperation(
        host_indices=torch.cat([op.host_indices for op in operations]),
        device_indices=torch.cat([op.device_indices for op in operations]),
        node_ids=[node_id for op in operations for node_id in op.node_ids],
        pool_transfers=_merge_transfers([t for op in operations for t in op.pool_transfers]),
    )


@dataclass(slots=True, kw_only=True)
class HiCacheAck:
    """A copy that was submitted; done when ``finish_event.query()``.

    ``operation`` keeps the index tensors alive for as long as the copy may read them.
    """

    start_event: Event
    finish_event: Event
    node_ids: list[int]
    num_tokens: int
    operation: CacheOperation


def num_done(acks: Sequence[HiCacheAck]) -> int:
    """Return how many leading acks are finished. Raises RuntimeError where a copy failed."""
    count = 0
    for ack in acks:
        if not ack.finish_event.query():
            break
        count += 1
    return count


class ThreadEvent:
    """A ``platforms`` event that a thread sets; not passed until recorded.

    Whoever looks at an event whose copy failed gets the failure: the bytes are not there.
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark as passed."""
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Mark as passed without what it stands for; keeps a pass that came before."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self, stream: Stream | None = None) -> None:
        """Block: threads have no streams to queue behind an event."""
        self.synchronize()

    def query(self) -> bool:
        """Whether it was recorded. Raises RuntimeError when the copy failed."""
        if self._done.is_set():
            self._raise_failure()
            return True
        return False

    def synchronize(self) -> None:
        """Block until it was recorded. Raises RuntimeError when the copy failed."""
        self._done.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise RuntimeError("a copy between device and host failed") from self._error


class CopyEngine(Protocol):
    """Runs copies in the order of submission."""

    def event(self) -> Event:
        """Return a new event that a job of this engine can record."""

    def submit(self, job: Callable[[], None], fence: Event, events: Sequence[Event]) -> None:
        """Run ``job`` after ``fence``; it records ``events``, in any case none is left waiting."""

    def close(self) -> None:
        """Run nothing any more; idempotent."""


class StreamCopyEngine:
    """Copies on a device stream: a job queues work, the device does it."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.stream: Stream = platform.stream()

    def event(self) -> Event:
        """See ``CopyEngine``."""
        event: Event = self._platform.event()
        return event

    def submit(self, job: Callable[[], None], fence: Event, events: Sequence[Event]) -> None:
        """See ``CopyEngine``."""
        with self._platform.use_stream(self.stream):
            self.stream.wait_event(fence)
            job()

    def close(self) -> None:
        """See ``CopyEngine``."""
        self.stream.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    run: Callable[[], None]
    fence: Event
    events: Sequence[Event]


class ThreadCopyEngine:
    """Copies in a thread of its own, begun at the first job: a stream for the CPU."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def event(self) -> ThreadEvent:
        """See ``CopyEngine``."""
        return ThreadEvent()

    def submit(self, job: Callable[[], None], fence: Event, events: Sequence[Event]) -> None:
        """See ``CopyEngine``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(_Job(run=job, fence=fence, events=events))

    def close(self) -> None:
        """See ``CopyEngine``; jobs submitted before still run."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _run(self) -> None:
        # The grad mode is a thread's own.
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            try:
                job.fence.synchronize()
                job.run()
            except Exception as error:  # noqa: BLE001 - whoever waits for the events gets it
                for event in job.events:
                    assert isinstance(event, ThreadEvent)
                    event.fail(error)


class LayerLoadingEvent:
    """One load: an event a layer. Made anew for each load, so that a batch that still waits for
    an earlier load never waits for a later one."""

    def __init__(self, num_layers: int, make_event: Callable[[], Event]) -> None:
        self.start_event = make_event()
        self.layer_events = [make_event() for _ in range(num_layers)]

    @property
    def finish_event(self) -> Event:
        """Passed when every layer has arrived."""
        return self.layer_events[-1]

    def all_events(self) -> list[Event]:
        """Return start and layer events."""
        return [self.start_event, *self.layer_events]


class LayerDoneCounter:
    """Ring of the latest loads; pools ask it before they hand out a layer's buffer.

    The scheduler thread produces; ``set_consumer`` and ``wait_until`` belong to the thread that
    runs the forward pass.
    """

    def __init__(
        self, num_layers: int, make_event: Callable[[], Event], platform: Platform
    ) -> None:
        self.num_layers = num_layers
        self._make_event = make_event
        self._platform = platform
        self._ring: list[LayerLoadingEvent | None] = [None] * LOAD_RING_SIZE
        self._producer_index = -1
        self._consumer: LayerLoadingEvent | None = None

    def update_producer(self) -> int:
        """Take the next place in the ring for a new load and return its index.

        Waits for the load that had the place: its batch may not have found it yet.
        """
        self._producer_index = (self._producer_index + 1) % LOAD_RING_SIZE
        previous = self._ring[self._producer_index]
        if previous is not None:
            previous.finish_event.synchronize()
        self._ring[self._producer_index] = LayerLoadingEvent(self.num_layers, self._make_event)
        return self._producer_index

    def loading_event(self, index: int) -> LayerLoadingEvent:
        """Return the load at a place in the ring."""
        event = self._ring[index]
        if event is None:
            raise RuntimeError(f"no load was ever started at place {index} of the ring")
        return event

    def set_consumer(self, index: int) -> None:
        """Say which load the forward passes that follow depend on; -1: none."""
        self._consumer = None if index < 0 else self.loading_event(index)

    def wait_until(self, layer_idx: int) -> None:
        """Make the current stream (the caller, on the CPU) wait for a local layer.

        Layers beyond the target's (a longer draft) are complete with its last one.
        """
        if self._consumer is not None:
            event = self._consumer.layer_events[min(layer_idx, self.num_layers - 1)]
            self._platform.current_stream().wait_event(event)

    def reset(self) -> None:
        """Forget all loads; none is under way."""
        self._ring = [None] * LOAD_RING_SIZE
        self._consumer = None
