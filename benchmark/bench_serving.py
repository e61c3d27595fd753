"""Load on a server over HTTP: latencies, throughput, and whether it stays well under a soak.

Drives any server with SGLang's `/generate` or the OpenAI endpoints. Open loop (Poisson arrivals at
`--request-rate`, `inf` sends everything at once), closed loop (`--concurrency` places, the next
request when one becomes free), or both: arrivals that wait for a place.

    python benchmark/bench_serving.py --url http://127.0.0.1:30000 --request-rate 8
    python benchmark/bench_serving.py --workload prefix --groups 8 --concurrency 16 --plot out.png
    python benchmark/bench_serving.py --mix 10        # ten minutes; exit code 1 if it did not hold
    python benchmark/bench_serving.py --serve MODEL_FOLDER --serve-flags "--page-size 64" --mix 5
    python benchmark/bench_serving.py --small         # own server, tiny random model: a self-test

Latency starts when the request is sent, connecting included. "Between tokens" is the time between
events of a stream; where an event brings several tokens "per output token" is the better figure.
Warm-up requests have the same shape, other content, and are not counted. The seed is new for each
run unless given, since the same prompts would hit the server's prefix cache. The client watches
itself: the lag of its event loop and its share of a core are part of the result.

`--mix` sends long prompts, long answers, aborts and disconnects for the given minutes, then checks
that the server is idle with no token in use, that the time per token of the last quarter is that
of the first, and that nothing failed.

SIGTERM ends the sending. What is open then has 10 s to end; after that it is cut off, which counts
as no failure. What was measured is checked and reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import resource
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from arguments import (
    count,
    input_file,
    json_object,
    length_range,
    model_path,
    output_file,
    parser_of,
    positive,
    whole_number,
)
from serving import plot, report, soak, workloads
from serving.backends import BACKENDS, RequestOptions
from serving.http_stream import Endpoint, HttpError, fetch_json
from serving.load import LoadGenerator, Pacing, Recording
from serving.workloads import LengthRange, PromptSpec, Shape

FALLBACK_VOCAB_SIZE = 10_000
MIX_CONCURRENCY = 16
SMALL_CONCURRENCY = 6
SHORT_SOAK_MIN = 0.05
SERVER_START_S = 300
WANTED_FILES = 65_536
SERVER_FACTS = (
    "version",
    "model_path",
    "device",
    "dtype",
    "tp_size",
    "dp_size",
    "page_size",
    "attention_backend",
    "chunked_prefill_size",
    "max_total_num_tokens",
    "max_running_requests",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "enable_hierarchical_cache",
    "hicache_storage_backend",
    "speculative_algorithm",
    "stream_interval",
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; `--small` replaces sizes that were not given."""
    parser = parser_of(__doc__)
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:30000", help="where the server listens")
    server.add_argument(
        "--backend",
        choices=sorted(BACKENDS),
        default="sglang",
        help="sglang: /generate with token ids; the others: the endpoints of OpenAI's interface",
    )
    server.add_argument("--model", default="default", help="model name in OpenAI requests")
    server.add_argument("--api-key", help="sent as a bearer token")
    server.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="an object whose fields each request carries",
    )
    server.add_argument(
        "--small", action="store_true", help="serve a tiny random model, a self-test"
    )
    server.add_argument(
        "--serve", type=model_path, metavar="MODEL", help="start a server of this model for the run"
    )
    server.add_argument("--serve-flags", default="", help="of --serve: its command line")
    load = parser.add_argument_group("load")
    load.add_argument("--request-rate", type=positive, help="requests per second; default inf")
    load.add_argument("--concurrency", type=count, help="most requests at once")
    load.add_argument("--num-prompts", type=count, help="default 200, or the whole file")
    load.add_argument(
        "--warmup", type=whole_number(0), default=4, help="requests before, not counted"
    )
    load.add_argument("--timeout", type=positive, default=600.0, help="seconds, each request")
    load.add_argument("--seed", type=int, help="default: a new one")
    load.add_argument(
        "--mix",
        type=positive,
        metavar="MINUTES",
        help="mixed soak load, then three checks: server idle, no drift, no failures",
    )
    load.add_argument(
        "--drift-tolerance", type=float, default=0.05, help="of --mix, slower by that share"
    )
    work = parser.add_argument_group("workload")
    work.add_argument(
        "--workload",
        choices=["random", "prefix", "file"],
        default="random",
        help="prompts: independent, in groups with a shared prefix, or of --file",
    )
    work.add_argument("--input-len", type=length_range, help="N or LOW:HIGH, default 512")
    work.add_argument("--output-len", type=length_range, help="N or LOW:HIGH, default 128")
    work.add_argument("--groups", type=count, default=8, help="of prefix: different prefixes")
    work.add_argument("--prefix-len", type=count, help="of prefix: shared tokens, default 1024")
    work.add_argument("--file", type=input_file, help="of file: JSONL of prompts")
    work.add_argument("--vocab-size", type=count, help="random ids are below; default: the model's")
    work.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    work.add_argument("--stop-at-eos", action="store_true", help="default: answers of full length")
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=output_file, help="write all figures to this file")
    output.add_argument("--plot", type=output_file, help="draw the run (needs matplotlib)")
    args = parser.parse_args(arguments)
    if (args.workload == "file") != (args.file is not None):
        parser.error("--workload file and --file need each other")
    if args.mix is not None and args.workload != "random":
        parser.error("--mix has its own workload")
    _fill_defaults(args)
    return args


