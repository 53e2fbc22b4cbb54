"""The flags of other engines: what each is called here, or why there is none.

The tables of docs/migrating-from-vllm.md and docs/migrating-from-others.md, which `vllm_flags.txt`
and `other_flags.txt` contain too, since the package comes without the documentation.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

_VLLM = "vLLM"
_FOLDER = Path(__file__).parent
_ALWAYS = "always"
"""The counterpart of a switch that is accepted, because it is on without a flag."""
_FLAG = re.compile(r"`(--?[^\s`]+)")
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_MIN_SIMILARITY = 0.8
"""Names less similar than this are not guesses worth reading."""


@dataclass(frozen=True, slots=True)
class Row:
    """Flags of another engine with one explanation."""

    engine: str
    flags: tuple[str, ...]
    """Names, or patterns such as `--mm-*`."""
    counterparts: tuple[str, ...]
    """Flags of Pagewire for the same purpose."""
    is_always: bool
    remark: str

    def has_like(self, name: str) -> bool:
        """Whether a pattern stands for it."""
        return any(fnmatchcase(name, pattern) for pattern in self.flags)


@functools.cache
def rows() -> tuple[Row, ...]:
    """All rows, those of vLLM first, in the order of the pages."""
    vllm, others = (
        (_FOLDER / f"{name}_flags.txt").read_text(encoding="utf-8") for name in ("vllm", "other")
    )
    tables = [part.partition("\n") for part in re.split(r"^### ", others, flags=re.MULTILINE)[1:]]
    return (
        *_rows_of_table(_VLLM, vllm),
        *(row for engine, _, table in tables for row in _rows_of_table(engine, table)),
    )


def _rows_of_table(engine: str, table: str) -> Iterator[Row]:
    for line in table.splitlines():
        if line.startswith("| `"):
            theirs, ours, remark = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
            yield Row(
                engine,
                tuple(_FLAG.findall(theirs)),
                tuple(_FLAG.findall(ours)),
                ours == _ALWAYS,
                _LINK.sub(r"\1", remark).replace("`", ""),
            )


def rows_of(flag: str) -> list[Row]:
    """The rows of `--flag`, `--no-flag` or `--flag.key`, one for each engine that has it; empty if
    none has. If none names it, vLLM's row whose pattern stands for it."""
    name = _positive(flag).split(".")[0]
    found: dict[str, Row] = {}
    for candidate in (flag, name):
        for row in rows():
            if candidate in row.flags:
                found.setdefault(row.engine, row)
    if not found:
        like = [row for row in rows() if row.engine == _VLLM and row.has_like(name)]
        return like[:1]
    if flag.startswith("--") and _VLLM in found:
        return [found[_VLLM]]
    return list(found.values())


def _positive(flag: str) -> str:
    return re.sub(r"^--no-", "--", flag)


def is_foreign(flag: str) -> bool:
    """Whether another engine has it and no service of Pagewire has."""
    ours = {name for row in rows() for name in row.counterparts}
    names = {flag, _positive(flag)}
    return flag.startswith("--") and not names & ours and bool(rows_of(flag))


def is_always_on(flag: str) -> bool:
    """Whether it is a switch of another engine that may be given, and changes nothing."""
    found = rows_of(flag)
    return bool(found) and found[0].is_always and not flag.startswith("--no-")


def explain(
    flag: str, known: Iterable[str] = (), *, spell: Callable[[str], str] = str, foreign: bool = True
) -> str:
    """Why there is no `flag`, and what to use instead.

    `known`: the options there are, of which a similar one is named for a flag that no engine has.
    `spell`: how the caller writes those. `foreign`: whether a flag may be another engine's.
    """
    if foreign and (found := rows_of(flag)):
        return _explained(flag, found, spell)
    known = list(known)
    longer = [name for name in known if name.startswith(f"{flag}-")]
    near = get_close_matches(flag, known, n=2, cutoff=_MIN_SIMILARITY)
    near = near or (longer if len(longer) <= 2 else [])
    if foreign and not near:
        like = [row for row in rows() if row.has_like(_positive(flag))]
        if like:
            return _explained(flag, like[:1], spell)
        theirs = [name for row in rows() for name in row.flags]
        theirs = [name for name in theirs if name.startswith("--") and "*" not in name]
        for name in get_close_matches(flag, theirs, n=1, cutoff=_MIN_SIMILARITY):
            return f"{flag}: no such option; {explain(name, known, spell=spell)}"
    hint = f"; did you mean {' or '.join(map(spell, near))}?" if near else ""
    return f"{flag}: no such option{hint}"


def _explained(flag: str, found: Sequence[Row], spell: Callable[[str], str]) -> str:
    """What each engine's flag is here, in one line."""
    engines = {_explanation(row, spell): row.engine for row in reversed(found)}
    (first, _), *others = reversed(engines.items())
    return f"{flag} {first}" + "".join(f"; that of {name} {text}" for text, name in others)


def _explanation(row: Row, spell: Callable[[str], str]) -> str:
    if row.counterparts:
        used = f"is {', '.join(map(spell, row.counterparts))} here"
        return used + (f" ({row.remark})" if row.remark else "")
    if row.is_always:
        return "cannot be given here: it is always on"
    return "has no counterpart here" + (f": {row.remark}" if row.remark else "")
