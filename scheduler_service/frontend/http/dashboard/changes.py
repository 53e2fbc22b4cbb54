"""What differs between two views, in few bytes.

| part | as |
| --- | --- |
| facts | a JSON merge patch (RFC 7396): what changed, and null for what is gone |
| columns | `[length, start, count, value, start, count, value, ...]`: runs of changed blocks |
| block tables | per sequence `[keep, block, ...]`: the first `keep` entries stay |

A column of another length than before begins anew with zeros. The whole view is the change from
an empty one, so a page needs to know one thing alone.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from scheduler_service.frontend.http.dashboard.view import Column, Facts, View


def changes(old: View, new: View) -> dict[str, Any]:
    """What turns a page that shows `old` into one that shows `new`; absent parts are the same."""
    parts = {
        "facts": merge_patch(old.facts, new.facts),
        "columns": _columns(old.columns, new.columns),
        "tables": _tables(old.tables, new.tables),
    }
    return {name: part for name, part in parts.items() if part}


def merge_patch(old: Facts, new: Facts) -> Facts:
    """The JSON merge patch from one object to another. A null in `new` means absent."""
    patch: Facts = {}
    for name, value in new.items():
        former = old.get(name)
        if isinstance(value, dict):
            nested = merge_patch(former if isinstance(former, dict) else {}, value)
            if nested or not isinstance(former, dict):
                patch[name] = nested
        elif value != former:
            patch[name] = value
    gone = [name for name in old if name not in new]
    return patch | dict.fromkeys(gone)


def runs(old: Column, new: Column) -> list[int]:
    """`new` as the runs of equal values at which it differs from `old`, which is as long."""
    changed = np.flatnonzero(old != new)
    if not len(changed):
        return []
    breaks = np.flatnonzero((np.diff(changed) != 1) | (np.diff(new[changed]) != 0)) + 1
    first = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((first, [len(changed)])))
    starts = changed[first]
    triples: list[int] = np.stack((starts, counts, new[starts]), axis=1).ravel().tolist()
    return triples


def splice(old: bytes, new: bytes) -> list[int]:
    """`new` as how many entries it has in common with `old`, and those that follow; both are
    columns of little-endian int32."""
    if new.startswith(old):
        keep = len(old) // 4  # a table mostly grows
    else:
        shorter = min(len(old), len(new)) // 4
        former, later = (np.frombuffer(column, "<i4", shorter) for column in (old, new))
        differing = np.flatnonzero(former != later)
        keep = int(differing[0]) if len(differing) else shorter
    return [keep, *np.frombuffer(new, "<i4")[keep:].tolist()]


def _columns(old: Mapping[str, Column], new: Mapping[str, Column]) -> dict[str, list[int] | None]:
    changed: dict[str, list[int] | None] = {name: None for name in old if name not in new}
    for name, column in new.items():
        former = old.get(name)
        is_new = former is None or len(former) != len(column)
        if is_new:
            former = np.zeros_like(column)
        assert former is not None
        found = runs(former, column)
        if found or is_new:
            changed[name] = [len(column), *found]
    return changed


def _tables(
    old: Mapping[str, list[bytes]], new: Mapping[str, list[bytes]]
) -> dict[str, list[list[int]] | None]:
    changed: dict[str, list[list[int]] | None] = {name: None for name in old if name not in new}
    for name, tables in new.items():
        former = old.get(name, [])
        if tables != former:
            missing = [b""] * max(0, len(tables) - len(former))
            pairs = zip([*former, *missing], tables, strict=False)
            changed[name] = [splice(was, table) for was, table in pairs]
    return changed
