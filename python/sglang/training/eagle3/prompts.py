"""Built-in English prompts: enough variety to train a small draft without any file.

Combined from short parts at random, so that thousands differ. Questions, tasks on a topic, school
mathematics, and beginnings of code.
"""

from __future__ import annotations

import random

_TOPICS = (
    "the water cycle", "volcanoes", "the moon", "honey bees", "bicycles", "the Roman Empire",
    "photosynthesis", "electric cars", "the printing press", "coral reefs", "jazz music",
    "gravity", "bread baking", "chess", "the human heart", "computer networks", "rainforests",
    "the stock market", "solar panels", "Shakespeare", "vaccines", "machine learning", "tea",
    "the French Revolution", "penguins", "earthquakes", "democracy", "the internet", "sleep",
    "time management", "gardening", "healthy food", "public libraries", "space travel", "maps",
    "recycling", "the Olympic Games", "friendship", "remote work", "learning a language",
    "job interviews", "budgeting", "running a marathon", "photography", "black holes", "money",
    "clouds", "dinosaurs", "databases", "city planning", "family dinners", "online privacy",
)  # fmt: skip
_TASKS = (
    "Explain {t} to a ten-year-old.",
    "What is the most important thing to know about {t}?",
    "Write a short story in which {t} play a part.",
    "Write a poem about {t}.",
    "Give me five facts about {t}.",
    "Write an email to a colleague about {t}.",
    "Summarise the history of {t} in one paragraph.",
    "What are advantages and disadvantages of {t}?",
    "List ten questions that a beginner might ask about {t}.",
    "How would you teach a class on {t}?",
    "Tell me a joke about {t}.",
    "Compare {t} with {u}.",
    "What could {t} and {u} have in common?",
    "Write a dialogue between two friends who disagree about {t}.",
    "Describe {t} in exactly three sentences.",
    "Rewrite this more politely: tell me about {t} now!",
    "Create a step-by-step plan to learn more about {t}.",
    "Make a table of terms that belong to {t}, with a short definition of each.",
    "Translate into French: I like reading about {t}.",
    "Why do people care about {t}?",
)
_PEOPLE = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jack")
_THINGS = ("apples", "books", "marbles", "stickers", "cookies", "pencils", "coins", "flowers")
_MATHS = (
    "{p} has {a} {t} and buys {b} bags with {c} {t} each. How many {t} does {p} have now?",
    "A box holds {c} {t}. How many boxes does {p} need for {a} {t}?",
    "{p} gives {b} of {a} {t} to a friend and shares the rest among {c} children. "
    "How many does each child get?",
    "{t} cost {c} dollars each. {p} pays for {b} of them with {a} dollars. What is the change?",
    "What is {a} times {b} plus {c}? Think step by step.",
    "{p} reads {b} pages a day. How long does a book of {a} pages take?",
)
_CODE = (
    "Write a Python function that {d}.",
    "Write a Python function that {d}, with a docstring and an example.",
    "Complete this Python code:\n\ndef {n}(values):\n    ",
    "Write JavaScript code that {d}.",
    "What does this function do?\n\ndef {n}(values):\n    return sorted(set(values))",
)
_DEEDS = (
    "reverses a string", "finds the largest number in a list", "checks whether a number is prime",
    "counts the words of a text", "removes duplicates from a list", "sorts a list of dictionaries",
    "computes the factorial of a number", "merges two sorted lists", "reads a CSV file",
    "finds all files with a given ending", "checks whether brackets are balanced",
    "converts Celsius to Fahrenheit", "computes a moving average", "finds the median of a list",
    "counts how often each character occurs", "flattens nested lists", "validates an email address",
)  # fmt: skip
_NAMES = ("process", "unique", "summarize", "normalize", "group_by_length", "running_total")


def builtin_prompts(count: int, seed: int) -> list[str]:
    """`count` different prompts, fewer where the parts do not give as many."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(20 * count):
        if len(found) == count:
            break
        found[_one(rng)] = None
    return list(found)


def _one(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.65:
        topic, other = rng.sample(_TOPICS, 2)
        return rng.choice(_TASKS).format(t=topic, u=other)
    if kind < 0.85:
        c, b = rng.randint(2, 9), rng.randint(3, 30)
        a = b * c + rng.randint(1, 60)
        return rng.choice(_MATHS).format(
            p=rng.choice(_PEOPLE), t=rng.choice(_THINGS), a=a, b=b, c=c
        )
    return rng.choice(_CODE).format(d=rng.choice(_DEEDS), n=rng.choice(_NAMES))
