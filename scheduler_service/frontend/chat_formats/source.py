"""The text of an answer, which comes in pieces, and the marks in it."""

import re
import sys
from functools import lru_cache

Texts = tuple[str, ...]

_SPACE = re.compile(r"\s*")


class Marks:
    """A set of marks to look for."""

    def __init__(self, marks: Texts) -> None:
        self._marks = sorted(set(marks) - {""}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._first = re.compile("|".join(re.escape(mark[0]) for mark in self._marks) or "(?!)")
        self._max_partial = max(map(len, self._marks), default=1) - 1

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first mark."""
        return self._pattern.search(text, start)

    def match(self, text: str, start: int, end: int = sys.maxsize) -> re.Match[str] | None:
        """The longest mark at `start`."""
        return self._pattern.match(text, start, end)

    def partial(self, text: str, start: int, end: int) -> int:
        """Where the last part of `text[start:end]` begins that more text could make a mark; `end`
        if there is none. Constant time."""
        for found in self._first.finditer(text, max(start, end - self._max_partial), end):
            last = text[found.start() : end]
            if any(len(last) < len(mark) and mark.startswith(last) for mark in self._marks):
                return found.start()
        return end


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
        self._mark: int | None = None
        """Where the text begins that is kept; earlier pieces of it are in `_kept`."""
        self._kept: list[str] = []
        self._num_dropped = 0

    @property
    def is_empty(self) -> bool:
        """Whether all text was read."""
        return self.at == len(self.text)

    @property
    def char(self) -> str:
        """The next character; empty without one."""
        return self.text[self.at : self.at + 1]

    @property
    def num_read(self) -> int:
        """The length of the text before `at`, from its very start."""
        return self._num_dropped + self.at

    @property
    def keeps_text(self) -> bool:
        """Whether text is kept from some place on."""
        return self._mark is not None

    @property
    def num_kept(self) -> int:
        """The length of the text that is kept."""
        return 0 if self._mark is None else sum(map(len, self._kept)) + self.at - self._mark

    def push(self, text: str) -> None:
        """Add a piece of text."""
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.at])
            self._mark = 0
        self._num_dropped += self.at
        self.text, self.at = self.text[self.at :] + text, 0

    def keep(self, start: int | None = None) -> None:
        """Keep the text from here on, or from `start` on, so that `restore` can return to it."""
        self._mark, self._kept = self.at if start is None else start, []

    def release(self) -> str:
        """Keep no text; returns what was kept."""
        text = ""
        if self._mark is not None:
            text = "".join(self._kept) + self.text[self._mark : self.at]
        self._mark, self._kept = None, []
        return text

    def restore(self) -> None:
        """Return to the start of the text that is kept, if any is."""
        if self._kept:
            kept = "".join(self._kept)
            self._num_dropped -= len(kept)
            self.text, self.at = kept + self.text[self._mark :], 0
        elif self._mark is not None:
            self.at = self._mark
        self._mark, self._kept = None, []

    def skip_space(self) -> str:
        """Read the white space that comes next."""
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return found[0]

    def peek(self, marks: Texts) -> str | None:
        """The mark that comes next; empty if other text does, None if more text is needed."""
        look = marks_of(marks)
        if not self.is_last and look.partial(self.text, self.at, len(self.text)) == self.at:
            return None
        found = look.match(self.text, self.at)
        return found[0] if found else ""

    def split(self, marks: Texts) -> tuple[str, str]:
        """Read the text before the next mark, and the mark; the mark is empty if it is to come."""
        look = marks_of(marks)
        start, end = self.at, len(self.text)
        end = end if self.is_last else look.partial(self.text, start, end)
        found = look.search(self.text, start)
        if found and (found.start() < end or self.is_last):
            self.at = found.end()
            return self.text[start : found.start()], found[0]
        self.at = end
        return self.text[start:end], ""
