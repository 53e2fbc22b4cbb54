"""A constraint as one grammar in the dialect of Lark that llguidance reads.

Frontends check the very same text (`scheduler_service/frontend/structured_output/lark.py`): what
they accept is what is compiled here. A test holds the two to each other.
"""

import json
import re
from collections.abc import Sequence

from worker_service.structured.constraint import ConstraintKind

NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Otherwise llguidance allows, where only one text can follow, no token of it but the tokenizer's
own next one; the contract allows all that begin it."""

WHITE_SPACE = r"(?: |\r?\n[ \t]{0,32})"
"""Between the parts of a JSON text: as compact, spaced and indented ones have it. Bounded, so that
no model writes white space for ever."""


def to_lark(kind: ConstraintKind, texts: Sequence[str]) -> str:
    """The grammar. Raises ValueError for a schema that is no JSON object or boolean."""
    if kind is ConstraintKind.GRAMMAR:
        return texts[0] + NO_FORCING
    if kind is ConstraintKind.JSON_SCHEMA:
        return f"start: %json {_schema(texts[0])}{NO_FORCING}"
    pattern = texts[0] if kind is ConstraintKind.REGEX else "|".join(map(_literal, texts))
    return f"start: /{_between_slashes(pattern)}/{NO_FORCING}"


def _schema(text: str) -> str:
    """Written anew, so that nothing but one JSON value comes into the grammar."""
    schema = json.loads(text)
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("expected a JSON object or true")
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)


_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


def _between_slashes(pattern: str) -> str:
    """The pattern as it stands between slashes, on one line."""
    return re.sub(
        r"\\.|[/\n\r]",
        lambda found: _IN_SLASHES.get(found[0][-1], found[0]),
        pattern,
        flags=re.DOTALL,
    )
