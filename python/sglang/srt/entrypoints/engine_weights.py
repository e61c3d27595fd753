"""The offline engine's methods about weights and memory, under their documented names.

Owns nothing; `Engine` inherits it. The work is the tokenizer manager's. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from sglang.srt import utils
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")


class EngineWeights:
    """See the module docstring.

    Updates return (success, message); they raise RequestError only where no answer came: the engine
    is gone or too slow; and RuntimeError where they would wait for their own caller.
    """

    server_args: ServerArgs
    tokenizer_manager: TokenizerManager

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _run_alone(self, work: Coroutine[Any, Any, T]) -> T:
        """`_run` what waits for the requests in flight.

        Raises RuntimeError where these would wait for the call in turn.
        """
        raise NotImplementedError

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        """Join a trainer's process group; returns when all its members are there."""
        request = InitWeightsUpdateGroupReqInput(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        return self._run(self.tokenizer_manager.weights.init_group(request))

    def destroy_weights_update_group(self, group_name: str) -> tuple[bool, str]:
        """Leave a trainer's process group."""
        request = DestroyWeightsUpdateGroupReqInput(group_name=group_name)
        return self._run(self.tokenizer_manager.weights.destroy_group(request))

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        """Open a session: the updates until its end are parts of one."""
        request = BeginWeightUpdateReqInput(selector=selector)
        return self._run(self.tokenizer_manager.weights.begin(request))

    def end_weight_update(self) -> tuple[bool, str]:
        """Close the session."""
        return self._run(self.tokenizer_manager.weights.end(EndWeightUpdateReqInput()))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        """Receive the broadcasts of a trainer's group. `dtypes`: torch dtypes or their names."""
        request = UpdateWeightsFromDistributedReqInput(
            names=list(names),
            dtypes=[str(dtype) for dtype in dtypes],
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            flush_cache=flush_cache,
            load_format=load_format,
        )
        return self._run_alone(self.tokenizer_manager.weights.from_distributed(request))

    def update_weights_from_tensor(
        self,
        named_tensors: Sequence[Any],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        """Load (name, tensor) pairs.

        With load format "flattened_bucket" `named_tensors` is the list of serialized buckets, one
        a tensor-parallel rank, instead.
        """
        payloads = list(named_tensors)
        if load_format != "flattened_bucket":
            serializer = utils.MultiprocessingSerializer
            # Anew for each rank: the handle of a device tensor can be opened once.
            payloads = [serializer.serialize(payloads) for _ in range(self.server_args.tp_size)]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=flush_cache
        )
        return self._run_alone(self.tokenizer_manager.weights.from_tensor(request))

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None
    ) -> tuple[bool, str, int]:
        """Load a checkpoint; the third member counts paused requests and is 0."""
        request = UpdateWeightFromDiskReqInput(model_path=model_path, load_format=load_format)
        return self._run_alone(self.tokenizer_manager.update_weights_from_disk(request))

    def update_weights_from_ipc(
        self, zmq_handles: Mapping[str, str], flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Load what a checkpoint engine on this host sends."""
        request = UpdateWeightsFromIPCReqInput(
            zmq_handles=dict(zmq_handles), flush_cache=flush_cache
        )
        return self._run_alone(self.tokenizer_manager.weights.from_ipc(request))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """First rows of a tensor as nested lists. Raises RequestError for an unknown name."""
        request = GetWeightsByNameReqInput(name=name, truncate_size=truncate_size)
        return self._run(self.tokenizer_manager.weights.get_by_name(request))

    def get_weights_checksum(self) -> str:
        """One hex digest over the weights of all ranks."""
        result = self._run(self.tokenizer_manager.weights.check(CheckWeightsReqInput()))
        if not result.success:
            raise RuntimeError(result.message)
        checksum: str = result.replicas[0]["per_engine_checksum"]
        return checksum

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Give memory back until it is resumed. Raises RuntimeError where that cannot be done."""
        request = ReleaseMemoryOccupationReqInput(tags=None if tags is None else list(tags))
        self._run_alone(_as_runtime_error(self.tokenizer_manager.weights.release_memory, request))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again. Raises RuntimeError where that cannot be done."""
        request = ResumeMemoryOccupationReqInput(tags=None if tags is None else list(tags))
        self._run_alone(_as_runtime_error(self.tokenizer_manager.weights.resume_memory, request))


async def _as_runtime_error(call: Callable[[T], Coroutine[Any, Any, None]], request: T) -> None:
    try:
        await call(request)
    except RequestError as error:
        raise RuntimeError(error.message) from error
