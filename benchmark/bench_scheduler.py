"""Host time of one scheduler step; wanted: 1 ms, better 0.3, with 256 running requests.

Runs the real scheduler (overlap loop), batch building and output path over a model runner that
computes nothing, so that all time measured is the host's own: CPU time of the scheduler thread.
Rows: requests that stream (every step makes a message for each of them, encoded as it would travel)
and requests that do not, page sizes 1 and 16; decode steps built operator by operator, and as they
are given to CUDA graphs and read from them (replays and copies cost nothing here).

    python benchmark/bench_scheduler.py [--requests 256] [--steps 300] [--small] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import torch

from arguments import output_file, parse_small
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import ipc
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, capture_batch_sizes
from sglang.srt.model_executor.graph_capture import GraphableRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.test.fakes.eager_graphs import empty_graphs
from sglang.test.fakes.scheduler_harness import SchedulerHarness

PROMPT_LEN = 32


class NullRunner:
    """Everything a worker needs of a runner, without a model: the next token is always 7."""

    def __init__(self, num_requests: int, context_len: int, page_size: int) -> None:
        self.device = torch.device("cpu")
        slots = num_requests * context_len // page_size * page_size
        self.req_to_token_pool = ReqToTokenPool(num_requests, context_len + 1, "cpu")
        self.token_to_kv_pool_allocator = create_token_to_kv_pool_allocator(slots, page_size)
        self.token_to_kv_pool = None
        self.last_token_ids = torch.zeros(num_requests + 1, dtype=torch.int64)
        self.model_config = SimpleNamespace()

    def stage_decode(self, step: Any) -> None:
        return None

    def stage_prefill(self, step: Any, hidden_mode: Any) -> None:
        return None

    def forward(self, forward_batch: Any) -> LogitsProcessorOutput:
        return LogitsProcessorOutput(next_token_logits=torch.empty(0))

    def sample(self, logits: Any, forward_batch: Any) -> torch.Tensor:
        return torch.full((forward_batch.batch_size,), 7, dtype=torch.int64)

    def nan_rows(self, logits: Any) -> torch.Tensor | None:
        return None


class CapturedRunner(NullRunner):
    """Its decode steps are captured ones with nothing in them; the next token is always 0."""

    def __init__(self, num_requests: int, context_len: int, page_size: int) -> None:
        super().__init__(num_requests, context_len, page_size)
        self.attn_backend = SimpleNamespace(init_forward_metadata=lambda batch: None)
        with empty_graphs():
            sizes = capture_batch_sizes(num_requests)
            self.graphs = CudaGraphRunner(cast(GraphableRunner, self), sizes, show_progress=False)

    def model(self, input_ids: torch.Tensor, positions: Any, batch: Any) -> LogitsProcessorOutput:
        return LogitsProcessorOutput(next_token_logits=torch.zeros(len(input_ids), 8))

    def stage_decode(self, step: Any) -> Any:
        return self.graphs.stage(step)

    def forward(self, forward_batch: Any) -> LogitsProcessorOutput:
        if self.graphs.can_run(forward_batch):
            return self.graphs.run(forward_batch)
        return super().forward(forward_batch)

    def sample(self, logits: Any, forward_batch: Any) -> torch.Tensor:
        known: torch.Tensor | None = logits.greedy_token_ids
        return super().sample(logits, forward_batch) if known is None else known

    def nan_rows(self, logits: Any) -> torch.Tensor | None:
        rows: torch.Tensor | None = logits.unusable_rows
        return rows


def measure(
    num_requests: int, num_steps: int, page_size: int, *, stream: bool, captured: bool
) -> dict[str, Any]:
    """Median and 90th percentile of one iteration of the overlap loop, in microseconds."""
    warmup = 10
    context_len = PROMPT_LEN + num_steps + warmup + 16
    kind = CapturedRunner if captured else NullRunner
    runner = kind(num_requests, context_len, page_size)
    worker = TpModelWorker(cast(ModelRunner, runner))
    harness = SchedulerHarness(
        worker=worker,
        page_size=page_size,
        max_requests=num_requests,
        context_len=context_len,
        max_prefill_tokens=1 << 30,
        overlap=True,
        conservativeness=0.01,
    )
    sent_bytes = 0

    def on_output(message: Any) -> None:
        nonlocal sent_bytes
        sent_bytes += len(ipc.encode(message))

    harness.scheduler.streamer._send = on_output
    for index in range(num_requests):
        prompt = [1 + (index * 31 + i) % 900 for i in range(PROMPT_LEN)]
        harness.generate(f"r{index}", prompt, num_steps + warmup, stream=stream, ignore_eos=True)
    harness.step(warmup)
    running = len(harness.scheduler.running_batch)
    times = []
    for _ in range(num_steps):
        start = time.thread_time()
        harness.step()
        times.append((time.thread_time() - start) * 1e6)
    times = times[: num_steps - 5]  # the last steps end the requests
    return {
        "running": running,
        "page_size": page_size,
        "stream": stream,
        "captured": captured,
        "median_us": round(statistics.median(times), 1),
        "p90_us": round(statistics.quantiles(times, n=10)[8], 1),
        "min_us": round(min(times), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256, help="running requests")
    parser.add_argument("--steps", type=int, default=300, help="steps measured")
    parser.add_argument("--small", action="store_true", help="8 requests, 30 steps: a self-test")
    parser.add_argument("--json", type=output_file, help="also write the rows to this file")
    args = parse_small(parser, {"requests": 8, "steps": 30})
    torch.set_num_threads(1)
    rows = [
        measure(args.requests, args.steps, page_size, stream=stream, captured=captured)
        for captured in (False, True)
        for page_size in (1, 16)
        for stream in (False, True)
    ]
    names = f"{'running':>8} {'captured':>8} {'page':>5} {'stream':>7}"
    sys.stdout.write(f"{names} {'median us':>10} {'p90 us':>9}\n")
    for row in rows:
        sys.stdout.write(
            f"{row['running']:>8} {row['captured']!s:>8} {row['page_size']:>5} "
            f"{row['stream']!s:>7} "
            f"{row['median_us']:>10} {row['p90_us']:>9}\n"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
