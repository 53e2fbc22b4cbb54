"""Addition of numbers below 100, with some pairs held out of the corpus for the evaluation."""

import hashlib
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tools.embedded_model.documents import Document, Exchange, plain

LIMIT = 100
HELD_OUT_SEED = 20
HELD_OUT_PERCENT = 17

QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Can you add {a} and {b} for me?",
)
"""Wordings of a sum; the first is there twice, so that it is asked most."""

WORD_PROBLEMS = (
    (
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?",
        "{a} + {b} = {sum}. {name} has {sum} {things}.",
    ),
    (
        "There are {a} {things} in a box and {b} {things} in a bag. How many are there?",
        "{a} + {b} = {sum}. There are {sum} {things}.",
    ),
    (
        "{name} saw {a} {things} on Monday and {b} {things} on Tuesday. How many in all?",
        "{a} + {b} = {sum}. {name} saw {sum} {things} in all.",
    ),
)

NAMES = ("Tom", "Mia", "Sam", "Lily", "Ben", "Anna", "Max", "Nora")
THINGS = ("apples", "shells", "stones", "stars", "birds", "boats", "flowers", "buttons")


class Pair(NamedTuple):
    """Two numbers to add, in the order in which they are asked."""

    a: int
    b: int


def is_held_out(pair: Pair) -> bool:
    """Whether the corpus must never contain the sum of `pair`, in either order."""
    name = f"{HELD_OUT_SEED}:{min(pair)}+{max(pair)}"
    return hashlib.sha256(name.encode()).digest()[0] * 100 < HELD_OUT_PERCENT * 256


def held_out_pairs() -> Iterator[Pair]:
    """All ordered pairs that are kept out of the corpus, about a sixth of the 10,000."""
    pairs = (Pair(a, b) for a in range(LIMIT) for b in range(LIMIT))
    return (pair for pair in pairs if is_held_out(pair))


def training_pair(rng: Random) -> Pair:
    """A random pair that the corpus may contain."""
    while True:
        pair = Pair(rng.randrange(LIMIT), rng.randrange(LIMIT))
        if not is_held_out(pair):
            return pair


def plain_sum(rng: Random) -> Document:
    """For example "27 + 45 = 72" and a newline, of which the sum is learned."""
    a, b = training_pair(rng)
    return plain(f"{a} + {b} =", f" {a + b}\n")


def ask_sum(rng: Random) -> Exchange:
    """A sum asked in one of several ways, and its answer, such as "27 + 45 = 72."."""
    a, b = training_pair(rng)
    return Exchange(rng.choice(QUESTIONS).format(a=a, b=b), f"{a} + {b} = {a + b}.")


def ask_word_problem(rng: Random) -> Exchange:
    """A sum as a word problem."""
    a, b = training_pair(rng)
    question, answer = rng.choice(WORD_PROBLEMS)
    words = {"a": a, "b": b, "sum": a + b, "name": rng.choice(NAMES), "things": rng.choice(THINGS)}
    return Exchange(question.format(**words), answer.format(**words))
