"""A command whose parameters are the fields of records."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import Any, get_type_hints


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
