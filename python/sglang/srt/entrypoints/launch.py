"""Start, watch and stop the processes of one server.

One scheduler per tensor-parallel rank of every replica, and one detokenizer; the caller's process
is the front. Children are started by name (`module:function`), so that the front never imports
what they run. The order is: `start_subprocesses` (returns at once, so that the front can import
its own modules meanwhile), `Launching.wait_ready`, then `Launched.shutdown` at the end;
`launch_subprocesses` does the first two.

Life and death: a child reports ready, or a traceback, over a pipe. Children end when the parent
ends, whatever killed it. A child that ends unasked, or a scheduler loop that stands still, is a
failure: the watchdog thread logs it, tells its callbacks, and ends the whole tree with a non-zero
code (a server) or leaves the decision to the owner (an in-process `Engine`). Children ignore
SIGTERM and SIGINT, which often reach the whole process group: only the parent decides to stop.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.model_check import check_model
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import SchedulerReady, ShutdownReq
from sglang.srt.managers.ipc import PushChannel
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.server_args_availability import warn_ignored
from sglang.srt.utils.common import (
    get_exception_traceback,
    kill_process_tree,
    set_prometheus_multiproc_dir,
    set_ulimit,
)
from sglang.srt.utils.liveness import LivenessCounter
from sglang.srt.utils.logging import configure_logger

logger = logging.getLogger(__name__)

SCHEDULER_TARGET = "sglang.srt.managers.scheduler_process:run_scheduler_process"
DETOKENIZER_TARGET = "sglang.srt.managers.detokenizer_manager:run_detokenizer_process"

# What a child without facts to report sends when it is ready (any object but a traceback text).
READY = "ready"

# After a failure the front gets this long to answer waiting requests before the tree is killed.
_FAILURE_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
# Place of arg_start in /proc/self/stat, counted from the field after the name; arg_end follows.
_ARG_START = 45
_PR_SET_NAME = 15
# The kernel keeps this many bytes of a name, the closing zero not counted.
_NAME_BYTES = 15


class LaunchError(RuntimeError):
    """The server did not start. The text says why: a sentence where the cause is a setting or a
    file, else the child's traceback or exit code."""


# ------------------------------------------------------------------------------------------------
# In the child
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What one child runs."""

    name: str  # for messages: "scheduler DP0 TP1", "detokenizer"
    target: str  # "module:function"; called with `args` and the pipe's writing end
    args: tuple[Any, ...]
    log_level: str
    log_prefix: str
    environment: dict[str, str] = field(default_factory=dict)


def _child_main(spec: ChildSpec, pipe_writer: Connection, parent_dies_with_thread: bool) -> None:
    """Body of every child process."""
    _die_with_parent(parent_dies_with_thread)
    _set_title(spec.name)
    os.environ.update(spec.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The parent held them back while it started us; programs that we start need them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    # `kill -USR1 <pid>` writes the stacks of all threads; the watchdog uses it on a stuck loop.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    configure_logger(spec.log_level, spec.log_prefix)
    set_ulimit()
    try:
        _load(spec.target)(*spec.args, pipe_writer)
    except Exception as error:
        trace = get_exception_traceback()
        if isinstance(error, _USER_ERRORS) and not pipe_writer.closed:
            # A model or setting that cannot be served: the parent shows the sentence, once.
            logger.debug("%s failed:\n%s", spec.name, trace)
            _send_quietly(pipe_writer, f"{_one_line(error)} ({_TRACE_HINT})")
        else:
            logger.error("%s failed:\n%s", spec.name, trace)
            _send_quietly(pipe_writer, trace)
        logging.shutdown()
        # Threads of the failed body (storage, collectives) must not keep the process alive.
        os._exit(1)
    logging.shutdown()
    # The body has ended on purpose. An ordinary exit would run destructors of libraries whose
    # threads may still wait for a peer that has gone, and abort.
    os._exit(0)


def _load(target: str) -> Callable[..., None]:
    """Import a child's body.

    Nearly all that imports make is kept: looking for garbage in it takes a tenth of their time.
    """
    module, _, function = target.partition(":")
    gc.disable()
    try:
        body: Callable[..., None] = getattr(importlib.import_module(module), function)
    finally:
        gc.enable()
    return body


# While a child starts these mean a bad file or setting; all else is a mistake in this program.
_USER_ERRORS = (ValueError, OSError)
_TRACE_HINT = "run with --log-level debug for the trace"


def _one_line(error: BaseException) -> str:
    """The text of an exception without line breaks, never empty."""
    return " ".join(str(error).split()) or type(error).__name__


def _set_title(name: str) -> None:
    """Let `ps` and `top` tell the children apart: "sglang::scheduler TP0"."""
    short = ("sglang:" + name.replace("scheduler", "sch").replace(" ", ""))[:_NAME_BYTES]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode(), 0, 0, 0)
    # The command line that `ps` shows lies in our own memory, between these two addresses.
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
    except (OSError, ValueError, IndexError):
        logger.debug("no /proc here: the command line keeps its text")
        return
    if 0 < start < end:
        title = f"sglang::{name}".encode()[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _send_quietly(writer: Connection, text: str) -> None:
    """Report to the parent if it still listens."""
    try:
        writer.send(text)
    except OSError:
        logger.info("the parent closed the start-up pipe before the failure")


def _die_with_parent(parent_dies_with_thread: bool) -> None:
    """End this process when the parent ends, also when the parent is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if parent_dies_with_thread:
        # The kernel sends this when the *thread* that started us ends, so it is only used when
        # that was the parent's main thread.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("this function runs in child processes only")
    watcher = threading.Thread(
        target=_wait_parent_end, args=(parent.sentinel,), name="parent-watch", daemon=True
    )
    watcher.start()


