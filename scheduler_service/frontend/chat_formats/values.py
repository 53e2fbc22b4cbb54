"""Reads one value as models write it, and writes it as JSON, while it comes in pieces.

JSON is passed on as it was written; other dialects differ in quotes, keys and the names of
constants only. What is passed on can be completed at any time: keys and commas wait for the value
that follows them. Small errors that leave no doubt are mended: raw control characters in strings,
escapes that JSON lacks, a comma after the last element. Anything else ends the value.
"""

import json
import re
from dataclasses import dataclass

from scheduler_service.frontend.chat_formats.source import marks_of
from scheduler_service.frontend.chat_formats.syntax import Dialect

_SPACE = re.compile(r"[ \t\r\n]+")
_WORD = re.compile(r"[\w.+\-]+")
_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+\-]?\d+)?", re.ASCII)
_NUMBER_SO_FAR = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?)?((?<=\d)[eE][+\-]?\d*)?", re.ASCII)
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{0,4}")
_CONSTANTS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


@dataclass(slots=True)
class _Level:
    """An open object or list."""

    end: str
    """What ends it in the text, and in JSON."""
    json_end: str
    separator: str = ""
    """Between a key and a value; empty in a list."""
    has_bare_keys: bool = False


class ValueReader:
    """Reads one value. `out` collects its JSON; whoever uses it clears it."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._quotes = marks_of(dialect.quotes)
        self._levels: list[_Level] = []
        self._expects = "value"
        """`value`; `key` or `element`, after a comma; `first` (one of them, or the end);
        `separator`; `next` (a comma or the end)."""
        self._quote = ""
        """The quote of the string that is being read."""
        self._word: list[str] = []
        self._pending: list[str] = []
        """JSON that cannot be passed on before a value follows it."""
        self._comma = 0
        """The place of the last comma in it."""
        self.out: list[str] = []
        self.is_strict = False
        """Whether a raw control character in a string is an error."""
        self.is_done = False
        self.has_failed = False
        self.safe_end = -1
        """Where the text ends that `out` holds; whoever clears that sets it to -1."""

    @property
    def in_string(self) -> bool:
        """Whether a string has begun."""
        return bool(self._quote)

    def completion(self) -> str:
        """What completes the JSON that was passed on."""
        ends = "".join(level.json_end for level in reversed(self._levels))
        return ('"' if self._quote and self._expects != "separator" else "") + ends

    def rest(self, text: str) -> str | None:
        """The JSON of what was read but not passed on, and of `text`, where the value was cut;
        None if they are no beginning of JSON."""
        word = "".join(self._word)
        if self._quote:
            text = text if text.startswith("\\") else _escaped(text)
        elif (word and self._is_key()) or not word:
            text = '"' + word if word else text
        elif constant := next((name for name in _CONSTANTS if name.startswith(word)), None):
            text = _CONSTANTS[constant][: len(word)]
        elif _NUMBER_SO_FAR.fullmatch(word) is None:
            return None
        else:
            text = word
        return "".join(self._pending) + text

    def read(self, text: str, start: int, end: int) -> int:
        """Read `text[start:end]`; returns where the value, or what can be read of it, ends."""
        place = start
        while place < end and not self.is_done and not self.has_failed:
            step = self._read_string if self._quote else self._read_structure
            after = step(text, place, end)
            if after < 0:
                break
            place = after
        return place

    # Each returns the end of what it has read, or -1 if it needs more text.

    def _read_structure(self, text: str, place: int, end: int) -> int:
        if word := _WORD.match(text, place, end):
            self._word.append(word[0])
            return word.end()
        if self._word:
            self._end_word(place)
        elif space := _SPACE.match(text, place, end):
            self._pending.append(space[0])
            return space.end()
        elif self._expects == "separator":
            return self._punctuate(text, place, self._levels[-1].separator, ":", "value")
        elif self._levels and text[place] == self._levels[-1].end:
            return self._end_level(place)
        elif self._expects == "next":
            self._comma = len(self._pending)
            following = "key" if self._levels[-1].separator else "element"
            return self._punctuate(text, place, ",", ",", following)
        else:
            return self._begin(text, place, end)
        return place

    def _punctuate(self, text: str, place: int, char: str, written: str, following: str) -> int:
        if text[place] != char:
            self.has_failed = True
            return place
        self._pending.append(written)
        self._expects = following
        return place + 1

    def _begin(self, text: str, place: int, end: int) -> int:
        """Read the start of a string, an object or a list."""
        is_key = self._is_key()
        if quote := self._quotes.match(text, place, end):
            self._quote = quote[0]
            self._pending.append('"')
            if is_key:
                self._expects = "separator"
            else:
                self._commit(quote.end())
            return quote.end()
        if self._quotes.partial(text, place, end) == place:
            return -1
        level = None if is_key else self._level(text[place])
        if level is None:
            self.has_failed = True
            return place
        self._levels.append(level)
        self._expects = "first"
        self._pending.append("{" if level.separator else "[")
        self._commit(place + 1)
        return place + 1

    def _level(self, char: str) -> _Level | None:
        dialect = self._dialect
        if char == "[":
            return _Level("]", "]")
        if char == "(" and dialect.in_parentheses:
            return _Level(")", "]") if self._levels else _Level(")", "}", "=", has_bare_keys=True)
        if char == "{" and (self._levels or not dialect.in_parentheses):
            return _Level("}", "}", ":", dialect.has_bare_keys)
        return None

    def _end_level(self, place: int) -> int:
        if self._expects in ("key", "element"):
            self._pending[self._comma] = ""
        elif self._expects not in ("first", "next"):
            self.has_failed = True
            return place
        self._pending.append(self._levels.pop().json_end)
        self._end_value(place + 1)
        return place + 1

    def _is_key(self) -> bool:
        in_object = bool(self._levels) and bool(self._levels[-1].separator)
        return self._expects == "key" or (self._expects == "first" and in_object)

    def _end_word(self, place: int) -> None:
        word = "".join(self._word)
        if self._expects in ("next", "separator"):
            self.has_failed = True
        elif self._is_key():
            self.has_failed = not self._levels[-1].has_bare_keys
            self._pending.append(f'"{word}"')
            self._expects = "separator"
        elif word in _CONSTANTS or _NUMBER.fullmatch(word):
            self._pending.append(_CONSTANTS.get(word, word))
            self._end_value(place)
        elif self._dialect.has_bare_keys:
            self._pending.append(f'"{word}"')
            self._end_value(place)
        else:
            self.has_failed = True
        if not self.has_failed:
            self._word.clear()

    def _read_string(self, text: str, place: int, end: int) -> int:
        if not self._dialect.has_escapes:
            return self._read_raw_string(text, place, end)
        char = text[place]
        if plain := _PLAIN[self._quote].match(text, place, end):
            chunk, after = plain[0], plain.end()
            chunk = chunk if self._quote == '"' else _escaped(chunk)
        elif char == self._quote:
            return self._end_string(place + 1)
        elif char != "\\":
            self.has_failed = self.is_strict
            chunk, after = _escaped(char), place + 1
        elif end - place < 2:
            return -1
        else:
            chunk, after = _escape(text, place, end)
        return self._add(chunk, after) if after > 0 else -1

    def _read_raw_string(self, text: str, place: int, end: int) -> int:
        if text.startswith(self._quote, place, end):
            return self._end_string(place + len(self._quote))
        found = text.find(self._quote, place, end)
        stop = found if found >= 0 else self._quotes.partial(text, place, end)
        return self._add(_escaped(text[place:stop]), stop) if stop > place else -1

    def _add(self, chunk: str, end: int) -> int:
        if not self.has_failed:
            self._pending.append(chunk)
            if self._expects != "separator":
                self._commit(end)
        return end

    def _end_string(self, end: int) -> int:
        self._quote = ""
        self._pending.append('"')
        if self._expects != "separator":
            self._end_value(end)
        return end

    def _end_value(self, end: int) -> None:
        self._expects = "next"
        self.is_done = not self._levels
        self._commit(end)

    def _commit(self, end: int) -> None:
        self.out += self._pending
        self._pending.clear()
        self.safe_end = end


def _escape(text: str, place: int, end: int) -> tuple[str, int]:
    """A string's escape as JSON has it, and its end; -1 if more text is needed."""
    char = text[place + 1]
    if char == "u":
        found = _UNICODE.match(text, place, end)
        assert found is not None
        if found.end() == place + 6:
            return found[0], place + 6
        return (r"\\u", place + 2) if found.end() < end else ("", -1)
    if char in '"\\/bfnrt':
        return text[place : place + 2], place + 2
    return (char if char == "'" else "\\\\" + _escaped(char)), place + 2


def _escaped(text: str) -> str:
    """A text as it is within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def converted(text: str, dialect: Dialect) -> str | None:
    """A text that is one value of the dialect, as JSON; None if it is none."""
    reader = ValueReader(dialect)
    text = text.strip() + "\n"
    end = reader.read(text, 0, len(text))
    return "".join(reader.out) if reader.is_done and not text[end:].strip() else None