def _fill_defaults(args: argparse.Namespace) -> None:
    small = args.small
    args.input_len = args.input_len or (LengthRange(8, 96) if small else LengthRange(512, 512))
    args.output_len = args.output_len or (LengthRange(8, 48) if small else LengthRange(128, 128))
    args.prefix_len = args.prefix_len or (64 if small else 1024)
    if args.num_prompts is None and args.workload != "file" and args.mix is None:
        args.num_prompts = 40 if small else 200
    if args.request_rate is None:
        args.request_rate = 20.0 if small and args.mix is None else float("inf")
    if args.mix is not None and args.concurrency is None:
        args.concurrency = SMALL_CONCURRENCY if small else MIX_CONCURRENCY
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(1 << 32)


@contextlib.contextmanager
def own_server(args: argparse.Namespace) -> Iterator[None]:
    """Serve the model of `--serve` while the context lasts and point `args` at it."""
    # Late: against a server that runs elsewhere nothing of the package is needed.
    from sglang.srt.utils.network import get_free_port
    from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

    args.url = f"http://127.0.0.1:{get_free_port()}"
    flags = shlex.split(args.serve_flags)
    started = time.perf_counter()
    try:
        process = popen_launch_server(args.serve, args.url, SERVER_START_S, other_args=flags)
    except (RuntimeError, TimeoutError) as error:
        raise SystemExit(f"bench_serving.py: the server did not start: {error}") from error
    sys.stderr.write(f"the server answers after {time.perf_counter() - started:.1f} s\n")
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"the server ended during the run with code {process.returncode}")
    finally:
        terminate_and_kill_process_tree(process, terminate_timeout=20)


@contextlib.contextmanager
def small_server(args: argparse.Namespace) -> Iterator[None]:
    """Serve a tiny random model while the context lasts and point `args` at it."""
    # Late: against a server that runs elsewhere nothing of the package is needed.
    from sglang.srt.utils.network import get_free_port
    from sglang.test.fakes.tiny_models import PAD_ID, make_tiny_checkpoint
    from sglang.test.test_utils import popen_launch_server, terminate_and_kill_process_tree

    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_checkpoint(Path(folder) / "model", max_position_embeddings=512)
        args.url = f"http://127.0.0.1:{get_free_port()}"
        args.vocab_size = args.vocab_size or PAD_ID
        flags: list[str | int] = ["--max-total-tokens", 8192, "--num-threads", 1]
        flags += ["--stream-interval", 1, "--log-level", "warning", "--enable-cache-report"]
        process = popen_launch_server(str(model), args.url, 120, other_args=flags, device="cpu")
        try:
            yield
        finally:
            terminate_and_kill_process_tree(process, terminate_timeout=20)


