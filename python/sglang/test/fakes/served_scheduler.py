"""The scheduler of a server's flags, model and tiers included, in this process and without sockets.

Everything is wired by `scheduler_process.make_scheduler`, as in a server; only the ends are cut:
messages come from a list and news goes to lists. Loops run one iteration a `step()`. One tensor-
parallel rank. For tests that look into pools and tables, or that need many servers at little cost.
"""

from __future__ import annotations

import dataclasses
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from sglang.srt.managers.io_struct import (
    ClearHiCacheReqInput,
    ControlReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
)
from sglang.srt.managers.ipc import PullChannel, encode
from sglang.srt.managers.request_receiver import RequestReceiver
from sglang.srt.managers.scheduler_process import make_scheduler
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_base import HiCacheTreeBase
from sglang.srt.mem_cache.memory_pool_host import PoolEntry
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.tree_components.base import ComponentType
from sglang.srt.server_args import PortArgs, prepare_server_args
from sglang.srt.utils.wakeup import Wakeup
from sglang.test.fakes.stepped_scheduler import SteppedScheduler

# A test that steps an idle scheduler should not take as long as one that idles.
_LONGEST_SLEEP_S = 0.002

PoolRows = dict[str, torch.Tensor]

DEFAULT_FLAGS: tuple[str | int, ...] = ("--device", "cpu", "--random-seed", 1, "--num-threads", 1)


class _ListChannel:
    """Stands in for the channel from the front."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def recv_all_bytes_nowait(self) -> list[bytes]:
        frames, self.frames = self.frames, []
        return frames

    def wait(self, timeout_s: float | None, wakeup: Wakeup | None = None) -> bool:
        if not self.frames:
            sleep_s = _LONGEST_SLEEP_S if timeout_s is None else min(timeout_s, _LONGEST_SLEEP_S)
            select.select([] if wakeup is None else [wakeup], [], [], sleep_s)
            if wakeup is not None:
                wakeup.clear()
        return bool(self.frames)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request. `sources`: `cached_tokens_details`, {} where nothing was."""

    tokens: list[int]
    cached_tokens: int
    sources: dict[str, Any]
    finish: dict[str, Any]
    spec: dict[str, Any] | None = None


