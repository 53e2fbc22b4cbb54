"""Parts of a message, which a parser returns."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Kind = Literal["reasoning", "text", "call", "arguments"]

Functions = Mapping[str, Mapping[str, Any] | None]
"""The functions that may be called: the JSON schema of the parameters of each, by name."""


class Part(NamedTuple):
    """The next piece of a message."""

    kind: Kind
    """`reasoning`, `text` for the reader, the start of a `call`, or a call's `arguments`."""
    text: str
    """The text to append: arguments are JSON text. The name of the function where a call begins."""
    call: int = 0
    """Number of the call, of its parts."""
    call_id: str = ""
    """The id that the model wrote, where a call begins, in the formats that have one."""
