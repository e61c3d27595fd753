"""New weights for a running server: how long it takes, and how fast it stops.

    python benchmark/bench_weight_update.py --model benchmark/shapes/llama-3.1-8b
    python benchmark/bench_weight_update.py --device cpu --small            # a self-test

One server on GPU 0 with dummy weights; its trainer is another process.

* ipc: the trainer's tensors lie on the same GPU. Whole time: pause, update, continue. Engine: its
  own part of it, i.e. opening the handles, checking, copying, the fingerprint.
* distributed: the trainer broadcasts from GPU 1. Its rate ÷ that of one buffer of the same size,
  broadcast between two bare processes in the same run.
* pauses: a batch decodes; pause in place -> answer, continue -> next token, in steps.

What a machine has too few GPUs for is left out, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arguments import model_path, output_file, parse_small, require_device
from sglang.srt.utils.network import get_free_port
from sglang.test.small_server import SmallServer, serve
from sglang.test.test_utils import get_gpu_count
from weight_update import pausing

TRAINER = Path(__file__).resolve().parent / "weight_update" / "trainer.py"
PARTS = ("ipc", "distributed", "pauses")
# Both sides of a group must agree on these; multicast over NVLink stays off.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}


class Child:
    """A trainer's process, which prints one JSON line. It has no children."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, str(TRAINER), *map(str, arguments)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def result(self, timeout_s: float) -> Any:
        """What it printed. Raises RuntimeError where it failed, TimeoutExpired after the time."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        finally:
            self.kill()
        if self._process.returncode != 0:
            raise RuntimeError(f"the trainer ended with code {self._process.returncode}")
        return json.loads(output.splitlines()[-1])

    def kill(self) -> None:
        """End it; harmless when it has ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def bare_broadcast(devices: tuple[str, str], num_bytes: int, args: argparse.Namespace) -> Any:
    """One buffer from the first device to the second; the receiver's figures."""
    port = get_free_port()
    children = [
        Child(
            *("--device", device, "--repeats", args.repeats, "broadcast"),
            *("--rank", rank, "--port", port, "--bytes", num_bytes),
        )
        for rank, device in enumerate(devices)
    ]
    try:
        return [child.result(args.timeout) for child in children][1]
    finally:
        for child in children:
            child.kill()


def push(server: SmallServer, device: str, rows: list[str], args: argparse.Namespace) -> Any:
    """The figures of the rows, from a trainer of their own."""
    child = Child(
        *("--device", device, "--repeats", args.repeats, "push"),
        *("--url", server.url, "--shape", args.model, *rows),
    )
    return child.result(args.timeout)


def measure_ipc(server: SmallServer, args: argparse.Namespace) -> dict[str, Any]:
    device = "cuda:0" if args.device == "cuda" else "cpu"
    forms = ["bucket", "list"]
    return dict(push(server, device, [f"{f}:{size}" for size in args.gb for f in forms], args))


def measure_distributed(server: SmallServer, args: argparse.Namespace) -> dict[str, Any]:
    devices = ("cuda:1", "cuda:0") if args.device == "cuda" else ("cpu", "cpu")
    forms = ["broadcast-flat", "broadcast"]
    rows = [f"{form}:{size}" for size in args.gb for form in forms]
    result = dict(push(server, devices[0], rows, args))
    bare = bare_broadcast(devices, result["rows"][0]["bytes"], args)
    for row in result["rows"]:
        row["share"] = row["bytes_s"] / bare["bytes_s"]
        row["update_share"] = row["bytes"] / row["update_s"] / bare["bytes_s"]
    return {**result, "bare": bare}


def measure_pauses(server: SmallServer, args: argparse.Namespace) -> dict[str, Any]:
    return dict(
        pausing.measure(
            server.url,
            num_requests=args.batch,
            input_len=args.input_len,
            max_new_tokens=args.output_len,
            vocab_size=json.loads((Path(args.model) / "config.json").read_text())["vocab_size"],
            cycles=args.cycles,
        )
    )


MEASURES = {"ipc": measure_ipc, "distributed": measure_distributed, "pauses": measure_pauses}


