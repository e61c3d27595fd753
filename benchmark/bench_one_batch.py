"""Prefill and decode of one batch through the scheduler, against limits measured in the process.

The whole engine without HTTP: scheduler (overlap loop), batch building, model, sampler. Weights may
be random (`--load-format dummy`): speed does not depend on their values.

* decode, each batch size: `--input-len` random tokens in, `--output-len` out, the first steps
  dropped; tokens per second, and the share of the limit: bytes of weights and KV that a step must
  read ÷ read bandwidth;
* prefill: one prompt; time to the first token, and MFU: operations ÷ (time × measured matmul rate);
* busy: device time of the decode steps ÷ wall time; what is missing is time in which the device
  waits for the host (on the CPU: the share of forward and sampler);
* step / replay: time of a step in the engine ÷ that of its bare captured graph in a loop (on the
  CPU: of the model's forward). Steps grow with the context and the last one is replayed, so the
  step is the median of the last 16 measured. `bench_overhead.py` measures both more exactly.

With `--small` there are no limits and no shares: a tiny model lies in a cache.

    python benchmark/bench_one_batch.py --model benchmark/shapes/llama-3.1-8b --load-format dummy
    python benchmark/bench_one_batch.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arguments import (
    count,
    fraction,
    model_path,
    output_file,
    parse_small,
    parser_of,
    require_device,
    whole_number,
)
from load_fit import check_before_loading, check_pool, longest_request
from machine_limits import measure_limits, timed
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.registry import attention_backend_names
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult, TpModelWorker
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
from sglang.srt.model_loader.weight_utils import LOAD_FORMATS
from sglang.srt.platforms import current_platform, init_platform
from sglang.srt.server_args_availability import FP8_CACHE_DTYPES, KV_CACHE_DTYPES
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from step_cost import prefill_ops, step_bytes

DROPPED_STEPS = 32
LEAST_OUTPUT_LEN = 7  # two steps are left to measure, of which one ends where the other starts
LAST_STEPS = 16
TINY_LONGEST = 1 << 14
SMALL = {"batch": [1, 4], "prefill": [64], "input_len": 16, "output_len": 24, "repeats": 1}


class HostEvent:
    """A platform event's timing on the CPU, where work is done when the call returns."""

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.time_s - self.time_s) * 1e3


class TimedWorker:
    """A worker that notes when each decode step starts, with events around it while `is_timing`."""

    def __init__(self, worker: TpModelWorker) -> None:
        self._worker = worker
        self.events: list[tuple[Any, Any]] = []
        self.moments: list[float] = []  # the host's, in seconds
        self.is_timing = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        is_decode = batch.forward_mode is ForwardMode.DECODE
        if is_decode:
            self.moments.append(time.perf_counter())
        if not is_decode or not self.is_timing:
            return self._worker.forward_batch_generation(batch)
        platform = current_platform()
        start, end = (
            HostEvent() if platform.name == "cpu" else platform.event(enable_timing=True)
            for _ in range(2)
        )
        start.record()
        result = self._worker.forward_batch_generation(batch)
        end.record()
        self.events.append((start, end))
        return result


def last_step_ms(moments: list[float]) -> float:
    """Milliseconds of a step at the end of a run, from when its steps started.

    The median of the last ones; their mean would count the rare step of a busy machine, which the
    best of several loops of replays does not.
    """
    last = moments[-LAST_STEPS - 1 :]
    if len(last) < 2:
        return float("nan")
    return statistics.median(end - start for start, end in zip(last, last[1:])) * 1e3


