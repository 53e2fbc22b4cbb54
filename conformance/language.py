"""Sets of texts that are simple enough to say of any text whether it may become one of them."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """What may stand in one place, as regular expressions."""

    whole: str
    begun: str
    """Matches each beginning of what `whole` matches."""


def _any(choices: Iterable[bytes]) -> str:
    return "(?:" + "|".join(re.escape(text.decode("latin-1")) for text in choices) + ")"


def one_of(*texts: str) -> Part:
    """Any of these texts."""
    beginnings = {text.encode()[:end] for text in texts for end in range(len(text.encode()) + 1)}
    return Part(_any(text.encode() for text in texts), _any(beginnings))


WHITE_SPACE = Part(r"(?: |\r?\n[ \t]{0,32})?", r"(?: |\r?(?:\n[ \t]{0,32})?)")
"""Between the parts of a JSON text."""


class Language:
    """The texts that consist of these parts, one after the other."""

    def __init__(self, *parts: Part) -> None:
        self._whole = _compile("".join(part.whole for part in parts))
        begun = [
            "".join(part.whole for part in parts[:index]) + parts[index].begun
            for index in range(len(parts))
        ]
        self._begun = _compile("|".join(begun))

    def has(self, text: bytes) -> bool:
        """Whether it is one of the texts."""
        return self._whole.fullmatch(text) is not None

    def begins(self, text: bytes) -> bool:
        """Whether one of the texts begins with it, or is it."""
        return self._begun.fullmatch(text) is not None


def texts(*each: str) -> Language:
    """These texts and no others."""
    return Language(one_of(*each))


def json_object(names: Sequence[str]) -> Language:
    """JSON objects with these properties in this order, each of them true or false."""
    parts = [one_of("{"), WHITE_SPACE]
    for place, name in enumerate(names):
        comma = [one_of(","), WHITE_SPACE] if place else []
        parts += [*comma, one_of(f'"{name}"'), WHITE_SPACE, one_of(":"), WHITE_SPACE]
        parts += [one_of("true", "false"), WHITE_SPACE]
    return Language(*parts, one_of("}"))


def _compile(pattern: str) -> "re.Pattern[bytes]":
    """Of bytes, as tokens may be parts of characters."""
    return re.compile(pattern.encode("latin-1"))
