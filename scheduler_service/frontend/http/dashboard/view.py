"""The dashboard's view of the deployment's state, and the changes from one view to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

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


def view_of(status: pb.EngineStatus, steps_per_s: dict[str, float]) -> View:
    """The view of one status. `steps_per_s`: by worker group.

    Times are seconds of the core's uptime, so that they do not change and are sent only once.
    """
    view = View(
        {
            "engine": _engine(status),
            "groups": {g.group_id: _group(g, status.uptime_s, steps_per_s) for g in status.groups},
            "requests": {str(r.number): _request(r, status.uptime_s) for r in status.requests},
            "ended": {str(r.number): _request(r, status.uptime_s) for r in status.ended_requests},
            "losses": [_loss(loss, status.uptime_s) for loss in status.worker_losses],
            "loading": {f"{load.group_id}/{load.rank}": _load(load) for load in status.loading},
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


def _engine(status: pb.EngineStatus) -> Facts:
    return {
        "version": status.version,
        "models": list(status.models),
        "waiting": status.num_waiting,
        "running": status.num_running,
        "swapped": status.num_swapped,
        "frontends": status.num_frontends,
        "finished": status.num_finished,
        "generated": status.num_generated_tokens,
        "prefilled": status.num_prefill_tokens,
        "preemptions": status.num_preemptions,
        "swappedOut": status.num_swapped_out_blocks,
        "swappedIn": status.num_swapped_in_blocks,
        "losses": status.num_worker_losses,
        "unlisted": status.num_unlisted_requests,
    }


def _group(group: pb.WorkerGroupStatus, uptime_s: float, steps_per_s: dict[str, float]) -> Facts:
    return {
        "state": pb.WorkerState.Name(group.state).removeprefix("WORKER_STATE_").lower(),
        "model": group.model,
        "address": group.address,
        "blockSize": group.block_size,
        "gpuBlocks": group.num_gpu_blocks,
        "gpuFree": group.num_free_gpu_blocks,
        "cpuBlocks": group.num_cpu_blocks,
        "cpuFree": group.num_free_cpu_blocks,
        "sequences": group.num_running_sequences,
        "maxSequences": group.max_num_seqs,
        "steps": group.num_steps,
        "stepsPerS": round(steps_per_s.get(group.group_id, 0.0), 1),
        "decodeUs": round(group.decode_step_us),
        "prefillUs": round(group.prefill_token_us, 1),
        "epoch": group.epoch,
        "ranks": group.world_size,
        "heartbeatAt": round(uptime_s - group.heartbeat_age_s, 2),
    }


def _load(load: pb.WorkerLoading) -> Facts:
    return {
        "group": load.group_id,
        "model": load.model,
        "phase": load.phase,
        "share": round(load.done_bytes / load.total_bytes, 2) if load.total_bytes else None,
        "remaining": round(load.remaining_s) if load.HasField("remaining_s") else None,
    }


def _request(request: pb.RequestStatus, uptime_s: float) -> Facts:
    triples = zip(request.events, request.event_times_us, request.event_values, strict=True)
    started_at = uptime_s - request.age_s - request.ended_age_s
    return {
        "id": request.request_id,
        "tenant": request.tenant,
        "model": request.model,
        "group": request.group_id,
        "state": pb.RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower(),
        "priority": request.priority,
        "prompt": request.num_prompt_tokens,
        "cached": request.num_cached_tokens,
        "computed": request.num_computed_tokens,
        "output": request.num_output_tokens,
        "drafts": request.num_drafts,
        "fromDrafts": request.num_accepted_drafts,
        "maxTokens": request.max_tokens,
        "sequences": request.num_sequences,
        "startedAt": round(started_at, 3),
        "endedAt": round(started_at + request.age_s, 3) if request.ended_age_s else None,
        "error": request.error_reason,
        "placements": list(request.placements),
        "events": [[event, round(at_us / 1000, 1), value] for event, at_us, value in triples],
    }


def _loss(loss: pb.WorkerLoss, uptime_s: float) -> Facts:
    return {
        "group": loss.group_id,
        "rank": loss.rank,
        "model": loss.model,
        "at": round(uptime_s - loss.age_s, 2),
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
