"""CPU speed of the engine against its limits and against `transformers`.

Two processes with the same weights and number of threads, one for the engine (scheduler, caches,
model and sampler, without HTTP), one for transformers. They take turns A-B-B-A, so that what else
the machine does hits both alike; the figures are medians over the rounds.

* prefill: one prompt of `--prefill` random tokens, first token included, tokens per second;
* decode: tokens per second of batches 1 and 8 at a context of 64, after the first token;
* of the limit: the engine's decode at batch 1 ÷ (read bandwidth ÷ bytes of the weights, in the
  format that it reads), the bandwidth measured in the same process and round by streaming through
  a buffer larger than any cache;
* ratio: engine ÷ transformers.

    python benchmark/bench_cpu_engine.py --model FOLDER [--threads 2] [--rounds 5] [--json FILE]
    python benchmark/bench_cpu_engine.py --small      # a tiny random model: a self-test
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any, Protocol

from arguments import model_path, output_file, parse_small

PROMPT_LEN = 64


class Contestant(Protocol):
    """One engine in its process."""

    vocab_size: int

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from a prompt to its first token."""
        ...

    def decode(self, prompts: list[list[int]], num_steps: int) -> float:
        """Seconds of `num_steps` decode steps of all prompts together, prefill not counted."""
        ...


class EngineContestant:
    """The scheduler over the real model, in process."""

    def __init__(self, model: str, threads: int, weight_format: str) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig
        from sglang.srt.platforms import init_platform
        from sglang.test.fakes.scheduler_harness import SchedulerHarness
        from step_cost import weight_bytes

        init_platform("cpu").configure_process(threads)
        config = ModelConfig.from_path(model)
        runner = ModelRunner(
            config,
            RunnerConfig(
                load_format="auto",
                attention_backend="torch_native",
                page_size=1,
                mem_fraction_static=None,
                max_total_tokens=16384,
                max_running_requests=32,
                kv_cache_dtype="auto",
                random_seed=0,
                cpu_weight_format=weight_format,
            ),
        )
        self.vocab_size = config.vocab_size
        self.weight_bytes = weight_bytes(runner, 1)
        self._harness = SchedulerHarness(
            worker=TpModelWorker(runner),
            context_len=config.context_len,
            max_requests=32,
            vocab_size=config.vocab_size,
            chunk_size=2048,
            disable_cache=True,
        )
        self._next_rid = 0

    def _start(self, prompts: list[list[int]], max_new_tokens: int) -> list[str]:
        rids = []
        for prompt in prompts:
            rid = f"r{self._next_rid}"
            self._next_rid += 1
            self._harness.generate(rid, prompt, max_new_tokens, stream=True, ignore_eos=True)
            rids.append(rid)
        return rids

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._start([prompt], 1)
        self._harness.run_until_idle()
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], num_steps: int) -> float:
        rids = self._start(prompts, num_steps + 1)
        while any(not self._harness.tokens(rid) for rid in rids):
            self._harness.step()
        start = time.perf_counter()
        self._harness.step(num_steps)
        elapsed = time.perf_counter() - start
        lengths = {len(self._harness.tokens(rid)) for rid in rids}
        if lengths != {num_steps + 1}:
            raise RuntimeError(f"{num_steps} decode steps gave {lengths} tokens")
        self._harness.run_until_idle()
        return elapsed


class TransformersContestant:
    """`AutoModelForCausalLM` with its own KV cache, greedy."""

    def __init__(self, model: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.vocab_size = int(self._model.config.vocab_size)

    def _forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self._forward(self._torch.tensor([prompt]), None)
        return time.perf_counter() - start

    def decode(self, prompts: list[list[int]], num_steps: int) -> float:
        token, cache = self._forward(self._torch.tensor(prompts), None)
        start = time.perf_counter()
        for _ in range(num_steps):
            token, cache = self._forward(token, cache)
        return time.perf_counter() - start


def serve(args: argparse.Namespace) -> None:
    """Child: answer commands (one JSON a line) on standard input until it closes."""
    contestant: Contestant
    if args.role == "engine":
        contestant = EngineContestant(args.model, args.threads, args.cpu_weight_format)
    else:
        contestant = TransformersContestant(args.model, args.threads)
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, contestant.vocab_size) for _ in range(length)]

    _say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        if command["what"] == "prefill":
            length = command["length"]
            _say({"prefill": length / contestant.prefill(prompt(length))})
        elif command["what"] == "decode":
            prompts = [prompt(PROMPT_LEN) for _ in range(command["batch"])]
            elapsed = contestant.decode(prompts, command["steps"])
            _say({f"decode_b{command['batch']}": command["batch"] * command["steps"] / elapsed})
        elif isinstance(contestant, EngineContestant):
            # Late: the peer's process loads nothing of the package.
            from machine_limits import cpu_read_bandwidth

            bandwidth = cpu_read_bandwidth()
            limit = bandwidth / contestant.weight_bytes
            _say({"bandwidth_gb_s": bandwidth / 1e9, "limit_b1": limit})
        else:
            _say({})


