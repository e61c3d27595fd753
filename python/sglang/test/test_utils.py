"""Utilities of tests that run against a served model; names as in SGLang's documentation.

Owns: starting and ending a server for a test, the base test case, names of test models and what
can be found out about the machine. Does not own: fakes for unit tests (``fakes/``). GPUs are asked
about through nvidia-smi, so that a test process never holds a CUDA context of its own.
"""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import IO, Any

import psutil
import requests

from sglang.srt.utils import kill_process_tree
from sglang.utils import normalize_base_url

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_SMALL_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.2-1B-Instruct"
DEFAULT_SMALL_MODEL_NAME_FOR_TEST_BASE = "meta-llama/Llama-3.2-1B"
DEFAULT_SMALL_MODEL_NAME_FOR_TEST_QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
DEFAULT_SMALL_MOE_MODEL_NAME_FOR_TEST_BASE = "Qwen/Qwen1.5-MoE-A2.7B"
DEFAULT_SMALL_MOE_MODEL_NAME_FOR_TEST_CHAT = "Qwen/Qwen1.5-MoE-A2.7B-Chat"
DEFAULT_MODEL_NAME_FOR_TEST_MLA = "lmsys/sglang-ci-dsv3-test"
DEFAULT_MLA_MODEL_NAME_FOR_TEST = "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"
DEFAULT_TARGET_MODEL_EAGLE = "meta-llama/Llama-2-7b-chat-hf"
DEFAULT_DRAFT_MODEL_EAGLE = "lmsys/sglang-EAGLE-llama2-chat-7B"
DEFAULT_TARGET_MODEL_EAGLE3 = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_DRAFT_MODEL_EAGLE3 = "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B"
DEFAULT_TARGET_MODEL_STANDALONE = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_DRAFT_MODEL_STANDALONE = "meta-llama/Llama-3.2-1B-Instruct"
DEFAULT_TARGET_MODEL_NGRAM = "Qwen/Qwen2.5-Coder-7B-Instruct"
# Names under which older tests import the same models.
DEFAULT_EAGLE_TARGET_MODEL_FOR_TEST = DEFAULT_TARGET_MODEL_EAGLE
DEFAULT_EAGLE_DRAFT_MODEL_FOR_TEST = DEFAULT_DRAFT_MODEL_EAGLE
DEFAULT_MODEL_NAME_FOR_TEST_EAGLE3 = DEFAULT_DRAFT_MODEL_EAGLE3
# The draft that comes with the project, for the small model of scripts/fetch_model.py.
SMALL_EAGLE3_DRAFT = Path(__file__).resolve().parent / "data" / "smollm2-135m-eagle3"

_GPU_POLL_INTERVAL_S = 0.5
_READY_POLL_INTERVAL_S = 0.1


def _env_flag(name: str) -> bool:
    return os.environ.get(name, "false").strip().lower() in ("1", "true", "yes")


def is_in_ci() -> bool:
    """Tell whether continuous integration runs this process."""
    return _env_flag("SGLANG_IS_IN_CI")


def is_in_amd_ci() -> bool:
    """Tell whether continuous integration on AMD hardware runs this process."""
    return _env_flag("SGLANG_IS_IN_CI_AMD")


def _query_gpus(fields: str, query: str = "gpu") -> list[list[str]]:
    """Return nvidia-smi's rows of comma-separated values; none where it is absent or fails."""
    command = ["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"]
    try:
        reply = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if reply.returncode != 0:
        return []
    return [[cell.strip() for cell in row.split(",")] for row in reply.stdout.splitlines() if row]


def _visible_gpus() -> list[list[str]]:
    """Return [index, name, total memory in MiB] of each GPU that CUDA_VISIBLE_DEVICES leaves."""
    rows = _query_gpus("index,name,memory.total")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return rows
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(part.isdigit() for part in chosen):
        return rows[: len(chosen)]
    return [row for row in rows if row[0] in chosen]


def get_gpu_count() -> int:
    """Return how many GPUs this process may use."""
    return len(_visible_gpus())


def get_gpu_memory_gb() -> float:
    """Return the memory of the first usable GPU in GiB, 0 where there is none."""
    gpus = _visible_gpus()
    return float(gpus[0][2]) / 1024 if gpus else 0.0


def is_h200_system() -> bool:
    """Tell whether the first usable GPU is an H200."""
    return _first_gpu_is("H200")


def is_blackwell_system() -> bool:
    """Tell whether the first usable GPU is of the Blackwell generation."""
    return _first_gpu_is("B100", "B200", "B300", "GB200", "GB300")


