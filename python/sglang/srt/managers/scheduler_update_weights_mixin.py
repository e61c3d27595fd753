"""The scheduler's side of weight updates: from messages to the weight updater, and the one order.

`apply_weight_update` is the only place where weights change under a running scheduler. The
handlers below it, under their documented names, translate messages. Owns nothing: the models are
the `WeightUpdater`'s, memory is the `MemorySaver`'s, caches and requests are the scheduler's.
Scheduler thread only; every rank handles the same messages in the same order.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from sglang.srt.constants import (
    GPU_MEMORY_ALL_TYPES,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
)
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    ControlReqInput,
    ControlReqOutput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    InitWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    WeightUpdateReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.managers.scheduler_reports import SchedulerReports
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.weight_updater import WeightUpdater, WeightUpdateResult
from sglang.srt.platforms import current_platform
from sglang.srt.utils.liveness import keep_beating

logger = logging.getLogger(__name__)

# Label of the metrics by message.
_SOURCES: dict[type[WeightUpdateReqInput], str] = {
    UpdateWeightFromDiskReqInput: "disk",
    UpdateWeightsFromDistributedReqInput: "distributed",
    UpdateWeightsFromTensorReqInput: "tensor",
    UpdateWeightsFromIPCReqInput: "ipc",
}

Handler = Callable[[Any], ControlReqOutput | None]  # None: the reply comes later


class WeightUpdateHost(Protocol):
    """What of the scheduler is used here."""

    tree_cache: BasePrefixCache
    memory_saver: MemorySaver
    reports: SchedulerReports
    # Tells the watchdog that the loop is alive.
    beat: Callable[[], None]

    @property
    def weight_updater(self) -> WeightUpdater: ...

    def settle_requests(self, abort_all: bool) -> str | None:
        """Read all results, abort all if asked; None when a flush is possible, else counts."""
        ...

    def flush_cache(self, empty_cache: bool = True) -> bool: ...

    def isolate_cached_kv(self) -> None:
        """Let the cache go on under the weights' present fingerprint."""
        ...

    def stamp_weight_version(self, version: str) -> None: ...

    def reply(self, recv: ControlReqInput, reply: ControlReqOutput) -> None: ...


def apply_weight_update(
    host: WeightUpdateHost,
    recv: WeightUpdateReqInput,
    load: Callable[[], WeightUpdateResult],
    discard: Callable[[], str | None] | None = None,
) -> WeightUpdateReqOutput:
    """Update the weights, or refuse with the weights untouched. Collective over the TP ranks.

    1. Can it be done? A flush was asked for and, after the abort that was asked for, requests are
       still there: refuse (`discard` takes what a trainer sends anyway, and says what went wrong).
    2. Nothing of the old weights goes to or comes from storage any more.
    3. and 4. `load` writes in place and brings the fingerprints up to date.
    5. Flush, which step 1 made sure to succeed; without a flush, isolate old KV by its fingerprint.
    6. Every rank is here before
    7. any rank replies.
    """
    updater = host.weight_updater
    busy = host.settle_requests(recv.abort_all_requests)
    refusal = host.memory_saver.why_no_weights()
    if recv.flush_cache and busy is not None:
        refusal = (
            "The weights were not changed: the cache cannot be flushed because requests are still "
            f"running or queued ({busy}). Retract or finish them first, or update without a flush."
        )
    if refusal is not None:
        logger.warning("%s refused: %s", type(recv).__name__, refusal)
        error = None if discard is None else discard()
        updater.wait_for_all_ranks()
        return WeightUpdateReqOutput(
            success=False,
            message=refusal if error is None else f"{refusal} {error}",
            weights_mixed=updater.weights_mixed,
            mixed_tensors=updater.describe_mixed(),
        )
    before = updater.kv_fingerprint()
    host.tree_cache.prepare_weights_update()
    start = time.perf_counter()
    result = load()
    if result.success:
        host.reports.on_weight_update(_SOURCES[type(recv)], time.perf_counter() - start)
    is_changed = updater.kv_fingerprint() != before
    if recv.flush_cache and (result.success or is_changed):
        # Received tensors leave gigabytes behind: the next update uses them again, unless asked.
        if not host.flush_cache(empty_cache=recv.torch_empty_cache):
            raise RuntimeError("the scheduler was idle before the update and is not after it")
    else:
        host.isolate_cached_kv()
        if recv.torch_empty_cache:
            current_platform().empty_cache()
    if result.success and recv.weight_version is not None:
        host.stamp_weight_version(recv.weight_version)
    updater.wait_for_all_ranks()
    return _reply_of_update(result, recv.weight_version)


def _reply(result: WeightUpdateResult, version: str | None = None) -> WeightUpdateReqOutput:
    message = result.message
    if result.success and version is not None:
        message = f"{message.removesuffix('.')}. Weight version updated to {version}."
    return WeightUpdateReqOutput(
        success=result.success,
        message=message,
        weights_mixed=result.weights_mixed,
        mixed_tensors=result.mixed_tensors,
    )


