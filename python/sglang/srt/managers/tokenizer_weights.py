"""The front's side of weights and memory: which updates may start when, and what they change here.

`TokenizerWeights` owns what clients are told of the weights: version, model path, whether they are
mixed, which memory is released. The schedulers do the work, and what they say of it holds, also
where it comes after a call's time-out. Every method returns once all replicas have answered.
Event loop thread only.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    ControlReqInput,
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
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.tokenizer_control import (
    Adopt,
    TokenizerControl,
    merge_messages,
    require_success,
)

logger = logging.getLogger(__name__)

Guard = Callable[[bool], AbstractAsyncContextManager[None]]


class WeightResult(NamedTuple):
    """Outcome of a call about weights, over all replicas."""

    success: bool
    message: str


@dataclass(slots=True)
class WeightState:
    """What clients are told."""

    version: str
    model_path: str
    served_model_name: str
    is_mixed: bool = False  # tensors of two versions: not ready until a complete update
    mixed_tensors: str = ""  # which
    released: frozenset[str] = field(default_factory=frozenset)  # tags of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Outcome of the weights checker. `replicas`: one checksum record a replica."""

    success: bool
    message: str
    replicas: list[dict[str, Any]]


class TokenizerWeights:
    """See the module docstring."""

    def __init__(
        self,
        control: TokenizerControl,
        state: WeightState,
        *,
        dp_size: int,
        guard: Guard,
        on_memory_change: Callable[[], None],
    ) -> None:
        """`guard(abort_all)`: around an update, see `TokenizerManager.weight_update_guard`."""
        self.state = state
        self._control = control
        self._dp_size = dp_size
        self._guard = guard
        self._on_memory_change = on_memory_change
        self._num_running = 0

    @property
    def is_busy(self) -> bool:
        """Whether the schedulers are at a call of this class, and may answer nothing else."""
        return self._num_running > 0

    # -- groups and sessions ----------------------------------------------------------------------

    async def init_group(self, obj: InitWeightsUpdateGroupReqInput) -> WeightResult:
        """Join a trainer's group; returns when all its members are there. Requests go on."""
        if self._dp_size > 1:
            return _one_replica_only("init_weights_update_group")
        limit_s = envs.SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT.get() + envs.SGLANG_CONTROL_TIMEOUT.get()
        return _result(await self._control.request(obj, limit_s, adopt=self._note))

    async def destroy_group(self, obj: DestroyWeightsUpdateGroupReqInput) -> WeightResult:
        return await self._call(obj)

    async def begin(self, obj: BeginWeightUpdateReqInput) -> WeightResult:
        return await self._call(obj)

    async def end(self, obj: EndWeightUpdateReqInput) -> WeightResult:
        return await self._call(obj)

    # -- updates ----------------------------------------------------------------------------------

    async def from_tensor(self, obj: UpdateWeightsFromTensorReqInput) -> WeightResult:
        """Load serialized tensors, one entry a tensor-parallel rank."""
        return await self._update(obj)

    async def from_distributed(self, obj: UpdateWeightsFromDistributedReqInput) -> WeightResult:
        """Receive the broadcasts of a trainer's group."""
        if self._dp_size > 1:
            return _one_replica_only("update_weights_from_distributed")
        return await self._update(obj)

    async def from_ipc(self, obj: UpdateWeightsFromIPCReqInput) -> WeightResult:
        """Load what a checkpoint engine on this host sends."""
        return await self._update(obj)

    async def from_disk(self, obj: UpdateWeightFromDiskReqInput) -> WeightResult:
        """Load a checkpoint; its path becomes the model's path and name."""
        return await self._update(obj, model_path=obj.model_path)

    async def set_version(self, obj: UpdateWeightVersionReqInput) -> None:
        """Put another label on the weights in use. Raises RequestError."""

        def adopt(replies: list[UpdateWeightVersionReqOutput]) -> None:
            if all(reply.success for reply in replies):
                self.state.version = obj.new_version

        require_success(await self._control.request(obj, adopt=adopt), "Weight version update")

    async def _update(
        self, obj: WeightUpdateReqInput, model_path: str | None = None
    ) -> WeightResult:
        def adopt(replies: list[WeightUpdateReqOutput]) -> None:
            self._note(replies)
            if not all(reply.success for reply in replies):
                return
            if obj.weight_version is not None:
                self.state.version = obj.weight_version
            if model_path is not None:
                self.state.model_path = self.state.served_model_name = model_path

        async with self._guard(obj.abort_all_requests):
            return await self._call(obj, adopt)

    async def _call(self, obj: ControlReqInput, adopt: Adopt | None = None) -> WeightResult:
        with self._running():
            return _result(await self._control.request(obj, adopt=adopt or self._note))

    def _note(self, replies: Iterable[WeightUpdateReqOutput]) -> None:
        was_mixed = self.state.is_mixed
        mixed = [reply for reply in replies if reply.weights_mixed]
        self.state.is_mixed = bool(mixed)
        self.state.mixed_tensors = mixed[0].mixed_tensors if mixed else ""
        if mixed and not was_mixed:
            logger.warning(
                "The weights are mixed, and health is 503, until all have come: %s",
                self.state.mixed_tensors,
            )
        elif was_mixed and not mixed:
            logger.info("The weights are of one version again")
        tags = [reply.released_tags for reply in replies if reply.released_tags is not None]
        if tags:
            self.state.released = frozenset(tag for each in tags for tag in each)
            self._on_memory_change()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    # -- reading ----------------------------------------------------------------------------------

    async def get_by_name(self, obj: GetWeightsByNameReqInput) -> list[Any]:
        """First rows of a tensor; a list of them, one a replica, where there are several.

        Raises RequestError for an unknown name.
        """
        if obj.truncate_size < 0:
            raise RequestError(f"truncate_size must be >= 0, got {obj.truncate_size}.")
        replies: list[GetWeightsByNameReqOutput] = await self._control.request(obj)
        require_success(replies, "Get parameter by name")
        rows = [reply.parameter for reply in replies]
        return rows if self._dp_size > 1 else rows[0] or []

    async def check(self, obj: CheckWeightsReqInput) -> CheckResult:
        """Checksum, snapshot, reset or compare; a reset waits for running requests."""
        async with self._guard_reset(obj):
            with self._running():
                replies: list[CheckWeightsReqOutput] = await self._control.request(
                    obj, adopt=self._note
                )
        success = all(reply.success for reply in replies)
        said = [reply for reply in replies if reply.success == success]
        return CheckResult(
            success=success,
            message=merge_messages(said),
            replicas=[reply.checksum for reply in replies if reply.checksum is not None],
        )

    @asynccontextmanager
    async def _guard_reset(self, obj: CheckWeightsReqInput) -> AsyncIterator[None]:
        if obj.action != "reset_tensors":
            yield
            return
        async with self._guard(False):
            yield

    # -- memory -----------------------------------------------------------------------------------

    async def release_memory(self, obj: ReleaseMemoryOccupationReqInput) -> None:
        """Give memory back once nothing runs. Requests are held until it is resumed.

        Raises RequestError, with nothing changed, where that cannot be done.
        """
        await self._change_memory(obj)

    async def resume_memory(self, obj: ResumeMemoryOccupationReqInput) -> None:
        """Take memory again. Raises RequestError, with nothing changed, where it cannot be done."""
        await self._change_memory(obj)

    async def _change_memory(self, obj: ControlReqInput) -> None:
        async with self._guard(False):
            result = await self._call(obj)
        if not result.success:
            raise RequestError(result.message)


def _result(replies: list[WeightUpdateReqOutput]) -> WeightResult:
    success = all(reply.success for reply in replies)
    said = [reply for reply in replies if reply.success == success]
    return WeightResult(success, merge_messages(said))


def _one_replica_only(what: str) -> WeightResult:
    return WeightResult(False, f"{what} needs --dp-size 1: replicas would join as the same ranks")
