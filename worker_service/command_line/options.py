"""What the flags have in common: their environment variables, and sizes in bytes."""

import re

import typer

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