def show_rows(name: str, result: dict[str, Any]) -> None:
    print(
        f"\n{name}: {result['rows'][0]['bytes'] / 1e9:.2f} GB, "
        f"plain copy of it {result['plain_copy_s'] * 1e3:.1f} ms"
    )
    print("row                  calls  prepare   update    whole    worst   engine     GB/s  share")
    for row in result["rows"]:
        times = [row[f"{key}_s"] * 1e3 for key in ("prepare", "update", "whole", "worst_whole")]
        engine = f"{row['engine_s'] * 1e3:8.1f}" if "engine_s" in row else "       -"
        share = f"{row['share']:6.3f}" if "share" in row else "     -"
        print(
            f"{row['row']:<20} {row['calls']:5.0f} "
            + " ".join(f"{value:8.1f}" for value in times)
            + f" {engine} {row['bytes_s'] / 1e9:8.1f} {share}"
        )
    if "bare" in result:
        bare = result["bare"]
        print(f"one buffer: {bare['bytes_s'] / 1e9:.1f} GB/s ({bare['seconds'] * 1e3:.1f} ms)")


def show_pauses(result: dict[str, float]) -> None:
    print(f"\npauses: {result['cycles']:.0f} cycles, a step takes {result['step_ms']:.2f} ms")
    print("                              median      p90    worst    steps")
    labels = {
        "pause": "pause -> answer",
        "late_token": "answer -> last late token",
        "continue": "continue -> next token",
    }
    for key, label in labels.items():
        values = [result[f"{key}{suffix}_ms"] for suffix in ("", "_p90", "_worst")]
        print(
            f"{label:<27} "
            + " ".join(f"{value:8.2f}" for value in values)
            + f" {result[f'{key}_steps']:8.2f}"
        )


SMALL = {
    **{"device": "cpu", "gb": [1.0, 0.0001], "repeats": 1},
    **{"batch": 3, "input_len": 8, "output_len": 3000, "cycles": 3},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=model_path, help="folder of a model or of a shape (config.json alone)"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny random model, a self-test")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--gb", type=float, nargs="+", default=[100.0, 2.0], help="of a bucket")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=32, help="requests that decode (pauses)")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=4000)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds a trainer may take")
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--json", type=output_file, help="file for the figures")
    args = parse_small(parser, SMALL, needs_model=True)
    require_device(args.device)
    return args


def tiny_model(folder: Path, context_length: int) -> str:
    from sglang.test.fakes.tiny_models import make_tiny_checkpoint

    longest = max(4096, context_length)
    return str(make_tiny_checkpoint(folder / "model", max_position_embeddings=longest))


def server_flags(args: argparse.Namespace) -> list[str | int | float]:
    flags: list[str | int | float] = [
        *("--device", args.device),
        *("--max-total-tokens", args.batch * (args.input_len + args.output_len + 64)),
        *("--context-length", args.input_len + args.output_len + 64),
        "--enable-metrics",
        *("--log-level", "warning"),
        "--skip-tokenizer-init",
        *args.flags.split(),
    ]
    if args.device == "cuda":
        flags += ["--cuda-graph-bs", 1, 2, 4, 8, 16, args.batch]
    if not any(Path(args.model).glob("*.safetensors")):
        flags += ["--load-format", "dummy"]
    return flags


def missing(part: str, args: argparse.Namespace) -> str | None:
    """Why a part cannot run here."""
    if part == "distributed" and args.device == "cuda" and get_gpu_count() < 2:
        return "needs two GPUs"
    return None


def main() -> None:
    args = parse_args()
    os.environ.update(ENVIRONMENT)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        if args.small:
            args.model = tiny_model(Path(temporary), args.input_len + args.output_len + 64)
        server = stack.enter_context(serve(args.model, *server_flags(args)))
        for part in args.only:
            reason = missing(part, args)
            if reason is not None:
                print(f"\n{part}: left out, {reason}")
                continue
            results[part] = MEASURES[part](server, args)
            if part == "pauses":
                show_pauses(results[part])
            else:
                show_rows(part, results[part])
            sys.stdout.flush()
            if args.json:
                figures = {"arguments": vars(args), **results}
                args.json.write_text(json.dumps(figures, indent=2, default=str))


if __name__ == "__main__":
    main()
