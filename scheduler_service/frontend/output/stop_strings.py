"""Stop strings in a text that comes in pieces.

Where a text stops is a function of the text alone, however it is cut into pieces: at the first
position where any stop string is complete; of several that end there, the longest. Text that may
turn out to be the start of a stop string is held back.

Each stop string is looked for by Knuth, Morris and Pratt's automaton (1977). Its state is how much
of the string the text ends with, hence how much must be held back; it takes four bytes for each
character. One automaton for all of them, Aho and Corasick's, would take hundreds, and a request may
have 16,384 characters.
"""

from array import array
from collections.abc import Iterable


class _StopString:
    """One stop string, and where to go on after a beginning of it that did not come to its end."""

    __slots__ = ("_fallbacks", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallbacks = _fallbacks(text)

    def step(self, length: int, char: str) -> int:
        """How much of it the text ends with after one more character; `length`: before that."""
        if length == len(self.text):
            length = self._fallbacks[length]
        while length and self.text[length] != char:
            length = self._fallbacks[length]
        return length + (self.text[length] == char)


def _fallbacks(text: str) -> "array[int]":
    """By the length of a beginning of `text`: that of the longest shorter one at its end."""
    fallbacks = array("I", (0, 0))
    length = 0
    for char in text[1:]:
        while length and text[length] != char:
            length = fallbacks[length]
        length += text[length] == char
        fallbacks.append(length)
    return fallbacks


class StopStrings:
    """The stop strings of one request; shared by its choices."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.longest_first = [_StopString(text) for text in sorted(strings, key=len, reverse=True)]
        self.first_chars = frozenset(string.text[0] for string in self.longest_first)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.longest_first)


class StopMatcher:
    """Watches one text for the stop strings."""

    def __init__(self, strings: StopStrings, *, include_stop: bool) -> None:
        self._strings = strings.longest_first
        self._first_chars = strings.first_chars
        self._include_stop = include_stop
        self._lengths = [0] * len(self._strings)
        """How much of each the text ends with."""
        self._is_within = False
        """Whether that is anything."""
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that may be shown with one more piece; nothing may follow a match.

        With `may_stop` false a stop string that is complete within this piece is passed over.
        """
        if not text or not self._strings:
            return text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            if not self._is_within and char not in self._first_chars:  # nearly always
                continue
            complete = self._step(char)
            if may_stop and complete is not None:
                return self._stop(held[:position], complete)
        shown = len(held) - max(self._lengths)
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Take one more character; the longest stop string that is complete with it."""
        complete = None
        for index, string in enumerate(self._strings):
            length = self._lengths[index] = string.step(self._lengths[index], char)
            if complete is None and length == len(string.text):
                complete = string.text
        self._is_within = any(self._lengths)
        return complete

    def _stop(self, text: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return text if self._include_stop else text[: -len(match)]