class ServedScheduler(SteppedScheduler):
    """See the module docstring; `replies` collects answers to control requests."""

    def __init__(self, model: str | Path, *flags: str | int | float) -> None:
        super().__init__()
        argv = ["--model-path", str(model), *DEFAULT_FLAGS, "--skip-server-warmup", *flags]
        self.args = prepare_server_args([str(item) for item in argv])
        self._ports = PortArgs.init_new(self.args)
        self.replies: list[ControlReqOutput] = []
        self.scheduler, self.ready = make_scheduler(self.args, self._ports, 0, 0)
        own = self.scheduler.receiver
        self._own_channel = own._channel
        self.channel = _ListChannel()
        self.scheduler.receiver = RequestReceiver(
            cast(PullChannel, self.channel), None, own._wakeup
        )
        self.scheduler.streamer._send = self._on_output
        self.scheduler._send_to_front = self.replies.append
        self.scheduler.beat = self._beat
        self._num_requests = 0

    def close(self) -> None:
        """End the threads; give sockets and files back."""
        self.scheduler.tree_cache.shutdown()
        if self._own_channel is not None:
            self._own_channel.close()
        self._ports.remove_files()

    def __enter__(self) -> ServedScheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def tree(self) -> HiCacheTreeBase:
        """The cache with its tiers."""
        tree = self.scheduler.tree_cache
        assert isinstance(tree, HiCacheTreeBase)
        return tree

    # -- driving --------------------------------------------------------------------------------

    def send(self, *messages: Any) -> None:
        """Messages that the next step receives."""
        self.channel.frames.extend(encode(message) for message in messages)

    def submit(self, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> str:
        """Queue a request; fields of SamplingParams and of the message may be given."""
        self._num_requests += 1
        rid = fields.pop("rid", f"r{self._num_requests}")
        self._send_request(rid, prompt, fields, ignore_eos=True, max_new_tokens=max_new_tokens)
        return rid

    def run_until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Step until the condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still not so after {timeout_s} s: {self.state()}")
            self.step()

    def run_until_idle(self, timeout_s: float = 60) -> None:
        """Step until no request is left, and once more for the idle self-check."""
        self.run_until(lambda: not self.channel.frames and self._is_idle(), timeout_s)
        self.step(2)

    def settle(self, timeout_s: float = 60) -> None:
        """Step until copies and storage are done as well; everything must add up then."""
        self.run_until(
            lambda: (
                not self.channel.frames
                and self._is_idle()
                and not self.tree.has_pending_transfers()
            ),
            timeout_s,
        )
        self.step(2)
        self.tree.check_invariants(0)

    def _is_idle(self) -> bool:
        return not self.scheduler.waiting_queue and self.scheduler._is_no_request()

    def control(self, message: ControlReqInput) -> Any:
        """Send a control request and return its reply."""
        self.replies.clear()
        self.send(message)
        self.run_until(lambda: bool(self.replies))
        return self.replies[-1]

    def answer(self, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> Answer:
        """Serve one request to its end."""
        rid = self.submit(prompt, max_new_tokens, **fields)
        self.run_until(lambda: self.finish(rid) is not None)
        return self.answer_of(rid)

    def control_clear(self) -> None:
        """Delete our pages from storage."""
        assert self.control(ClearHiCacheReqInput()).success

    # -- looking --------------------------------------------------------------------------------

    def answer_of(self, rid: str) -> Answer:
        """What became of a request that has ended."""
        finish = self.finish(rid)
        assert finish is not None, f"{rid} has not ended"
        last = self.outputs[rid][-1]
        return Answer(
            tokens=self.tokens(rid),
            cached_tokens=last.cached_tokens,
            sources=last.cached_tokens_details or {},
            finish=finish,
            spec=last.spec,
        )

    def state(self) -> dict[str, Any]:
        """Counts for messages."""
        return {
            "waiting": len(self.scheduler.waiting_queue),
            "running": len(self.scheduler.running_batch.reqs),
            "prefetches": len(self.tree.ongoing_prefetch),
            "backups": len(self.tree.ongoing_backup),
            "occupied": self.tree.prefetch_tokens_occupied,
        }

    def device_kv(self, prompt: Sequence[int], extra_key: str | None = None) -> PoolRows:
        """KV of the part of a prompt that the device has now, of every pool with these slots.

        Copies, by pool: [buffers (K and V), layers, tokens, heads, head_dim].
        """
        key = self.tree.make_key(list(prompt), extra_key)
        slots = self.tree.match_prefix(MatchPrefixParams(key=key)).device_indices
        return {
            str(entry.name): torch.stack([b[:, slots] for b in entry.device_pool.buffers()])
            for entry in self._device_pools()
            if entry not in self.tree.cache_controller.host_pools.own_slot_entries
        }

    def device_state(self, prompt: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """The recurrent state where a prompt's match on the device ends; there must be one.

        Returns the tokens before it and copies of its buffers, [layers, ...] each.
        """
        match = self.tree.match_prefix(MatchPrefixParams(key=self.tree.make_key(list(prompt))))
        entry = self.tree.cache_controller.host_pools.get(PoolName.MAMBA)
        node = match.last_device_node
        assert entry is not None and node is not None
        slot = node.data[ComponentType.MAMBA].value
        assert slot is not None and len(slot) == 1
        states = [buffer[:, int(slot)].clone() for buffer in entry.device_pool.buffers()]
        return len(match.device_indices), states

    def _device_pools(self) -> tuple[PoolEntry, ...]:
        return self.tree.cache_controller.host_pools.entries

    # -- making things happen -------------------------------------------------------------------

    def evict_device(self) -> None:
        """Take everything that is only cached off the device, and overwrite what it was."""
        self.settle()
        self.tree.evict(self.ready.max_total_num_tokens)
        self.settle()
        allocator = self.scheduler.token_to_kv_pool_allocator
        assert allocator.available_size() == allocator.size
        for entry in self._device_pools():
            # The dummy page is read by padding and must stay finite.
            for buffer in entry.device_pool.buffers():
                buffer[:, entry.host_pool.page_size :] = float("nan")

    def flush(self) -> None:
        """Empty device and host once storage has everything, and overwrite what the host had."""
        reply = self.control(FlushCacheReqInput(timeout_s=30.0))
        assert reply.success, reply.message
        for entry in self.tree.cache_controller.host_pools.entries:
            pool = entry.host_pool
            assert pool.available_size() == pool.size
            for start in range(0, pool.size, pool.page_size):
                for buffer in pool.page_buffers(start):
                    buffer.cast("B")[:] = b"\x7f" * buffer.nbytes
