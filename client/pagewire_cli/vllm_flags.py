"""The flags of `vllm serve`: what each is called here, or why there is none.

The tables of docs/migrating-from-vllm.md, which `vllm_flags.txt` contains too, since the package
comes without the documentation.
"""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

_TABLES = Path(__file__).with_suffix(".txt")
_ALWAYS = "always"
"""The counterpart of a switch that is accepted, because it is on without a flag."""
_FLAG = re.compile(r"`(--?[^\s`]+)")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_MIN_SIMILARITY = 0.8
"""Names less similar than this are not guesses worth reading."""


@dataclass(frozen=True, slots=True)
class Row:
    """Flags of vLLM with one explanation."""

    flags: tuple[str, ...]
    """Names, or patterns such as `--mm-*`."""
    counterparts: tuple[str, ...]
    """Flags of Pagewire for the same purpose."""
    is_always: bool
    remark: str


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows, in the order of the page."""
    lines = [
        line for line in _TABLES.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
    ]
    cells = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4]] for line in lines)
    return tuple(
        Row(
            tuple(_FLAG.findall(vllm)),
            tuple(_FLAG.findall(ours)),
            ours == _ALWAYS,
            _LINK.sub(r"\1", remark).replace("`", ""),
        )
        for vllm, ours, remark in cells
    )


def row_of(flag: str) -> Row | None:
    """The row of vLLM's `--flag`, `--no-flag` or `--flag.key`; None if vLLM has no such flag."""
    name = _positive(flag).split(".")[0]
    named = (row for candidate in (flag, name) for row in rows() if candidate in row.flags)
    matching = (row for row in rows() if any(fnmatchcase(name, pattern) for pattern in row.flags))
    return next(named, None) or next(matching, None)


def _positive(flag: str) -> str:
    return re.sub(r"^--no-", "--", flag)


def is_foreign(flag: str) -> bool:
    """Whether vLLM has it and no service of Pagewire has."""
    ours = {name for row in rows() for name in row.counterparts}
    names = {flag, _positive(flag)}
    return flag.startswith("--") and not names & ours and row_of(flag) is not None


def is_always_on(flag: str) -> bool:
    """Whether it is a switch of vLLM that may be given, and changes nothing."""
    row = row_of(flag)
    return row is not None and row.is_always and not flag.startswith("--no-")


def explain(
    flag: str, known: Iterable[str] = (), *, spell: Callable[[str], str] = str, vllm: bool = True
) -> str:
    """Why there is no `flag`, and what to use instead.

    `known`: the options there are, of which a similar one is named for a flag that is not vLLM's.
    `spell`: how the caller writes those. `vllm`: whether a flag may be vLLM's.
    """
    if vllm and (row := row_of(flag)):
        if row.counterparts:
            used = f"{flag} is {', '.join(map(spell, row.counterparts))} here"
            return used + (f" ({row.remark})" if row.remark else "")
        if row.is_always:
            return f"{flag} cannot be given here: it is always on"
        return f"{flag} has no counterpart here: {row.remark}"
    known = list(known)
    longer = [name for name in known if name.startswith(f"{flag}-")]
    near = get_close_matches(flag, known, n=2, cutoff=_MIN_SIMILARITY)
    near = near or (longer if len(longer) <= 2 else [])
    theirs = [name for row in rows() for name in row.flags] if vllm and not near else []
    theirs = [name for name in theirs if name.startswith("--") and "*" not in name]
    for name in get_close_matches(flag, theirs, n=1, cutoff=_MIN_SIMILARITY):
        return f"{flag}: no such option; {explain(name, known, spell=spell)}"
    hint = f"; did you mean {' or '.join(map(spell, near))}?" if near else ""
    return f"{flag}: no such option{hint}"
