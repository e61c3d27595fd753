"""The front's engine client: tokenises, sends requests to the schedulers, follows their answers.

`TokenizerManager` owns the table of live requests (`rid_to_state`), the pause state, the
reader/writer lock of weight updates and the loop that receives the engine's messages. Control
requests that carry no such state are in `TokenizerControl` (`.control`), request splitting in
`request_normalizer`, checks and tokens in `tokenizer_prompts`, the choice of a replica in
`tokenizer_dispatch`, rendering in `request_state`. It runs on one asyncio loop: the HTTP server's
or the offline Engine's.

A request: split and checked -> registered -> tokenised -> held while the engine is paused -> sent
(reader lock held from here on) -> answers absorbed -> last answer rendered.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

from sglang.srt.configs.served_tokenizer import load_tokenizer
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.environ import envs
from sglang.srt.managers.client_watch import DISCONNECT_POLL_S, ClientConnection, ClientWatch
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchStrOutput,
    BeginWeightUpdateReqInput,
    ConfigureLoggingReq,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlReqOutput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqOutput,
    GenerateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    ProfileReqInput,
    ReleaseMemoryOccupationReqInput,
    RequestOutput,
    ResumeMemoryOccupationReqInput,
    SchedulerReady,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.ipc import AsyncPullChannel
from sglang.srt.managers.prefix_warm_up import make_warm_ups
from sglang.srt.managers.request_errors import EngineUnavailableError, RequestError
from sglang.srt.managers.request_logger import RequestLogger
from sglang.srt.managers.request_normalizer import (
    SplitRequest,
    parse_preferred,
    split_request,
)
from sglang.srt.managers.request_state import OutputListener, Phase, ReqState, warn_of_nan
from sglang.srt.managers.tokenizer_control import TokenizerControl
from sglang.srt.managers.tokenizer_dispatch import Dispatcher
from sglang.srt.managers.tokenizer_prompts import PromptPreparer
from sglang.srt.managers.tokenizer_weights import TokenizerWeights, WeightResult, WeightState
from sglang.srt.observability.metrics import TokenizerMetrics
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.async_lock import Mutex, RWLock, Waiters

logger = logging.getLogger(__name__)

# How often an abort-mode pause repeats its abort until nothing is in flight, seconds.
_PAUSE_ABORT_PERIOD_S = 1.0
_PAUSE_MODES = ("abort", "retract", "in_place")


SHUTTING_DOWN = "The server is shutting down."
_ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


class ServerStatus(Enum):
    """What the health endpoints report."""

    Up = "Up"
    Starting = "Starting"
    UnHealthy = "UnHealthy"


class TokenizerManager:
    """See the module docstring.

    Attributes used by others: `server_args`, `model_path`, `served_model_name`, `weight_version`,
    `tokenizer` (None with --skip-tokenizer-init), `context_len`, `vocab_size`, `scheduler_infos`,
    `rid_to_state`, `server_status`, `is_pause`, `control`, `last_receive_time` (monotonic),
    `engine_pids` (set by whoever started the children; empty where nobody told).
    """

    def __init__(
        self, server_args: ServerArgs, port_args: PortArgs, scheduler_infos: list[SchedulerReady]
    ) -> None:
        self.server_args = server_args
        self.scheduler_infos = scheduler_infos
        info = scheduler_infos[0]
        self.context_len = info.context_len
        self.vocab_size = info.vocab_size
        self.tokenizer = load_tokenizer(server_args)
        self._prompts = PromptPreparer(server_args, info, self.tokenizer)
        self.preferred_sampling = parse_preferred(
            server_args.preferred_sampling_params, info.vocab_size
        )

        self.server_status = ServerStatus.Starting
        self.gracefully_exit = False
        self.engine_pids: list[int] = []
        self.dead_message: str | None = None  # why the engine can no longer answer
        self.rid_to_state: dict[str, ReqState] = {}
        self.is_pause = False
        self._pause_mutex = Mutex()  # of those who pause, continue, or update meanwhile
        self._hold_changed = Waiters()  # requests that are held here
        self._pause_mode: str | None = None
        self._num_pauses = 0  # that were asked for
        self._pause_timer: asyncio.TimerHandle | None = None
        self.model_update_lock = RWLock()
        self.last_receive_time = time.monotonic()
        self._received = Waiters()  # for any message of the engine, or its death
        self.request_logger = RequestLogger(
            server_args.log_requests,
            server_args.log_requests_level,
            server_args.log_requests_format,
        )
        # Set by the server when it reports metrics.
        self.metrics: TokenizerMetrics | None = None

        self._pull = AsyncPullChannel(port_args.tokenizer_ipc_name)
        self._dispatcher = Dispatcher(
            port_args.scheduler_input_ipc_names, skip_tokenizer=self.tokenizer is None
        )
        self.control = TokenizerControl(self._send_to_all, self._dispatcher.dp_size)
        self.weights = TokenizerWeights(
            self.control,
            WeightState(
                version=server_args.weight_version,
                model_path=server_args.model_path,
                served_model_name=server_args.served_model_name or server_args.model_path,
            ),
            dp_size=self._dispatcher.dp_size,
            guard=self.weight_update_guard,
            on_memory_change=self._hold_changed.wake_all,
        )
        self._handle_loops: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self.event_loop: asyncio.AbstractEventLoop | None = None  # the one that it runs on
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def model_path(self) -> str:
        return self.weights.state.model_path

    @property
    def served_model_name(self) -> str:
        return self.weights.state.served_model_name

    @property
    def weight_version(self) -> str:
        return self.weights.state.version

    @property
    def is_holding(self) -> bool:
        """Whether new requests wait here: paused, or memory that they need is released."""
        return self.is_pause or bool(self.weights.state.released)

    # -- generation -----------------------------------------------------------------------------

    async def generate_request(
        self,
        obj: GenerateReqInput,
        request: ClientConnection | None = None,
        *,
        incremental: bool | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Serve one client request.

        Not streaming: yields once, a dict or (batch, n > 1) a list of dicts. Streaming: yields a
        dict per chunk with `index` in batches; cumulative, or only what is new if `incremental`
        (None: as `--incremental-streaming-output` says).
        Leaving the generator early aborts what is still running. Raises RequestError.
        """
        created = time.time()
        self.auto_create_handle_loop()
        self._check_alive()
        split = split_request(obj, self.preferred_sampling)
        self._prompts.check(split.singles)
        self.request_logger.log_received(obj)
        states = self._register(obj, split, created)
        watch = ClientWatch(request)
        is_holding_lock = False
        answers: list[dict[str, Any]] = []
        try:
            await self._prompts.tokenize(states)
            await self._acquire_dispatch(states, watch)
            is_holding_lock = True
            if split.num_samples > 1:
                await self._warm_prefixes(states, split.num_samples, watch)
                if self.is_holding:
                    # Not with the lock in hand: whoever ends the hold may have to write.
                    is_holding_lock = False
                    self.model_update_lock.release_reader()
                    await self._acquire_dispatch(states, watch)
                    is_holding_lock = True
            self._dispatcher.dispatch(states, split.num_samples, stream=obj.stream)
            if obj.stream:
                if incremental is None:
                    incremental = self.server_args.incremental_streaming_output
                async for chunk in self._stream(states, split.is_list, watch, incremental):
                    yield chunk
            else:
                answers = await self._wait_all(states, watch)
        finally:
            if is_holding_lock:
                self.model_update_lock.release_reader()
            left = self._unregister(states)
            if self.metrics is not None and obj.log_metrics:
                self.metrics.observe_left(left, obj.stream, obj.custom_labels)
        # Behind the answer, and before anything else that could look at the metrics.
        asyncio.get_running_loop().call_soon(self._account, obj, states)
        if not obj.stream:
            yield answers if split.is_list else answers[0]

    def _check_alive(self) -> None:
        if self.dead_message is not None:
            raise EngineUnavailableError(self.dead_message)
        if self.gracefully_exit:
            raise EngineUnavailableError(SHUTTING_DOWN)

    def check_text(self, text: str) -> None:
        """Refuse a prompt that cannot fit the context, without tokenising it."""
        self._prompts.check_text(text)

    async def encode(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts; long ones on a thread pool. Raises RequestError."""
        return await self._prompts.encode(texts, add_special_tokens)

    def _register(
        self, obj: GenerateReqInput, split: SplitRequest, created: float
    ) -> list[ReqState]:
        """Enter all requests in the table, or none.

        Raises RequestError on a duplicate id, or where a pause holds as many as may be queued.
        """
        for single in split.singles:
            if single.rid in self.rid_to_state:
                raise RequestError(f"Duplicate request ID detected: {single.rid}")
        limit = self.server_args.max_queued_requests
        if self.is_holding and limit is not None:
            if len(self._held()) + len(split.singles) > limit:
                raise RequestError(
                    "The request queue is full.", status_code=503, err_type="ServiceUnavailable"
                )
        text_of = None
        if obj.return_text_in_logprobs and self.tokenizer is not None:
            text_of = self.tokenizer.token_text
        listener = OutputListener()
        states = [
            ReqState(
                single,
                listener,
                created=created,
                text_of=text_of,
                return_prompt_token_ids=obj.return_prompt_token_ids,
            )
            for single in split.singles
        ]
        self.rid_to_state.update((state.rid, state) for state in states)
        return states

    def _held(self) -> list[ReqState]:
        """Client requests that no scheduler knows yet: a pause holds them, or their tokens."""
        return [
            state
            for state in self.rid_to_state.values()
            if state.phase is Phase.HELD and not state.rid.startswith(HEALTH_CHECK_RID_PREFIX)
        ]

    def show_held(self) -> None:
        """Bring the gauges of what waits here, unknown to the schedulers, up to date."""
        if self.metrics is not None:
            self.metrics.show_held(len(self._held()), is_paused=self.is_holding)

    def _unregister(self, states: list[ReqState]) -> list[ReqState]:
        """Drop the requests from the table; abort those that still run, and return these.

        The id of one that still runs stays taken until the engine is done with it: what it has
        sent meanwhile would be taken for news of a later request of that id.
        """
        left = [state for state in states if state.phase is Phase.SENT]
        for state in states:
            if state.phase is Phase.SENT:
                self._dispatcher.abort(state)
                state.phase = Phase.FINISHED
            elif self.rid_to_state.get(state.rid) is state:
                del self.rid_to_state[state.rid]
            self._dispatcher.forget(state)
        return left

    def _account(self, obj: GenerateReqInput, states: list[ReqState]) -> None:
        """Metrics and logs of a request that ran to its end."""
        if self.metrics is not None and obj.log_metrics:
            for state in states:
                self.metrics.observe_request(
                    state,
                    obj.stream,
                    obj.custom_labels,
                    has_grammar=state.single.sampling_params.grammar is not None,
                )
        logs = self.request_logger
        if (logs.enabled or logs.dump_folder is not None) and not obj.no_logs:
            logs.log_finished(obj, [self._render(state, False) for state in states])

    # -- dispatch -------------------------------------------------------------------------------

    async def _hold_while_paused(self, states: list[ReqState], watch: ClientWatch) -> None:
        """Return when generation may go on, or when all of `states` were aborted meanwhile."""
        while self.is_holding and not all(state.is_finished for state in states):
            try:
                async with asyncio.timeout(DISCONNECT_POLL_S):
                    await self._hold_changed.wait()
            except TimeoutError:
                await watch.check()
        self._check_alive()

    async def _acquire_dispatch(self, states: list[ReqState], watch: ClientWatch) -> None:
        """Return with the reader lock held, at a moment at which requests may be sent."""
        while True:
            await self._hold_while_paused(states, watch)
            await self.model_update_lock.acquire_reader()
            if not self.is_holding or all(state.is_finished for state in states):
                return
            self.model_update_lock.release_reader()

    async def _warm_prefixes(
        self, states: list[ReqState], num_samples: int, watch: ClientWatch
    ) -> None:
        """Compute each prompt once, so that its samples share the prefix."""
        if self.server_args.disable_radix_cache:
            return
        warm_ups = make_warm_ups(states, num_samples)
        warm = [warm_up.state for warm_up in warm_ups]
        self.rid_to_state.update((state.rid, state) for state in warm)
        try:
            self._dispatcher.dispatch(warm, 1, stream=False)
            await self._wait_finished(warm, watch)
        finally:
            self._unregister(warm)
        for warm_up in warm_ups:
            warm_up.hand_on()

    # -- following answers ----------------------------------------------------------------------

    @staticmethod
    async def _next_news(listener: OutputListener, watch: ClientWatch) -> ReqState:
        """The next state with news. Raises RequestError when the client is gone."""
        while True:
            state = await listener.next(DISCONNECT_POLL_S)
            await watch.check()
            if state is not None:
                return state

    async def _wait_finished(self, states: list[ReqState], watch: ClientWatch) -> None:
        """Return when all have finished. Raises RequestError for one that failed."""
        for state in states:  # ended while held
            state.is_counted = state.is_finished
            self._raise_failure(state)
        listener = states[0].listener if states else OutputListener()
        remaining = sum(not state.is_counted for state in states)
        while remaining:
            state = await self._next_news(listener, watch)
            if state.is_finished and not state.is_counted:
                state.is_counted = True
                remaining -= 1
                self._raise_failure(state)

    async def _wait_all(self, states: list[ReqState], watch: ClientWatch) -> list[dict[str, Any]]:
        await self._wait_finished(states, watch)
        return [self._render(state, False) for state in states]

    async def _stream(
        self,
        states: list[ReqState],
        is_list: bool,
        watch: ClientWatch,
        incremental: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        """Chunks in the order in which news arrive; slow readers get merged chunks."""
        for state in states:  # aborted while held: they never send anything
            if state.is_finished:
                state.listener.notify(state)
        remaining = len(states)
        listener = states[0].listener
        while remaining:
            state = await self._next_news(listener, watch)
            if state.is_counted:
                continue
            if state.is_finished:
                state.is_counted = True
                remaining -= 1
                self._raise_failure(state)
            chunk = self._render(state, incremental)
            if is_list:
                chunk["index"] = state.single.index
            yield chunk

    def _raise_failure(self, state: ReqState) -> None:
        """Raise for a request that the engine refused; a client's own abort is an answer."""
        reason = state.finish_reason
        if reason is not None and reason["type"] == "abort" and reason.get("status_code"):
            raise RequestError(
                reason.get("message") or "The request failed.",
                status_code=int(reason["status_code"]),
                err_type=reason.get("err_type"),
            )

    def _render(self, state: ReqState, incremental: bool) -> dict[str, Any]:
        return state.render(
            with_text=self.tokenizer is not None,
            incremental=incremental,
            with_timings=self.server_args.enable_metrics,
            weight_version=self.weight_version,
        )

    # -- receive loop ---------------------------------------------------------------------------

    def auto_create_handle_loop(self) -> None:
        """Start following the engine's messages on the running loop, once.

        An offline caller may use one loop after the other (`asyncio.run` twice): the task of a
        loop that no longer runs would leave every answer unread.
        """
        loop = asyncio.get_running_loop()
        self.event_loop = loop
        task = self._handle_loops.get(loop)
        if task is None or task.done():
            open_loops = {k: t for k, t in self._handle_loops.items() if not k.is_closed()}
            # One a loop, and kept: one that is dropped takes the channel from its successor.
            self._handle_loops = open_loops | {loop: loop.create_task(self._handle_messages())}

    def would_wait_for_itself(self) -> bool:
        """Whether an update made now, while only the caller's thread runs loops, would never end.

        It waits for client requests whose tasks no running loop goes on with.
        """
        try:
            own = asyncio.get_running_loop()
        except RuntimeError:
            own = None
        runs_elsewhere = any(loop.is_running() and loop is not own for loop in self._handle_loops)
        in_flight = self.model_update_lock.num_readers
        return in_flight > 0 and not self.is_holding and not runs_elsewhere

    async def _handle_messages(self) -> None:
        try:
            while True:
                for message in await self._pull.recv_all():
                    self._handle(message)
                self._note_received()
        except asyncio.CancelledError:
            raise
        except Exception as exc:
            logger.exception("The front's receive loop failed")
            self.mark_dead(f"The server's receive loop failed: {exc}")

    def _handle(self, message: Any) -> None:
        if isinstance(message, BatchStrOutput):
            now = time.time()
            for output in message.outputs:
                self._absorb(output, now)
        elif isinstance(message, ControlReqOutput):
            self.control.on_reply(message)
        else:
            logger.error("The front cannot handle a %s", type(message).__name__)

    def _absorb(self, output: RequestOutput, now: float) -> None:
        state = self.rid_to_state.get(output.rid)
        if state is None:
            return
        if state.is_finished:
            # Its client left, or it was a health probe that is no longer waited for.
            if output.finish_reason is not None:
                del self.rid_to_state[output.rid]
            return
        previous = state.last_token_time
        state.absorb(output, now)
        if self.metrics is not None and previous and output.new_token_ids:
            self.metrics.observe_inter_token(now - previous, len(output.new_token_ids))
        if state.is_finished:
            warn_of_nan(state)
            # The id is free again from the moment on at which the engine is done with it.
            del self.rid_to_state[state.rid]
            self._dispatcher.forget(state)

    def _note_received(self) -> None:
        self.last_receive_time = time.monotonic()
        self._received.wake_all()

    async def wait_received(self, timeout_s: float) -> bool:
        """Whether any message of the engine arrived within `timeout_s` from now.

        Its death counts as news too: look at `dead_message`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._received.wait()
        except TimeoutError:
            return False
        return True

    def mark_dead(self, message: str) -> None:
        """Nobody will answer: fail every waiting request and control call. Loop thread only."""
        if self.dead_message is not None:
            return
        level = logging.WARNING if self.gracefully_exit else logging.ERROR
        logger.log(level, "Failing %d requests: %s", len(self.rid_to_state), message)
        self.dead_message = message
        self.server_status = ServerStatus.UnHealthy
        reason = {
            "type": "abort",
            "message": message,
            "status_code": 503,
            "err_type": "EngineUnavailable",
        }
        for state in list(self.rid_to_state.values()):
            state.finish(reason, time.time())
        self.control.fail_all(message)
        self._received.wake_all()
        self.is_pause = False
        self._hold_changed.wake_all()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- abort, pause, update -------------------------------------------------------------------

    def _send_to_all(self, message: Any) -> None:
        self.auto_create_handle_loop()
        self._check_alive()
        self._dispatcher.broadcast(message)

    def abort_request(
        self,
        rid: str = "",
        abort_all: bool = False,
        abort_message: str | None = None,
        exact: bool = False,
    ) -> None:
        """Abort all requests, or those whose id starts with `rid` (`exact`: equals it).

        Unknown ids are ignored. The choices of a request have ids of their own: `rid`_0, …
        """
        message = AbortReq(
            rid=rid,
            abort_all=abort_all,
            abort_message=abort_message,
            exact=exact and not abort_all,
        )
        hit = [state for state in self.rid_to_state.values() if message.means(state.rid)]
        for state in hit:
            if state.phase is Phase.HELD:
                self._finish_held(state, abort_message)
        if any(state.phase is Phase.SENT for state in hit) or abort_all:
            self._dispatcher.broadcast(message)

    def _finish_held(self, state: ReqState, abort_message: str | None) -> None:
        """End a request that no scheduler knows yet."""
        message = abort_message or "Abort in waiting queue"
        state.finish({**_ABORTED, "message": message}, time.time())
        # Its handler may be held by a pause: let it look.
        self._hold_changed.wake_all()

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        """Stop generating; new requests are held. Raises RequestError on an unknown mode.

        `abort` ends what is in flight and returns when nothing is; `retract` and `in_place`
        return when every scheduler has stopped stepping.
        """
        if obj.mode not in _PAUSE_MODES:
            raise RequestError(f"mode must be one of {', '.join(_PAUSE_MODES)}, got {obj.mode!r}.")
        self.auto_create_handle_loop()
        self._check_alive()
        async with self._pause_mutex:
            self.is_pause = True
            self._num_pauses += 1
            self._arm_pause_timer()
            if obj.mode != "abort":
                self._pause_mode = obj.mode
                await self.control.pause(obj.mode)
                return
            was_stopped, self._pause_mode = self._pause_mode is not None, None
        await self._drain(was_stopped)

    def _arm_pause_timer(self) -> None:
        """Start the time after which a forgotten pause ends by itself, where one is set."""
        self._cancel_pause_timer()
        limit_s = envs.SGLANG_ENGINE_PAUSE_TIMEOUT.get()
        if limit_s >= 0:
            loop = asyncio.get_running_loop()
            self._pause_timer = loop.call_later(limit_s, self._end_forgotten_pause, limit_s)

    def _cancel_pause_timer(self) -> None:
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None

    def _end_forgotten_pause(self, limit_s: float) -> None:
        logger.warning("Nobody continued generation within %g s: going on", limit_s)
        self._spawn(self.continue_generation(ContinueGenerationReqInput()))

    async def _drain(self, was_stopped: bool) -> None:
        """Abort until no sent request is left. Stopped schedulers must step once more for that."""
        self._abort_sent()
        if was_stopped:
            await self.control.resume(torch_empty_cache=False)
        while self.is_pause and any(s.phase is Phase.SENT for s in self.rid_to_state.values()):
            self._abort_sent()
            await self.wait_received(_PAUSE_ABORT_PERIOD_S)
            self._check_alive()

    def _abort_sent(self) -> None:
        """Abort everything that schedulers know, not what is held for the time after."""
        self._dispatcher.broadcast(AbortReq(abort_all=True))

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        """End a pause and let held requests go. Harmless when not paused."""
        async with self._pause_mutex:
            ended = self._num_pauses

            def end_pause(replies: list[ContinueGenerationReqOutput]) -> None:
                # The schedulers that say so late have been told of a later pause.
                if self._num_pauses == ended and all(reply.success for reply in replies):
                    self._cancel_pause_timer()
                    self.is_pause = False
                    self._pause_mode = None
                    self._hold_changed.wake_all()

            await self.control.resume(obj.torch_empty_cache, end_pause)

    @asynccontextmanager
    async def weight_update_guard(self, abort_all_requests: bool = False) -> AsyncIterator[None]:
        """Around a weight update: nothing is generated under half of the new weights.

        Waits for the requests in flight, later ones queue behind; while none is sent (paused, or
        without memory) the update starts at once and `continue_generation` waits for it.
        """
        if abort_all_requests:
            self.abort_request(abort_all=True)
        async with self._pause_mutex:
            if self.is_holding:
                yield
                return
        async with self.model_update_lock.writer_lock():
            yield

    async def update_weight_version(self, obj: UpdateWeightVersionReqInput) -> None:
        """Stamp a new label on the weights in use; returns when every scheduler has it."""
        if obj.abort_all_requests:
            self.abort_request(abort_all=True)
        await self.weights.set_version(obj)

    # Documented names; `request` is the HTTP request or None and is not looked at.

    async def init_weights_update_group(
        self, obj: InitWeightsUpdateGroupReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.init_group(obj)

    async def destroy_weights_update_group(
        self, obj: DestroyWeightsUpdateGroupReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.destroy_group(obj)

    async def begin_weight_update(
        self, obj: BeginWeightUpdateReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.begin(obj)

    async def end_weight_update(
        self, obj: EndWeightUpdateReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.end(obj)

    async def update_weights_from_tensor(
        self, obj: UpdateWeightsFromTensorReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.from_tensor(obj)

    async def update_weights_from_distributed(
        self, obj: UpdateWeightsFromDistributedReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.from_distributed(obj)

    async def update_weights_from_disk(
        self, obj: UpdateWeightFromDiskReqInput, request: Any = None
    ) -> tuple[bool, str, int]:
        success, message = await self.weights.from_disk(obj)
        return success, message, 0

    async def update_weights_from_ipc(
        self, obj: UpdateWeightsFromIPCReqInput, request: Any = None
    ) -> WeightResult:
        return await self.weights.from_ipc(obj)

    async def get_weights_by_name(
        self, obj: GetWeightsByNameReqInput, request: Any = None
    ) -> list[Any]:
        return await self.weights.get_by_name(obj)

    async def release_memory_occupation(
        self, obj: ReleaseMemoryOccupationReqInput, request: Any = None
    ) -> None:
        await self.weights.release_memory(obj)

    async def resume_memory_occupation(
        self, obj: ResumeMemoryOccupationReqInput, request: Any = None
    ) -> None:
        await self.weights.resume_memory(obj)

    # -- other controls -------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """See `TokenizerControl.flush_cache`."""
        return await self.control.flush_cache(timeout_s)

    async def get_loads(self) -> list[dict[str, Any]]:
        """One load report per replica; requests held here count as waiting and paused.

        A held request that names no replica counts for one of them in turn.
        """
        begin = time.monotonic()
        loads = await self.control.get_loads()
        if self.metrics is not None:
            self.metrics.observe_get_loads(time.monotonic() - begin)
        for index, state in enumerate(self._held()):
            rank = state.single.routed_dp_rank
            load = loads[index % len(loads) if rank is None else rank]
            num_tokens = len(state.prompt_ids)
            for key, amount in (
                ("num_waiting_reqs", 1),
                ("num_total_reqs", 1),
                ("num_waiting_uncached_tokens", num_tokens),
                ("num_total_tokens", num_tokens),
            ):
                load[key] = load.get(key, 0) + amount
            queues = load.setdefault("queues", {})
            queues["paused"] = queues.get("paused", 0) + 1
        return loads

    async def start_profile(self, **options: Any) -> None:
        """Start torch's profiler in the schedulers; options as in ProfileReqInput."""
        await self.control.profile(ProfileReqInput(start=True, **options))

    async def stop_profile(self) -> None:
        await self.control.profile(ProfileReqInput(start=False))

    def configure_logging(self, obj: ConfigureLoggingReq) -> None:
        """Change what is logged. Raises RequestError."""
        try:
            self.request_logger.configure(obj)
        except ValueError as exc:
            raise RequestError(str(exc)) from exc

    @staticmethod
    def freeze_gc() -> None:
        """Exempt everything alive in this process from garbage collection."""
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        """Stop following messages and close the channels."""
        for loop, task in self._handle_loops.items():
            if not loop.is_closed():
                task.cancel()
        self._handle_loops = {}
        self._prompts.close()
        self._pull.close()
        self._dispatcher.close()
