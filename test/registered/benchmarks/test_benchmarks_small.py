"""Every script of `benchmark/` runs in its small form on a CPU and writes its figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_hicache_copy
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="benchmarks")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmark"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
TIMEOUT_S = 200

# Script: its small form, to which the file of the figures is added; the longest first.
SMALL_FORMS = {
    "bench_replicas": ["--small", "--json"],
    "bench_serving": ["--small", "--json"],
    "bench_cpu_engine": ["--small", "--threads", "1", "--json"],
    "bench_weight_update": ["--small", "--json"],
    "bench_one_batch": ["--device", "cpu", "--small", "--json"],
    "bench_overhead": ["--device", "cpu", "--json"],
    "bench_attention": ["--small", "--json"],
    "bench_radix_cache": ["--small", "--json"],
    "bench_hicache": ["--small", "--json"],
    "bench_draft_coherence": ["--small", "--json"],
    "bench_speculative": ["--device", "cpu", "--small", "--json"],
    "bench_hicache_storage": ["--small", "--json"],
    "bench_hicache_copy": ["--device", "cpu", "--small", "--json"],
    "bench_scheduler": ["--small", "--json"],
    "bench_cpu_ops": ["--small", "--threads", "1", "--json"],
}
# Times kernels that only a GPU runs: there is no small form of it.
CUDA_ONLY = ["bench_gemv"]
PLOT = "picture.png"


@dataclass(frozen=True)
class Done:
    """A script that has ended, and the folder it wrote to."""

    process: subprocess.CompletedProcess[str]
    folder: Path

    def figures(self) -> Any:
        assert self.process.returncode == 0, self.process.stdout + self.process.stderr
        return json.loads((self.folder / "figures.json").read_text())


def run_script(name: str, folder: Path) -> Done:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *SMALL_FORMS[name]]
    command.append(str(folder / "figures.json"))
    if name == "bench_serving" and importlib.util.find_spec("matplotlib") is not None:
        command += ["--plot", str(folder / PLOT)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    return Done(process, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """All scripts, two at a time: they mostly start up, and nobody looks at the times."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_script, name, tmp_path_factory.mktemp(name))
            for name in SMALL_FORMS
        }


def test_every_script_has_a_small_form_here() -> None:
    scripts = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
    assert sorted([*SMALL_FORMS, *CUDA_ONLY]) == scripts


@pytest.mark.parametrize("name", SMALL_FORMS)
def test_small_form_prints_a_table_and_writes_json(
    name: str, runs: dict[str, Future[Done]]
) -> None:
    done = runs[name].result()
    assert done.figures(), "the JSON holds no figures"
    assert len(done.process.stdout.splitlines()) >= 3


def test_serving_measures_soaks_and_draws(runs: dict[str, Future[Done]]) -> None:
    """Its small form is an open loop, then a soak, on a server of its own."""
    done = runs["bench_serving"].result()
    result = done.figures()
    assert [check["passed"] for check in result["checks"]] == [True] * 3
    assert "left early" in result["checks"][2]["detail"]
    summary = result["summary"]
    assert summary["outcomes"] == {"ok": 40} and summary["short_answers"] == 0
    assert result["server"]["version"] and summary["client_lag_ms"]["count"] > 0
    assert {"time to first token", "between tokens"} <= set(summary["latencies_ms"])
    picture = done.folder / PLOT
    if importlib.util.find_spec("matplotlib") is not None:
        assert picture.read_bytes().startswith(PNG_SIGNATURE)