def _wait_parent_end(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


# ------------------------------------------------------------------------------------------------
# In the parent
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Child:
    """A started process and the reading end of its pipe."""

    spec: ChildSpec
    process: SpawnProcess
    pipe: Connection

    @property
    def name(self) -> str:
        return self.spec.name

    def describe_exit(self) -> str:
        """How an ended process ended, with what it reported."""
        code = _collect_exit_code(self.process)
        text = f"{self.name} (pid {self.process.pid}) ended with exit code {code}"
        if code is None:
            text = f"{self.name} (pid {self.process.pid}) closed its pipe and goes on"
        elif code < 0:
            text = f"{self.name} (pid {self.process.pid}) was killed by {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                text += "; the system does that when memory runs out"
        report = self._pending_report()
        return f"{text}\n{report}" if report else text

    def _pending_report(self) -> str:
        try:
            message = self.pipe.recv() if self.pipe.poll() else ""
        except (EOFError, OSError):
            return ""
        return message if isinstance(message, str) and message != READY else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _exit_code_of(child_code: int | None) -> int:
    """The exit code of the tree for a child's unexpected end: never 0."""
    if child_code is None or child_code == 0:
        return 1
    return child_code if child_code > 0 else 128 - child_code


def _collect_exit_code(process: SpawnProcess, timeout_s: float = 5.0) -> int | None:
    """The exit code of a process that is ending; None if it goes on or the code was lost."""
    # When another thread of this program (say, through `active_children`) collects the code at
    # the same moment, multiprocessing knows it only a little later.
    deadline = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.1)
    return process.exitcode


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold back SIGTERM and SIGINT, so that no child is started without being recorded."""
    # Starting the tracker would unblock them, so it must run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(spec: ChildSpec) -> Child:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    in_main = threading.current_thread() is threading.main_thread()
    process = context.Process(target=_child_main, args=(spec, writer, in_main), name=spec.name)
    process.start()
    # Only the child holds the writing end now, so that its death is seen as end of file.
    writer.close()
    return Child(spec, process, reader)


def _child_environment(server_args: ServerArgs) -> dict[str, str]:
    """Variables that libraries read when they are imported, so they must be there before."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if server_args.num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(server_args.num_threads)
    return environment


def _child_specs(server_args: ServerArgs, port_args: PortArgs) -> list[ChildSpec]:
    environment = _child_environment(server_args)
    specs = []
    for dp_rank in range(server_args.dp_size):
        for tp_rank in server_args.local_tp_ranks():
            ranks = f"DP{dp_rank} TP{tp_rank}" if server_args.dp_size > 1 else f"TP{tp_rank}"
            specs.append(
                ChildSpec(
                    name=f"scheduler {ranks}",
                    target=SCHEDULER_TARGET,
                    args=(server_args, port_args, tp_rank, dp_rank),
                    log_level=server_args.log_level,
                    log_prefix=f" {ranks}",
                    environment=environment,
                )
            )
    if server_args.node_rank == 0:
        specs.append(
            ChildSpec(
                name="detokenizer",
                target=DETOKENIZER_TARGET,
                args=(server_args, port_args),
                log_level=server_args.log_level,
                log_prefix=" detokenizer",
                environment=environment,
            )
        )
    return specs