class Bench:
    """One engine and the measurements on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises ValueError for a model that cannot be loaded, and a load that does not fit."""
        init_platform(args.device).configure_process(args.threads)
        self.args = args
        self.config = ModelConfig.from_path(
            args.model, context_length=args.context_length, device=args.device
        )
        check_before_loading(args, self.config)
        began = time.perf_counter()
        self.runner = ModelRunner(
            self.config,
            RunnerConfig(
                load_format=args.load_format,
                attention_backend=args.attention_backend,
                page_size=args.page_size,
                mem_fraction_static=args.mem_fraction_static,
                max_total_tokens=args.max_total_tokens,
                max_running_requests=max(args.batch),
                kv_cache_dtype=args.kv_cache_dtype,
                random_seed=0,
                disable_cuda_graph=args.disable_cuda_graph,
                cuda_graph_bs=args.batch,
                warm_up_tokens=args.warm_up_tokens,
            ),
        )
        self.start_s = time.perf_counter() - began
        check_pool(args, self.runner.max_total_num_tokens)
        self.worker = TimedWorker(TpModelWorker(self.runner))
        self.last_step: Any = None
        self._keep_last_step()
        self.rng = random.Random(0)
        self.harness = SchedulerHarness(
            worker=self.worker,
            page_size=args.page_size,
            max_requests=max(args.batch),
            context_len=self.config.context_len,
            vocab_size=self.config.vocab_size,
            chunk_size=args.chunk_size,
            max_prefill_tokens=1 << 30,
            overlap=True,
            disable_cache=True,
            conservativeness=0.01,
        )
        self.num_requests = 0

    def _keep_last_step(self) -> None:
        build = self.worker._worker.build_forward_batch

        def build_and_keep(
            batch: ScheduleBatch, hidden_mode: CaptureHiddenMode | None = None
        ) -> ForwardBatch:
            forward_batch = build(batch, hidden_mode)
            if batch.forward_mode is ForwardMode.DECODE:
                self.last_step = forward_batch
            return forward_batch

        self.worker._worker.build_forward_batch = build_and_keep  # type: ignore[method-assign]

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(self.config.vocab_size) for _ in range(length)]

    def start(self, count: int, input_len: int, output_len: int) -> None:
        for _ in range(count):
            rid = f"r{self.num_requests}"
            self.num_requests += 1
            self.harness.generate(rid, self.prompt(input_len), output_len, ignore_eos=True)

    def finish(self) -> None:
        self.harness.run_until_idle(1 << 20)
        self.harness.outputs.clear()

    def prefill(self, length: int, repeats: int) -> dict[str, float]:
        times = []
        for number in range(repeats + 1):
            self.start(1, length, 1)
            current_platform().synchronize()
            start = time.perf_counter()
            self.finish()
            if number:
                times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        return {"length": length, "ms": seconds * 1e3, "tok_s": length / seconds}

    def first_uses(self, lengths: list[int]) -> list[dict[str, float]]:
        """Prompts of lengths that were not seen before, each sent twice: what the first costs."""
        rows = []
        for length in lengths:
            times = []
            for _ in range(2):
                self.start(1, length, 1)
                current_platform().synchronize()
                start = time.perf_counter()
                self.finish()
                times.append((time.perf_counter() - start) * 1e3)
            rows.append({"length": length, "first_ms": times[0], "again_ms": times[1]})
        return rows

    def decode(
        self, batch: int, input_len: int, output_len: int, *, events: bool = True
    ) -> dict[str, float]:
        """Without `events` nothing is known of the device, and nothing is added to a step."""
        self.worker.is_timing = events
        dropped = min(DROPPED_STEPS, output_len // 4)
        self.start(batch, input_len, output_len)
        while len(self.harness.scheduler.running_batch) < batch:
            self.harness.step()
        self.harness.step(dropped)
        current_platform().synchronize()
        self.worker.events.clear()
        self.worker.moments.clear()
        steps = output_len - dropped - 4
        start = time.perf_counter()
        self.harness.step(steps)
        current_platform().synchronize()
        elapsed = time.perf_counter() - start
        busy = sum(begin.elapsed_time(end) for begin, end in self.worker.events) / 1e3
        last_ms = last_step_ms(self.worker.moments)
        self.finish()
        return {
            "batch": batch,
            "tok_s": batch * steps / elapsed,
            "ms_per_step": elapsed / steps * 1e3,
            "last_ms_per_step": last_ms,
            "busy_share": busy / elapsed if events else float("nan"),
            "context": input_len + dropped + steps / 2,
        }

    def profile(self, batch: int, input_len: int, steps: int = 20) -> str:
        """Device time of one decode step by kernel, the largest first."""
        self.start(batch, input_len, steps + 16)
        while len(self.harness.scheduler.running_batch) < batch:
            self.harness.step()
        self.harness.step(4)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profiler:
            self.harness.step(steps)
            current_platform().synchronize()
        self.finish()
        events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
        lines = [
            f"  {event.self_device_time_total / steps:9.1f} us {event.count / steps:6.1f} x  "
            f"{event.key[:100]}"
            for event in events[:14]
        ]
        return "\n".join(lines) + "\n"

    def bare_replay_ms(self, batch: int) -> float:
        """The last decode step alone, in a loop: its graph, or on the CPU the model's forward."""
        graphs = self.runner.decode_runner
        with torch.inference_mode(), ExitStack() as stack:
            step: Callable[[], object] = partial(self.runner.forward, self.last_step)
            if isinstance(graphs, CudaGraphRunner):
                if batch not in graphs.batch_sizes:
                    return float("nan")
                step = stack.enter_context(graphs.bare_replays(batch))
            return timed(lambda: [step() for _ in range(50)], 3) / 50 * 1e3


def make_bench(args: argparse.Namespace) -> Bench:
    """Raises SystemExit, in one line, where `Bench` refuses."""
    try:
        return Bench(args)
    except ValueError as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error


def find_limits(bench: Bench, *, small: bool) -> dict[str, float] | None:
    """Measure and print what the machine reaches; nothing for a model that lies in a cache."""
    if small:
        sys.stdout.write("--small: no limits, since a tiny model lies in a cache\n")
        return None
    limits = measure_limits(bench.runner.device, bench.runner.dtype)
    sys.stdout.write(
        f"limits: read {limits['read_bytes_s'] / 1e9:.0f} GB/s, "
        f"copy {limits['copy_bytes_s'] / 1e9:.0f} GB/s, "
        f"matmul {limits['matmul_ops_s'] / 1e12:.1f} TFLOP/s\n"
    )
    return limits


def prefill_row(
    bench: Bench, length: int, repeats: int, limits: dict[str, float] | None
) -> dict[str, float]:
    """Figures of prompts of one length, printed too."""
    row = bench.prefill(length, repeats)
    line = f"prefill {length}: {row['ms']:.1f} ms, {row['tok_s']:.0f} tok/s"
    if limits is not None:
        row["mfu"] = prefill_ops(bench.runner, length) / (row["ms"] / 1e3) / limits["matmul_ops_s"]
        line += f", MFU {row['mfu']:.3f}"
    sys.stdout.write(line + "\n")
    return row


def decode_row(
    bench: Bench, batch: int, args: argparse.Namespace, limits: dict[str, float] | None
) -> dict[str, float]:
    """Figures of one batch size, those of the run with the median speed; printed too."""
    runs = [bench.decode(batch, args.input_len, args.output_len) for _ in range(args.repeats)]
    row = sorted(runs, key=lambda r: r["tok_s"])[len(runs) // 2]
    line = f"decode batch {batch}: {row['tok_s']:.0f} tok/s ({row['ms_per_step']:.3f} ms/step)"
    if limits is not None:
        limit_s = step_bytes(bench.runner, batch, row["context"]) / limits["read_bytes_s"]
        row["limit_tok_s"] = batch / limit_s
        row["share"] = row["tok_s"] / row["limit_tok_s"]
        line += f", {row['share']:.3f} of {row['limit_tok_s']:.0f}"
    row["replay_ms"] = bench.bare_replay_ms(batch)
    row["step_over_replay"] = row["last_ms_per_step"] / row["replay_ms"]
    line += f"; busy {row['busy_share']:.3f}, step / replay {row['step_over_replay']:.3f}"
    sys.stdout.write(line + "\n")
    return row


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and print the table."""
    bench = make_bench(args)
    write = sys.stdout.write
    limits = find_limits(bench, small=args.small)
    rows: dict[str, Any] = {"limits": limits}
    rows["start_s"], rows["warm_up_s"] = bench.start_s, bench.runner.warm_up_s
    write(f"start {bench.start_s:.1f} s, of it warm-up {bench.runner.warm_up_s:.1f} s\n")
    rows["first_uses"] = bench.first_uses(args.first_uses)
    for row in rows["first_uses"]:
        write(f"prompt of {row['length']}: {row['first_ms']:.1f} ms, then {row['again_ms']:.1f}\n")
    rows["prefill"] = [prefill_row(bench, n, args.repeats, limits) for n in args.prefill]
    rows["decode"] = []
    for batch in args.batch:
        rows["decode"].append(decode_row(bench, batch, args, limits))
        if args.profile:
            write(bench.profile(batch, args.input_len))
        sys.stdout.flush()
    return rows


def make_parser() -> argparse.ArgumentParser:
    """The options of `Bench` and `run`."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--model",
        type=model_path,
        help="folder of the model, or of its config.json for dummy weights",
    )
    parser.add_argument(
        "--load-format", default="auto", choices=LOAD_FORMATS, help="as the server's flag"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="where it runs")
    parser.add_argument(
        "--attention-backend", choices=attention_backend_names(), help="default: the device's"
    )
    parser.add_argument("--threads", type=count, help="CPU threads; default: all cores")
    parser.add_argument("--page-size", type=count, default=1, help="tokens of a page of KV")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="as the server's flag"
    )
    parser.add_argument("--context-length", type=count, help="tokens; default: the model's")
    parser.add_argument("--mem-fraction-static", type=fraction, help="as the server's flag")
    parser.add_argument("--max-total-tokens", type=count, help="tokens of the KV pool")
    parser.add_argument(
        "--chunk-size", type=count, default=8192, help="most tokens of a prefill step"
    )
    parser.add_argument(
        "--batch", type=count, nargs="+", default=[1, 8, 64, 256], help="requests that decode"
    )
    parser.add_argument(
        "--prefill", type=count, nargs="*", default=[8192], help="prompts to time, tokens"
    )
    parser.add_argument("--input-len", type=count, default=512, help="tokens before decode")
    parser.add_argument(
        "--output-len", type=whole_number(LEAST_OUTPUT_LEN), default=256, help="tokens of decode"
    )
    parser.add_argument(
        "--repeats", type=count, default=5, help="runs of each figure; the median counts"
    )
    parser.add_argument(
        "--first-uses",
        type=count,
        nargs="*",
        default=[],
        metavar="TOKENS",
        help="send a prompt of each length twice: the ms of the first of its length and of another",
    )
    parser.add_argument(
        "--warm-up-tokens",
        type=whole_number(0),
        default=0,
        help="of a prefill before the first request, as a server does",
    )
    parser.add_argument("--disable-cuda-graph", action="store_true", help="no captured steps")
    parser.add_argument("--profile", action="store_true", help="device time by kernel (CUDA)")
    parser.add_argument(
        "--small", action="store_true", help="tiny random model and sizes: a self-test"
    )
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    return parser