def _reply_of_update(result: WeightUpdateResult, version: str | None) -> WeightUpdateReqOutput:
    """The reply of what may leave the weights mixed: it says so."""
    reply = _reply(result, version)
    if result.weights_mixed:
        reply.message = (
            f"{reply.message.removesuffix('.')}. The weights are mixed until all have come: "
            f"{result.mixed_tensors}."
        )
    return reply


class SchedulerUpdateWeightsMixin:
    """Handlers of weight messages; see `WeightUpdateHost` for what they read."""

    def weight_handlers(self: WeightUpdateHost) -> dict[type, Handler]:
        """Message type -> handler that returns the reply."""
        mixin = SchedulerUpdateWeightsMixin
        table: dict[type, Callable[[WeightUpdateHost, Any], ControlReqOutput | None]] = {
            InitWeightsUpdateGroupReqInput: mixin.init_weights_update_group,
            DestroyWeightsUpdateGroupReqInput: mixin.destroy_weights_update_group,
            BeginWeightUpdateReqInput: mixin.begin_weight_update,
            EndWeightUpdateReqInput: mixin.end_weight_update,
            UpdateWeightFromDiskReqInput: mixin.update_weights_from_disk,
            UpdateWeightsFromDistributedReqInput: mixin.update_weights_from_distributed,
            UpdateWeightsFromTensorReqInput: mixin.update_weights_from_tensor,
            UpdateWeightsFromIPCReqInput: mixin.update_weights_from_ipc,
            GetWeightsByNameReqInput: mixin.get_weights_by_name,
            CheckWeightsReqInput: mixin.weights_checker,
            ReleaseMemoryOccupationReqInput: mixin.release_memory_occupation,
            ResumeMemoryOccupationReqInput: mixin.resume_memory_occupation,
        }
        return {kind: _bind(self, handler) for kind, handler in table.items()}

    def init_weights_update_group(
        self: WeightUpdateHost, recv: InitWeightsUpdateGroupReqInput
    ) -> None:
        """Join a trainer's group beside the loop; the reply comes when all members are there."""
        self.weight_updater.init_group(
            recv.master_address,
            recv.master_port,
            recv.rank_offset,
            recv.world_size,
            recv.group_name,
            recv.backend,
            on_end=lambda result: self.reply(recv, _reply(result)),
        )

    def destroy_weights_update_group(
        self: WeightUpdateHost, recv: DestroyWeightsUpdateGroupReqInput
    ) -> WeightUpdateReqOutput:
        """Leave a trainer's group."""
        return _reply(self.weight_updater.destroy_group(recv.group_name))

    def begin_weight_update(
        self: WeightUpdateHost, recv: BeginWeightUpdateReqInput
    ) -> WeightUpdateReqOutput:
        """Open a session."""
        return _reply(self.weight_updater.begin(recv.selector))

    def end_weight_update(
        self: WeightUpdateHost, recv: EndWeightUpdateReqInput
    ) -> WeightUpdateReqOutput:
        """Close the session."""
        return _reply(self.weight_updater.end())

    def update_weights_from_disk(
        self: WeightUpdateHost, recv: UpdateWeightFromDiskReqInput
    ) -> WeightUpdateReqOutput:
        """Load a checkpoint."""
        updater = self.weight_updater
        return apply_weight_update(
            self, recv, lambda: updater.update_from_disk(recv.model_path, recv.load_format)
        )

    def update_weights_from_distributed(
        self: WeightUpdateHost, recv: UpdateWeightsFromDistributedReqInput
    ) -> WeightUpdateReqOutput:
        """Receive the broadcasts of a trainer's group."""
        updater = self.weight_updater
        what = (recv.names, recv.dtypes, recv.shapes, recv.group_name, recv.load_format)
        return apply_weight_update(
            self,
            recv,
            lambda: updater.update_from_distributed(*what, recv.selector),
            # The trainer broadcasts whatever the answer: a broadcast that nobody takes would be
            # taken for the next update's.
            discard=lambda: updater.discard_distributed(*what),
        )

    def update_weights_from_tensor(
        self: WeightUpdateHost, recv: UpdateWeightsFromTensorReqInput
    ) -> WeightUpdateReqOutput:
        """Load serialized tensors."""
        updater = self.weight_updater
        return apply_weight_update(
            self,
            recv,
            lambda: updater.update_from_tensor(
                recv.serialized_named_tensors, recv.load_format, recv.selector
            ),
        )

    def update_weights_from_ipc(
        self: WeightUpdateHost, recv: UpdateWeightsFromIPCReqInput
    ) -> WeightUpdateReqOutput:
        """Load what a checkpoint engine sends."""
        updater = self.weight_updater
        return apply_weight_update(self, recv, lambda: updater.update_from_ipc(recv.zmq_handles))

    def update_weight_version(
        self: WeightUpdateHost, recv: UpdateWeightVersionReqInput
    ) -> UpdateWeightVersionReqOutput:
        """Put another label on the weights in use."""
        self.settle_requests(recv.abort_all_requests)
        self.stamp_weight_version(recv.new_version)
        return UpdateWeightVersionReqOutput(message=f"Weight version updated to {recv.new_version}")

    def get_weights_by_name(
        self: WeightUpdateHost, recv: GetWeightsByNameReqInput
    ) -> GetWeightsByNameReqOutput:
        """The first rows of a tensor of the target."""
        refusal = self.memory_saver.why_no_weights()
        if refusal is not None:
            return GetWeightsByNameReqOutput(success=False, message=refusal)
        rows = self.weight_updater.get_weights_by_name(recv.name, recv.truncate_size)
        if rows is None:
            return GetWeightsByNameReqOutput(
                success=False, message=f"Get parameter by name failed: {recv.name}"
            )
        return GetWeightsByNameReqOutput(parameter=rows)

    def weights_checker(
        self: WeightUpdateHost, recv: CheckWeightsReqInput
    ) -> CheckWeightsReqOutput:
        """Checksums, snapshot, reset and compare."""
        refusal = self.memory_saver.why_no_weights()
        if refusal is not None:
            updater = self.weight_updater
            return CheckWeightsReqOutput(
                success=False,
                message=refusal,
                weights_mixed=updater.weights_mixed,
                mixed_tensors=updater.describe_mixed(),
            )
        if recv.action == "reset_tensors":
            self.tree_cache.prepare_weights_update()
        result = self.weight_updater.check_weights(
            recv.action,
            allow_quant_error=recv.allow_quant_error,
            skip_tensor_list=recv.skip_tensor_list,
            selector=recv.selector,
        )
        if recv.action == "reset_tensors":
            self.isolate_cached_kv()
        reply = _reply(result)
        checksum = None if result.checksum is None else dict(result.checksum)
        return CheckWeightsReqOutput(
            success=reply.success,
            message=reply.message,
            weights_mixed=reply.weights_mixed,
            mixed_tensors=reply.mixed_tensors,
            checksum=checksum,
        )

    def release_memory_occupation(
        self: WeightUpdateHost, recv: ReleaseMemoryOccupationReqInput
    ) -> WeightUpdateReqOutput:
        """Give memory back, and flush the caches where KV goes. Refused while requests run."""
        return _memory_reply(self, _release(self, recv.tags))

    def resume_memory_occupation(
        self: WeightUpdateHost, recv: ResumeMemoryOccupationReqInput
    ) -> WeightUpdateReqOutput:
        """Take memory again; weights without a host copy are to be sent anew."""
        return _memory_reply(self, _resume(self, recv.tags))


