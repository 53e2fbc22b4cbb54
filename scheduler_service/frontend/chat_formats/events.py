"""Events of a parser, and its interface."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of this function begins; its arguments follow."""

    name: str
    call_id: str | None = None
    """The id that the model wrote, in the formats that have one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the present call's arguments, as JSON text."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments


class MessageParser(Protocol):
    """Reads the text of one choice."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""

    def push(self, text: str) -> list[Event]:
        """The events in the next piece of text."""

    def finish(self) -> list[Event]:
        """The events of the text that was held back, at its end."""


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
