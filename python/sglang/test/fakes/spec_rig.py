"""Tiny targets with drafts of every speculative algorithm, served in this process.

Random drafts guess next to nothing. Where a test needs drafts that are accepted now and then, an
`Oracle` takes the place of what a draft model proposes: trees that follow the known continuation
for a while, at changing nodes. Everything else of the step, the draft's passes included, is real.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.draft_config import EAGLE_ARCHITECTURE
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.coins import Coins
from sglang.srt.speculative.draft_runner import Drafted, DraftedRows
from sglang.srt.speculative.eagle_utils import chain_tree, tree_from_parents
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_counters import SpecCounters
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

# Tokens with text of their own, so that stop strings and grammars can be written down.
NUM_TEXT_TOKENS = 256
NUM_LAYERS = 3
# The output of these layers; the usual choice needs a deeper target.
_FEATURES = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}


@dataclass(frozen=True)
class TinyPair:
    """Folders of a target and of drafts for it, by algorithm."""

    target: Path
    drafts: dict[str, Path]

    @classmethod
    def make(cls, root: Path, family: str = "llama") -> TinyPair:
        """Write the folders. The draft of STANDALONE is the target with some noise."""
        target = make_tiny_checkpoint(root / "target", family, num_hidden_layers=NUM_LAYERS)
        drafts = {
            "EAGLE3": make_tiny_draft(root / "eagle3", eagle_config=_FEATURES),
            "EAGLE": make_tiny_draft(root / "eagle", EAGLE_ARCHITECTURE),
            "STANDALONE": make_tiny_checkpoint(
                root / "standalone", family, num_hidden_layers=NUM_LAYERS
            ),
        }
        weights = load_file(str(target / "model.safetensors"))
        generator = torch.Generator().manual_seed(5)
        for name, tensor in weights.items():
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = tensor + 0.03 * tensor.std() * noise
        save_file(weights, str(drafts["STANDALONE"] / "model.safetensors"), {"format": "pt"})
        return cls(target, drafts)


@contextmanager
def serve(
    pair: TinyPair,
    algorithm: str | None,
    *flags: str | int | float,
    topk: int = 1,
    num_steps: int = 3,
    overlap: bool = False,
) -> Iterator[ServedScheduler]:
    """Serve the pair; `algorithm` None: the target alone."""
    own: list[str | int | float] = ["--max-total-tokens", 4096, "--max-running-requests", 16]
    if "--grammar-backend" not in flags:
        own += ["--grammar-backend", "none"]
    if algorithm is not None:
        own += ["--speculative-algorithm", algorithm]
    if algorithm in pair.drafts:
        width = num_steps + 1 if topk == 1 else 2 * num_steps + 2
        own += ["--speculative-draft-model-path", str(pair.drafts[algorithm])]
        own += ["--speculative-num-steps", num_steps, "--speculative-eagle-topk", topk]
        own += ["--speculative-num-draft-tokens", width]
    with ExitStack() as stack:
        stack.enter_context(envs.SGLANG_ENABLE_OVERLAP_ON_CPU.override(overlap))
        served = stack.enter_context(ServedScheduler(pair.target, *own, *flags))
        worker = served.scheduler.worker
        if isinstance(worker, NGRAMWorker):
            # Whether drafts pay is a matter of time; here all are verified.
            always_verify(worker)
        yield served


def worker_of(served: ServedScheduler) -> BaseSpecWorker:
    """The speculative worker."""
    worker = served.scheduler.worker
    assert isinstance(worker, BaseSpecWorker)
    return worker


def always_verify(worker: NGRAMWorker) -> None:
    """Let every step verify what was found."""
    worker.gate.wants_verification = lambda *_: True  # type: ignore[method-assign]


class Oracle:
    """Proposes what will come, with mistakes. Knows requests by their prompts."""

    def __init__(self, worker: BaseSpecWorker, seed: int = 0, share_right: float = 0.8) -> None:
        self._worker = worker
        self._random = random.Random(seed)
        self._share_right = share_right
        self._known: dict[tuple[int, ...], list[int]] = {}
        self.num_steps = 0
        worker._propose = self._propose  # type: ignore[method-assign]

    def know(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """`output` follows `prompt`."""
        self._known[tuple(prompt)] = [*prompt, *output]

    def _propose(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        self.num_steps += 1
        shape = self._worker.shape
        rows = []
        for req, root, position in zip(
            batch.reqs, drafted.root_ids.tolist(), drafted.committed_lens.tolist()
        ):
            known = self._known.get(tuple(req.origin_input_ids), [])
            if position < len(known):
                assert root == known[position], f"{req}: token {position} is {root}, not the known"
            build = self._chain if shape.is_chain else self._tree
            rows.append(build(root, known[position + 1 :]))
        token_ids = torch.tensor([tokens for tokens, _ in rows])
        if shape.is_chain:
            return Drafted(tree=chain_tree(token_ids))
        parents = torch.tensor([parents for _, parents in rows])
        return Drafted(tree=tree_from_parents(token_ids, parents))

    def _next(self, future: Iterator[int]) -> int:
        token = next(future, None)
        is_right = token is not None and self._random.random() < self._share_right
        return token if is_right and token is not None else self._random.randrange(NUM_TEXT_TOKENS)

    def _chain(self, root: int, future: list[int]) -> tuple[list[int], list[int]]:
        tokens = iter(future)
        drafts = [self._next(tokens) for _ in range(self._worker.shape.num_draft_tokens - 1)]
        return [root, *drafts], []

    def _tree(self, root: int, future: list[int]) -> tuple[list[int], list[int]]:
        shape, tokens = self._worker.shape, iter(future)
        ids, parents, depths, tip = [root], [-1], [0], 0
        for node in range(1, shape.num_draft_tokens):
            if depths[tip] < shape.max_depth and self._random.random() < 0.6:
                parent, token, tip = tip, self._next(tokens), node
            else:
                open_nodes = [n for n, depth in enumerate(depths) if depth < shape.max_depth]
                parent = self._random.choice(open_nodes)
                token = self._random.randrange(NUM_TEXT_TOKENS)
            ids.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return ids, parents


class Proposals:
    """Records what is proposed, by request and number of tokens committed."""

    def __init__(self, worker: BaseSpecWorker) -> None:
        self._propose = worker._propose
        self.seen: dict[str, dict[int, list[int]]] = {}
        worker._propose = self._record  # type: ignore[method-assign]

    def _record(self, batch: ScheduleBatch, drafted: DraftedRows, coins: Coins | None) -> Drafted:
        proposal = self._propose(batch, drafted, coins)
        lens = drafted.committed_lens.tolist()
        for req, length, tokens in zip(batch.reqs, lens, proposal.tree.token_ids.tolist()):
            self.seen.setdefault(req.rid, {})[length] = tokens[1:]
        return proposal


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of text tokens, with a shared start now and then."""
    generator = random.Random(seed)
    shared = [generator.randrange(NUM_TEXT_TOKENS) for _ in range(longest // 2)]
    made = []
    for index in range(count):
        length = generator.randrange(2, longest)
        own = [generator.randrange(NUM_TEXT_TOKENS) for _ in range(length)]
        made.append(shared + own[: longest // 4 + 1] if index % 3 == 2 else own)
    return made


def run_all(
    served: ServedScheduler, requests: Sequence[Sequence[int]], max_new_tokens: int, **fields: Any
) -> list[list[int]]:
    """Tokens of all requests, served together."""
    rids = [served.submit(prompt, max_new_tokens, **fields) for prompt in requests]
    finish_all(served, rids)
    return [served.answer_of(rid).tokens for rid in rids]


def check_greedy(
    served: ServedScheduler,
    requests: Sequence[Sequence[int]],
    answers: Sequence[list[int]],
    max_new_tokens: int,
) -> SpecCounters:
    """Assert that drafts change no answer, nor does the prefix cache; returns what was counted.

    The draft model, where there is one, knows the answers.
    """
    worker = worker_of(served)
    if not isinstance(worker, NGRAMWorker):
        oracle = Oracle(worker)
        for prompt, answer in zip(requests, answers):
            oracle.know(prompt, answer)
    assert run_all(served, requests, max_new_tokens) == answers
    # From the prefix cache, and NGRAM knows the texts by now.
    assert run_all(served, requests, max_new_tokens) == answers
    total = served.scheduler.result_processor.spec_total
    assert total is not None
    return total


def finish_all(served: ServedScheduler, rids: Sequence[str]) -> None:
    """Serve until these, and all others, have ended; then every pool equation must hold."""
    served.run_until(lambda: not served.channel.frames and served._is_idle(), timeout_s=240)
    assert all(served.finish(rid) is not None for rid in rids)
    served.scheduler.checker.check_idle()


def matrix() -> Iterator[dict[str, Any]]:
    """Every combination of algorithm, topk, page size and loop that exists."""
    pages, loops = (1, 16), (False, True)
    for algorithm, topk, page, overlap in itertools.product(
        ("EAGLE3", "EAGLE", "STANDALONE", "NGRAM"), (1, 4), pages, loops
    ):
        if algorithm != "NGRAM" or topk == 1:
            yield {"algorithm": algorithm, "topk": topk, "page": page, "overlap": overlap}
