"""Builds what a run learns from and is judged by: read, written by the target, repeated.

Everything is made once, at the start of a run, and kept in its folder. Held-out prompts never
become training text. Answers are written in batches until the prompts, `--max-answers` or the time
are used up.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang.training.eagle3.options import TrainOptions
from sglang.training.eagle3.progress import bar
from sglang.training.eagle3.prompts import builtin_prompts
from sglang.training.eagle3.samples import Sample, load_samples, make_sample, save_samples
from sglang.training.eagle3.target import FrozenTarget
from sglang.training.eagle3.texts import DataError, Entry, Texts, read_entries, repetition_units

logger = logging.getLogger(__name__)

_FILES = {
    "train": "train.safetensors",
    "chat": "eval.safetensors",
    "repeated": "repeated.safetensors",
}
_INVENTED_TOKENS = 96  # longest user turn that the target invents
_DATA_SHARE = 1 / 3  # of --max-minutes, where --data-minutes says nothing
_REPEATED_PROMPT = 1024  # tokens of a held-out repeated text


@dataclass(slots=True, kw_only=True)
class Dataset:
    """Held-out sequences are prompts with the target's greedy answers."""

    train: list[Sample]
    chat: list[Sample]
    repeated: list[Sample]

    def save(self, folder: Path) -> None:
        """`train.safetensors` last: its presence says that all are there."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("chat", "repeated", "train"):
            samples: list[Sample] = getattr(self, name)
            if samples:
                save_samples(folder / _FILES[name], samples)

    @classmethod
    def load(cls, folder: Path) -> Dataset:
        """What `save` wrote; raises FileNotFoundError where a run has not got that far."""
        parts = {}
        for name, file_name in _FILES.items():
            path = folder / file_name
            is_needed = name == "train"
            parts[name] = load_samples(path) if is_needed or path.is_file() else []
        return cls(**parts)


class DatasetBuilder:
    """One use: `build`."""

    def __init__(self, options: TrainOptions, target: FrozenTarget, texts: Texts) -> None:
        self._options = options
        self._target = target
        self._texts = texts
        self._rng = random.Random(options.seed)
        self._deadline = float("inf")
        minutes = options.data_minutes or _DATA_SHARE * options.max_minutes
        if minutes:
            self._deadline = time.monotonic() + 60 * minutes

    def build(self) -> Dataset:
        """Raises DataError where a file is wrong or nothing is left to learn from."""
        options = self._options
        entries = [entry for path in options.data for entry in read_entries(path)]
        self._rng.shuffle(entries)
        prompts = self._known_prompts()
        held_out = prompts[: options.eval_prompts]
        if not prompts and options.eval_prompts:
            held_out = [self._prompt_of(e) for e in entries[: options.eval_prompts]]
            del entries[: options.eval_prompts]
        train = [self._sample_of(entry) for entry in entries]
        train += self._write_answers(prompts[options.eval_prompts :])
        train = [s.cut(options.max_length) for s in train]
        train = [s for s in train if bool(s.is_answer.any())]
        if not train:
            raise DataError("no text is left to learn from: fewer held-out prompts, or more text")
        units = repetition_units([self._answer_text(s) for s in train], self._rng)
        repeated_prompts = self._repeated_prompts(units)
        train += self._repeated(units, sum(len(s.token_ids) for s in train))
        logger.info(
            "%d sequences of %d tokens to learn from; held out: %d prompts, %d repeated texts",
            len(train), sum(len(s.token_ids) for s in train), len(held_out), len(repeated_prompts),
        )  # fmt: skip
        return Dataset(
            train=train,
            chat=self._greedy(held_out, stop_at_end=True),
            repeated=self._greedy(repeated_prompts, stop_at_end=False),
        )

    # -- prompts ----------------------------------------------------------------------------------

    def _known_prompts(self) -> list[list[int]]:
        options = self._options
        entries = [e for path in options.prompts for e in read_entries(path, plain_lines=True)]
        prompts = [self._prompt_of(entry) for entry in entries]
        for text in builtin_prompts(options.builtin_prompts, options.seed):
            prompts.append(self._texts.prompt([{"role": "user", "content": text}]))
        limit = options.max_length // 2
        short = [prompt for prompt in prompts if len(prompt) <= limit]
        if len(short) < len(prompts):
            logger.info("Left out %d prompts of over %d tokens", len(prompts) - len(short), limit)
        self._rng.shuffle(short)
        return short

    def _prompt_of(self, entry: Entry) -> list[int]:
        """A conversation up to its last user turn; of a text, the first third."""
        if entry.text:
            token_ids = self._texts.plain(entry.text).token_ids.tolist()
            return token_ids[: max(len(token_ids) // 3, 2)]
        users = [i for i, message in enumerate(entry.messages) if message["role"] == "user"]
        if not users:
            raise DataError("a conversation has no user turn")
        return self._texts.prompt(entry.messages[: users[-1] + 1])

    def _sample_of(self, entry: Entry) -> Sample:
        if entry.text:
            return self._texts.plain(entry.text)
        return self._texts.conversation(entry.messages)

    def _invent(self, count: int) -> list[list[int]]:
        """Prompts around user turns that the model writes where a user would (arXiv 2406.08464)."""
        before, after = self._texts.user_turn()
        turns = self._target.write(
            [before] * count, _INVENTED_TOKENS, temperature=1.0, top_p=self._options.top_p
        )
        # Cut-off turns are left out, and empty ones.
        whole = {tuple(turn[:-1]) for turn in turns if turn[-1] in self._target.end_ids}
        return [[*before, *turn, *after] for turn in sorted(whole) if len(turn) >= 2]

    # -- answers ----------------------------------------------------------------------------------

    def _write_answers(self, prompts: list[list[int]]) -> list[Sample]:
        options = self._options
        total = options.max_answers or len(prompts) + options.self_prompts
        written: list[Sample] = []
        if not total:
            return written
        greedy_credit = 0.0
        with bar(total, "write answers", "answer") as progress:
            for batch in self._prompt_batches(prompts):
                if len(written) >= total or time.monotonic() > self._deadline:
                    break
                batch = batch[: total - len(written)]
                if not batch:
                    continue  # the target invented nothing that a user could have written
                greedy_credit += options.greedy_share
                is_greedy = greedy_credit >= 1
                greedy_credit -= is_greedy
                answers = self._target.write(
                    batch,
                    self._answer_room(batch),
                    temperature=0.0 if is_greedy else options.temperature,
                    top_p=options.top_p,
                )
                written += [make_sample(p, answer) for p, answer in zip(batch, answers)]
                progress.update(len(batch))
        return written

    def _answer_room(self, batch: Sequence[Sequence[int]]) -> int:
        longest = max(len(prompt) for prompt in batch)
        return max(min(self._options.answer_tokens, self._options.max_length - longest), 1)

    def _prompt_batches(self, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
        """Known and invented prompts by turns, so that a short time gets some of both."""
        size, known = self._options.write_batch, prompts
        to_invent = self._options.self_prompts
        while known or to_invent > 0:
            if known:
                yield known[:size]
                known = known[size:]
            if to_invent > 0:
                yield self._invent(min(size, to_invent))
                to_invent -= size

    def _greedy(self, prompts: list[list[int]], stop_at_end: bool) -> list[Sample]:
        """Prompts of a like length as one batch."""
        size = self._options.write_batch
        samples = []
        ordered = sorted(prompts, key=len)
        for start in range(0, len(ordered), size):
            batch = ordered[start : start + size]
            answers = self._target.write(
                batch, self._options.eval_tokens, temperature=0.0, stop_at_end=stop_at_end
            )
            samples += [make_sample(prompt, answer) for prompt, answer in zip(batch, answers)]
        return samples

    # -- repetition -------------------------------------------------------------------------------

    def _answer_text(self, sample: Sample) -> str:
        return self._texts.decode(sample.token_ids[sample.is_answer].tolist())

    def _repeated_prompts(self, units: Iterator[str]) -> list[list[int]]:
        options = self._options
        length = min(_REPEATED_PROMPT, options.max_length - options.eval_tokens)
        if length < 2:
            return []
        count = options.eval_repeated
        return [self._texts.repeated(next(units), length).token_ids.tolist() for _ in range(count)]

    def _repeated(self, units: Iterator[str], other_tokens: int) -> list[Sample]:
        options = self._options
        share = options.repetition_share
        wanted = int(other_tokens * share / (1 - share))
        shortest = min(options.repetition_min, options.max_length)
        samples: list[Sample] = []
        while wanted > 0:
            length = self._rng.randint(shortest, options.max_length)
            sample = self._texts.repeated(next(units), length, options.repetition_weight)
            samples.append(sample)
            wanted -= len(sample.token_ids)
        return samples