def start_subprocesses(
    server_args: ServerArgs, port_args: PortArgs | None = None, *, exit_on_failure: bool = True
) -> Launching:
    """Start all children of this host and return without waiting for them.

    `exit_on_failure`: a child that dies later ends this process too, with a non-zero code.
    Raises ValueError when the arguments were changed to something that cannot work, LaunchError
    when the model cannot be served.
    """
    server_args.check()
    _check_model(server_args)
    warn_ignored(server_args)
    metrics_dir = None
    if server_args.enable_metrics:
        owned = not os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        path = set_prometheus_multiproc_dir()
        metrics_dir = path if owned else None
    set_ulimit()
    port_args = port_args if port_args is not None else PortArgs.init_new(server_args)
    launching = Launching(
        server_args=server_args,
        port_args=port_args,
        exit_on_failure=exit_on_failure,
        owned_metrics_dir=metrics_dir,
    )
    try:
        with _signals_deferred():
            for spec in _child_specs(server_args, port_args):
                launching.children.append(_start(spec))
    except BaseException:
        launching.abandon()
        raise
    return launching


def _check_model(server_args: ServerArgs) -> None:
    """Say at once, in one sentence, what a child would take seconds to fail with."""
    try:
        check_model(server_args)
    except (ValueError, OSError) as error:
        raise LaunchError(_one_line(error)) from error