def _say(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Child:
    """A contestant's process, seen from the parent."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--role", role, "--model", args.model]
        command += ["--threads", str(args.threads), "--cpu-weight-format", args.cpu_weight_format]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self._read()

    def ask(self, **command: Any) -> dict[str, float]:
        if self._process.stdin is None:
            raise RuntimeError("the child has no standard input")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"a contestant ended with code {self._process.wait()}")
        values: dict[str, float] = json.loads(line)
        return values

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)


def run_rounds(args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """All figures of all rounds: role -> figure -> values."""
    children = {role: Child(role, args) for role in ("engine", "transformers")}
    figures: dict[str, dict[str, list[float]]] = {role: defaultdict(list) for role in children}
    commands: list[dict[str, Any]] = [
        {"what": "bandwidth"},
        {"what": "prefill", "length": args.prefill},
        {"what": "decode", "batch": 1, "steps": args.steps},
        {"what": "decode", "batch": 8, "steps": args.steps},
    ]
    try:
        for number in range(args.rounds + 1):
            order = ["engine", "transformers"] if number % 2 else ["transformers", "engine"]
            for command in commands:
                for role in order:
                    values = children[role].ask(**command)
                    if number:  # round 0 warms up
                        for name, value in values.items():
                            figures[role][name].append(value)
            sys.stderr.write(f"round {number} of {args.rounds} done\n")
    finally:
        for child in children.values():
            child.close()
    return figures


def report(figures: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Print the table; return what goes into the JSON file."""
    median = {
        role: {name: statistics.median(values) for name, values in of_role.items()}
        for role, of_role in figures.items()
    }
    engine, peer = median["engine"], median["transformers"]
    sys.stdout.write(f"{'':<12} {'engine':>10} {'transformers':>13} {'ratio':>7}  (tokens/s)\n")
    for name in ("prefill", "decode_b1", "decode_b8"):
        ratios = [a / b for a, b in zip(figures["engine"][name], figures["transformers"][name])]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        sys.stdout.write(
            f"{name:<12} {engine[name]:>10.1f} {peer[name]:>13.1f} "
            f"{engine[name] / peer[name]:>7.2f}  ({spread})\n"
        )
    of_limit = engine["decode_b1"] / engine["limit_b1"]
    sys.stdout.write(
        f"decode, batch 1: {engine['decode_b1']:.1f} of {engine['limit_b1']:.1f} tokens/s that "
        f"{engine['bandwidth_gb_s']:.1f} GB/s allow = {of_limit:.2f}\n"
    )
    return {"median": median, "of_limit": of_limit, "rounds": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=model_path, help="folder of a Llama-like model with safetensors"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each process")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds")
    parser.add_argument("--prefill", type=int, default=1024, help="prompt tokens of prefill")
    parser.add_argument("--steps", type=int, default=48, help="decode steps measured")
    parser.add_argument("--cpu-weight-format", default="auto", help="as the server's flag")
    parser.add_argument("--small", action="store_true", help="tiny model, one round")
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    parser.add_argument("--role", choices=["engine", "transformers"], help=argparse.SUPPRESS)
    args = parse_small(parser, {"rounds": 1, "prefill": 32, "steps": 4}, needs_model=True)
    if args.role:
        serve(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.small:
            from sglang.test.fakes.tiny_models import make_tiny_checkpoint

            args.model = str(make_tiny_checkpoint(folder))
        result = report(run_rounds(args))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
