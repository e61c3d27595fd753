"""Bodies of child processes for tests of the launcher: no model, no torch.

Run in place of the scheduler and the detokenizer; what they do is chosen by the environment
variable `FAKE_CHILD` (a test sets it before starting the children).
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from sglang.srt.managers.io_struct import SchedulerReady, ShutdownReq
from sglang.srt.managers.ipc import PullChannel
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.liveness import LivenessCounter

BEHAVIOUR_ENV = "FAKE_CHILD"


def fake_ready() -> SchedulerReady:
    """Facts of an imaginary scheduler."""
    return SchedulerReady(
        max_total_num_tokens=1000,
        max_req_input_len=100,
        context_len=128,
        vocab_size=256,
        eos_token_ids=[0],
        page_size=1,
        max_running_requests=8,
        memory_usage={"weight": 0.0, "kv_cache": 0.0, "graph": 0.0, "token_capacity": 1000},
        resolved_args={"threads": os.environ.get("OMP_NUM_THREADS")},
    )


def run_fake_scheduler(
    server_args: ServerArgs,
    port_args: PortArgs,
    tp_rank: int,
    dp_rank: int,
    pipe_writer: Connection,
) -> None:
    """Report ready, then tick until asked to leave, unless told to misbehave."""
    behaviour = os.environ.get(BEHAVIOUR_ENV, "")
    if behaviour == "raise":
        raise RuntimeError("the weights are made of cheese")
    if behaviour == "bad-file":
        raise ValueError("the file weights.bin\nis not for this model")
    if behaviour == "exit-early":
        os._exit(7)
    if behaviour == "never-ready":
        time.sleep(600)
    index = dp_rank * server_args.tp_size + tp_rank
    counter = LivenessCounter(port_args.liveness_path, index)
    channel = PullChannel(port_args.scheduler_input_ipc_names[dp_rank]) if tp_rank == 0 else None
    pipe_writer.send(fake_ready())
    while True:
        if behaviour != "stuck":
            counter.increment()
        if behaviour == "crash-later":
            raise RuntimeError("a broken invariant")
        if channel is None:
            time.sleep(0.02)
            continue
        if isinstance(channel.recv(0.02), ShutdownReq):
            return


def run_fake_detokenizer(
    server_args: ServerArgs, port_args: PortArgs, pipe_writer: Connection
) -> None:
    """Report ready, then wait until asked to leave."""
    channel = PullChannel(port_args.detokenizer_ipc_name)
    pipe_writer.send("ready")
    while not isinstance(channel.recv(None), ShutdownReq):
        pass