# (script, its command line, what its one line says); none of them measures anything.
REFUSALS = [
    *((name, words, "needs a CUDA device") for name, words in (
        ("bench_one_batch", "--model {benchmarks}/shapes/tiny --load-format dummy"),
        ("bench_one_batch", "--small"),
        ("bench_overhead", ""),
        ("bench_gemv", ""),
        ("bench_attention", ""),
        ("bench_hicache", "--model {benchmarks}/shapes/tiny"),
        ("bench_hicache_copy", ""),
        ("bench_speculative", "--small"),
        ("bench_weight_update", "--model {benchmarks}/shapes/tiny"),
        ("bench_draft_coherence", "--device cuda --model {benchmarks}"),
        ("bench_one_batch", "--device cpu --small --profile"),
        ("bench_one_batch", "--device cpu --small --kv-cache-dtype fp8_e4m3"),
    )),
    ("bench_one_batch", "--device cpu --small --batch 0", "0 is no whole number of 1 or more"),
    ("bench_one_batch", "--device cpu --small --batch -1", "-1 is no whole number of 1 or more"),
    ("bench_one_batch", "--device cpu --small --model {benchmarks}", "leave out --model"),
    ("bench_one_batch", "--device cpu --model /nope", "there is no /nope"),
    ("bench_one_batch", "--device cpu --model {benchmarks}", "config.json"),
    *(("bench_one_batch", f"--device cpu --small {words}", said) for words, said in (
        ("--attention-backend foo", "invalid choice: 'foo'"),
        ("--attention-backend triton", "needs a CUDA device"),
        ("--kv-cache-dtype foo", "invalid choice: 'foo'"),
        ("--mem-fraction-static 7", "7 is no number between 0 and 1"),
        ("--mem-fraction-static 1", "1 is no number between 0 and 1"),
        ("--batch 300 --max-total-tokens 2048", "the load needs KV of 12000 tokens"),
        ("--batch 100000000", "the load needs KV of 4000000000 tokens"),
        ("--input-len 1000000000", "takes requests of less than"),
    )),
    ("bench_one_batch", "--device cpu --model {benchmarks}/shapes/tiny --load-format foo",
     "invalid choice: 'foo'"),
    ("bench_one_batch", "--device cpu --model {benchmarks}/shapes/tiny --batch 1 --prefill 64",
     "--load-format dummy"),
    ("bench_one_batch",
     "--device cpu --model {benchmarks}/shapes/tiny --load-format dummy --input-len 1000000",
     "a request would have 1000256 tokens"),
    ("bench_serving", "--small --workload file --file /nope", "there is no file /nope"),
    ("bench_serving", "--small --workload file --file {benchmarks}", "there is no file"),
    ("bench_serving", "--serve /nope", "there is no /nope"),
    ("bench_serving", "--serve {benchmarks} --serve-flags=--nope", "the server did not start"),
    ("bench_overhead", "--device cpu --batch 100000000", "the load needs KV of"),
    ("bench_overhead", "--device cpu --input-len 1000000000", "takes requests of less than"),
    ("bench_overhead", "--device cpu --shapes tiny", "has a tiny model only"),
    ("bench_overhead", "--device cpu --shapes foo", "invalid choice: 'foo'"),
    *((name, f"{' '.join(words)} /nope/x.json", "there is no folder /nope")
      for name, words in SMALL_FORMS.items()),
]  # fmt: skip
REFUSING = """
import contextlib, importlib, io, json, sys
ends = []
for name, words in json.loads(sys.argv[1]):
    sys.argv = [name + ".py", *words]
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            end = importlib.import_module(name).main()
        except SystemExit as exc:
            end = exc.code
        except BaseException as exc:
            end = 0
            errors.write(f"raised {exc!r}")
    # As the interpreter does with a message.
    ends.append([end != 0, errors.getvalue() + (end if isinstance(end, str) else "")])
print("ENDS" + json.dumps(ends))
"""


@pytest.fixture(scope="module")
def refusals() -> list[tuple[bool, str]]:
    """Whether each of REFUSALS ended with an error, and what it said; in one process, no GPU."""
    cases = [(name, words.format(benchmarks=BENCHMARKS).split()) for name, words, _ in REFUSALS]
    path = os.pathsep.join([str(BENCHMARKS), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", REFUSING, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return [tuple(end) for end in json.loads(done.stdout.partition("ENDS")[2])]


@pytest.mark.parametrize("number", range(len(REFUSALS)), ids=lambda n: " ".join(REFUSALS[n][:2]))
def test_what_cannot_be_measured_ends_with_one_line(
    number: int, refusals: list[tuple[bool, str]]
) -> None:
    is_error, text = refusals[number]
    message = text.partition(": error: ")[2] or text  # argparse: after the usage
    assert is_error and REFUSALS[number][2] in message, text
    assert len(message.strip().splitlines()) == 1 and "raised" not in text


def test_small_form_takes_given_sizes(tmp_path: Path) -> None:
    words = "--device cpu --small --batch 3 --input-len 600 --output-len 8 --json".split()
    command = [sys.executable, str(BENCHMARKS / "bench_one_batch.py"), *words]
    path = tmp_path / "figures.json"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(path)], env=env, check=True, timeout=TIMEOUT_S)
    (row,) = json.loads(path.read_text())["decode"]
    assert row["batch"] == 3 and 600 < row["context"] < 608


def test_copies_are_refused_where_the_host_is_too_small() -> None:
    shape = replace(bench_hicache_copy.LLAMA_8B, tokens=(1 << 40,))
    with pytest.raises(SystemExit, match=r"GiB of host memory, and .* GiB are free"):
        bench_hicache_copy.check_memory(shape, torch.device("cpu"), torch.float32)
    bench_hicache_copy.check_memory(bench_hicache_copy.SMALL, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["bench_one_batch", "bench_overhead"])
def test_help_says_what_the_columns_mean(name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    text = " ".join(done.stdout.split())
    assert "step / replay" in text and "wall time" in text and "(default: [1, 8, 64" in text
    assert f"python benchmark/{name}.py --" in text


@pytest.mark.parametrize(
    ("name", "words", "code", "said"),
    [
        ("bench_attention", "--help", 0, "--sweep"),
        ("bench_gemv", "--help", 0, "--sweep"),
        ("bench_attention", "--small", 1, "bench_attention.py: needs Triton"),
    ],
)
def test_command_lines_are_read_without_triton(name: str, words: str, code: int, said: str) -> None:
    program = (
        "import importlib, sys\n"
        "sys.modules['triton'] = None\n"
        f"sys.argv = ['{name}.py', '{words}']\n"
        f"sys.exit(importlib.import_module('{name}').main())\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == code and said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_no_script_needs_the_test_tools() -> None:
    """Whoever measures has the server's environment, not that of its tests."""
    kernels = ["kernel_timing.attention", "kernel_timing.gemv", "sglang.test.compile_kernels"]
    names = [*SMALL_FORMS, *CUDA_ONLY, *kernels]
    program = (
        "import importlib, sys\n"
        "for tool in ('pytest', 'hypothesis'): sys.modules[tool] = None\n"
        f"for name in {names}: importlib.import_module(name)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
