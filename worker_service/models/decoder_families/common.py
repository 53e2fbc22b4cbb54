"""What families of decoders have in common."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""The content of `config.json`."""


def by_lines(names: str) -> dict[str, str]:
    """Names of tensors by the path of attributes, from lines that begin with the path."""
    rows = (line.split(maxsplit=1) for line in names.strip().splitlines())
    return {path: " ".join(stored.split()) for path, stored in rows}
