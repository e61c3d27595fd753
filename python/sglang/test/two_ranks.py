"""What only a second rank can break, as parts that run by themselves: on two GPUs, or on the CPU.

Each part starts the servers that it compares, next to each other, and raises `CheckFailed` with a
sentence, or returns figures. Servers report at their end (`probed_server.py`): every part also
checks that both ranks made the same collective calls in the same order, hold the same cache, and
that no slot is lost. `scripts/two_gpus.py` runs them, each in a process with a time limit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.probed_server import Flag, ProbedServer, ServerSpec, serve_probed

ROOT = Path(__file__).resolve().parents[3]
SHAPE_8B = ROOT / "benchmark" / "shapes" / "llama-3.1-8b"
PAGE = 16
POOL = 1024
NUM_TOKENS = 24
PROMPT_LEN = 200
# Logits of two ranks are sums in another order. Closer than this, either token is right.
NEAR_TIE = {"float32": 2e-3, "bfloat16": 3e-1}
# What the log probability of the same token may differ by.
LOGPROB_SLACK = {"float32": 1e-3, "bfloat16": 2e-1}
_SLOW_COPY_S = 0.01

Figures = dict[str, Any]


class CheckFailed(AssertionError):
    """Two ranks gave something else than one, or than each other."""


@dataclass(frozen=True)
class Setup:
    """Where and how large. `small`: what a test can afford on two CPU cores."""

    device: str
    small: bool
    folder: Path

    def common(self) -> list[Flag]:
        """Flags of every tiny server."""
        flags: list[Flag] = [
            *("--device", self.device),
            *("--dtype", "float32"),
            *("--max-total-tokens", POOL),
            *("--page-size", PAGE),
            *("--random-seed", 1),
            *("--num-threads", 1),
            *("--log-level", "warning"),
            "--skip-tokenizer-init",
            "--skip-server-warmup",
        ]
        if self.device == "cuda":
            flags += ["--mem-fraction-static", 0.8, "--cuda-graph-bs", 1, 2, 4, 8]
        return flags

    def model(self, name: str, family: str = "llama", **changes: Any) -> str:
        """A tiny model; on a GPU of sizes that its kernels take."""
        if self.device == "cuda":
            latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16}
            latent |= {"qk_rope_head_dim": 16, "v_head_dim": 16}
            changes = {**(latent if "deepseek" in family else {"head_dim": 16}), **changes}
        folder = self.folder / "models" / name
        made = make_tiny_checkpoint(folder, family, max_position_embeddings=2048, **changes)
        return str(made)

    def draft(self) -> str:
        """An EAGLE3 draft for a model of six layers."""
        changes: dict[str, Any] = {"head_dim": 16} if self.device == "cuda" else {}
        folder = self.folder / "models" / "draft"
        return str(make_tiny_draft(folder, max_position_embeddings=2048, **changes))


# ------------------------------------------------------------------------------------------------
# Asking and comparing
# ------------------------------------------------------------------------------------------------


def prompt(number: int, length: int = PROMPT_LEN) -> list[int]:
    return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(length)]


def ask(
    server: ProbedServer, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS, **fields: Any
) -> list[dict[str, Any]]:
    """Greedy answers of one batch."""
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    answers: list[dict[str, Any]] = server.generate(
        input_ids=list(prompts), sampling_params=params, **fields
    )
    return answers


def tokens(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [list(answer["output_ids"]) for answer in answers]


def ask_with_tops(
    server: ProbedServer, prompts: Sequence[list[int]], num_tokens: int = NUM_TOKENS
) -> list[dict[str, Any]]:
    """Answers with the two largest log probabilities of every position."""
    return ask(server, prompts, num_tokens, return_logprob=True, top_logprobs_num=2)


def compare(
    what: str,
    wanted: Sequence[dict[str, Any]],
    got: Sequence[dict[str, Any]],
    dtype: str,
) -> Figures:
    """Equal tokens up to each prompt's first near-tie. `wanted` comes from `ask_with_tops`.

    Raises CheckFailed where they part at another place, or where the probability of a token that
    both chose differs by more than rounding.
    """
    num_equal, ties, worst = 0, 0, 0.0
    for number, (one, two) in enumerate(zip(wanted, got, strict=True)):
        tops = one["meta_info"]["output_top_logprobs"]
        for index, (a, b) in enumerate(zip(one["output_ids"], two["output_ids"], strict=True)):
            if a != b:
                gap = tops[index][0][0] - tops[index][1][0]
                if gap > NEAR_TIE[dtype]:
                    raise CheckFailed(
                        f"{what}: prompt {number} differs at token {index}, {a} and {b}, where "
                        f"the two best are {gap:.4f} apart"
                    )
                ties += 1
                break
            num_equal += 1
            worst = max(worst, _logprob_difference(one, two, index))
    if worst > LOGPROB_SLACK[dtype]:
        raise CheckFailed(f"{what}: log probabilities of equal tokens differ by {worst:.4f}")
    total = sum(len(answer["output_ids"]) for answer in wanted)
    return {"equal_tokens": num_equal, "of": total, "near_ties": ties, "logprob_difference": worst}


def _logprob_difference(one: dict[str, Any], two: dict[str, Any], index: int) -> float:
    other = two["meta_info"].get("output_token_logprobs")
    if not other:
        return 0.0
    own = one["meta_info"]["output_token_logprobs"]
    return abs(float(own[index][0]) - float(other[index][0]))


def check_equal(what: str, wanted: Any, got: Any) -> None:
    if wanted != got:
        raise CheckFailed(f"{what}: {got} instead of {wanted}")


def check_ranks(server: ProbedServer, num_ranks: int = 2) -> Figures:
    """Both ranks did the same and nothing is lost; call it after the servers have ended."""
    name = server.name
    check_equal(f"{name}: reports", num_ranks, len(server.reports))
    first = server.reports[0]
    for report in server.reports:
        if report["pools"]["error"] is not None:
            raise CheckFailed(f"{name}, rank {report['rank']}: {report['pools']['error']}")
        check_equal(f"{name}: collectives by rank", first["collectives"], report["collectives"])
        check_equal(f"{name}: replays by rank", first["replays"], report["replays"])
        if report["tree"] != first["tree"]:
            pairs = zip(first["tree"], report["tree"])
            different = next((f"{a} and {b}" for a, b in pairs if a != b), "another length")
            raise CheckFailed(f"{name}: the ranks' caches differ: {different}")
    calls = {thread: count for thread, (count, _) in first["collectives"].items()}
    return {
        "collectives": sum(calls.values()),
        "nodes": len(first["tree"]),
        "replays": first["replays"],
    }


# ------------------------------------------------------------------------------------------------
# Parts
# ------------------------------------------------------------------------------------------------


def one_and_two(setup: Setup, family: str, *more: ServerSpec) -> tuple[list[ServerSpec], str]:
    """Servers of one and of two ranks of a tiny model."""
    model = setup.model(family, family)
    flags = setup.common()
    specs = [
        ServerSpec(name="one", model=model, flags=flags),
        ServerSpec(name="two", model=model, flags=[*flags, "--tp", 2]),
    ]
    return [*specs, *more], model


def same_tokens(setup: Setup, family: str) -> Figures:
    """Two ranks against one: a batch, the same again from the cache, sampling; graphs or not."""
    specs, model = one_and_two(setup, family)
    if setup.device == "cuda":
        flags = [*setup.common(), "--tp", 2, "--disable-cuda-graph"]
        specs.append(ServerSpec(name="eager", model=model, flags=flags))
    prompts = [prompt(number, 5 + 9 * number) for number in range(3 if setup.small else 6)]
    figures: Figures = {}
    with serve_probed(specs, setup.folder) as (one, *others):
        wanted = ask_with_tops(one, prompts)
        for server in others:
            for again in ("", " again"):
                answers = ask_with_tops(server, prompts)
                figures[server.name] = compare(f"{server.name}{again}", wanted, answers, "float32")
            sampled = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
            # Ranks that drew differently would hang or part here.
            server.generate(input_ids=prompts, sampling_params=sampled)
    for server in others:
        figures[server.name] |= check_ranks(server)
    if setup.device == "cuda":
        if not figures["two"]["replays"].get("decode"):
            raise CheckFailed("no captured step was replayed: all-reduce in graphs was not tested")
        check_equal("replays without graphs", {}, figures["eager"]["replays"])
    return figures


def dense(setup: Setup) -> Figures:
    return same_tokens(setup, "llama")


def experts(setup: Setup) -> Figures:
    return same_tokens(setup, "qwen3_moe")


def latent(setup: Setup) -> Figures:
    return same_tokens(setup, "deepseek_v3")


def hicache(setup: Setup) -> Figures:
    """Host tier with two ranks, and with copies of one rank slowed: equal trees, equal tokens."""
    specs, model = one_and_two(setup, "llama")
    tier: list[Flag] = [*setup.common(), "--tp", 2]
    tier += ["--enable-hierarchical-cache", "--hicache-ratio", 2]
    slow_ranks = [1] if setup.small else [0, 1]
    tiered = [] if setup.small else [ServerSpec(name="even", model=model, flags=tier)]
    tiered += [
        ServerSpec(
            name=f"slow{rank}",
            model=model,
            flags=tier,
            env={"HISPEC_PROBE_SLOW": f"{rank}:{_SLOW_COPY_S}"},
        )
        for rank in slow_ranks
    ]
    rounds, count = (2, 7) if setup.small else (4, 12)
    figures: Figures = {}
    with serve_probed([specs[0], *tiered], setup.folder) as (one, *servers):
        numbers = list(range(count))
        wanted = {n: ask_with_tops(one, [prompt(n)], 6)[0] for n in numbers}
        for server in servers:
            start = time.monotonic()
            sources: Counter[str] = Counter()
            for _ in range(rounds):
                with ThreadPoolExecutor(3) as pool:
                    answers = list(pool.map(lambda n, s=server: ask(s, [prompt(n)], 6)[0], numbers))
                compare(server.name, list(wanted.values()), answers, "float32")
                for answer in answers:
                    details = answer["meta_info"]["cached_tokens_details"] or {}
                    sources.update({k: v for k, v in details.items() if isinstance(v, int)})
            if not sources["host"]:
                raise CheckFailed(f"{server.name}: nothing came from the host: {dict(sources)}")
            figures[server.name] = {**sources, "seconds": round(time.monotonic() - start, 2)}
    for server in servers:
        figures[server.name] |= check_ranks(server)
    return figures


def spec_flags(setup: Setup, draft: str, topk: int = 1) -> list[Flag]:
    num_draft_tokens = 4 if topk == 1 else 6
    return [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", draft),
        *("--speculative-num-steps", 3),
        *("--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", num_draft_tokens),
    ]


def speculation(setup: Setup) -> Figures:
    """EAGLE3 with two ranks, a chain and a tree, against one rank without a draft."""
    model, draft = setup.model("target", num_hidden_layers=6), setup.draft()
    flags = setup.common()
    specs = [ServerSpec(name="plain", model=model, flags=flags)]
    for name, topk in (("chain", 1), ("tree", 2))[: 1 if setup.small else 2]:
        own = [*flags, "--tp", 2, *spec_flags(setup, draft, topk)]
        specs.append(ServerSpec(name=name, model=model, flags=own))
    prompts = [prompt(number, 5 + 9 * number) for number in range(3 if setup.small else 6)]
    figures: Figures = {}
    with serve_probed(specs, setup.folder) as (plain, *servers):
        wanted = ask_with_tops(plain, prompts)
        for server in servers:
            answers = ask(server, prompts)
            figures[server.name] = compare(server.name, wanted, answers, "float32")
            verified = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            if not verified:
                raise CheckFailed(f"{server.name}: nothing was verified")
            figures[server.name]["verify_steps"] = verified
    for server in servers:
        figures[server.name] |= check_ranks(server)
        if setup.device == "cuda" and not any(figures[server.name]["replays"].values()):
            raise CheckFailed(f"{server.name}: no captured step was replayed")
    return figures


def coherence(setup: Setup) -> Figures:
    """Cold, from the device, the host, storage and after a restart: the same steps of a draft."""
    model, draft = setup.model("target", num_hidden_layers=6), setup.draft()
    storage = setup.folder / "storage"
    config = {"file_storage_path": str(storage), "prefetch_threshold": PAGE}
    flags: list[Flag] = [
        *setup.common(),
        *("--tp", 2),
        *spec_flags(setup, draft),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    ]
    asked = prompt(99)
    seen: dict[str, Any] = {}

    def note(name: str, server: ProbedServer, source: str) -> None:
        answer = ask(server, [asked], NUM_TOKENS)[0]
        meta = answer["meta_info"]
        details = meta["cached_tokens_details"] or {}
        seen[name] = (answer["output_ids"], meta["spec_verify_ct"])
        check_equal(f"{name}: answer and verify steps", seen["cold"], seen[name])
        if source and not details.get(source, 0):
            raise CheckFailed(f"{name}: nothing came from {source}: {details}")

    ended = []
    first = ServerSpec(name="first", model=model, flags=flags)
    with serve_probed([first], setup.folder) as (server,):
        note("cold", server, "")
        note("device", server, "device")
        for number in range(7):
            ask(server, [prompt(number)], 4)
        note("host", server, "host")
        _flush(server)
        note("storage", server, "storage")
        _flush(server)
        ended.append(server)
    with serve_probed([ServerSpec(name="restart", model=model, flags=flags)], setup.folder) as (
        server,
    ):
        note("restart", server, "storage")
        ended.append(server)
    figures: Figures = {server.name: check_ranks(server) for server in ended}
    figures["bytes"] = bytes_by_rank(storage)
    return {"verify_steps": seen["cold"][1], **figures}


def bytes_by_rank(storage: Path) -> Figures:
    """Files and bytes by kind and rank. Raises CheckFailed where the ranks' are not equal."""
    found: dict[str, Counter[str]] = {"target": Counter(), "draft": Counter()}
    for path in storage.rglob("*.bin"):
        kind = "draft" if ".draft" in path.name else "target"
        rank = path.stem.split("_")[-2]
        found[kind][f"files{rank}"] += 1
        found[kind][f"bytes{rank}"] += path.stat().st_size
    for kind, counts in found.items():
        check_equal(f"{kind}: files of rank 1", counts["files0"], counts["files1"])
        check_equal(f"{kind}: bytes of rank 1", counts["bytes0"], counts["bytes1"])
        if not counts["files0"]:
            raise CheckFailed(f"storage holds nothing of the {kind}")
    check_equal("pages of the draft", found["target"]["files0"], found["draft"]["files0"])
    return {kind: dict(counts) for kind, counts in found.items()}


