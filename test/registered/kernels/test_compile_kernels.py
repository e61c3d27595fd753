"""Every kernel compiles for a GPU and fits one, though the machine has none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="kernels")

# Kernels that the interpreter runs without complaint.
REFUSED = """
import torch, triton, triton.language as tl
from sglang.test.compile_kernels import compiling

@triton.jit
def kernel(target: tl.tensor, flag: tl.tensor) -> None:
    if flag > 0:
        value = 1
    else:
        value = 1.5
    tl.store(target, value)

with compiling():
    kernel[(1,)](torch.empty(1), 2)
"""
TOO_LARGE = """
import torch, triton, triton.language as tl
from sglang.test.compile_kernels import compiling

@triton.jit
def kernel(x: tl.tensor, y: tl.tensor, SIZE: tl.constexpr) -> None:
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    a = tl.load(x + place)
    for step in tl.range(0, 9, num_stages=4):
        a = tl.dot(a, tl.load(y + step * SIZE * SIZE + place)).to(tl.float16)
    tl.store(x + place, a)

x = torch.empty(256 * 256, dtype=torch.float16)
with compiling() as compiled:
    kernel[(1,)](x, x, SIZE=256, num_warps=8)
assert [k.name for k in compiled] == ["kernel"] and not compiled[0].fits, compiled
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: here kernels are interpreted."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = (sys.executable, *command)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("group", ["attention", "elementwise", "others", "products"])
def test_kernels_compile_and_fit(group: str) -> None:
    done = run("-m", "sglang.test.compile_kernels", "--only", group)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "_kernel" in done.stdout


def test_what_only_the_compiler_refuses_is_noticed(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "refused.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(REFUSED)
    assert "CompilationError" in run(path).stderr


def test_what_does_not_fit_is_noticed(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "large.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(TOO_LARGE)
    done = run(path)
    assert done.returncode == 0, done.stderr
