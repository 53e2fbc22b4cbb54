"""What models write: thoughts and calls in each format (calls.txt, thoughts.txt)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from scheduler_service.frontend.chat_formats.events import Functions

FUNCTIONS: Functions = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "note": {"type": "string"}},
    },
    "now": None,
}
PARIS = {"city": "Paris", "days": 3}
NOTE = 'say "hi" {there},\tnow'
ADD = {"a": 1.5, "note": NOTE}


class Calls(NamedTuple):
    """`get_weather(PARIS)` and `add(ADD)`, with what is around them."""

    opening: str
    first: str
    between: str
    second: str
    closing: str

    def one(self) -> str:
        return self.opening + self.first + self.closing

    def two(self) -> str:
        return self.opening + self.first + self.between + self.second + self.closing


def _read(file: str) -> Iterator[tuple[str, list[str]]]:
    """Each format's name, and what it writes around and between « and »."""
    text = (Path(__file__).parent / file).read_text()
    for name, written in re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", text, re.MULTILINE):
        yield name, re.split("[«»]", written.removesuffix("\n"))


CALLS = {name: Calls(*parts) for name, parts in _read("calls.txt")}
THOUGHTS = {
    name: (before, between, after) for name, (before, _, between, _, after) in _read("thoughts.txt")
}
"""Before and after a thought, and after the answer."""