def _flush(server: ProbedServer) -> None:
    reply = server.post("/flush_cache?timeout=30")
    if reply.status_code != 200:
        raise CheckFailed(f"flush: {reply.status_code} {reply.text}")


def weights(setup: Setup) -> Figures:
    """New weights for two ranks: as a bucket and as copies by rank over IPC, and by broadcast."""
    models = {name: setup.model(name, seed=seed) for seed, name in enumerate(("old", "new"))}
    flags = setup.common()
    specs = [
        ServerSpec(name="fresh", model=models["new"], flags=flags),
        ServerSpec(name="updated", model=models["old"], flags=[*flags, "--tp", 2]),
    ]
    prompts = [prompt(number, 5 + 9 * number) for number in range(3)]
    figures: Figures = {}
    with serve_probed(specs, setup.folder) as (fresh, server):
        wanted = ask_with_tops(fresh, prompts)
        before = tokens(ask(server, prompts))
        if before == tokens(wanted):
            raise CheckFailed("old and new weights answer alike: the part shows nothing")
        sent = []
        for way in ("bucket", "copies", "broadcast"):
            start = time.monotonic()
            push_weights(way, server, models["new"], setup)
            answers = ask_with_tops(server, prompts)
            figures[way] = compare(way, wanted, answers, "float32")
            figures[way]["seconds"] = round(time.monotonic() - start, 2)
            sent.append(_checksum(server))
            reply = server.post("/update_weights_from_disk", json={"model_path": models["old"]})
            check_equal(f"{way}: back to the old files", 200, reply.status_code)
            check_equal(f"{way}: old tokens", before, tokens(ask(server, prompts)))
        check_equal("checksums of all ways", [sent[0]] * len(sent), sent)
    figures["updated"] = check_ranks(server)
    return figures


