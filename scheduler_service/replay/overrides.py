"""Configurations as they are written on a command line: `policy=fair,max_num_seqs=64`."""

import dataclasses
import types
import typing
from enum import Enum
from typing import Any

from scheduler_service.core import SchedulerConfig

_BOOLS = {"true": True, "false": False}


def apply_overrides(config: SchedulerConfig, text: str) -> SchedulerConfig:
    """The configuration with the fields that `text` names; raises ValueError, naming the field."""
    kinds = typing.get_type_hints(SchedulerConfig)
    changes = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if not separator:
            raise ValueError(f"{part!r}: expected FIELD=VALUE")
        if name not in kinds:
            raise ValueError(f"{name}: no such field; there are {', '.join(sorted(kinds))}")
        changes[name] = _parse(name, kinds[name], value.strip())
    return dataclasses.replace(config, **changes)


def _parse(name: str, kind: Any, text: str) -> Any:
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        kind = typing.get_args(kind)[0]
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError(f"{name}: expected true or false, got {text!r}")
        return _BOOLS[text.lower()]
    if kind not in (int, float, str) and not _is_enum(kind):
        raise ValueError(f"{name}: cannot be set here")
    try:
        return kind(text)
    except ValueError:
        expected = f"one of {', '.join(m.value for m in kind)}" if _is_enum(kind) else kind.__name__
        raise ValueError(f"{name}: expected {expected}, got {text!r}") from None


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)
