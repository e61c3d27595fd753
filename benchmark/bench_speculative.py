"""What speculation brings: tokens per second with it ÷ without, by batch size. Table and JSON.

    python benchmark/bench_speculative.py --model MODEL --draft DRAFT      # a real pair, greedy
    python benchmark/bench_speculative.py --shape benchmark/shapes/llama-3.1-8b
    python benchmark/bench_speculative.py --device cpu --small --json figures.json

Both sides answer the same prompts in a process of its own, through the whole engine but HTTP
(overlapped scheduler, graphs). A real pair shows what drafts are worth; with `--shape` weights and
drafts are random and `--accept-length` tokens are taken in each step, which shows the cost of a
step. Wanted: speculative ÷ plain of at least 0.55 x accept length at batch 1, better 0.8 x, and
never below 1 at any batch size; *busy*, the share of the wall time in which the device is at work
on decode steps, as in `bench_overhead.py`.
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
from pathlib import Path
from typing import Any

from arguments import model_path, output_file, parse_small, require_device
from bench_one_batch import TimedWorker
from sglang.srt.environ import envs
from sglang.srt.platforms import current_platform
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

# Least ratio at batch 1, as a share of the accept length.
FLOOR_AT_ONE = 0.55
TEXTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "How does a bicycle stay upright?",
    "List ten uses of a paper clip.",
    "What is the difference between a virus and a bacterium?",
    "Describe how bread is made, step by step.",
    "Write a letter to a friend about a journey by train.",
    "What should a beginner know about gardening?",
)


def eagle3_config(target: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE3 draft of the usual size: one layer, a head over 32,000 tokens."""
    size = min(32_000, target["vocab_size"] // 2)
    return {
        **target,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
    }


def make_prompts(args: argparse.Namespace, count: int) -> list[list[int]]:
    """Chats in turn for a real pair, random tokens otherwise."""
    if args.texts:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        chats: list[list[int]] = [
            tokenizer.apply_chat_template(  # type: ignore[misc]
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            for text in TEXTS
        ]
        return [chats[index % len(chats)] for index in range(count)]
    rng = random.Random(0)
    return [
        [rng.randrange(3, args.vocab_size) for _ in range(args.input_len)] for _ in range(count)
    ]


def server_flags(args: argparse.Namespace) -> list[str | int | float]:
    """Flags of both sides."""
    flags: list[str | int | float] = [
        *("--device", args.device, "--disable-radix-cache"),
        *("--max-running-requests", max(args.batch)),
        *("--max-total-tokens", max(args.batch) * (args.input_len + 2 * args.output_len + 64)),
        *("--load-format", args.load_format, "--cuda-graph-bs", *args.batch),
    ]
    if not args.texts:
        flags += ["--skip-tokenizer-init"]
    if args.side == "speculative":
        flags += [
            *("--speculative-algorithm", args.algorithm),
            *("--speculative-num-steps", args.num_steps, "--speculative-eagle-topk", args.topk),
            *("--speculative-num-draft-tokens", args.num_draft_tokens),
            *("--speculative-draft-load-format", args.load_format),
        ]
        if args.draft:
            flags += ["--speculative-draft-model-path", args.draft]
    return flags


def measure(server: ServedScheduler, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
    """One round: from the moment when all requests decode until the last has ended."""
    timed = TimedWorker(server.scheduler.worker)  # type: ignore[arg-type]
    own, server.scheduler.worker = server.scheduler.worker, timed
    server.outputs.clear()
    rids = [server.submit(prompt, output_len) for prompt in prompts]
    server.run_until(lambda: len(server.scheduler.running_batch) == len(rids), 600)
    before = sum(len(output.new_token_ids) for rid in rids for output in server.outputs[rid])
    current_platform().synchronize()
    timed.events.clear()
    start = time.perf_counter()
    server.run_until(lambda: all(server.finish(rid) for rid in rids), 600)
    current_platform().synchronize()
    elapsed = time.perf_counter() - start
    num_steps = len(timed.events)
    busy = sum(begin.elapsed_time(end) for begin, end in timed.events) / 1e3
    server.run_until_idle()
    server.scheduler.worker = own
    answers = [server.answer_of(rid) for rid in rids]
    num_tokens = sum(len(answer.tokens) for answer in answers) - before
    return {
        "batch": len(prompts),
        "tok_s": num_tokens / elapsed,
        "ms_per_step": elapsed / num_steps * 1e3,
        "busy_share": busy / elapsed,
        "tokens_per_step": num_tokens / num_steps / len(prompts),
        "spec": [answer.spec for answer in answers if answer.spec],
        "tokens": [answer.tokens for answer in answers],
    }


def run_side(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All batch sizes of one side: the run with the median speed."""
    rows = []
    with ServedScheduler(args.model, *server_flags(args)) as server:
        for batch in args.batch:
            prompts = make_prompts(args, batch)
            measure(server, prompts, min(args.output_len, 32))
            runs = [measure(server, prompts, args.output_len) for _ in range(args.repeats)]
            rows.append(sorted(runs, key=lambda run: run["tok_s"])[len(runs) // 2])
    return rows


def run_in_process(args: argparse.Namespace, side: str, folder: Path) -> list[dict[str, Any]]:
    """`run_side` in a process of its own: one platform and one model a process."""
    options, result = folder / "options.json", folder / "result.json"
    options.write_text(json.dumps({**vars(args), "side": side, "json": None}))
    environment = dict(os.environ)
    if side == "speculative" and args.accept_length is not None:
        environment[envs.SGLANG_SIMULATE_ACC_LEN.name] = str(args.accept_length)
    if args.device == "cpu":
        environment[envs.SGLANG_ENABLE_OVERLAP_ON_CPU.name] = "1"
    command = [sys.executable, __file__, "--options", str(options), "--json", str(result)]
    subprocess.run(command, env=environment, check=True)
    rows: list[dict[str, Any]] = json.loads(result.read_text())
    return rows


def same_tokens(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of each answer before the first difference, the mean."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        shares.append(same / len(a))
    return statistics.mean(shares)


def accept_length(row: dict[str, Any]) -> float:
    """Tokens of a verification, the target's own included."""
    num_verifications = sum(spec["spec_verify_ct"] for spec in row["spec"])
    num_drafts = sum(spec["spec_num_correct_drafts"] for spec in row["spec"])
    return 1.0 + num_drafts / max(num_verifications, 1)


def compare(plain: list[dict[str, Any]], drafted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a batch size, printed too."""
    write = sys.stdout.write
    write(
        f"{'batch':>5} {'plain tok/s':>12} {'spec tok/s':>12} {'ratio':>6} {'accept':>7} "
        f"{'ratio/accept':>12} {'ms plain':>9} {'ms spec':>9} {'busy':>6} {'same':>5}  verdict\n"
    )
    rows = []
    for before, after in zip(plain, drafted, strict=True):
        length = accept_length(after)
        ratio = after["tok_s"] / before["tok_s"]
        floor = max(1.0, FLOOR_AT_ONE * length) if before["batch"] == 1 else 1.0
        row = {
            "batch": before["batch"],
            "plain_tok_s": before["tok_s"],
            "spec_tok_s": after["tok_s"],
            "ratio": ratio,
            "accept_length": length,
            "ratio_over_accept": ratio / length,
            "plain_ms_per_step": before["ms_per_step"],
            "spec_ms_per_step": after["ms_per_step"],
            "busy_share": after["busy_share"],
            "same_tokens": same_tokens(after["tokens"], before["tokens"]),
            "floor": floor,
            "is_above_floor": ratio >= floor,
        }
        rows.append(row)
        write(
            f"{row['batch']:>5} {row['plain_tok_s']:>12.1f} {row['spec_tok_s']:>12.1f} "
            f"{ratio:>6.2f} {length:>7.2f} {row['ratio_over_accept']:>12.2f} "
            f"{row['plain_ms_per_step']:>9.3f} {row['spec_ms_per_step']:>9.3f} "
            f"{row['busy_share']:>6.3f} {row['same_tokens']:>5.2f}  "
            f"{'ok' if row['is_above_floor'] else 'below the floor'}\n"
        )
    return rows


SMALL = {
    **{"batch": [1, 3], "input_len": 8, "output_len": 12},
    **{"repeats": 1, "accept_length": 2.0},
}


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Turn `--small` and `--shape` into a model, a draft and the load."""
    if args.small:
        args.model = str(
            make_tiny_checkpoint(
                folder / "target",
                num_hidden_layers=6,
                max_position_embeddings=max(512, args.input_len + 2 * args.output_len + 64),
            )
        )
        args.draft = str(make_tiny_draft(folder / "draft"))
        args.texts = False
    elif args.shape:
        args.model, args.load_format, args.texts = args.shape, "dummy", False
        config = json.loads((Path(args.shape) / "config.json").read_text())
        draft = folder / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps(eagle3_config(config)))
        args.draft = str(draft)
        args.accept_length = args.accept_length or 3.0
    args.vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=model_path, help="folder of a real target")
    parser.add_argument("--draft", type=model_path, help="folder of its draft; none for NGRAM")
    parser.add_argument(
        "--shape", type=model_path, help="folder of a config.json: random target and EAGLE3 draft"
    )
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--load-format", default="auto", help="as the server's flag")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--accept-length", type=float, help="take so many tokens, right or wrong")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input-len", type=int, default=128, help="of random prompts, or more")
    parser.add_argument("--output-len", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3, help="runs; the median counts")
    parser.add_argument("--small", action="store_true", help="tiny random pair: a self-test")
    parser.add_argument("--json", type=output_file, help="also write all figures to this file")
    parser.add_argument("--options", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(texts=True, side="plain", vocab_size=0)
    return parser


def main() -> None:
    parser = make_parser()
    args = parse_small(parser, SMALL)
    if args.options is not None:
        options = json.loads(args.options.read_text())
        args.json.write_text(json.dumps(run_side(argparse.Namespace(**options))))
        return
    if not (args.model or args.shape or args.small):
        parser.error("--model, --shape or --small is needed")
    require_device(args.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(args, folder)
        plain = run_in_process(args, "plain", folder)
        rows = compare(plain, run_in_process(args, "speculative", folder))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