def _first_gpu_is(*names: str) -> bool:
    gpus = _visible_gpus()
    return bool(gpus) and any(name in gpus[0][1] for name in names)


def empty_gpu_cache() -> None:
    """Give the memory that this process's torch keeps for reuse back to the device, if any."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _first_visible_device() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return int(first) if first.isdigit() else 0


def _launch_timeout_s() -> int:
    if is_in_amd_ci() or is_h200_system():
        return 3600
    return 3000 if is_blackwell_system() else 600


# Tests of different GPUs run at the same time, hence a range of ports for each device.
DEFAULT_PORT_FOR_SRT_TEST_RUNNER = (
    10000 + 2000 * _first_visible_device() if is_in_ci() else 20000 + 1000 * _first_visible_device()
)
DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{DEFAULT_PORT_FOR_SRT_TEST_RUNNER + 1000}"
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = _launch_timeout_s()


def find_available_port(base_port: int) -> int:
    """Return a port that can be bound, a random distance above ``base_port``."""
    port = base_port + random.randint(100, 1000)
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                port = port + 42 if port < 60000 else port - 43


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[str | int | float] | None = None,
    env: Mapping[str, str] | None = None,
    return_stdout_stderr: tuple[IO[str], IO[str]] | None = None,
    device: str = "auto",
    pd_separated: bool = False,
    num_replicas: int | None = None,
) -> subprocess.Popen[Any]:
    """Serve ``model`` at ``base_url`` and return the process once it generates tokens.

    ``env`` is laid over this process's environment. ``return_stdout_stderr`` are two text files
    that receive a copy of the output. ``timeout`` is in seconds; after it the process tree is
    killed and TimeoutError raised. A server that ends early raises RuntimeError.
    """
    if pd_separated:
        raise ValueError("prefill and decode on separate servers is not supported")
    address = normalize_base_url(base_url)
    host, _, port = address.split("://", 1)[1].rpartition(":")
    if device == "auto":
        device = "cuda" if get_gpu_count() > 0 else "cpu"
    command = [sys.executable, "-m", "sglang.cli", "serve", "--model-path", model]
    command += [str(argument) for argument in other_args or ()]
    command += ["--device", device, "--host", host.strip("[]"), "--port", port]
    if num_replicas is not None:
        command += ["--dp-size", str(num_replicas)]
    if api_key:
        command += ["--api-key", api_key]
    logger.info("command: %s", " ".join(command))
    process = _start(command, env or {}, return_stdout_stderr)
    _wait_until_generating(process, address, timeout, api_key)
    return process


def _start(
    command: list[str], env: Mapping[str, str], copies: tuple[IO[str], IO[str]] | None
) -> subprocess.Popen[Any]:
    full_env = {**os.environ, "SGLANG_WAIT_PORT_TIMEOUT": "120", **env}
    if copies is None:
        return subprocess.Popen(command, env=full_env)
    process = subprocess.Popen(
        command, env=full_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    for stream, sinks in (
        (process.stdout, (sys.stdout, copies[0])),
        (process.stderr, (sys.stderr, copies[1])),
    ):
        assert stream is not None
        threading.Thread(target=_copy_lines, args=(stream, sinks), daemon=True).start()
    return process


def _copy_lines(stream: IO[str], sinks: Sequence[IO[str]]) -> None:
    """Copy a server's output until it ends. A sink that the test has closed is passed over."""
    with stream:
        for line in stream:
            for sink in sinks:
                if not sink.closed:
                    sink.write(line)
                    sink.flush()


def _wait_until_generating(
    process: subprocess.Popen[Any], address: str, timeout_s: float, api_key: str | None
) -> None:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise RuntimeError(
                f"Server process exited with code {code}. Check server logs for errors."
            )
        try:
            url = f"{address}/health_generate"
            if requests.get(url, headers=headers, timeout=5).status_code == 200:
                return
        except requests.exceptions.RequestException:
            pass  # not listening yet
        time.sleep(_READY_POLL_INTERVAL_S)
    kill_process_tree(process.pid)
    raise TimeoutError(f"Server failed to start within the timeout period of {timeout_s} seconds.")


def terminate_and_kill_process_tree(
    process: subprocess.Popen[Any], terminate_timeout: float = 60, **kill_kwargs: Any
) -> None:
    """End a server politely, then kill what is left of its tree and wait for its GPU memory.

    ``kill_kwargs`` go to ``kill_process_tree``, e.g. ``wait_timeout=60`` in seconds.
    """
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(timeout=terminate_timeout)
    except subprocess.TimeoutExpired:
        logger.warning("server %d ignored SIGTERM for %s s", process.pid, terminate_timeout)
    # Children of a parent that has ended are found by having listed them before.
    for member in family:
        if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
            kill_process_tree(member.pid, **kill_kwargs)
    process.wait()
    _wait_for_gpu_memory({member.pid for member in family}, kill_kwargs.get("wait_timeout", 60))