def _release(host: WeightUpdateHost, tags: list[str] | None) -> str | None:
    """Release on every rank; None, or why not. Collective."""
    busy = host.settle_requests(False)
    if busy is not None:
        return f"Memory cannot be released while requests are running or queued ({busy})."
    error = host.weight_updater.agree(lambda: host.memory_saver.check_release(tags))
    if error is not None:
        return error
    if GPU_MEMORY_TYPE_KV_CACHE in (tags or GPU_MEMORY_ALL_TYPES) and not host.flush_cache():
        raise RuntimeError("the scheduler was idle before the release and is not any more")
    # All ranks release or none: what may fail comes first.
    error = host.weight_updater.agree(lambda: host.memory_saver.make_copies(tags))
    if error is not None:
        host.memory_saver.drop_copies()
        return error
    return host.weight_updater.agree(lambda: host.memory_saver.release(tags))


def _resume(host: WeightUpdateHost, tags: list[str] | None) -> str | None:
    """Resume on every rank, or on none; None, or why not. Collective."""
    saver, updater = host.memory_saver, host.weight_updater
    resumed: set[str] = set()
    error = updater.agree(lambda: resumed.update(saver.resume(tags)))
    if error is not None:
        if resumed:  # another rank could not
            saver.release(resumed)
        return error
    if GPU_MEMORY_TYPE_WEIGHTS in resumed:
        updater.weights_lost(saver.keeps_weights_of)
        host.isolate_cached_kv()
    return None


def _memory_reply(host: WeightUpdateHost, error: str | None) -> WeightUpdateReqOutput:
    host.weight_updater.wait_for_all_ranks()
    return WeightUpdateReqOutput(
        success=error is None,
        message=error or "",
        weights_mixed=host.weight_updater.weights_mixed,
        mixed_tensors=host.weight_updater.describe_mixed(),
        released_tags=sorted(host.memory_saver.released),
    )


def _bind(
    host: WeightUpdateHost, handler: Callable[[WeightUpdateHost, Any], ControlReqOutput | None]
) -> Handler:
    def handle(recv: Any) -> ControlReqOutput | None:
        # Broadcasts and files may take longer than a loop may stand still.
        with keep_beating(host.beat, envs.SGLANG_CONTROL_TIMEOUT.get()):
            return handler(host, recv)

    return handle
