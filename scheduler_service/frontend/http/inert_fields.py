"""Fields of requests that have no effect here: ignored, redundant or refused, as the table
`inert_fields.toml` says."""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

_TABLES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
IGNORED, FIXED, NEUTRAL = (_TABLES[name] for name in ("ignored", "fixed", "neutral"))
INSTEAD = dict.fromkeys(NEUTRAL, "leave it out") | _TABLES["instead"]
SYNONYMS = {name: group for group in _TABLES["synonyms"]["groups"] for name in group}
"""The names of a field in all bodies, by any of them."""


def without_inert(kind: Any, value: dict[str, Any]) -> dict[str, Any]:
    """The fields of a body or part of type `kind` that have an effect; null means absent."""
    ignored, declared = ignored_by(kind), kind.model_fields
    return {
        name: item
        for name, item in value.items()
        if not (item is None or name in ignored or item in NEUTRAL.get(name, ()))
        and not (name in FIXED and name not in declared and item == FIXED[name])
    }


@lru_cache
def ignored_by(kind: Any) -> frozenset[str]:
    """The fields that a body or part of this type ignores."""
    return frozenset(name for base in kind.__mro__ for name in IGNORED.get(base.__name__, ()))


def document_ignored(schema: dict[str, Any], kind: Any) -> None:
    """Add the ignored fields to the JSON schema of a body or part."""
    for name in sorted(ignored_by(kind)):
        schema.setdefault("properties", {})[name] = {"description": "Ignored."}
