"""A front with a fake scheduler behind it, for tests: no model, no child processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.fakes.fake_scheduler import FakeScheduler, fake_ready
from sglang.test.fakes.tiny_tokenizer import write_tiny_model

T = TypeVar("T")


@dataclass
class Front:
    """The engine client and the fakes that it talks to."""

    manager: TokenizerManager
    schedulers: list[FakeScheduler]

    @property
    def scheduler(self) -> FakeScheduler:
        return self.schedulers[0]

    async def generate(self, **fields: Any) -> Any:
        """One answer, not streaming."""
        return await anext(self.manager.generate_request(GenerateReqInput(**fields)))

    async def start(self, **fields: Any) -> asyncio.Task[Any]:
        """A request that the scheduler has; the task ends with its answer."""
        before = len(self.scheduler.of_type(TokenizedGenerateReqInput))
        task = asyncio.create_task(self.generate(**fields))
        await until(lambda: len(self.scheduler.of_type(TokenizedGenerateReqInput)) > before)
        return task

    async def stream(self, **fields: Any) -> list[dict[str, Any]]:
        source = self.manager.generate_request(GenerateReqInput(stream=True, **fields))
        return [chunk async for chunk in source]


@contextmanager
def make_front(folder: Path, **args: Any) -> Iterator[Front]:
    """Build it; `args` go to ServerArgs."""
    write_tiny_model(folder)
    server_args = ServerArgs(model_path=str(folder), device="cpu", random_seed=0, **args)
    ports = PortArgs.init_new(server_args)
    tokenizer = None if server_args.skip_tokenizer_init else get_tokenizer(str(folder))
    with ExitStack() as stack:
        stack.callback(ports.remove_files)
        schedulers = [
            stack.enter_context(FakeScheduler(ports, tokenizer, rank))
            for rank in range(server_args.dp_size)
        ]
        manager = TokenizerManager(server_args, ports, [fake_ready()] * server_args.dp_size)
        stack.callback(manager.close)
        manager.server_status = ServerStatus.Up
        yield Front(manager, schedulers)


def run_with_front(folder: Path, body: Callable[[Front], Awaitable[T]], **args: Any) -> T:
    """Run an async test body with a front of its own, at most 30 seconds."""

    async def run(front: Front) -> T:
        async with asyncio.timeout(30):
            return await body(front)

    with make_front(folder, **args) as front:
        return asyncio.run(run(front))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that another thread or task does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
