"""Clients' JSON schemas before they become constraints: closed, and moved into other schemas."""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

from service_common.lark import DATA, SCHEMAS_BY_NAME


def _places(
    value: Any, pointer: str = "", base: str = ""
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The schema and all schemas in it, outer ones first: JSON pointer, escaped as in URIs; the URI
    that references are relative to; schema."""
    if isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _places(entry, f"{pointer}/{index}", base)
    if not isinstance(value, dict):
        return
    if isinstance(own := value.get("$id"), str):
        base = _join(base, own)
    yield pointer, base, value
    for keyword, inner in value.items():
        if keyword in SCHEMAS_BY_NAME and isinstance(inner, dict):
            for name, entry in inner.items():
                yield from _places(entry, f"{pointer}/{keyword}/{_encode(name)}", base)
        elif keyword not in DATA:
            yield from _places(inner, f"{pointer}/{_encode(keyword)}", base)


def _encode(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="~$")


def _join(base: str, name: str) -> str:
    try:
        return urldefrag(urljoin(base, name)).url
    except ValueError:  # not a URI
        return name


def moved(schema: Any, place: str = "") -> Any:
    """A copy of a schema whose references are valid at the JSON pointer `place` of another one.

    References become plain pointers. Identifiers, and the version that says how to read them, are
    left out: schemas that meet in another may have equal ones. Choices by a discriminator exclude
    one another, so that `oneOf`, of which not all can be enforced, is `anyOf`.
    """
    targets = {"": ""}
    for pointer, base, inner in _places(schema):
        own, anchor = inner.get("$id"), inner.get("$anchor")
        if isinstance(own, str) and not own.startswith("#"):
            targets.setdefault(base, pointer)
        for name in (own, f"#{anchor}"):
            targets.setdefault(f"{base}{name}", pointer)
    schema = deepcopy(schema)
    for _, base, inner in _places(schema):
        if isinstance(reference := inner.get("$ref"), str):
            inner["$ref"] = _moved(reference, base, targets, place)
        for keyword in ("$id", "$anchor", "$schema"):
            inner.pop(keyword, None)
        if "discriminator" in inner and "oneOf" in inner and "anyOf" not in inner:
            inner["anyOf"] = inner.pop("oneOf")
    return schema


def _moved(reference: str, base: str, targets: Mapping[str, str], place: str) -> str:
    """A reference as a pointer; as it is if nothing in the schema has the name."""
    name, fragment = urldefrag(reference)
    url = _join(base, name) if name else base
    if fragment.startswith("/") or not fragment:
        target, rest = targets.get(url), quote(fragment, safe="/~%$")
    else:
        target, rest = targets.get(f"{url}#{fragment}"), ""
    return reference if target is None else f"#{place}{target}{rest}"


def closed(schema: Any) -> Any:
    """A copy of a schema in which objects with `properties` allow no others unless it says so.

    JSON Schema allows any, and a model would write them without end. Other servers close objects,
    too. An object that several schemas describe (`allOf`, or `anyOf`, `oneOf` or `$ref` beside
    properties) is closed where they meet.
    """
    try:
        schema = moved(schema)
        return _Closing(schema).result()
    except RecursionError:
        return schema  # the check of constraints says that it is too deep


_DECIDING = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("minProperties", "enum", "const"),
    )
)
"""Keywords that say which other properties there are, or that may require some."""
_INNER = ("items", "prefixItems", "additionalItems", "additionalProperties")
_CHOICES = ("anyOf", "oneOf")
_OPEN = "x-pagewire-open"
"""The place of open copies of schemas that are parts of others; the originals, which may describe
values alone too, are closed."""


class _Description(NamedTuple):
    """What a schema says of an object's properties, with all that it combines."""

    shared: frozenset[str] = frozenset()
    """Properties that are described or required whichever of its choices applies."""
    names: frozenset[str] = frozenset()
    """These, and those of choices."""
    num_parts: int = 0
    """How many schemas describe properties of the object at a time."""
    is_decided: bool = False
    """Whether it says which others there may be, or refers to what is not there."""


class _Closing:
    """Closes the objects of a schema whose references are pointers."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._descriptions: dict[int, _Description] = {}
        self._values: dict[int, Any] = {}
        """Closed schemas by the original's id."""
        self._open: dict[str, Any] = {}
        """Open copies by the original's reference."""

    def result(self) -> Any:
        """The closed schema."""
        schema = self._value(self._root)
        return schema | {_OPEN: self._open} if self._open else schema

    def _value(self, schema: Any) -> Any:
        """The schema of a value, closed."""
        if id(schema) not in self._values:
            self._values[id(schema)] = self._close(schema)
        return self._values[id(schema)]

    def _close(self, schema: Any, outer: frozenset[str] = frozenset()) -> Any:
        """outer: properties of the same object that surrounding schemas describe."""
        if not isinstance(schema, dict):
            return schema
        found = self._describe(schema)
        is_combined = found.num_parts + bool(outer) > 1
        closed = self._copy(schema, self._part if is_combined else self._value)
        choices = [key for key in _CHOICES if self._names(schema, key)]
        if found.is_decided or len(choices) > 1:
            return closed
        if is_combined and choices:
            shared = outer | found.shared
            closed[choices[0]] = [self._close(part, shared) for part in schema[choices[0]]]
        elif is_combined or outer or "properties" in schema:
            others = (found.names | outer) - _properties(schema).keys()
            closed["properties"] = _properties(closed) | {name: {} for name in sorted(others)}
            closed["additionalProperties"] = False
        return closed

    def _part(self, schema: Any) -> Any:
        """A schema that others complete: open, with the values in it closed."""
        return self._copy(schema, self._part) if isinstance(schema, dict) else schema

    def _copy(self, schema: dict[str, Any], part: Callable[[Any], Any]) -> dict[str, Any]:
        """A copy of a schema. part: what becomes of the schemas that it combines."""
        copy = dict(schema)
        for key, inner in schema.items():
            if key in SCHEMAS_BY_NAME and isinstance(inner, dict):
                copy[key] = {name: self._value(entry) for name, entry in inner.items()}
            elif key in _INNER:
                is_list = isinstance(inner, list)
                copy[key] = list(map(self._value, inner)) if is_list else self._value(inner)
            elif key in ("allOf", *_CHOICES) and isinstance(inner, list):
                copy[key] = list(map(part, inner))
            elif key == "$ref" and part == self._part:
                copy[key] = self._open_reference(inner)
        return copy

    def _open_reference(self, reference: Any) -> Any:
        """The reference to an open copy of what `reference` leads to."""
        target = self._target(reference)
        if target is None:
            return reference
        if reference not in self._open:
            self._open[reference] = True  # for a schema that contains itself
            self._open[reference] = self._part(target)
        return f"#/{_OPEN}/{_encode(reference)}"

    def _describe(self, schema: Any) -> _Description:
        found = self._descriptions.get(id(schema), _Description())
        if isinstance(schema, dict) and id(schema) not in self._descriptions:
            self._descriptions[id(schema)] = found  # for a schema that contains itself
            parts = self._all_of(schema)
            shared = [_own_names(schema), *(self._describe(part).names for part in parts)]
            choices = [self._names(schema, key) for key in _CHOICES]
            found = self._descriptions[id(schema)] = _Description(
                frozenset().union(*shared),
                frozenset().union(*shared, *choices),
                sum(map(bool, shared + choices)),
                not _DECIDING.isdisjoint(schema)
                or not isinstance(schema.get("properties", {}), dict)
                or any(part is None or self._describe(part).is_decided for part in parts),
            )
        return found

    def _names(self, schema: dict[str, Any], key: str) -> frozenset[str]:
        """Properties that the schemas of a list describe."""
        return frozenset[str]().union(*(self._describe(part).names for part in _list(schema, key)))

    def _all_of(self, schema: dict[str, Any]) -> list[Any]:
        """The schemas of `allOf`, and that of a reference."""
        refers = isinstance(schema.get("$ref"), str)
        return _list(schema, "allOf") + ([self._target(schema["$ref"])] if refers else [])

    def _target(self, reference: Any) -> Any:
        """What a pointer leads to, or None."""
        value = self._root
        try:
            for name in unquote(reference.removeprefix("#")).split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                value = value[int(name) if isinstance(value, list) else name]
        except (AttributeError, LookupError, TypeError, ValueError):
            return None
        return value


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _own_names(schema: dict[str, Any]) -> frozenset[str]:
    required = (name for name in _list(schema, "required") if isinstance(name, str))
    return frozenset((*_properties(schema), *required))


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
