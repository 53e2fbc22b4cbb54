"""What a format of `formats.toml` consists of: the marks around thoughts and calls."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.frontend.chat_formats.source import Texts

_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""What a marker may contain that is one token of a vocabulary."""
_GROUP = re.compile(r"\(\?P<\w+>")


def tokens_in(marks: Iterable[str]) -> set[str]:
    """Everything in marks and patterns that may be a token of the vocabulary."""
    return {
        token for mark in marks for token in _TOKEN.findall(_GROUP.sub("", mark).replace("\\", ""))
    }


@dataclass(frozen=True, slots=True)
class Dialect:
    """How values are written in a call's arguments."""

    quotes: Texts = ('"',)
    """What a string begins and ends with."""
    has_escapes: bool = True
    """Whether a backslash escapes the next character of a string."""
    has_bare_keys: bool = False
    """Whether keys and strings need no quotes."""
    in_parentheses: bool = False
    """Whether the arguments are `(key=value, …)`; lists may be tuples."""


JSON = Dialect()
LITERAL = Dialect(('"', "'"))
"""One value: JSON, or Python's literals."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Arguments that are written one by one between tags."""

    opening: str = ""
    key: str = ""
    """Pattern of what is between `opening` and the value; group `key`."""
    closing: str = ""
    padding: str = ""
    """What is around a value and no part of it."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    Calls are in a section, `openings` to `closings`, or follow each other without one. A call is a
    JSON object with the name and the arguments, or a head with the name and then its arguments.
    """

    names: Texts = ()
    """What `--tool-call-parser` calls it."""
    openings: Texts = ()
    closings: Texts = ()
    call_openings: Texts = ()
    call_closings: Texts = ()
    shown_by: str = ""
    """It is used by a chat template that contains `one text or another and a third`; if empty, by
    one that contains the first opening."""
    unmarked: str = ""
    """The character that begins a section at the start of a message without any mark."""
    has_objects: bool = False
    """Whether a call is `{"name": …, "arguments": {…}}`, alone or in a list."""
    head: str = ""
    """Pattern of what is before the arguments; groups `name` and `id`."""
    head_so_far: str = "(?s:.*)"
    """Pattern of the beginnings of a head, where ordinary text could be held back too long."""
    dialect: Dialect = JSON
    parameters: Parameters = Parameters()
    framing: Texts = ()
    """Marks around texts before calls that are no text themselves."""

    @property
    def all_openings(self) -> Texts:
        """What begins calls within a text."""
        return self.openings + self.call_openings

    @property
    def all_closings(self) -> Texts:
        """What ends them."""
        return self.closings + self.call_closings

    @property
    def marks(self) -> Texts:
        """All marks, the first opening first, and the patterns that contain some."""
        marks = self.all_openings + self.all_closings + self.framing + self.dialect.quotes
        tags = self.parameters
        return (*marks, self.head, tags.opening, tags.key, tags.closing)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks thoughts. They precede the answer."""

    names: Texts = ()
    """What `--reasoning-parser` calls it."""
    openings: Texts = ()
    closings: Texts = ()
    shown_by: str = ""
    """See `CallFormat`."""
    starts_unmarked: bool = False
    """Whether an answer begins within a thought."""
    answer: tuple[str, str] = ("", "")
    """Marks around the answer after a thought."""
    answer_openings: Texts = ()
    """What announces the answer, if that is not the end of the thought."""
    framing: Texts = ()
    """Marks around texts that are no text themselves."""

    @property
    def marks(self) -> Texts:
        """All marks, the first opening first."""
        return self.openings + self.closings + self.answer + self.framing


NO_REASONING, NO_CALLS = ReasoningFormat(), CallFormat()