def _wait_for_gpu_memory(pids: set[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while held := {int(row[0]) for row in _query_gpus("pid", "compute-apps")} & pids:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(held)} still hold GPU memory")
        time.sleep(_GPU_POLL_INTERVAL_S)


class CustomTestCase(unittest.TestCase):
    """Test case whose class clean-up also runs when its set-up fails, and that may retry.

    ``SGLANG_TEST_MAX_RETRY`` says how often a failing test method is repeated (default 1 in CI,
    otherwise 0). Skipping is no failure.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "setUpClass" in cls.__dict__:
            set_up = cls.__dict__["setUpClass"].__func__
            cls.setUpClass = classmethod(_cleaning_up(set_up))  # type: ignore[method-assign, assignment]

    def setUp(self) -> None:
        super().setUp()
        print(f"[CI Test Method] {type(self).__name__}.{self._testMethodName}", flush=True)

    def _callTestMethod(self, method: Callable[[], Any]) -> None:  # noqa: N802
        retries = int(os.environ.get("SGLANG_TEST_MAX_RETRY", "1" if is_in_ci() else "0"))
        for attempt in range(retries + 1):
            try:
                method()
                return
            except unittest.SkipTest:
                raise
            except Exception:
                if attempt == retries:
                    raise
                logger.exception("%s failed, trying again", self.id())


def _cleaning_up(set_up: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``setUpClass`` so that ``tearDownClass`` follows its failure; that error is raised."""

    @wraps(set_up)
    def wrapped(cls: Any) -> None:
        try:
            set_up(cls)
        except Exception:
            try:
                cls.tearDownClass()
            except Exception:
                # The set-up's error is the cause; what it left undone may well fail to be undone.
                logger.exception("tearDownClass failed after a failed setUpClass")
            raise

    return wrapped


def write_github_step_summary(content: str) -> None:
    """Append ``content`` to the summary page of the CI job; without one, log it."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path is None:
        logger.info("%s", content)
        return
    with open(path, "a", encoding="utf-8") as summary:
        summary.write(content)


def dump_metric(name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
    """Record a measured number: a JSON line in the file SGLANG_TEST_METRICS_OUTPUT, if set."""
    record = {
        "name": name,
        "value": value,
        "labels": dict(labels or {}),
        "test": os.environ.get("PYTEST_CURRENT_TEST", Path(sys.argv[0]).name),
        "time": time.time(),
    }
    logger.info("metric %s = %s %s", name, value, record["labels"])
    path = os.environ.get("SGLANG_TEST_METRICS_OUTPUT")
    if path:
        with open(path, "a", encoding="utf-8") as output:
            output.write(json.dumps(record) + "\n")


def try_cached_model(model_repo: str) -> str:
    """Return the folder of a model of the local hub cache, or the name itself."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return snapshot_download(model_repo, local_files_only=True)
    except LocalEntryNotFoundError:
        return model_repo


def send_generate_requests(base_url: str, num_requests: int) -> list[str]:
    """Send ``num_requests`` short prompts one after the other and return the texts."""
    return [_generate_once(base_url, 16) for _ in range(num_requests)]


def send_concurrent_generate_requests(base_url: str, num_requests: int) -> list[str]:
    """Send ``num_requests`` longer prompts all at once and return the texts."""
    with ThreadPoolExecutor(num_requests) as pool:
        return list(pool.map(lambda _: _generate_once(base_url, 128), range(num_requests)))


def _generate_once(base_url: str, max_new_tokens: int) -> str:
    body: dict[str, Any] = {
        "text": "The capital of France is",
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
    }
    reply = requests.post(f"{normalize_base_url(base_url)}/generate", json=body, timeout=600)
    reply.raise_for_status()
    return str(reply.json()["text"])


def calculate_rouge_l(outputs: Sequence[str], references: Sequence[str]) -> list[float]:
    """Return the ROUGE-L F-measure of each output against its reference, over words."""
    scores = []
    for output, reference in zip(outputs, references, strict=True):
        left, right = output.split(), reference.split()
        common = _longest_common_subsequence(left, right)
        scores.append(2 * common / (len(left) + len(right)) if common else 0.0)
    return scores


def _longest_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for position, other in enumerate(right, start=1):
            above = lengths[position]
            lengths[position] = diagonal + 1 if word == other else max(above, lengths[position - 1])
            diagonal = above
    return lengths[-1]