@dataclass(slots=True, kw_only=True)
class Launching:
    """Children that were started and are not ready yet."""

    server_args: ServerArgs
    port_args: PortArgs
    exit_on_failure: bool
    owned_metrics_dir: str | None = None
    children: list[Child] = field(default_factory=list)

    def wait_ready(self, timeout_s: float | None = None) -> Launched:
        """Wait until every child is ready. Kills them all and raises LaunchError otherwise."""
        timeout_s = timeout_s if timeout_s is not None else envs.SGLANG_STARTUP_TIMEOUT.get()
        try:
            reports = self._collect(time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            self.abandon()
            raise
        infos = [info for info in reports if isinstance(info, SchedulerReady)]
        ranks_here = len(self.server_args.local_tp_ranks())
        launched = Launched(
            server_args=self.server_args,
            port_args=self.port_args,
            # The first rank of every replica speaks for it.
            scheduler_infos=infos[::ranks_here],
            processes=[child.process for child in self.children],
            watchdog=Watchdog(self),
            owned_metrics_dir=self.owned_metrics_dir,
        )
        launched.watchdog.start()
        atexit.register(launched.shutdown)
        return launched

    def _collect(self, deadline: float, timeout_s: float) -> list[Any]:
        reports: dict[int, Any] = {}
        while len(reports) < len(self.children):
            waiting = {
                child.pipe: index
                for index, child in enumerate(self.children)
                if index not in reports
            }
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(self.children[index].name for index in waiting.values())
                raise LaunchError(f"not ready after {timeout_s:g} s: {names}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                index = waiting[pipe]
                reports[index] = self._report_of(self.children[index])
        return [reports[index] for index in range(len(self.children))]

    def _report_of(self, child: Child) -> Any:
        try:
            message = child.pipe.recv()
        except (EOFError, OSError) as error:
            raise LaunchError(f"not ready: {child.describe_exit()}") from error
        if isinstance(message, str) and message != READY:
            gap = "\n" if "\n" in message else " "
            raise LaunchError(f"{child.name} failed to start:{gap}{message}")
        return message

    def abandon(self) -> None:
        """Kill the children and remove what was created for them."""
        for child in self.children:
            if child.process.is_alive():
                child.process.kill()
        for child in self.children:
            child.process.join()
        _remove_files(self.port_args, self.owned_metrics_dir)


def _remove_files(port_args: PortArgs, metrics_dir: str | None) -> None:
    port_args.remove_files()
    if metrics_dir is not None:
        shutil.rmtree(metrics_dir, ignore_errors=True)
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


@dataclass(slots=True, kw_only=True)
class Launched:
    """A server whose children are ready. `shutdown` may be called from any thread, repeatedly."""

    server_args: ServerArgs
    port_args: PortArgs
    scheduler_infos: list[SchedulerReady]  # one a replica
    processes: list[SpawnProcess]
    watchdog: Watchdog
    owned_metrics_dir: str | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_down: bool = False

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ask the children to leave, kill those that stay, remove sockets and counters."""
        with self._lock:
            if self._is_down:
                return
            self._is_down = True
        timeout_s = timeout_s if timeout_s is not None else envs.SGLANG_SHUTDOWN_TIMEOUT.get()
        self.watchdog.stop()
        if self.watchdog.failure is None:
            self._ask_to_leave()
            deadline = time.monotonic() + timeout_s
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            if process.is_alive():
                logger.warning("%s did not leave by itself and is killed", process.name)
                process.kill()
        for process in self.processes:
            process.join()
        _remove_files(self.port_args, self.owned_metrics_dir)
        atexit.unregister(self.shutdown)

    def _ask_to_leave(self) -> None:
        if self.server_args.node_rank != 0:
            return  # rank 0 on the first host passes the request on to the ranks here
        names = self.port_args.scheduler_input_ipc_names
        for address in [*names, self.port_args.detokenizer_ipc_name]:
            channel = PushChannel(address)
            channel.send(ShutdownReq())
            channel.close(linger_s=1.0)

    def wait_children(self) -> int:
        """Block until the children of a host without HTTP end; the exit code for this host."""
        # Not by joining them here: the watchdog collects their exit codes, and only one can.
        self.watchdog.wait()
        codes = [_collect_exit_code(process) for process in self.processes]
        bad = [code for code in codes if code != 0]
        return _exit_code_of(bad[0]) if bad else 0


class Watchdog:
    """Thread that notices ended children and stuck scheduler loops.

    Callbacks run in this thread, with one sentence that says what happened; they must not block
    and must hop to the event loop themselves (`call_soon_threadsafe`).
    """

    def __init__(self, launching: Launching) -> None:
        server_args = launching.server_args
        self._children = launching.children
        self._port_args = launching.port_args
        self._metrics_dir = launching.owned_metrics_dir
        self._exit_on_failure = launching.exit_on_failure
        # On other hosts the ranks leave with code 0 when rank 0 tells them to.
        self._clean_exit_is_fine = server_args.node_rank != 0
        self._timeout_s = server_args.watchdog_timeout
        self._liveness = LivenessCounter(self._port_args.liveness_path)
        self._local_counters = [
            dp_rank * server_args.tp_size + tp_rank
            for dp_rank in range(server_args.dp_size)
            for tp_rank in server_args.local_tp_ranks()
        ]
        # Counter index -> (last count, when it was first seen).
        self._progress: dict[int, tuple[int, float]] = {}
        self._callbacks: list[Callable[[str], None]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.failure: str | None = None

    def add_failure_callback(self, callback: Callable[[str], None]) -> None:
        """Call `callback(reason)` from the watchdog's thread when the server breaks."""
        self._callbacks.append(callback)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: from now on the end of a child is expected."""
        self._stopping.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def wait(self) -> None:
        """Block until all children have ended cleanly, or one of them has failed."""
        self._thread.join()

    def _run(self) -> None:
        watched = list(self._children)
        while watched and not self._stopping.is_set():
            ended = wait([child.process.sentinel for child in watched], timeout=0.2)
            if self._stopping.is_set():
                return
            for child in [child for child in watched if child.process.sentinel in ended]:
                watched.remove(child)
                code = _collect_exit_code(child.process)
                if code == 0 and self._clean_exit_is_fine:
                    continue
                self._fail(child.describe_exit(), _exit_code_of(code))
                return
            stuck = self._stuck_child()
            if stuck is not None:
                assert stuck.process.pid is not None
                os.kill(stuck.process.pid, signal.SIGUSR1)
                self._fail(f"{stuck.name} made no step for {self._timeout_s:g} s", 1)
                return

    def _stuck_child(self) -> Child | None:
        if self._timeout_s == 0:
            return None
        now = time.monotonic()
        for child, index in zip(self._children, self._local_counters):
            count = self._liveness.read(index)
            last, since = self._progress.get(index, (-1, now))
            if count != last:
                self._progress[index] = (count, now)
            elif now - since > self._timeout_s:
                return child
        return None

    def _fail(self, reason: str, exit_code: int) -> None:
        self.failure = reason
        logger.critical("The server cannot go on: %s", reason)
        for callback in self._callbacks:
            try:
                callback(reason)
            except Exception:
                logger.exception("a failure callback failed")
        if not self._exit_on_failure:
            return
        # Health checks fail from the callback on; waiting clients get their error meanwhile.
        self._stopping.wait(_FAILURE_GRACE_S)
        try:
            kill_process_tree(None, wait_timeout=10)
        except RuntimeError:
            logger.exception("some processes are left over")
        _remove_files(self._port_args, self._metrics_dir)
        logging.shutdown()
        os._exit(exit_code)


def launch_subprocesses(
    server_args: ServerArgs,
    port_args: PortArgs | None = None,
    *,
    launching: Launching | None = None,
    exit_on_failure: bool = True,
) -> Launched:
    """Start all children (unless `launching` holds them already) and wait until they are ready.

    Raises LaunchError when one of them fails; nothing is left running then.
    """
    if launching is None:
        launching = start_subprocesses(server_args, port_args, exit_on_failure=exit_on_failure)
    return launching.wait_ready()
