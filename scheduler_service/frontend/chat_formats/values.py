"""Reads one value as models write it, and writes it as JSON, while it comes in pieces.

JSON is passed on as it was written; other dialects differ in quotes, keys and the names of
constants only. What is passed on can be completed at any time: keys and commas wait for the value
that follows them. Small errors that leave no doubt are mended: raw control characters in strings,
escapes that JSON lacks, a comma after the last element. Half of a character (an unpaired surrogate,
which nothing can encode) becomes U+FFFD. Anything else ends the value.
"""

import json
import re
from collections.abc import Callable

from scheduler_service.frontend.chat_formats.source import Reading, Source, Texts, marks_of
from scheduler_service.frontend.chat_formats.syntax import JSON, Dialect

MAX_DEPTH = 64
"""Levels of objects and lists."""
MAX_WORD_CHARS = 1024
"""Of a number or a key without quotes."""

_SPACE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[\w.+\-]*")
_BARE_KEY = re.compile(r"""(?:[^\s"'{}\[\],:<>][^"'{}\[\],:<>\n]*)?""")
_CONTROL = re.compile(r"[\x00-\x1f]")
_CODE_UNIT = re.compile("[0-9a-fA-F]{0,4}")
_FIRST_HALF, _LAST_HALF = (re.compile(f"[dD][{digits}]..") for digits in ("89abAB", "c-fC-F"))
_LAST_HALF_SO_FAR = re.compile(r"(\\(u([dD]([c-fC-F][0-9a-fA-F]{0,2})?)?)?)?")
_HALF = r"\ufffd"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+\-]?\d+)?", re.ASCII)
_NUMBER_SO_FAR = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?)?((?<=\d)[eE][+\-]?\d*)?", re.ASCII)
_CONSTANTS = {name: name.lower() for name in ("true", "false", "null", "True", "False")}
_CONSTANTS["None"] = "null"


class BrokenValue(Exception):
    """The text is no value from some place on, or it ends within one."""

    def __init__(self, rest: str | None = None) -> None:
        """`rest`: the JSON that was read and not passed on, if the text ends."""
        super().__init__(rest)
        self.rest = rest


