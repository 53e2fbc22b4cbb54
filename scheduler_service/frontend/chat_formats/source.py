"""The text of an answer, which comes in pieces, and the marks in it."""

import re
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Reads a part of a source, and returns the result; yields where it needs more text."""

Texts = tuple[str, ...]

_SPACE = re.compile(r"\s*")


class Marks:
    """A set of marks to look for."""

    def __init__(self, marks: Texts) -> None:
        longest_first = sorted(set(marks) - {""}, key=len, reverse=True)
        beginnings = {mark[:size] for mark in longest_first for size in range(1, len(mark))}
        self.pattern = _any_of(longest_first)
        self.first_character = _any_of({mark[0] for mark in longest_first})
        self._beginning = _any_of(sorted(beginnings, key=len, reverse=True), r"\Z")
        self._max_beginning = max(map(len, beginnings), default=0)

    def partial(self, text: str, start: int) -> int:
        """Where the end of `text[start:]` begins that more text could make a mark; the length of
        `text` if there is none. Constant time."""
        found = self._beginning.search(text, max(start, len(text) - self._max_beginning))
        return found.start() if found else len(text)


def _any_of(texts: Iterable[str], end: str = "") -> re.Pattern[str]:
    return re.compile(f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'}){end}")


marks_of = lru_cache(maxsize=256)(Marks)


class Source:
    """The text that was not read yet, `text[at:]`, and text to which a reader may return.

    What its methods return depends on the text alone, never on the pieces in which it comes: they
    wait for more while that could change their result.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_last = False
        """Whether no more text comes."""
        self._kept: int | None = None
        """Where the text begins to which a reader may return."""

    @property
    def is_empty(self) -> bool:
        """Whether all text was read."""
        return self.at == len(self.text)

    @property
    def char(self) -> str:
        """The next character; empty without one."""
        return self.text[self.at : self.at + 1]

    def push(self, text: str) -> None:
        """Add a piece of text."""
        start = self.at if self._kept is None else self._kept
        self._kept = None if self._kept is None else 0
        self.text, self.at = self.text[start:] + text, self.at - start

    def keep(self, start: int | None = None) -> None:
        """Keep the text from here on, or from `start` on, so that `restore` can return to it."""
        self._kept = self.at if start is None else start

    def release(self) -> None:
        """Keep no text."""
        self._kept = None

    def restore(self) -> int:
        """Return to the start of the text that is kept, if any is; its length."""
        length = 0 if self._kept is None else self.at - self._kept
        self.at, self._kept = self.at - length, None
        return length

    def skip_space(self) -> Reading[str]:
        """Read white space, until other text comes."""
        spaces = []
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            spaces.append(found[0])
            self.at = found.end()
            if self.is_last or not self.is_empty:
                return "".join(spaces)
            yield

    def peek(self, marks: Texts) -> Reading[str]:
        """The mark that comes next; empty if other text does, or none."""
        look = marks_of(marks)
        while not self.is_last and (self.is_empty or look.partial(self.text, self.at) == self.at):
            yield
        found = look.pattern.match(self.text, self.at)
        return found[0] if found else ""

    def match(self, pattern: str, possible: str, max_chars: int) -> Reading[re.Match[str] | None]:
        """What comes next, if it has this pattern within `max_chars`; None as soon as the text
        cannot have it, which it can while `possible` matches all of it."""
        while True:
            limit = self.at + max_chars
            found = re.compile(pattern).match(self.text, self.at, limit)
            is_over = self.is_last or len(self.text) >= limit
            if found or is_over or not re.compile(possible).fullmatch(self.text, self.at):
                return found
            yield

    def split(self, marks: Texts) -> tuple[str, str]:
        """Read the text before the next mark, and the mark; the mark is empty if it is to come."""
        look = marks_of(marks)
        start, end = self.at, len(self.text)
        end = end if self.is_last else look.partial(self.text, start)
        found = look.pattern.search(self.text, start)
        if found and (found.start() < end or self.is_last):
            self.at = found.end()
            return self.text[start : found.start()], found[0]
        self.at = end
        return self.text[start:end], ""
