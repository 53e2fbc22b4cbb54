"""What parsers make of a text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of this function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the present call's arguments, as JSON text."""

    text: str


Event = Content | CallStart | CallArguments


class ToolCallParser(Protocol):
    """Takes one choice's text."""

    def push(self, text: str) -> list[Event]:
        """What the next piece tells."""

    def finish(self) -> list[Event]:
        """What was held back, at the text's end."""


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` may begin."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
