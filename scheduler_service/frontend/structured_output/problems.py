"""Problems of constraints with their locations, and the JSON schema keywords that are supported."""

import json
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from service_common import lark

_SUPPORTED = frozenset(
    (
        *("type", "enum", "const", "anyOf", "oneOf", "allOf"),
        *("$ref", "$anchor", "$defs", "definitions"),
        *("properties", "additionalProperties", "patternProperties", "required"),
        *("minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$comment", "title", "description", "default", "example", "examples"),
        *("deprecated", "readOnly", "writeOnly", "discriminator", "externalDocs", "xml"),
        *("contentMediaType", "contentEncoding", "contentSchema"),
    )
)
"""Keywords that do not affect what matches."""

_WITH_SCHEMAS = frozenset(
    ("anyOf", "oneOf", "allOf", "prefixItems", "items", "additionalItems", "additionalProperties")
)
"""Keywords whose values are schemas, or lists of them."""


def places(value: Any, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schema and all schemas in it that are objects, outer ones first, after their JSON
    pointers; that of the whole is empty."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, f"{pointer}/{index}")
    if not isinstance(value, dict):
        return
    yield pointer, value
    for keyword, inner in value.items():
        if keyword in lark.SCHEMAS_BY_NAME and isinstance(inner, dict):
            for name, named in inner.items():
                yield from places(named, f"{pointer}/{keyword}/{_encode(name)}")
        elif keyword in _WITH_SCHEMAS:
            yield from places(inner, f"{pointer}/{keyword}")


def unsupported_keyword(schema: Any) -> tuple[str, str] | None:
    """The first keyword that is not supported, and the pointer to its schema."""
    for pointer, inner in places(schema):
        for keyword in inner:
            # Names are reserved for extensions, of which the compiler reads one.
            is_extension = keyword.startswith("x-") and keyword != "x-guidance"
            if keyword not in _SUPPORTED | _ANNOTATIONS and not is_extension:
                return keyword, pointer
    return None


def _encode(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


MAX_CHARS = 500
"""Maximum length of a problem; compilers quote their input."""

MAX_OPTIONAL_PROPERTIES = 400
"""Maximum number of optional properties of one object: each adds four items to a row of the parser,
which has at most `lark.LIMITS.max_items_in_row`."""

PARSED_BYTES = 16
"""Length of a matching text that is parsed: its first rows show if the parser's limits hold."""

MAX_COMPILED_SCHEMAS = 200
"""Maximum number of subschemas that are compiled separately to locate the problem of a schema."""

_NO_BYTE = "NoExtension"
"""The compiler's name for a grammar that nothing matches."""

_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/', re.DOTALL)
"""Literals of a grammar: strings, comments, regular expressions."""

_PREFERRED = (ord('"'), *range(0x21, 0x100), *range(0x21))
"""Bytes in the order in which they are tried: what opens and closes strings, then what is visible.
"""


class _Bytes:
    """A vocabulary of bytes, and nothing else that a grammar could name."""

    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text."""
        return list(text)


def byte_tokenizer() -> LLTokenizer:
    """A tokenizer of that vocabulary."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), eos_token=_Bytes.eos_token_id)


def find_problem(kind: str, texts: Sequence[str]) -> str | None:
    """The constraint's problem, or None.

    kind: the field's name in SamplingParams; texts: all of a choice, otherwise one.
    """
    find = {
        "json_schema": _find_in_schema,
        "regex": _find_in_regex,
        "grammar": _find_in_grammar,
    }.get(kind)
    problem = _find_in_choice(texts) if find is None else find(texts[0])
    return None if problem is None else problem[:MAX_CHARS]


def _find_in_schema(text: str) -> str | None:
    try:
        schema: Any = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        return f"expected JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except (ValueError, RecursionError) as error:
        return f"expected JSON: {error}"
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return "expected a JSON object or true"
    try:
        schema = lark.effective(schema)
    except ValueError as error:
        return str(error)
    if found := unsupported_keyword(schema):
        keyword, pointer = found
        return f'keyword "{keyword}"{_at(pointer)} is not supported: {_instead(keyword)}'
    for pointer, inner in places(schema):
        number = _num_optional_properties(inner)
        if number > MAX_OPTIONAL_PROPERTIES:
            return (
                f"too complex: expected at most {MAX_OPTIONAL_PROPERTIES} properties that are not "
                f"required, got {number}{_at(pointer)}"
            )
    complaint = _compile(lark.schema_to_lark(schema))
    if complaint is None:
        return None
    if "regex parse error" in complaint and (problem := _find_in_patterns(schema)):
        return problem
    reason = _schema_reason(complaint)
    where = _innermost_with(reason, schema)
    return reason if where is None else reason + _at(where)


def _at(pointer: str) -> str:
    return f' at "{pointer}"' if pointer else " at the root"


def _instead(keyword: str) -> str:
    """What to do instead of using a keyword."""
    if keyword == "nullable":
        return 'add "null" to type'
    if similar := get_close_matches(keyword, _SUPPORTED, 1, 0.8):
        return f'did you mean "{similar[0]}"?'
    return "leave it out, and check the output for it"


_REASONS = {
    r"Invalid type: (.*)": "expected type to be array, boolean, integer, null, number, object or "
    r'string, or a list of these, got "\1"',
    r"Unknown format: (.*)": "expected format to be date-time, time, date, duration, email, "
    r'hostname, ipv4, ipv6, uuid or uri, got "\1"',
    r"oneOf constraints are not supported.*": "oneOf whose choices may match the same value is not "
    "supported (use anyOf)",
    r"(Resource '.*') is not present in a registry.*": r"\1 is not in the schema (use $defs)",
}
"""What to say in place of the compiler's messages."""


def _num_optional_properties(schema: dict[str, Any]) -> int:
    """Properties that an object may leave out: the parser has to consider all of them at once."""
    properties, required = schema.get("properties"), schema.get("required")
    names = [name for name in required if isinstance(name, str)] if type(required) is list else []
    return len(properties.keys() - set(names)) if isinstance(properties, dict) else 0


def _schema_reason(message: str) -> str:
    reason = _without_context(message.split("failed to compile JSON schema: ", 1)[-1])
    for pattern, instead in _REASONS.items():
        reason = re.sub(pattern, instead, reason)
    return reason


def _innermost_with(reason: str, schema: Any) -> str | None:
    """The pointer to the innermost schema that has this problem without its context."""
    inner_first = list(places(schema))[MAX_COMPILED_SCHEMAS::-1]
    for pointer, inner in inner_first:
        message = _compile(lark.schema_to_lark(inner))
        if message is not None and _schema_reason(message) == reason:
            return pointer
    return None


def _find_in_patterns(schema: Any) -> str | None:
    """The first invalid pattern of a schema, with its problem."""
    for pointer, inner in places(schema):
        named = inner.get("patternProperties")
        patterns = list(named) if isinstance(named, dict) else []
        patterns += [inner["pattern"]] if isinstance(inner.get("pattern"), str) else []
        for pattern in patterns:
            if problem := _find_in_regex(pattern):
                return f'pattern {json.dumps(pattern)} at "{pointer}": {problem}'
    return None


def _find_in_regex(pattern: str) -> str | None:
    if len(pattern) - len(pattern.rstrip("\\")) & 1:
        return f"incomplete escape sequence at offset {len(pattern) - 1}"
    message = _compile(lark.regex_to_lark(pattern))
    if message is None:
        return None
    place, reason = _parse_regex_error(message)
    if reason is None:
        return _without_context(message.split("(in regex): ", 1)[-1])
    return reason if place is None else f"{reason} at offset {_original_offset(pattern, place)}"


def _find_in_grammar(text: str) -> str | None:
    try:
        text, original = lark.from_gbnf(text), text
    except ValueError as error:
        return str(error)
    if text != original:
        message = _compile(lark.grammar_to_lark(text))
        return message and f"converted from GBNF to Lark: {_without_context(message)}"
    without = _LITERALS.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    if (place := without.find("<")) >= 0:
        line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
        at = f"line {line}, column {column}"
        return f"special tokens have no text to match at {at}"
    message = _compile(lark.grammar_to_lark(text))
    if message is None:
        return None
    found = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", message, re.DOTALL)
    if not found:
        return _without_context(message)
    at, rest = f"line {found[1]}, column {found[2]}", found[3]
    offset, reason = _parse_regex_error(rest)
    if reason is not None:
        pattern = re.match(r'invalid regex ("(?:[^"\\]|\\.)*")', rest, re.DOTALL)
        inside = "" if offset is None else f" at offset {offset}"
        what = f"regex {pattern[1]}: " if pattern else ""
        return f"{what}{reason}{inside}, at {at}"
    return f"{_without_context(rest)} at {at}"


def _find_in_choice(choices: Sequence[str]) -> str | None:
    message = _compile(lark.choice_to_lark(choices))
    return None if message is None else _without_context(message)


def _compile(grammar: str) -> str | None:
    """The error message of the compiler, or of the parser about a text's first bytes, or None."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=lark.LIMITS)
    if not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error():
        return _parse_start(matcher)
    message = str(matcher.get_error())
    return "nothing matches" if not message or message.startswith(_NO_BYTE) else message


def _parse_start(matcher: LLMatcher) -> str | None:
    """The parser's error message about the first bytes of a text that matches."""
    for _ in range(PARSED_BYTES):
        mask = matcher.compute_bitmask()
        byte = next((b for b in _PREFERRED if mask[b >> 3] >> (b & 7) & 1), None)
        if byte is None:
            break
        if not matcher.consume_token(byte):
            break
    return f"too complex: {matcher.get_error()}" if matcher.is_error() else None


def _parse_regex_error(message: str) -> tuple[int | None, str | None]:
    """Offset in the compiled pattern, in characters, and message; None for what is not given.

    The message holds the pattern, indented by four, a line with carets below it, and the error.
    """
    reason = re.search(r"^error: (.*)", message, re.MULTILINE)
    carets = re.search(r"^    ( *)\^+$", message, re.MULTILINE)
    return (len(carets[1]) if carets else None), (reason[1] if reason else None)


def _original_offset(pattern: str, place: int) -> int:
    """The offset in a pattern of a place in it as it was compiled."""
    for offset in range(len(pattern)):
        if len(lark.between_slashes(pattern[: offset + 1])) > place:
            return offset
    return len(pattern)


def _without_context(message: str) -> str:
    """A message without the lines of the grammar that it quotes, as one line."""
    lines = message.split("\n")
    quoted = next((i for i, line in enumerate(lines) if re.match(r" *\d+ \| ", line)), len(lines))
    return " ".join(" ".join(lines[:quoted]).split()).removesuffix(" <non-verbose/>")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")
