"""Prompts and arrival times of a run.

Every workload is an endless (or, for a file, finite) iterator of `PromptSpec`; the caller takes as
many as it wants. Prompts are random, never repeated unless repeating is what is measured.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

Fate = Literal["finish", "abort", "disconnect"]

# The shares of a soak run.
MIX = {"prefill-heavy": 0.3, "decode-heavy": 0.5, "abort": 0.1, "disconnect": 0.1}
# Of the requests that leave, those that do so on a clock, so that some are still queued or in
# their prefill; the others leave after some tokens.
EARLY_SHARE = 0.3
EARLY_S = 0.1


class LengthRange(NamedTuple):
    """Inclusive bounds of a uniform distribution of token counts."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Read `N` or `LOW:HIGH`. Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        bounds = cls(int(low), int(high or low))
        if not 1 <= bounds.low <= bounds.high:
            raise ValueError(f"not a range of lengths: {text}")
        return bounds

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpec:
    """One request to send. Exactly one of `input_ids` and `text` is given. Lengths are tokens."""

    kind: str
    output_len: int
    input_ids: list[int] | None = None
    text: str | None = None
    fate: Fate = "finish"
    leave_after_tokens: int = 0  # abort or disconnect once that many have come
    leave_after_s: float | None = None  # or after that time, whichever is first


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of prompts and answers, and the vocabulary that prompts are drawn from."""

    vocab_size: int
    input_len: LengthRange
    output_len: LengthRange
    as_text: bool = False  # for servers that take no token ids: as many short words


def prompt_of(shape: Shape, ids: list[int]) -> dict[str, list[int] | str]:
    """Return the prompt field of a PromptSpec: the ids, or words that stand for them."""
    if shape.as_text:
        return {"text": " ".join(_word(idx) for idx in ids)}
    return {"input_ids": ids}


def _word(idx: int) -> str:
    """A pronounceable word for a number, mostly one or two tokens of a usual vocabulary."""
    consonants, vowels = "bdfghklmnprstvz", "aeiou"
    word = ""
    while True:
        idx, rest = divmod(idx, len(consonants) * len(vowels))
        word += consonants[rest % len(consonants)] + vowels[rest // len(consonants)]
        if not idx:
            return word


def random_ids(shape: Shape, rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(shape.vocab_size), k=count)


def random_prompts(shape: Shape, rng: random.Random) -> Iterator[PromptSpec]:
    """Yield independent prompts."""
    while True:
        ids = random_ids(shape, rng, shape.input_len.draw(rng))
        output_len = shape.output_len.draw(rng)
        yield _spec("random", output_len, prompt_of(shape, ids))


def shared_prefix_prompts(
    shape: Shape, rng: random.Random, num_groups: int, prefix_len: int
) -> Iterator[PromptSpec]:
    """Yield prompts of groups in turn: a prefix of the group, then `shape.input_len` of its own.

    The first request of a group cannot hit the cache; its kind is `prefix-first`.
    """
    prefixes = [random_ids(shape, rng, prefix_len) for _ in range(num_groups)]
    for number in itertools.count():
        ids = prefixes[number % num_groups] + random_ids(shape, rng, shape.input_len.draw(rng))
        kind = "prefix-first" if number < num_groups else "prefix-again"
        yield _spec(kind, shape.output_len.draw(rng), prompt_of(shape, ids))


def file_prompts(path: Path, default_output_len: int) -> Iterator[PromptSpec]:
    """Yield the prompts of a JSONL file in order, once.

    Each line is a string or an object with `prompt` (or `text`, or `input_ids`), and optionally
    `output_len` (or `max_tokens`). Raises ValueError with the line's number for anything else.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            entry = json.loads(line)
            if isinstance(entry, str):
                entry = {"prompt": entry}
            text, ids = entry.get("prompt", entry.get("text")), entry.get("input_ids")
            if (text is None) == (ids is None):
                raise ValueError(f"{path}:{number}: needs one of prompt, text and input_ids")
            output_len = entry.get("output_len") or entry.get("max_tokens") or default_output_len
            yield PromptSpec(kind="file", output_len=output_len, input_ids=ids, text=text)


def mixed_prompts(shape: Shape, rng: random.Random) -> Iterator[PromptSpec]:
    """Yield the soak load: long prompts, long answers, and requests that are left early.

    `shape` gives the longest prompt and answer; short means an eighth of it.
    """
    long_in, long_out = shape.input_len.high, shape.output_len.high
    while True:
        (kind,) = rng.choices(list(MIX), list(MIX.values()))
        prefill = kind == "prefill-heavy" or (kind != "decode-heavy" and rng.random() < 0.5)
        num_in = rng.randint(long_in // 2, long_in) if prefill else rng.randint(1, long_in // 8)
        num_out = rng.randint(1, long_out // 8) if prefill else rng.randint(long_out // 2, long_out)
        prompt = prompt_of(shape, random_ids(shape, rng, num_in))
        if kind not in ("abort", "disconnect"):
            yield _spec(kind, num_out, prompt)
            continue
        early = rng.random() < EARLY_SHARE
        yield _spec(
            kind,
            num_out,
            prompt,
            leave_after_tokens=num_out + 1 if early else rng.randint(1, num_out),
            leave_after_s=rng.random() * EARLY_S if early else None,
        )


def _spec(
    kind: str,
    output_len: int,
    prompt: dict[str, list[int] | str],
    leave_after_tokens: int = 0,
    leave_after_s: float | None = None,
) -> PromptSpec:
    ids, text = prompt.get("input_ids"), prompt.get("text")
    return PromptSpec(
        kind=kind,
        output_len=output_len,
        input_ids=ids if isinstance(ids, list) else None,
        text=text if isinstance(text, str) else None,
        fate="abort" if kind == "abort" else "disconnect" if kind == "disconnect" else "finish",
        leave_after_tokens=leave_after_tokens,
        leave_after_s=leave_after_s,
    )


def arrivals(rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the times, seconds from the start, of a Poisson process; all 0 for an infinite rate."""
    now = 0.0
    while True:
        yield now
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
