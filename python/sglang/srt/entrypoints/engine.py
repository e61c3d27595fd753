"""`Engine`: a server without HTTP, inside the caller's process.

Schedulers and the detokenizer are child processes as in a server; the tokenizer manager lives
here, on the engine's own asyncio loop (`engine.loop`), which runs only while a call is waited
for. Synchronous calls are serialised by a lock, so any thread may make them; inside a running
loop (a notebook) they run the engine's loop on a helper thread. The `async_` calls run on the
caller's loop. One loop at a time reads the answers: no synchronous call may be made while another
thread's loop has `async_` calls in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from sglang.srt.entrypoints.engine_weights import EngineWeights
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.entrypoints.front import (
    Parts,
    embedded_parts,
    init_tokenizer_manager,
    run_detokenizer_process,
    run_scheduler_process,
)
from sglang.srt.entrypoints.launch import Launched, start_subprocesses
from sglang.srt.entrypoints.server_info import get_model_info, get_server_info
from sglang.srt.managers.io_struct import FlushCacheReqOutput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.logging import configure_logger

T = TypeVar("T")


def _set_envs_and_config(server_args: ServerArgs) -> None:
    """What `Engine._launch_subprocesses` does to its process. Embedding programs replace it."""
    configure_logger(server_args.log_level)


class Engine(EngineWeights, EngineBase):
    """See the module docstring. Raises LaunchError when a child process does not start."""

    def __init__(self, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        """Start from `server_args`, or from its fields as keywords (log level: error)."""
        if server_args is None:
            server_args = ServerArgs.from_kwargs(**{"log_level": "error", **kwargs})
        elif kwargs:
            raise ValueError("give either server_args or its fields as keywords, not both")
        self.server_args = server_args
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._launched: Launched = start_subprocesses(
            server_args, exit_on_failure=False
        ).wait_ready()
        self.port_args = self._launched.port_args
        self.scheduler_info = self._launched.scheduler_infos[0]
        try:
            self.tokenizer_manager = TokenizerManager(
                server_args, self.port_args, self._launched.scheduler_infos
            )
        except BaseException:
            self._launched.shutdown()
            self.loop.close()
            raise
        self.tokenizer_manager.engine_pids = [
            process.pid for process in self._launched.processes if process.pid is not None
        ]
        self.tokenizer_manager.server_status = ServerStatus.Up
        self._launched.watchdog.add_failure_callback(self._on_failure)

    @classmethod
    def _launch_subprocesses(
        cls,
        server_args: ServerArgs,
        init_tokenizer_manager_func: Callable[..., Any] = init_tokenizer_manager,
        run_scheduler_process_func: Callable[..., Any] = run_scheduler_process,
        run_detokenizer_process_func: Callable[..., Any] = run_detokenizer_process,
        port_args: PortArgs | None = None,
    ) -> Parts:
        """Start a server's processes for a program that serves `http_server.app` itself.

        Documented name and arguments. The functions must be those of this module: children are
        started by name. Raises ValueError for others, LaunchError when a child does not start. The
        children end with this process; one that dies makes every later request fail.
        """
        own = (init_tokenizer_manager, run_scheduler_process, run_detokenizer_process)
        given = (
            init_tokenizer_manager_func,
            run_scheduler_process_func,
            run_detokenizer_process_func,
        )
        if given != own:
            raise ValueError("the functions of the server's processes cannot be replaced")
        _set_envs_and_config(server_args)
        launching = start_subprocesses(server_args, port_args, exit_on_failure=False)
        launched = launching.wait_ready()
        try:
            return embedded_parts(server_args, launched)
        except BaseException:
            launched.shutdown()
            raise

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str | None] | None = None,
        return_hidden_states: bool | list[bool | str] = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        data_parallel_rank: int | None = None,
        external_trace_header: dict[str, str] | None = None,
        rid: str | list[str] | None = None,
        session_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | None = None,
        extra_key: str | list[str | None] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]] | Iterator[dict[str, Any]]:
        """Generate for one prompt (a dict) or a batch (a list of dicts).

        The parameters are the fields of `GenerateReqInput`; `stream` gives an iterator of
        cumulative dicts instead. Raises RequestError on bad values.
        """
        request = _request(locals())
        if stream:
            return self._iterate(request)
        return self._run(self._generate_once(request))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        audio_data: Any = None,
        video_data: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str | None] | None = None,
        custom_logit_processor: str | list[str | None] | None = None,
        return_hidden_states: bool | list[bool | str] = False,
        return_routed_experts: bool = False,
        routed_experts_start_len: int = 0,
        stream: bool = False,
        bootstrap_host: Any = None,
        bootstrap_port: Any = None,
        bootstrap_room: Any = None,
        routed_dp_rank: int | None = None,
        data_parallel_rank: int | None = None,
        external_trace_header: dict[str, str] | None = None,
        rid: str | list[str] | None = None,
        session_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        priority: int | None = None,
        session_id: str | None = None,
        *,
        cache_salt: str | None = None,
        extra_key: str | list[str | None] | None = None,
    ) -> dict[str, Any] | list[dict[str, Any]] | AsyncIterator[dict[str, Any]]:
        """As `generate`, on the caller's loop; `stream` gives an asynchronous generator."""
        request = _request(locals())
        if stream:
            return self.tokenizer_manager.generate_request(request, None)
        return await self._generate_once(request)

    async def _generate_once(self, request: GenerateReqInput) -> Any:
        return await anext(self.tokenizer_manager.generate_request(request, None))

    def _iterate(self, request: GenerateReqInput) -> Iterator[dict[str, Any]]:
        generator = self.tokenizer_manager.generate_request(request, None)
        try:
            while True:
                try:
                    yield self._run(_next(generator))
                except StopAsyncIteration:
                    return
        finally:
            self._leave(generator)

    def _leave(self, generator: AsyncGenerator[Any, None]) -> None:
        """Abort the request of a stream that nobody reads any more.

        That may be found out by the garbage collector in the middle of another call, where nothing
        can be waited for: then the loop does it next.
        """
        if self.loop.is_closed():
            return
        if self._lock.acquire(blocking=False):
            try:
                self._drive(generator.aclose())
            finally:
                self._lock.release()
        else:
            asyncio.run_coroutine_threadsafe(generator.aclose(), self.loop)

    # -- control --------------------------------------------------------------------------------

    def flush_cache(self) -> FlushCacheReqOutput:
        """Forget all cached KV, if nothing is running; see `.success` of the answer."""
        return self._run(self.tokenizer_manager.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """As GET /server_info."""
        return self._run(get_server_info(self.tokenizer_manager))

    def get_model_info(self) -> dict[str, Any]:
        """As GET /model_info."""
        return get_model_info(self.tokenizer_manager)

    def start_profile(self, **options: Any) -> None:
        """Start torch's profiler in the schedulers; options are fields of `ProfileReqInput`."""
        self._run(self.tokenizer_manager.start_profile(**options))

    def stop_profile(self) -> None:
        """Stop the profiler and write its files."""
        self._run(self.tokenizer_manager.stop_profile())

    def freeze_gc(self) -> None:
        """Take all present objects of the schedulers out of the garbage collector's sight."""
        self._run(self.tokenizer_manager.control.freeze_gc())

    def shutdown(self) -> None:
        """End the child processes. The engine cannot be used afterwards. Harmless when repeated."""
        if self.loop.is_closed():
            return
        self._launched.shutdown()
        with self._lock:
            self.tokenizer_manager.close()
            # Lets cancelled tasks end, so that the interpreter does not complain about them.
            self._drive(asyncio.sleep(0))
            self.loop.close()

    # -- mechanism ------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the engine's loop until `work` is done, from any thread, also inside a loop."""
        if self.loop.is_closed():
            work.close()
            raise RuntimeError("the engine was shut down")
        with self._lock:
            return self._drive(work)

    def _run_alone(self, work: Coroutine[Any, Any, T]) -> T:
        """See `EngineWeights`: `_run`, but where nobody could finish the requests in flight.

        Those are streams that are not read now, and requests of the loop that this call stops.
        """
        with self._lock:
            is_closed = self.loop.is_closed()
            if not is_closed and not self.tokenizer_manager.would_wait_for_itself():
                return self._drive(work)
        work.close()
        raise RuntimeError(
            "the engine was shut down"
            if is_closed
            else "requests in flight would wait for this call, which waits for them: read streams "
            "to their end, and await the requests of the running event loop"
        )

    def _drive(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self.loop.run_until_complete(work)
        return _run_on_thread(self.loop, work)

    def _on_failure(self, reason: str) -> None:
        """In the watchdog's thread: fail what waits now, or at the next call."""
        manager = self.tokenizer_manager
        for loop in {self.loop, manager.event_loop or self.loop}:
            with suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(manager.mark_dead, reason)


async def _next(generator: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return await anext(generator)


def _request(parameters: dict[str, Any]) -> GenerateReqInput:
    """The message made of the parameters of `generate`."""
    values = {name: value for name, value in parameters.items() if name not in ("self", "prompt")}
    return GenerateReqInput(text=parameters["prompt"], **values)


def _run_on_thread(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run `loop` on another thread, because this one already runs a loop."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(loop.run_until_complete(work))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="engine-loop")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
