"""Functions of a test, each in a process of its own, made by a fork: nothing is pickled."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

_TIMEOUT_S = 60.0

Target = tuple[Callable[..., Any], tuple[Any, ...]]


def run_in_forks(*targets: Target, num_awaited: int | None = None) -> list[Any]:
    """What the functions returned for their arguments, in order.

    `num_awaited`: of so many, the first; the others are ended then. Raises AssertionError where one
    raises, ends otherwise, or takes longer than a minute.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in targets]
    processes = [
        context.Process(target=_run, args=(function, pipe[1], *arguments))
        for (function, arguments), pipe in zip(targets, pipes)
    ]
    for process in processes:
        process.start()
    try:
        outcomes = []
        for process, (receiver, _) in list(zip(processes, pipes))[:num_awaited]:
            deadline = time.monotonic() + _TIMEOUT_S
            while not receiver.poll(0.1):
                assert process.exitcode in (None, 0), f"ended with {process.exitcode}"
                assert time.monotonic() < deadline, "a process hangs"
            outcomes.append(receiver.recv())
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert all(is_fine for is_fine, _ in outcomes), outcomes
    return [value for _, value in outcomes]


def _run(function: Callable[..., Any], pipe: Connection, *arguments: Any) -> None:
    # Stores and groups of earlier tests came along without their threads: to collect one would wait
    # for a thread that is not there.
    gc.freeze()
    torch.set_num_threads(1)  # the pool of threads does not survive a fork
    try:
        pipe.send((True, function(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    os._exit(0)