def use_tiny_model(args: argparse.Namespace, folder: str) -> None:
    """Make a tiny model in `folder` that takes these lengths, and a pool that holds them.

    Raises SystemExit for lengths that are not tiny.
    """
    longest = longest_request(args) + 1
    if longest > TINY_LONGEST:
        raise SystemExit(
            f"{Path(sys.argv[0]).name}: the tiny model takes requests of less than {TINY_LONGEST} "
            f"tokens, not {longest - 1}"
        )
    checkpoint = make_tiny_checkpoint(folder, max_position_embeddings=max(512, longest))
    args.model, args.load_format = str(checkpoint), "auto"
    args.max_total_tokens = args.max_total_tokens or max(2048, 2 * max(args.batch) * longest)


def parse_arguments() -> argparse.Namespace:
    """Read the command line, and end where it asks for what the device does not have."""
    parser = make_parser()
    args = parse_small(parser, SMALL, needs_model=True)
    for flag, is_given in (
        ("--profile", args.profile),
        ("--attention-backend triton", args.attention_backend == "triton"),
        (f"--kv-cache-dtype {args.kv_cache_dtype}", args.kv_cache_dtype in FP8_CACHE_DTYPES),
    ):
        if args.device == "cpu" and is_given:
            parser.error(f"{flag} needs a CUDA device")
    require_device(args.device)
    return args


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        if args.small:
            use_tiny_model(args, folder)
        if args.attention_backend is None:
            args.attention_backend = init_platform(args.device).default_attention_backend
        rows = run(args)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
