"""A constraint as one grammar in llguidance's dialect of Lark, and the limits to compile it with.

Frontends check a constraint, and workers compile it, with this text and these limits.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Without this, llguidance allows only the tokenizer's own next token where a single text can
follow; the contract allows every token that begins it."""

WHITE_SPACE = r"(?: |\r?\n[ \t]{0,32})"
"""White space between the parts of a JSON text, for compact, spaced and indented ones. Bounded, so
that a model cannot write white space without end."""

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Limits of one constraint's cost, for compilation and for each token. Nothing is computed in
advance over the whole vocabulary, so the cost does not depend on its size."""

_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}

SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of JSON schemas whose values are schemas by name."""
DATA = frozenset(("const", "enum", "default", "example", "examples"))
"""Keywords whose values are no schemas."""

_NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "format": ("password", "binary", "path", "file-path", "directory-path"),
}
"""Values of keywords that the compiler does not have in this form, and that exclude nothing."""

MAX_DEPTH = 200
"""Levels of a JSON schema, so that no function that follows them exceeds Python's limit."""


def effective(schema: Any, depth: int = 0) -> Any:
    """A JSON schema without keywords that exclude nothing. Raises ValueError if it is too deep."""
    if depth > MAX_DEPTH:
        raise ValueError(f"too complex: expected at most {MAX_DEPTH} levels")
    if isinstance(schema, list):
        return [effective(inner, depth + 1) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: {name: effective(inner, depth + 1) for name, inner in value.items()}
        if keyword in SCHEMAS_BY_NAME and isinstance(value, dict)
        else (value if keyword in DATA else effective(value, depth + 1))
        for keyword, value in schema.items()
        if value not in _NO_EFFECT.get(keyword, ())
    }


def schema_to_lark(schema: dict[str, Any]) -> str:
    """The grammar of the JSON texts that a schema allows."""
    schema = {**effective(schema), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"start: %json {json.dumps(schema)}{NO_FORCING}"


def from_gbnf(grammar: str) -> str:
    """A grammar in GBNF, the notation of llama.cpp, in Lark; any other grammar as it is.

    Raises ValueError if it is not valid GBNF.
    """
    if not re.search(r"^[ \t]*[\w-]+[ \t]*::=", grammar, re.MULTILINE):
        return grammar
    try:
        return gbnf_to_lark(grammar.replace("\r\n", "\n"))
    except Exception as error:  # of many kinds
        raise ValueError(f"not valid GBNF: {error}") from error


def regex_to_lark(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole."""
    return f"start: /{between_slashes(pattern)}/{NO_FORCING}"


def grammar_to_lark(grammar: str) -> str:
    """A client's own grammar."""
    return grammar + NO_FORCING


def choice_to_lark(choices: Sequence[str]) -> str:
    """The grammar of these texts."""
    return regex_to_lark("|".join(map(_literal, choices)))


def between_slashes(pattern: str) -> str:
    """The pattern as it stands between slashes, on one line."""
    return re.sub(
        r"\\.|[/\n\r]",
        lambda found: _IN_SLASHES.get(found[0][-1], found[0]),
        pattern,
        flags=re.DOTALL,
    )


def _literal(text: str) -> str:
    """A regular expression for one text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$]", r"\\\g<0>", text)