def _checksum(server: ProbedServer) -> str:
    return str(server.post("/weights_checker").json()["per_engine_checksum"])


def push_weights(way: str, server: ProbedServer, model: str, setup: Setup) -> None:
    """From a process of its own, as a trainer is."""
    command = [sys.executable, "-m", "sglang.test.two_rank_trainer", way]
    command += ["--url", server.url, "--weights", model, "--device", setup.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    if done.returncode != 0:
        raise CheckFailed(f"{way}: the trainer failed: {done.stderr[-2000:]}")


def speed(setup: Setup) -> Figures:
    """Decode of the 8B shape, two ranks against one, in turns; tokens up to the first near-tie."""
    batches = [1, 2] if setup.small else [1, 64, 256]
    num_steps, input_len, rounds = (64, 16, 1) if setup.small else (96, 256, 3)
    if setup.small:
        model, dtype, load = setup.model("shape"), "float32", []
    else:
        model, dtype, load = str(SHAPE_8B), "bfloat16", ["--load-format", "dummy"]
    num_slots = max(batches) * (input_len + num_steps + PAGE)
    flags: list[Flag] = [
        *("--device", setup.device, "--dtype", dtype, "--max-total-tokens", num_slots),
        *("--max-running-requests", max(batches), "--num-threads", 1, "--random-seed", 1),
        *("--context-length", input_len + num_steps + 64, "--log-level", "warning"),
        *("--skip-tokenizer-init", "--skip-server-warmup", *load),
    ]
    if setup.device == "cuda":
        flags += ["--mem-fraction-static", 0.8, "--cuda-graph-bs", *batches]
    specs = [
        ServerSpec(name="one", model=model, flags=flags),
        ServerSpec(name="two", model=model, flags=[*flags, "--tp", 2]),
    ]
    figures: Figures = {}
    with serve_probed(specs, setup.folder, start_timeout_s=150) as (one, two):
        checked = [prompt(number, 64) for number in range(2 if setup.small else 8)]
        wanted = ask_with_tops(one, checked, 16)
        figures["tokens"] = compare("two", wanted, ask_with_tops(two, checked, 16), dtype)
        for batch in batches:
            prompts = [prompt(1000 + number, input_len) for number in range(batch)]
            for server in (one, two):
                ask(server, prompts, 4)  # fills the cache: prefills must not count
            pairs = [
                [decode_rate(server, prompts, num_steps) for server in (one, two)]
                for _ in range(rounds)
            ]
            rates = [statistics.median(values) for values in zip(*pairs)]
            figures[f"batch {batch}"] = {
                "one_tok_s": round(rates[0], 1),
                "two_tok_s": round(rates[1], 1),
                "ratio": round(rates[1] / rates[0], 3),
            }
    figures["two"] = check_ranks(two)
    if setup.device == "cuda" and not figures["two"]["replays"].get("decode"):
        raise CheckFailed("no captured step was replayed")
    return figures


def decode_rate(server: ProbedServer, prompts: list[list[int]], num_steps: int) -> float:
    """Tokens a second: the long answer's time without that of one of a single token."""
    times = []
    for length in (1, 1 + num_steps):
        start = time.perf_counter()
        ask(server, prompts, length)
        times.append(time.perf_counter() - start)
    return len(prompts) * num_steps / (times[1] - times[0])


def distributed(setup: Setup) -> Figures:
    """The rate of a trainer's broadcasts, by the benchmark itself."""
    figures = setup.folder / "distributed.json"
    command = [sys.executable, str(ROOT / "benchmark" / "bench_weight_update.py")]
    command += ["--only", "distributed", "--json", str(figures)]
    command += ["--small"] if setup.small else ["--model", str(SHAPE_8B), "--repeats", "5"]
    log = setup.folder / "distributed.log"
    with log.open("wb") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=os.environ, timeout=170)
    if done.returncode != 0:
        raise CheckFailed(f"the benchmark failed: {log.read_text(errors='replace')[-3000:]}")
    result = json.loads(figures.read_text())["distributed"]
    found: Figures = {"one buffer": {"GB_s": round(result["bare"]["bytes_s"] / 1e9, 1)}}
    for row in result["rows"]:
        found[row["row"]] = {
            "whole_ms": round(row["whole_s"] * 1e3, 1),
            "GB_s": round(row["bytes_s"] / 1e9, 1),
            "share": round(row["share"], 3),
            "update_share": round(row["update_share"], 3),
        }
    return found


@dataclass(frozen=True)
class Part:
    """`limit_s`: seconds it may take on GPUs. `alone`: it measures time."""

    run: Callable[[Setup], Figures]
    limit_s: float
    alone: bool = False


PARTS: dict[str, Part] = {
    "speed": Part(speed, 150, alone=True),
    "distributed": Part(distributed, 120, alone=True),
    "dense": Part(dense, 110),
    "experts": Part(experts, 110),
    "latent": Part(latent, 110),
    "hicache": Part(hicache, 140),
    "speculation": Part(speculation, 140),
    "coherence": Part(coherence, 150),
    "weights": Part(weights, 140),
}
