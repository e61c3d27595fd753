"""Text to token sequences: conversations with their answers marked, plain texts, repetitions.

Uses the server's tokenizer and chat templates, so that prompts are encoded here as they are served.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt.utils.chat_template import ChatTemplateError, render_chat, select_template
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.training.eagle3.samples import Sample, make_sample

Message = dict[str, Any]
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
_MARK = "@@CONTENT@@"


class DataError(ValueError):
    """A file of texts cannot be used; the message names the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a file: a conversation or a text."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def read_entries(path: str | Path, plain_lines: bool = False) -> Iterator[Entry]:
    """Entries of a JSON-lines file; with `plain_lines`, lines that are no object are user turns.

    Raises DataError with the line's number.
    """
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            if not line:
                continue
            if plain_lines and not line.startswith("{"):
                yield Entry(messages=({"role": "user", "content": line},))
                continue
            try:
                yield _entry(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path}, line {number}: {error}") from error


def _entry(raw: Any) -> Entry:
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    if isinstance(raw.get("messages"), list):
        messages = tuple(
            {"role": str(m["role"]), "content": str(m["content"])} for m in raw["messages"]
        )
        return Entry(messages=messages)
    for key in ("text", "prompt"):
        if isinstance(raw.get(key), str):
            if key == "prompt":
                return Entry(messages=({"role": "user", "content": raw[key]},))
            return Entry(text=raw[key])
    raise ValueError('neither "messages" nor "text"')


class Texts:
    """Encodes for one model folder."""

    def __init__(self, folder: str | Path, end_ids: frozenset[int]) -> None:
        self.tokenizer = get_tokenizer(str(folder))
        self._template = select_template(self.tokenizer.chat_template, has_tools=False)
        self._end_ids = end_ids

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """Without added special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """What the model gets to read before it answers."""
        if not self.can_chat:
            return self.start_ids + self.encode(str(messages[-1]["content"]))
        return self.encode(self._render(messages, add_generation_prompt=True))

    def conversation(self, messages: Sequence[Message]) -> Sample:
        """All turns; those of the assistant are answers.

        Each turn is encoded by itself, as in serving, where an answer follows an encoded prompt.
        Raises DataError where the template rewrites earlier turns, so that none has its place.
        """
        if not self.can_chat:
            text = "\n\n".join(str(message["content"]) for message in messages)
            return self.plain(text)
        token_ids: list[int] = []
        is_answer: list[bool] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1], add_generation_prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise DataError("the chat template does not keep earlier turns as they were")
            prompt = self.encode(before[len(done) :])
            answer = self.encode(after[len(before) :])
            ended = [i for i, token in enumerate(answer) if token in self._end_ids]
            num_learnt = ended[-1] + 1 if ended else len(answer)
            token_ids += prompt + answer
            is_answer += [False] * len(prompt)
            is_answer += [i < num_learnt for i in range(len(answer))]
            done = after
        return Sample(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            is_answer=torch.tensor(is_answer, dtype=torch.bool),
        )

    def plain(self, text: str) -> Sample:
        """A text that is learnt from its beginning on."""
        return make_sample(self.start_ids, self.encode(text))

    def repeated(self, unit: str, num_tokens: int, weight: float = 1.0) -> Sample:
        """`unit` again and again, `num_tokens` in all; the first time it is no answer."""
        first = len(self.encode(unit)) + len(self.start_ids)
        times = num_tokens // max(first - len(self.start_ids), 1) + 2
        token_ids = (self.start_ids + self.encode(unit * times))[:num_tokens]
        return make_sample(token_ids[:first], token_ids[first:], weight)

    def user_turn(self) -> tuple[list[int], list[int]]:
        """What stands before and after the content of a first user turn, for a model to invent."""
        text = self._render([{"role": "user", "content": _MARK}], add_generation_prompt=True)
        before, _, after = text.partition(_MARK)
        return self.encode(before), self.encode(after)

    @property
    def start_ids(self) -> list[int]:
        """The token that texts begin with, if the model has one."""
        bos = self.tokenizer.bos_token_id
        return [] if bos is None else [bos]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        kept = [t for t in token_ids if t not in self._end_ids]
        return self.tokenizer.decode(kept, skip_special_tokens=True)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise DataError("the model has no chat template")
        try:
            return render_chat(
                self._template,
                list(messages),
                add_generation_prompt=add_generation_prompt,
                special_tokens=self.tokenizer.special_tokens_map,
            )
        except ChatTemplateError as error:
            raise DataError(str(error)) from error


def repetition_units(texts: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Endless units to repeat: one to three neighbouring sentences, a list of words, a few words.

    Raises DataError where the texts hold no sentence.
    """
    sentences = [
        part.strip() for text in texts for part in _SENTENCE_END.split(text) if part.strip()
    ]
    if not sentences:
        raise DataError("there is no text to take repeated sentences from")
    separators = (" ", "\n", "\n\n")
    while True:
        start = rng.randrange(len(sentences))
        kind = rng.random()
        if kind < 0.7:
            unit = " ".join(sentences[start : start + rng.randint(1, 3)])
        else:
            words = sentences[start].split()
            count = rng.randint(2, 12) if kind < 0.85 else rng.randint(1, 5)
            unit = (", " if kind < 0.85 else " ").join(words[:count])
        separator = rng.choice(separators)
        # In front, as in " The quick brown fox.", or behind.
        yield separator + unit if separator == " " else unit + separator
