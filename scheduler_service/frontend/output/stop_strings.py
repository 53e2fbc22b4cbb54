"""Stop strings in a text that arrives in pieces.

A text stops at the first position where any stop string is complete, however the text is cut into
pieces; of several that end there, the longest counts. Text that may be the start of a stop string
is held back.

Each stop string is matched by the automaton of Knuth, Morris and Pratt (1977). Its state is the
length of the stop string's prefix with which the text ends, which is how much must be held back;
it takes four bytes per character. A single automaton for all stop strings (Aho and Corasick) would
take hundreds of bytes per character, and a request may have 16,384 characters of them.
"""

from array import array
from collections.abc import Iterable


class _StopString:
    """One stop string, with the fallback states of its automaton."""

    __slots__ = ("_fallbacks", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallbacks = _fallbacks(text)

    def step(self, length: int, char: str) -> int:
        """The state after one more character; `length`: the state before it."""
        if length == len(self.text):
            length = self._fallbacks[length]
        while length and self.text[length] != char:
            length = self._fallbacks[length]
        return length + (self.text[length] == char)


def _fallbacks(text: str) -> "array[int]":
    """For each prefix of `text`: length of its longest proper prefix that is also its suffix."""
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
        """State of each stop string's automaton."""
        self._is_within = False
        """Whether any of them is not in its initial state."""
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held)

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Text that may be sent after one more piece; no piece may follow a match.

        If `may_stop` is false, a stop string that is complete within this piece is ignored.
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
        """The text held back, when the text has ended without a stop string; another may begin."""
        held, self._held = self._held, ""
        if self._is_within:
            self._lengths, self._is_within = [0] * len(self._strings), False
        return held

    def _step(self, char: str) -> str | None:
        """Process one more character; the longest stop string that it completes."""
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
