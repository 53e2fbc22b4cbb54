"""The dashboard's view of the deployment's state, and the changes from one view to the next."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from pagewire.cache_groups import describe_cache_group
from pagewire.plain import plain
from pagewire.status_rates import RecentStatuses
from pagewire.v1 import status_pb2 as pb

Facts: TypeAlias = dict[str, Any]
Column: TypeAlias = NDArray[np.int32]

MEMORIES = ("gpu", "cpu")


@dataclass(slots=True)
class View:
    """All data of a page."""

    facts: Facts = field(default_factory=dict)
    columns: dict[str, Column] = field(default_factory=dict)
    """Columns by `WORKER GROUP/MEMORY/owners` and `.../references`."""
    tables: dict[str, list[bytes]] = field(default_factory=dict)
    """Block tables of a request's sequences by `NUMBER/MEMORY`, as little-endian int32: they
    mostly grow, so their bytes are compared, not their numbers."""


_REQUEST_COLUMNS = ("block_tables", "host_block_tables")
_EVENT_FIELDS = ("events", "event_times_us", "event_values")


def view_of(status: pb.EngineStatus, recent: RecentStatuses) -> View:
    """The view of the last of `recent` statuses: its fields under their names.

    Numbers are rounded. Times are seconds of the core's uptime, so that they do not change and are
    sent only once.
    """
    lists = [field.name for field in status.DESCRIPTOR.fields if field.message_type is not None]
    view = View(
        {
            "engine": _facts(status, omitted=[*lists, "uptime_s"]),
            "groups": {group.group_id: _group(group, recent) for group in status.groups},
            "requests": {str(r.number): _request(r) for r in status.requests},
            "ended": {str(r.number): _request(r) for r in status.ended_requests},
            "losses": [_facts(loss) for loss in status.worker_losses],
            "loading": {f"{load.group_id}/{load.rank}": _facts(load) for load in status.loading},
        }
    )
    for group in status.groups:
        for memory, blocks in zip(MEMORIES, (group.gpu_blocks, group.cpu_blocks), strict=True):
            key = f"{group.group_id}/{memory}"
            view.columns[f"{key}/owners"] = np.frombuffer(blocks.owners, "<i4")
            references = np.frombuffer(blocks.num_references, np.uint8).astype(np.int32)
            view.columns[f"{key}/references"] = references
    for request in status.requests:
        both = (request.block_tables, request.host_block_tables)
        for memory, tables in zip(MEMORIES, both, strict=True):
            if tables:
                view.tables[f"{request.number}/{memory}"] = list(tables)
    return view


def _facts(message: Message, *, omitted: Collection[str] = ()) -> Facts:
    facts = plain(message, omitted=omitted)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}


def _group(group: pb.WorkerGroupStatus, recent: RecentStatuses) -> Facts:
    facts = _facts(group, omitted=("gpu_blocks", "cpu_blocks", "cache_groups"))
    return facts | {
        "steps_per_s": round(recent.steps_per_second(group.group_id) or 0.0, 1),
        "cache_groups": [list(describe_cache_group(held)) for held in group.cache_groups],
    }


def _request(request: pb.RequestStatus) -> Facts:
    triples = zip(request.events, request.event_times_us, request.event_values, strict=True)
    facts = _facts(request, omitted=(*_REQUEST_COLUMNS, *_EVENT_FIELDS))
    return facts | {
        "events": [[event, round(at_us / 1000, 1), value] for event, at_us, value in triples]
    }


def changes(old: View, new: View) -> dict[str, Any]:
    """The changes that turn a page with `old` into one with `new`; absent parts are the same."""
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
        previous = old.get(name)
        if isinstance(value, dict):
            nested = merge_patch(previous if isinstance(previous, dict) else {}, value)
            if nested or not isinstance(previous, dict):
                patch[name] = nested
        elif value != previous:
            patch[name] = value
    gone = [name for name in old if name not in new]
    return patch | dict.fromkeys(gone)


def runs(old: Column, new: Column) -> list[int]:
    """The runs of equal values at which `new` differs from `old`, which has the same length."""
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
    """The number of first entries that `new` shares with `old`, and the entries of `new` after
    them; both are columns of little-endian int32."""
    if new.startswith(old):
        keep = len(old) // 4  # a table mostly grows
    else:
        shorter = min(len(old), len(new)) // 4
        previous, later = (np.frombuffer(column, "<i4", shorter) for column in (old, new))
        differing = np.flatnonzero(previous != later)
        keep = int(differing[0]) if len(differing) else shorter
    return [keep, *np.frombuffer(new, "<i4")[keep:].tolist()]


def _columns(old: Mapping[str, Column], new: Mapping[str, Column]) -> dict[str, list[int] | None]:
    changed: dict[str, list[int] | None] = {name: None for name in old if name not in new}
    for name, column in new.items():
        previous = old.get(name)
        is_new = previous is None or len(previous) != len(column)
        if is_new:
            previous = np.zeros_like(column)
        assert previous is not None
        found = runs(previous, column)
        if found or is_new:
            changed[name] = [len(column), *found]
    return changed


def _tables(
    old: Mapping[str, list[bytes]], new: Mapping[str, list[bytes]]
) -> dict[str, list[list[int]] | None]:
    changed: dict[str, list[list[int]] | None] = {name: None for name in old if name not in new}
    for name, tables in new.items():
        previous = old.get(name, [])
        if tables != previous:
            missing = [b""] * max(0, len(tables) - len(previous))
            pairs = zip([*previous, *missing], tables, strict=False)
            changed[name] = [splice(was, table) for was, table in pairs]
    return changed
