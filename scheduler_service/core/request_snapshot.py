"""What status pages see of one request: where it stands and what happened to it, not what it says.

Snapshots are made when somebody asks for them, and once when a request ends.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus, number_of
from scheduler_service.core.stats.request_timing import Phase
from scheduler_service.core.timeline import Entry

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
    events: list[Entry]
    placements: list[str]
    ended_us: int = 0
    error_reason: str = ""
    block_tables: list[list[int]] = field(default_factory=list)
    """Of the sequences that have one on the device."""
    host_block_tables: list[list[int]] = field(default_factory=list)


def of_live(group: SequenceGroup, group_id: str, *, prefills: bool) -> RequestSnapshot:
    """A live request; `group_id`: the worker group that it is in; `prefills`: whether it has tokens
    to compute there besides its newest ones."""
    return _of(group, _state(group, prefills=prefills), group_id)


def of_ended(group: SequenceGroup, now_us: int) -> RequestSnapshot:
    """A request whose sequences have all ended."""
    snapshot = _of(group, _end_state(group), next(reversed(group.timeline.placements), ""))
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


def _of(group: SequenceGroup, state: RequestState, group_id: str) -> RequestSnapshot:
    request = group.request
    is_prefilling = state is RequestState.PREFILLING
    return RequestSnapshot(
        request_id=request.request_id,
        number=number_of(group),
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


def _state(group: SequenceGroup, *, prefills: bool) -> RequestState:
    if group.num_running:
        return RequestState.PREFILLING if prefills else RequestState.DECODING
    if any(seq.status is SequenceStatus.SWAPPED for seq in group.sequences):
        return RequestState.SWAPPED
    return {
        Phase.QUEUE: RequestState.QUEUED,
        Phase.PREEMPTED: RequestState.PREEMPTED,
        Phase.RECOVERY: RequestState.RECOVERING,
    }[group.clock.phase]


def _end_state(group: SequenceGroup) -> RequestState:
    statuses = {seq.status for seq in group.choices()}
    if not statuses.isdisjoint(_FAILED):
        return RequestState.FAILED
    if SequenceStatus.FINISHED_ABORTED in statuses:
        return RequestState.ABORTED
    return RequestState.FINISHED
