"""Fifty mixed prompts for differential tests: what must not change the tokens is tried on these.

Short and long, prose, code, lists, other scripts, repetition, shared prefixes. Fixed: no random
numbers, so that two runs (and two processes) speak of the same prompts.
"""

from __future__ import annotations

_SHORT = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM orders",
    "Dear Sir or Madam,\n\n",
    "Q: What is 12 times 11?\nA:",
    "The opposite of hot is",
    "1, 2, 3, 4, 5, 6,",
    "A B C D E F G",
    "Roses are red,\nViolets are blue,\n",
    "To make a good cup of tea, first",
    "Photosynthesis is the process by which",
    "In 1969, Neil Armstrong",
    "<html>\n<head>\n<title>",
    '{"name": "Alice", "age": 30, "city":',
    "La capitale de la France est",
    "Die Hauptstadt von Deutschland ist",
    "El perro come",
    "日本の首都は",
    "Привет, как",
    "مرحبا",
    "The 🐱 sat on the 🧶 and",
]

_TOPICS = [
    "the life cycle of a star",
    "how a bicycle stays upright",
    "why the sky is blue",
    "the history of paper",
    "how bread rises",
    "the rules of chess",
    "how vaccines work",
    "the water cycle",
]

_PARAGRAPH = (
    "A hierarchical cache keeps what was computed once and may be needed again. The first level "
    "is small and fast, the second is larger and slower, and the third survives a restart. "
    "When a request arrives, its beginning is compared with what is kept, page by page, and only "
    "the rest has to be computed. The art lies in never serving what has become wrong. "
)

_CODE = '''class Stack:
    """A last-in, first-out list."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from empty stack")
        return self.items.pop()


class Queue:
'''


def _chat(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        f"Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def mixed_prompts() -> list[str]:
    """The fifty prompts, 1 to about 400 tokens each."""
    chats = [_chat(f"Explain {topic} in one sentence.") for topic in _TOPICS]
    long = [_PARAGRAPH * count + "In short," for count in (1, 2, 3, 4, 5)]
    repeated = [
        "The quick brown fox jumps over the lazy dog. " * 12,
        "I will not talk in class.\n" * 20,
        "red green blue " * 30,
        "x = x + 1\n" * 25,
    ]
    shared = [
        _PARAGRAPH + f"Question {i}: what is the role of level {i}? Answer:" for i in range(4)
    ]
    code = [_CODE, _CODE + "    def enqueue(self, item):\n", "/* C */\nint main(void) {\n    "]
    odd = ["a", " \n\n"]
    prompts = _SHORT + chats[:7] + long + repeated + shared + code + odd
    if len(prompts) != 50:
        raise AssertionError(f"there should be 50 prompts, not {len(prompts)}")
    return prompts
