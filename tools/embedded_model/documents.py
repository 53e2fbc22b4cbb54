"""The documents of the corpus, each a sequence of segments with a role."""

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import NamedTuple


class Role(Enum):
    """The speaker of a segment; SYSTEM, USER and ASSISTANT make chats, the others plain text."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    PROMPT = "prompt"
    TEXT = "text"

    @property
    def is_learned(self) -> bool:
        """Whether the model is trained to write such segments, not only to read them."""
        return self in (Role.ASSISTANT, Role.TEXT)

    @property
    def is_chat(self) -> bool:
        """Whether the segment is a message of a chat, with turn tokens around it."""
        return self in (Role.SYSTEM, Role.USER, Role.ASSISTANT)


class Segment(NamedTuple):
    """A piece of a document that one role speaks."""

    role: Role
    text: str


class Exchange(NamedTuple):
    """A question and its answer, the unit that chats are built of."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Document:
    """One training example; the model starts it at `bos` and learns to end it."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """All segments, without the tokens that separate chat turns."""
        return "".join(segment.text for segment in self.segments)


def plain(prompt: str, completion: str) -> Document:
    """A document without turns; only `completion` is learned."""
    prompts = (Segment(Role.PROMPT, prompt),) if prompt else ()
    return Document((*prompts, Segment(Role.TEXT, completion)))


def chat(exchanges: list[Exchange], system: str | None = None) -> Document:
    """A chat of one or more exchanges, perhaps after a system message."""
    segments = [Segment(Role.SYSTEM, system)] if system is not None else []
    for exchange in exchanges:
        segments.append(Segment(Role.USER, exchange.question))
        segments.append(Segment(Role.ASSISTANT, exchange.answer))
    return Document(tuple(segments))


def article(noun: str) -> str:
    """`noun` with "a" or "an" before it."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def pick_some(rng: Random, items: tuple[str, ...], low: int, high: int) -> list[str]:
    """Between `low` and `high` different items, in random order."""
    return rng.sample(items, rng.randint(low, high))