async def find_vocab_size(args: argparse.Namespace, endpoint: Endpoint) -> int:
    """Return the size of the vocabulary: given, or of the model's config.json if it is local."""
    if args.vocab_size:
        return int(args.vocab_size)
    try:
        info = await fetch_json(endpoint, "GET", "/model_info")
        config = Path(info["model_path"], "config.json")
        return int(json.loads(config.read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, HttpError, KeyError, ValueError):
        sys.stderr.write(f"vocabulary unknown: random ids are below {FALLBACK_VOCAB_SIZE}\n")
        return FALLBACK_VOCAB_SIZE


def make_prompts(
    args: argparse.Namespace, shape: Shape, rng: random.Random
) -> Iterator[PromptSpec]:
    """Return the prompts that the command line asks for."""
    if args.mix is not None:
        return workloads.mixed_prompts(shape, rng)
    if args.workload == "prefix":
        return workloads.shared_prefix_prompts(shape, rng, args.groups, args.prefix_len)
    if args.workload == "file":
        return workloads.file_prompts(args.file, args.output_len.high)
    return workloads.random_prompts(shape, rng)


async def describe_server(endpoint: Endpoint) -> dict[str, Any]:
    """Return what a reader needs to know of the server; empty where it does not tell."""
    try:
        info = await fetch_json(endpoint, "GET", "/server_info")
    except (OSError, HttpError, ValueError):
        return {}
    return {name: info[name] for name in SERVER_FACTS if name in info}


class Measured(NamedTuple):
    """What a run leaves behind."""

    recording: Recording
    checks: list[soak.Check]
    server: dict[str, Any]


async def run(args: argparse.Namespace) -> Measured:
    """Warm up, measure, check."""
    endpoint = Endpoint.parse(args.url, args.api_key)
    options = RequestOptions(
        model=args.model,
        temperature=args.temperature,
        ignore_eos=not args.stop_at_eos,
        extra_body=args.extra_body,
    )
    generator = LoadGenerator(endpoint, BACKENDS[args.backend](options))
    shape = Shape(
        vocab_size=await find_vocab_size(args, endpoint),
        input_len=args.input_len,
        output_len=args.output_len,
        as_text=args.backend == "openai-chat",
    )
    rng = random.Random(args.seed)
    warmup = itertools.islice(workloads.random_prompts(shape, rng), args.warmup)
    await _warm_up(generator, list(warmup), args)
    prompts = make_prompts(args, shape, rng)
    if args.mix is None:
        # Made beforehand, so that drawing random numbers does not disturb the measurement.
        prompts = iter(list(itertools.islice(prompts, args.num_prompts)))
    duration_s = None if args.mix is None else 60 * args.mix
    pacing = Pacing(
        arrivals_s=workloads.arrivals(args.request_rate, rng),
        has_schedule=args.request_rate != float("inf"),
        concurrency=args.concurrency,
        duration_s=duration_s,
        timeout_s=args.timeout,
    )
    server = await describe_server(endpoint)
    with tqdm(total=args.num_prompts, unit="req", mininterval=0.5, file=sys.stderr) as bar:
        with stopped_by_sigterm(generator):
            recording = await generator.run(prompts, pacing, lambda record: _advance(bar, record))
    checks: list[soak.Check] = []
    if duration_s is not None:
        checks = [
            await soak.check_idle(endpoint),
            soak.check_drift(recording, min(duration_s, recording.sending_s), args.drift_tolerance),
            soak.check_errors(recording),
        ]
    return Measured(recording, checks, server)


@contextlib.contextmanager
def stopped_by_sigterm(generator: LoadGenerator) -> Iterator[None]:
    """While the context lasts, SIGTERM ends the sending and not the process."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, generator.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _advance(bar: Any, record: Any) -> None:
    bar.update()
    if record.outcome == "error":
        bar.set_postfix_str("with errors", refresh=False)


async def _warm_up(
    generator: LoadGenerator, prompts: list[PromptSpec], args: argparse.Namespace
) -> None:
    pacing = Pacing(arrivals_s=itertools.repeat(0.0), timeout_s=args.timeout)
    recording = await generator.run(prompts, pacing) if prompts else None
    failed = [record.error for record in recording.records if record.error] if recording else []
    if failed:
        raise SystemExit(f"the warm-up failed, nothing was measured: {failed[0]}")


def allow_many_connections() -> None:
    """Raise the soft limit of open files as far as the hard limit lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def describe_load(args: argparse.Namespace, sending_s: float) -> str:
    """Return one line for tables and pictures."""
    if args.mix is not None:
        return f"soak of {min(args.mix, sending_s / 60):.3g} min, {args.concurrency} at once"
    pace = f"{args.request_rate:g} requests/s" if args.request_rate != float("inf") else ""
    places = f"at most {args.concurrency} at once" if args.concurrency else ""
    load = ", ".join(filter(None, (pace, places))) or "all at once"
    return f"{args.workload} prompts, {load}"


def short_soak(args: argparse.Namespace) -> list[soak.Check]:
    """Soak the small server for seconds, the second half of `--small`."""
    changes = {
        "mix": SHORT_SOAK_MIN,
        "concurrency": args.concurrency or SMALL_CONCURRENCY,
        "num_prompts": None,
        "request_rate": float("inf"),
        "workload": "random",
        "warmup": 0,
        "drift_tolerance": float("inf"),  # seconds on a busy machine say nothing about a drift
    }
    return asyncio.run(run(argparse.Namespace(**{**vars(args), **changes}))).checks


def settings_for_json(args: argparse.Namespace) -> dict[str, Any]:
    """Return the command line without secrets; an infinite rate is a word, as JSON has none."""
    settings = {name: value for name, value in vars(args).items() if name != "api_key"}
    if args.request_rate == float("inf"):
        settings["request_rate"] = "inf"
    return settings


def server_for(args: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """The server that the run brings along, if it does."""
    if args.small:
        return small_server(args)
    return own_server(args) if args.serve else contextlib.nullcontext()


def main(arguments: list[str] | None = None) -> int:
    """Run and report; returns 1 if a request failed or a check of `--mix` did not hold."""
    args = parse_arguments(arguments)
    allow_many_connections()
    started = time.time()
    with server_for(args):
        recording, checks, server = asyncio.run(run(args))
        if args.small and args.mix is None:
            checks += short_soak(args)
    summary = report.summarize(recording)
    load = describe_load(args, recording.sending_s)
    sys.stdout.write(f"{load}; seed {args.seed}\n{report.format_table(summary)}")
    for check in checks:
        verdict = "ok" if check.passed else "FAILED"
        sys.stdout.write(f"{check.name:<28}{verdict}: {check.detail}\n")
    if args.json:
        content = {
            "started": started,
            "settings": settings_for_json(args),
            "server": server,
            "client": {"python": platform.python_version(), "cores": os.cpu_count()},
            **report.to_json(summary, recording),
            "checks": [asdict(check) for check in checks],
        }
        args.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
    if args.plot:
        title = f"{args.backend}: {load}"
        plot.draw(args.plot, recording, summary, title, soak=args.mix is not None)
    failed = summary.errors or not all(check.passed for check in checks)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
