"""Does speculation keep its accept length when prefixes come back from host and storage?

    python benchmark/bench_draft_coherence.py --model FOLDER --draft FOLDER      # 500 requests
    python benchmark/bench_draft_coherence.py --small                            # a self-test

A multi-turn workload: conversations that grow turn by turn, asked in an order that keeps all of
them alive, through a device pool that holds only a few. The same hundred requests are repeated, so
the first round is computed and later rounds are restored, and each round should need exactly as
many verifications as the first. Greedy; the tokens of each request must stay the same, too. Where
the tokens came from is counted by the server (device, host, storage).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from arguments import model_path, output_file, require_device
from sglang.srt.cache_folder import small_model_folder
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.prompts import mixed_prompts
from sglang.test.small_server import SmallServer, serve

FOLLOW_UPS = (
    " Please go on.",
    " Say the same in other words.",
    " Now give an example of it.",
    " Repeat the first sentence.",
    " And what follows from that?",
)


@dataclass
class Round:
    """Sums over the requests of one round."""

    num_tokens: int = 0
    num_verified: int = 0
    sources: Counter[str] = field(default_factory=Counter)

    @property
    def accept_length(self) -> float:
        return self.num_tokens / max(1, self.num_verified)


class Conversations:
    """Prompts of every turn; what was answered first is part of the next turn's prompt."""

    def __init__(self, model: str, count: int, turns: int, head_len: int) -> None:
        tokenizer = get_tokenizer(model)
        texts = mixed_prompts()
        self._heads = []
        for index in range(count):
            text = texts[index % len(texts)] + f" ({index}) " + texts[(index * 7 + 3) % len(texts)]
            ids = tokenizer.encode(text * 8)
            self._heads.append(ids[:head_len])
        self._follow_ups = [tokenizer.encode(text) for text in FOLLOW_UPS]
        self.turns = turns
        self.answers: dict[tuple[int, int], list[int]] = {}

    def order(self) -> list[tuple[int, int]]:
        """(conversation, turn): all first turns, then all second turns ..."""
        return [(c, turn) for turn in range(self.turns) for c in range(len(self._heads))]

    def prompt(self, conversation: int, turn: int) -> list[int]:
        ids = list(self._heads[conversation])
        for earlier in range(turn):
            ids += self.answers[(conversation, earlier)]
            ids += self._follow_ups[earlier % len(self._follow_ups)]
        return ids


def run_round(server: SmallServer, talk: Conversations, num_tokens: int, progress: Any) -> Round:
    """Every request once. Raises RuntimeError where an answer differs from the first round's."""
    result = Round()
    for conversation, turn in talk.order():
        reply = server.generate(
            input_ids=talk.prompt(conversation, turn),
            sampling_params={"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        )
        meta = reply["meta_info"]
        first = talk.answers.setdefault((conversation, turn), reply["output_ids"])
        if first != reply["output_ids"]:
            raise RuntimeError(
                f"conversation {conversation}, turn {turn}: other tokens than before"
            )
        result.num_tokens += meta["completion_tokens"]
        result.num_verified += meta["spec_verify_ct"]
        details = meta["cached_tokens_details"] or {}
        for source in ("device", "host", "storage"):
            result.sources[source] += details.get(source, 0)
        progress.update()
    return result


SMALL = {"conversations": 3, "turns": 2, "rounds": 2, "num_tokens": 16, "pool_tokens": 1024}


def parse_args() -> argparse.Namespace:
    from sglang.test.test_utils import SMALL_EAGLE3_DRAFT

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=model_path, help="target; default: the fetched model")
    parser.add_argument("--draft", default=str(SMALL_EAGLE3_DRAFT), help="EAGLE3 draft folder")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="a few requests, a self-test")
    parser.add_argument("--conversations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=48)
    parser.add_argument("--head-len", type=int, default=320)
    parser.add_argument("--pool-tokens", type=int, default=2048)
    parser.add_argument("--host-ratio", type=float, default=2.0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=output_file, help="file for the figures")
    args = parser.parse_args()
    if args.small:
        parser.set_defaults(**SMALL)
        args = parser.parse_args()
    require_device(args.device, "--device cpu is the form without one")
    if args.model is None:
        args.model = str(small_model_folder())
        if not Path(args.model).exists():
            parser.error(f"there is no {args.model}: scripts/fetch_model.py fetches it")
    return args


def main() -> None:
    args = parse_args()
    talk = Conversations(args.model, args.conversations, args.turns, args.head_len)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as storage:
        config = {"file_storage_path": storage, "prefetch_threshold": args.page_size}
        flags: list[str | int | float] = [
            *("--device", args.device),
            *("--page-size", args.page_size),
            *("--max-total-tokens", args.pool_tokens),
            "--enable-hierarchical-cache",
            *("--hicache-ratio", args.host_ratio),
            *("--hicache-storage-backend", "file"),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", json.dumps(config)),
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", args.draft),
            *("--speculative-num-steps", 7),
            *("--speculative-eagle-topk", 1),
            *("--speculative-num-draft-tokens", 8),
        ]
        total = args.rounds * len(talk.order())
        with serve(args.model, *flags) as server, tqdm(total=total, unit="request") as progress:
            for _ in range(args.rounds):
                rounds.append(run_round(server, talk, args.num_tokens, progress))
    print("round  accept length  of first   device     host  storage")
    for index, one in enumerate(rounds):
        ratio = one.accept_length / rounds[0].accept_length
        counts = [one.sources[name] for name in ("device", "host", "storage")]
        print(
            f"{index:>5} {one.accept_length:14.4f} {ratio:9.4f} "
            + " ".join(f"{count:>8}" for count in counts)
        )
    if args.json:
        figures = [
            {
                "accept_length": one.accept_length,
                "of_first": one.accept_length / rounds[0].accept_length,
                "num_tokens": one.num_tokens,
                "num_verified": one.num_verified,
                **one.sources,
            }
            for one in rounds
        ]
        args.json.write_text(
            json.dumps({"arguments": vars(args), "rounds": figures}, indent=2, default=str)
        )


if __name__ == "__main__":
    main()
