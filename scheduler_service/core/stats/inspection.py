"""A close look at the core's state, for status pages: requests one by one, memory block by block.

A request's snapshot shows where it stands and what happened to it, not its text. Snapshots are
taken on demand, and once when a request ends. Taking one changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.kv_cache.block_pool import BlockMap
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus, request_number
from scheduler_service.core.stats.request_timing import RequestPhase, TimelineEntry

_FAILED = (SequenceStatus.FINISHED_ERROR, SequenceStatus.FINISHED_IGNORED)


class RequestState(IntEnum):
    """Where a request stands; the numbers are those of the contract (`status.proto`)."""

    QUEUED = 1
    PREFILLING = 2
    DECODING = 3
    PREEMPTED = 4
    SWAPPED = 5
    RECOVERING = 6
    FINISHED = 7
    ABORTED = 8
    FAILED = 9


@dataclass(slots=True, kw_only=True)
class RequestSnapshot:
    """One request, live or ended. Times are microseconds on the core's clock."""

    request_id: str
    number: int
    tenant: str
    model: str
    group_id: str
    """Empty if it is in no worker group."""
    state: RequestState
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_sequences: int
    submitted_us: int
    events: list[TimelineEntry]
    placements: list[str]
    ended_us: int = 0
    error_reason: str = ""
    block_tables: list[list[int]] = field(default_factory=list)
    """Of the sequences that have one on the device."""
    host_block_tables: list[list[int]] = field(default_factory=list)


def snapshot_live(group: SequenceGroup, group_id: str, *, prefills: bool) -> RequestSnapshot:
    """A live request; `group_id`: the worker group that it is in; `prefills`: whether it has tokens
    to compute there besides its newest ones."""
    return _snapshot(group, _live_state(group, prefills=prefills), group_id)


def snapshot_ended(group: SequenceGroup, now_us: int) -> RequestSnapshot:
    """A request whose sequences have all ended."""
    snapshot = _snapshot(group, _end_state(group), next(reversed(group.timeline.placements), ""))
    snapshot.ended_us = now_us
    if group.error is not None:
        snapshot.error_reason = getattr(group.error, "reason", "")
    return snapshot


def add_tables(snapshot: RequestSnapshot, group: SequenceGroup, blocks: BlockManager) -> None:
    """Add the block tables that a live request's sequences have."""
    for seq in group.sequences:
        if blocks.holds(seq.seq_id):
            snapshot.block_tables.append(blocks.table(seq.seq_id))
        elif seq.status is SequenceStatus.SWAPPED:
            snapshot.host_block_tables.append(blocks.host_table(seq.seq_id))


def _snapshot(group: SequenceGroup, state: RequestState, group_id: str) -> RequestSnapshot:
    request = group.request
    is_prefilling = state is RequestState.PREFILLING
    return RequestSnapshot(
        request_id=request.request_id,
        number=request_number(group),
        tenant=request.tenant,
        model=request.model,
        group_id=group_id,
        state=state,
        priority=request.priority,
        num_prompt_tokens=group.num_prompt_tokens,
        num_cached_tokens=group.num_cached_tokens,
        num_computed_tokens=group.sequences[0].num_computed if is_prefilling else 0,
        num_output_tokens=sum([len(seq.output_token_ids) for seq in group.sequences]),
        max_tokens=request.max_tokens,
        num_sequences=len(group.sequences),
        submitted_us=group.clock.submitted_us,
        events=group.timeline.entries.copy(),
        placements=group.timeline.placements.copy(),
    )


def _live_state(group: SequenceGroup, *, prefills: bool) -> RequestState:
    if group.num_running:
        return RequestState.PREFILLING if prefills else RequestState.DECODING
    if any(seq.status is SequenceStatus.SWAPPED for seq in group.sequences):
        return RequestState.SWAPPED
    return {
        RequestPhase.QUEUE: RequestState.QUEUED,
        RequestPhase.PREEMPTED: RequestState.PREEMPTED,
        RequestPhase.RECOVERY: RequestState.RECOVERING,
    }[group.clock.phase]


def _end_state(group: SequenceGroup) -> RequestState:
    statuses = {seq.status for seq in group.choices()}
    if not statuses.isdisjoint(_FAILED):
        return RequestState.FAILED
    if SequenceStatus.FINISHED_ABORTED in statuses:
        return RequestState.ABORTED
    return RequestState.FINISHED


MAX_ENDED = 64
"""Requests that have ended which are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionDetail:
    """What is looked at."""

    include_requests: bool = False
    include_blocks: bool = False
    max_requests: int = 256
    """The most live requests."""


@dataclass(slots=True, kw_only=True)
class Inspection:
    """What was asked for; the rest is empty."""

    requests: list[RequestSnapshot] = field(default_factory=list)
    """Live ones: those that run, then those swapped out, then those that wait."""
    num_unlisted_requests: int = 0
    ended_requests: list[RequestSnapshot] = field(default_factory=list)
    """The last one last."""
    block_maps: dict[str, tuple[BlockMap, BlockMap]] = field(default_factory=dict)
    """By worker group: device and host."""


class Inspector:
    """Looks at a core's parts; remembers the last requests that ended."""

    def __init__(self, schedulers: Mapping[str, Scheduler]) -> None:
        self._schedulers = schedulers
        self._ended: deque[RequestSnapshot] = deque(maxlen=MAX_ENDED)

    def note_end(self, group: SequenceGroup, now_us: int) -> None:
        """Remember a request whose sequences have all ended."""
        self._ended.append(snapshot_ended(group, now_us))

    def look(self, groups: Iterable[SequenceGroup], detail: InspectionDetail) -> Inspection:
        """What there is to see; `groups` are all that are live, the longest accepted first."""
        inspection = Inspection()
        if detail.include_blocks:
            inspection.block_maps = {
                group_id: scheduler.block_maps() for group_id, scheduler in self._schedulers.items()
            }
        if detail.include_requests:
            self._add_requests(inspection, groups, detail)
        return inspection

    def _add_requests(
        self, inspection: Inspection, groups: Iterable[SequenceGroup], detail: InspectionDetail
    ) -> None:
        ordered = _in_order(groups)
        places = {group: s for s in self._schedulers.values() for group in s.groups}
        prefilling = {group for s in self._schedulers.values() for group in s.prefilling_groups()}
        for group in ordered[: detail.max_requests]:
            scheduler = places.get(group)
            group_id = scheduler.capacity.group_id if scheduler is not None else ""
            snapshot = snapshot_live(group, group_id, prefills=group in prefilling)
            if scheduler is not None and detail.include_blocks:
                add_tables(snapshot, group, scheduler.blocks)
            inspection.requests.append(snapshot)
        inspection.num_unlisted_requests = len(ordered) - len(inspection.requests)
        inspection.ended_requests = list(self._ended)


def _in_order(groups: Iterable[SequenceGroup]) -> list[SequenceGroup]:
    running: list[SequenceGroup] = []
    swapped: list[SequenceGroup] = []
    waiting: list[SequenceGroup] = []
    for group in groups:
        if group.num_running:
            running.append(group)
        else:
            (swapped if group.swapped() else waiting).append(group)
    return [*running, *swapped, *waiting]
