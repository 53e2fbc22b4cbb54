"""The training text: an endless, seeded mixture of all kinds of documents."""

from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar

from tools.embedded_model import arithmetic, lessons, stories
from tools.embedded_model.documents import Document, Exchange, chat

T = TypeVar("T", Document, Exchange)

PLAIN_WEIGHTS: dict[Callable[[Random], Document], float] = {
    arithmetic.plain_sum: 24,
    lessons.plain_count: 6,
    lessons.plain_calendar: 2,
    lessons.plain_copy: 3,
    lessons.plain_reverse_word: 2,
    stories.plain_story: 8,
    stories.plain_sentences: 3,
}
EXCHANGE_WEIGHTS: dict[Callable[[Random], Exchange], float] = {
    arithmetic.ask_sum: 24,
    arithmetic.ask_word_problem: 3,
    lessons.ask_count: 9,
    lessons.ask_neighbour_number: 2,
    lessons.ask_larger: 2,
    lessons.ask_calendar: 3,
    lessons.ask_copy: 5,
    lessons.ask_reverse_word: 5,
    lessons.ask_reverse_order: 4,
    lessons.ask_fact: 3,
    lessons.ask_small_talk: 2,
    stories.ask_story: 8,
}
CHAT_SHARE = 0.5
"""Share of documents that are chats."""
NUM_EXCHANGES = (1, 1, 1, 1, 1, 2, 3, 4, 5, 12)
"""How many exchanges a chat may have, each of these as often as the others."""
SYSTEM_SHARE = 0.25
"""Share of chats that begin with a system message; the answers do not depend on it."""
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a kind and helpful assistant.",
    "You are a small model that ships with Pagewire.",
    "Answer the questions of the user.",
    "You are a friendly teacher. Answer in short sentences.",
)


def _choose(rng: Random, weights: dict[Callable[[Random], T], float]) -> T:
    make = rng.choices(tuple(weights), tuple(weights.values()))[0]
    return make(rng)


def _chat(rng: Random) -> Document:
    exchanges = [_choose(rng, EXCHANGE_WEIGHTS) for _ in range(rng.choice(NUM_EXCHANGES))]
    system = rng.choice(SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else None
    return chat(exchanges, system)


def documents(seed: int) -> Iterator[Document]:
    """Documents without end; the same seed gives the same ones."""
    rng = Random(seed)
    while True:
        yield _chat(rng) if rng.random() < CHAT_SHARE else _choose(rng, PLAIN_WEIGHTS)