class ValueReader:
    """Reads one value.

    `send` gets its JSON, when the source is where the text of that ends. A mark in `ends` may be
    part of a string or end the value. What follows the first is sent only when the value has ended;
    until then a raw control character in a string shows that the mark has ended it.
    """

    def __init__(
        self, source: Source, dialect: Dialect, send: Callable[[str], object], ends: Texts = ()
    ) -> None:
        self._source = source
        self._dialect = dialect
        self._send = send
        self._ends = ends
        self._pending: list[str] = []
        """JSON that cannot be passed on before a value follows it."""
        self._levels: list[str] = []
        """What ends the open objects and lists in JSON."""
        self._in_text = False
        """Whether a string has begun that is no key."""
        self.completion: str | None = None
        """What completes the JSON before the first mark."""
        self._withheld: list[str] = []
        """The JSON after it."""

    def read(self, token: str = "") -> Reading[None]:
        """Read the value that begins with a token, or with the next one; raises BrokenValue if
        there is none."""
        yield from self._read_value(token or (yield from self.next()))
        self._send("".join(self._withheld))

    def copy(self) -> Reading[None]:
        """Pass on all text as it comes, which is known to be JSON: only its escapes are read."""
        source = self._source
        while True:
            text, mark = source.split(("\\",))
            if text:
                self._send(text)
            if mark:
                self._send((yield from self._read_escape()))
            elif source.is_last:
                return
            else:
                yield

    def complete(self) -> str:
        """What completes the JSON that was passed on."""
        ends = ('"' if self._in_text else "") + "".join(reversed(self._levels))
        return ends if self.completion is None else self.completion

    def _write(self, *texts: str, commits: bool = True) -> None:
        """Add JSON, and pass on what is pending."""
        self._pending += texts
        if commits:
            text = "".join(self._pending)
            self._pending.clear()
            (self._send if self.completion is None else self._withheld.append)(text)

    def _more(self, rest: str = "") -> Reading[None]:
        """Wait for more text; `rest` is the JSON of what was read and not written if none comes."""
        if self._source.is_last:
            raise BrokenValue("".join(self._pending) + rest)
        yield

    # A token is a word, a quote or another character; white space before it is passed on.

    def next(self, *, is_key: bool = False) -> Reading[str]:
        """Read the next token."""
        source, quotes = self._source, self._dialect.quotes
        while True:
            self._read_space()
            if source.is_empty:
                yield from self._more()
            elif word := self._word(is_key):
                if source.at + len(word) < len(source.text) or len(word) == MAX_WORD_CHARS:
                    break
                yield from self._more(self._beginning(word, is_key))
            elif marks_of(quotes).partial(source.text, source.at) == source.at:
                yield from self._more(source.text[source.at :])
            else:
                found = marks_of(quotes).pattern.match(source.text, source.at)
                word = found[0] if found else source.char
                break
        source.at += len(word)
        return word

    def _read_space(self) -> None:
        source = self._source
        space = _SPACE.match(source.text, source.at)
        assert space is not None
        self._pending.append(space[0])
        source.at = space.end()

    def _word(self, is_key: bool) -> str:
        source = self._source
        pattern = _BARE_KEY if is_key and self._dialect.has_bare_keys else _WORD
        found = pattern.match(source.text, source.at, source.at + MAX_WORD_CHARS)
        assert found is not None
        return found[0]

    def _beginning(self, word: str, is_key: bool) -> str:
        """The beginning of the JSON of a word that is cut."""
        constant = next((name for name in _CONSTANTS if name.startswith(word)), None)
        if is_key:
            return f'"{_escaped(word)}'
        if constant:
            return _CONSTANTS[constant][: len(word)]
        if _NUMBER_SO_FAR.fullmatch(word):
            return word
        if self._dialect.has_bare_keys:
            return f'"{word}'
        raise BrokenValue

    # Values, each after its first token.

    def _read_value(self, token: str) -> Reading[None]:
        in_call = self._dialect.in_parentheses and not self._levels
        if token in self._dialect.quotes:
            yield from self._read_string(token, is_key=False)
        elif token == "[":
            yield from self._read_level("]", "[]")
        elif token == "(" and in_call:
            yield from self._read_level(")", "{}", "=")
        elif token == "(" and self._dialect.in_parentheses:
            yield from self._read_level(")", "[]")
        elif token == "{" and not in_call:
            yield from self._read_level("}", "{}", ":")
        elif token in _CONSTANTS or _NUMBER.fullmatch(token):
            self._write(_CONSTANTS.get(token, token))
        elif self._dialect.has_bare_keys and _WORD.fullmatch(token):
            self._write(f'"{token}"')
        else:
            raise BrokenValue

    def _read_level(self, end: str, brackets: str, separator: str = "") -> Reading[None]:
        """Read an object, in which keys and values have a separator, or a list."""
        if len(self._levels) == MAX_DEPTH:
            raise BrokenValue
        self._write(brackets[0])
        self._levels.append(brackets[1])
        comma: int | None = None
        is_object = bool(separator)
        while (token := (yield from self.next(is_key=is_object))) != end:
            if is_object:
                yield from self._read_key(token, separator)
                token = yield from self.next()
            yield from self._read_value(token)
            comma = None
            if (token := (yield from self.next())) == ",":
                comma = len(self._pending)
                self._write(",", commits=False)
            elif token == end:
                break
            else:
                raise BrokenValue
        if comma is not None:
            self._pending[comma] = ""
        self._write(self._levels.pop())

    def _read_key(self, token: str, separator: str) -> Reading[None]:
        if token in self._dialect.quotes:
            yield from self._read_string(token, is_key=True)
        elif self._dialect.has_bare_keys and _BARE_KEY.fullmatch(token):
            self._write(f'"{_escaped(token.rstrip())}"', commits=False)
        elif separator == "=" and _WORD.fullmatch(token):
            self._write(f'"{token}"', commits=False)
        else:
            raise BrokenValue
        if (yield from self.next()) != separator:
            raise BrokenValue
        self._write(":", commits=False)

    def _read_string(self, quote: str, *, is_key: bool) -> Reading[None]:
        source, escape = self._source, "\\" if self._dialect.has_escapes else ""
        self._write('"', commits=not is_key)
        self._in_text = not is_key
        while True:
            text, mark = source.split((quote, escape, *self._ends))
            if self.completion is not None and escape and _CONTROL.search(text):
                raise BrokenValue
            source.at -= len(mark)
            self._write(_escaped(text), commits=not is_key)
            source.at += len(mark)
            if mark == quote:
                break
            if not mark:
                yield from self._more()
                continue
            if mark == escape:
                mark = yield from self._read_escape()
            else:
                self.completion, self._ends = self.complete(), ()
                mark = _escaped(mark)
            self._write(mark, commits=not is_key)
        self._in_text = False
        self._write('"', commits=not is_key)

    def _read_escape(self) -> Reading[str]:
        """An escape as JSON has it, after the backslash."""
        source = self._source
        while source.is_empty:
            yield from self._more("\\")
        char = source.char
        source.at += 1
        if char in '"\\/bfnrt':
            return f"\\{char}"
        if char != "u":
            return char if char == "'" else f"\\\\{_escaped(char)}"
        while True:
            digits = _CODE_UNIT.match(source.text, source.at)
            assert digits is not None
            if len(digits[0]) == 4:
                source.at = digits.end()
                return (yield from self._read_halves(digits[0]))
            if digits.end() < len(source.text):
                return r"\\u"
            yield from self._more(rf"\u{digits[0]}")

    def _read_halves(self, unit: str) -> Reading[str]:
        """The escape of a code unit that was read, and of the other half of its character."""
        source = self._source
        if _LAST_HALF.fullmatch(unit):
            return _HALF
        if not _FIRST_HALF.fullmatch(unit):
            return rf"\u{unit}"
        while True:
            rest = source.text[source.at : source.at + 6]
            if not _LAST_HALF_SO_FAR.fullmatch(rest):
                return _HALF
            if len(rest) == 6:
                source.at += 6
                return rf"\u{unit}{rest}"
            yield from self._more(rf"\u{unit}{rest}")


def _escaped(text: str) -> str:
    """A text as it is within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def converted(text: str, dialect: Dialect) -> str | None:
    """A text that is one value of the dialect, as JSON; None if it is none."""
    source, out = Source(), list[str]()
    source.push(text.strip() + "\n")
    source.is_last = True
    try:
        for _ in ValueReader(source, dialect, out.append).read():
            pass
    except BrokenValue:
        return None
    return None if source.text[source.at :].strip() else "".join(out)


def completed_object(text: str) -> str:
    """The object that a text begins with, completed where it stops being JSON; without one, an
    empty object."""
    source, out = Source(), list[str]()
    source.push(text.strip())
    source.is_last = True
    reader = ValueReader(source, JSON, out.append)
    if source.char != "{":
        return "{}"
    try:
        for _ in reader.read():
            pass
    except BrokenValue:
        out.append(reader.complete())
    return "".join(out)
