"""Commands whose parameters are the fields of dataclasses; environment variables; sizes."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, get_type_hints

import typer


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command` as a function of flags instead of records of flags.

    Each of its parameters is a dataclass whose fields all have defaults; no name is in two of them.
    """
    records = get_type_hints(command)
    del records["return"]

    @wraps(command)
    def with_flags(**flags: Any) -> None:
        command(
            *(made(**{f.name: flags[f.name] for f in fields(made)}) for made in records.values())
        )

    parameters = [each for made in records.values() for each in _parameters_of(made)]
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
    del with_flags.__wrapped__
    return with_flags


def _parameters_of(record: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default_of(field),
            annotation=hints[field.name],
        )
        for field in fields(record)
    ]


def _default_of(field: "Field[Any]") -> object:
    assert field.default is not MISSING, f"{field.name}: a flag has a default"
    return field.default


_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def env(name: str) -> str:
    """The environment variable that stands in for a flag."""
    return f"PAGEWIRE_{name}"


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5GB` or a plain number, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise typer.BadParameter(f"expected a size such as 512MiB or 4GiB, got {text!r}")
    return int(float(match[1]) * unit)
