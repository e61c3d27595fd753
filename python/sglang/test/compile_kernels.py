"""Compile the Triton kernels for a GPU that is not there, and say what became of them.

    python -m sglang.test.compile_kernels                     # all, for Hopper
    python -m sglang.test.compile_kernels --only attention products

Without a GPU the tests interpret the kernels. The interpreter accepts programs that the compiler
refuses and knows nothing of registers and shared memory, so a kernel may pass there that no GPU
runs. Here each is launched as for a real shape (`gpu_launches`) up to the point where it would run.
Prints registers of a thread, bytes that spill over, and shared memory; exit code 1 where a kernel
is refused or does not fit a multiprocessor. Needs Triton's compiler, no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, MockTensor

from sglang.test import gpu_launches

HOPPER = GPUTarget("cuda", 90, 32)
NUM_MULTIPROCESSORS = 132
# Of one program on Hopper: bytes of shared memory; of one multiprocessor: registers.
MAX_SHARED = 232_448
NUM_REGISTERS = 65_536
_DEVICE_FACTS: dict[str, Any] = {
    "num_multiprocessors": lambda device: NUM_MULTIPROCESSORS,
    "supports_early_launch": lambda device: True,
    "converts_fp8": lambda device: True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What one launch was compiled to."""

    name: str
    num_warps: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int  # of a program

    @property
    def fits(self) -> bool:
        """Whether a multiprocessor can run one program."""
        registers = self.registers * self.num_warps * HOPPER.warp_size
        return self.shared_bytes <= MAX_SHARED and registers <= NUM_REGISTERS


class _NoDriver:
    """As much of Triton's driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[CompiledKernel]]:
    """While the context lasts launches are compiled for Hopper, listed, and not run.

    Tensors may be anywhere; addresses count as divisible by 16. Raises RuntimeError where kernels
    are interpreted in this process.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels are interpreted in this process: TRITON_INTERPRET is set")
    compiled: list[CompiledKernel] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        named = {name: _without_memory(value) for name, value in kwargs.items()}
        kernel = run(self, *map(_without_memory, args), grid=grid, warmup=True, **named)
        compiled.append(_facts(self.__name__, kernel))
        return kernel

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(driver, "_active", _NoDriver()))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        for name, module in list(sys.modules.items()):
            for fact, function in _DEVICE_FACTS.items():
                if name.startswith("sglang.") and hasattr(module, fact):
                    stack.enter_context(mock.patch.object(module, fact, function))
        yield compiled


def _without_memory(value: Any) -> Any:
    return MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value


def _facts(name: str, kernel: Any) -> CompiledKernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
    if found is None:
        raise RuntimeError(f"no registers in what cuobjdump says of {name}: {usage.stdout}")
    return CompiledKernel(
        name=name,
        num_warps=kernel.metadata.num_warps,
        registers=int(found[1]),
        spilled_bytes=int(found[2]),
        shared_bytes=kernel.metadata.shared,
    )


def main(arguments: list[str] | None = None) -> int:
    """Compile and print a table; 1 where something was refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    groups = sorted(gpu_launches.GROUPS)
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, metavar="GROUP")
    args = parser.parse_args(arguments)
    launches = [launch for group in args.only for launch in gpu_launches.GROUPS[group]]
    rows, failed = [], []
    for launch in tqdm(launches, unit="launch", file=sys.stderr, disable=None):
        try:
            with compiling() as compiled:
                launch.run()
        except Exception as error:
            failed.append(f"{launch.name}: {type(error).__name__}: {error}")
            continue
        rows += [(launch.name, kernel) for kernel in compiled]
        failed += [
            f"{launch.name}: {kernel} does not fit" for kernel in compiled if not kernel.fits
        ]
        if not compiled:
            failed.append(f"{launch.name}: no kernel was launched")
    head = f"{'launch':<44} {'kernel':<28} {'warps':>5} {'regs':>5} {'spilled':>7} {'shared':>7}"
    sys.stdout.write(head + "\n")
    for name, kernel in rows:
        sys.stdout.write(
            f"{name:<44} {kernel.name:<28} {kernel.num_warps:>5} {kernel.registers:>5} "
            f"{kernel.spilled_bytes:>7} {kernel.shared_bytes:>7}\n"
        )
    for line in failed:
        sys.stdout.write(f"FAILED {line}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
