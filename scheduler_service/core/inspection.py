"""The core's state in detail, for status pages: requests one by one, memory block by block.

A request's snapshot shows its state and its events, not its text. Snapshots are taken on demand,
and once when a request ends. Taking one changes nothing.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from scheduler_service.core.config import MoveKV, Role
from scheduler_service.core.kv_cache.block_pool import BlockMap, map_blocks
from scheduler_service.core.kv_cache.usage import usage_of
from scheduler_service.core.request_timing import RequestPhase, TimelineEntry
from scheduler_service.core.scheduler_stats import (
    CoreSnapshot,
    ModelSnapshot,
    WorkerGroupSnapshot,
    summed,
)
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus, request_number

_FAILED = (SequenceStatus.FINISHED_ERROR, SequenceStatus.FINISHED_IGNORED)


class RequestState(IntEnum):
    """A request's state; numbered as in `status.proto`."""

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
    worker_group_id: str
    """Empty if it is in no worker group."""
    state: RequestState
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_accepted_drafts: int
    num_drafts: int
    max_tokens: int
    num_sequences: int
    submitted_us: int
    events: list[TimelineEntry]
    placements: list[str]
    ended_us: int = 0
    error_reason: str = ""
    lora: str = ""
    """The name of its adapter; empty without one."""
    block_tables: list[list[int]] = field(default_factory=list)
    """One for each sequence with blocks on the device."""
    host_block_tables: list[list[int]] = field(default_factory=list)


def _snapshot(
    seq_group: SequenceGroup, state: RequestState, worker_group_id: str
) -> RequestSnapshot:
    request = seq_group.request
    is_prefilling = state is RequestState.PREFILLING
    return RequestSnapshot(
        request_id=request.request_id,
        number=request_number(seq_group),
        tenant=request.tenant,
        model=request.model,
        worker_group_id=worker_group_id,
        state=state,
        priority=request.priority,
        num_prompt_tokens=seq_group.num_prompt_tokens,
        num_cached_tokens=seq_group.num_cached_tokens,
        num_computed_tokens=seq_group.sequences[0].prefill.num_computed if is_prefilling else 0,
        num_output_tokens=sum([len(seq.output_token_ids) for seq in seq_group.sequences]),
        num_accepted_drafts=seq_group.clock.timings.num_accepted_drafts,
        num_drafts=seq_group.clock.timings.num_drafts,
        max_tokens=request.work.max_tokens,
        num_sequences=len(seq_group.sequences),
        submitted_us=seq_group.clock.submitted_us,
        events=seq_group.clock.timeline.entries.copy(),
        placements=seq_group.clock.timeline.placements.copy(),
    )


def _live_state(seq_group: SequenceGroup, *, is_prefilling: bool) -> RequestState:
    if seq_group.num_running:
        return RequestState.PREFILLING if is_prefilling else RequestState.DECODING
    if any(seq.status is SequenceStatus.SWAPPED for seq in seq_group.sequences):
        return RequestState.SWAPPED
    return {
        RequestPhase.QUEUE: RequestState.QUEUED,
        RequestPhase.PREEMPTED: RequestState.PREEMPTED,
        RequestPhase.RECOVERY: RequestState.RECOVERING,
    }[seq_group.clock.phase]


def _end_state(seq_group: SequenceGroup) -> RequestState:
    statuses = {seq.status for seq in seq_group.choices()}
    if not statuses.isdisjoint(_FAILED):
        return RequestState.FAILED
    if SequenceStatus.FINISHED_ABORTED in statuses:
        return RequestState.ABORTED
    return RequestState.FINISHED


def _kv_moves(here: Scheduler, others: Iterable[Scheduler]) -> str:
    """With which other groups of its model a worker group exchanges KV, and why not with others."""
    config, capacity = here.config, here.capacity
    if not capacity.cache_groups:
        return "none: nothing of a sequence is kept"
    facts = []
    if not here.has_partner:
        rest = "decoding" if capacity.role is Role.PREFILL else "prefills"
        facts.append(f"no group for {rest}, so it does both")
    if config.move_kv is MoveKV.NEVER:
        facts.append("none: --move-kv never")
    elif not config.enable_prefix_caching:
        facts.append("none: the prefix cache is off")
    elif not capacity.kv_layout:
        facts.append("none: its workers copy no blocks")
    else:
        others = [other for other in others if other.capacity.model == capacity.model]
        for other in (other.capacity for other in others if other is not here):
            if other.kv_layout:
                reason = ", ".join(f"another {name}" for name in capacity.kv_differences(other))
            else:
                reason = "its workers copy no blocks"
            if reason:
                facts.append(f"not with {other.worker_group_id}: {reason}")
        if not facts:
            facts.append("with all" if len(others) > 1 else "no other group")
    return "; ".join(facts)


def _worker_group_snapshot(
    scheduler: Scheduler, schedulers: Collection[Scheduler], adapters: str
) -> WorkerGroupSnapshot:
    capacity, rates, clock = scheduler.capacity, scheduler.rates, scheduler.clock
    return WorkerGroupSnapshot(
        worker_group_id=capacity.worker_group_id,
        model=capacity.model,
        draining=scheduler.is_draining,
        num_gpu_blocks=capacity.num_gpu_blocks,
        num_free_gpu_blocks=scheduler.cache.tables.pool.num_free_blocks,
        num_cpu_blocks=capacity.num_cpu_blocks,
        num_free_cpu_blocks=scheduler.cache.host.pool.num_free_blocks,
        num_running_sequences=sum(group.num_running for group in scheduler.seq_groups),
        num_steps=scheduler.num_steps,
        block_size=capacity.block_size,
        max_num_seqs=scheduler.config.max_num_seqs,
        us_per_decode_step=rates.us_per_decode_step or 0.0,
        us_per_prefill_token=rates.us_per_prefill_token or 0.0,
        plan_us=clock.plan_us,
        wire_us=clock.wire_us,
        forward_us=clock.forward_us,
        sample_us=clock.sample_us,
        cache_groups=usage_of(scheduler.cache),
        kv_moves=_kv_moves(scheduler, schedulers),
        adapters=adapters,
    )


def _block_maps(scheduler: Scheduler) -> tuple[BlockMap, BlockMap]:
    """The owner of each block on the device and on the host. A block that several requests share is
    assigned to the one that came here first."""
    owners = [
        (seq.seq_id, request_number(seq_group))
        for seq_group in reversed(scheduler.seq_groups)
        for seq in seq_group.sequences
    ]
    device, host = scheduler.cache.tables, scheduler.cache.swap
    return map_blocks(device.pool, device.held, owners), map_blocks(host.pool, host.held, owners)


MAX_ENDED = 64
"""Number of ended requests that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectionDetail:
    """Optional contents of an inspection."""

    include_requests: bool = False
    include_blocks: bool = False
    max_requests: int = 256
    """Maximum number of live requests listed."""


@dataclass(slots=True, kw_only=True)
class Inspection:
    """The requested details; the rest is empty."""

    requests: list[RequestSnapshot] = field(default_factory=list)
    """Live requests: first running, then swapped-out, then waiting ones."""
    num_unlisted_requests: int = 0
    ended_requests: list[RequestSnapshot] = field(default_factory=list)
    """The latest to end is last."""
    block_maps: dict[str, tuple[BlockMap, BlockMap]] = field(default_factory=dict)
    """The maps of the device and of the host, by worker group."""


class Inspector:
    """Takes snapshots of live requests, and remembers the last requests that ended."""

    def __init__(
        self,
        schedulers: Mapping[str, Scheduler],
        adapters: Mapping[str, Mapping[bytes, str]],
    ) -> None:
        """adapters: names by digest, of each model."""
        self._schedulers, self._adapters = schedulers, adapters
        self._ended: deque[RequestSnapshot] = deque(maxlen=MAX_ENDED)
        self._num_ended = 0

    def record_end(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Remember a request whose sequences have all ended."""
        last_worker_group_id = next(reversed(seq_group.clock.timeline.placements), "")
        snapshot = _snapshot(seq_group, _end_state(seq_group), last_worker_group_id)
        snapshot.lora = self._name_of(seq_group.request.model, seq_group.adapter)
        snapshot.ended_us = now_us
        snapshot.error_reason = getattr(seq_group.error, "reason", "")
        self._ended.append(snapshot)
        self._num_ended += 1

    def snapshot(
        self,
        models: Collection[ModelSnapshot],
        listed: list[ModelSnapshot],
        seq_groups: Iterable[SequenceGroup],
    ) -> CoreSnapshot:
        """Counts of the present state; `seq_groups` are all live groups."""
        totals = [model.totals for model in models]
        return CoreSnapshot(
            num_waiting=sum(model.num_waiting for model in models),
            num_running=sum(model.num_running for model in models),
            num_swapped=sum(model.num_swapped for model in models),
            num_finished=self._num_ended,
            num_generated_tokens=sum(total.num_generated_tokens for total in totals),
            num_prefill_tokens=sum(total.num_prefill_tokens for total in totals),
            num_preemptions=sum(total.num_preemptions for total in totals),
            num_swapped_out_blocks=sum(total.num_swapped_out_blocks for total in totals),
            num_swapped_in_blocks=sum(total.num_swapped_in_blocks for total in totals),
            num_fetched_blocks=sum(total.num_fetched_blocks for total in totals),
            num_failed_fetches=sum(total.num_failed_fetches.total() for total in totals),
            first_token_counts=summed(total.first_token for total in totals),
            inter_token_counts=summed(total.inter_token for total in totals),
            models=listed,
            num_by_tenant=Counter(seq_group.tenant.name for seq_group in seq_groups),
            worker_groups=[
                _worker_group_snapshot(
                    scheduler, self._schedulers.values(), self._adapters_of(scheduler)
                )
                for scheduler in self._schedulers.values()
            ],
        )

    def _name_of(self, model: str, adapter: bytes | None) -> str:
        """The name of an adapter, or the beginning of its digest if no name means it any more."""
        if adapter is None:
            return ""
        return self._adapters.get(model, {}).get(adapter, adapter.hex()[:12])

    def _adapters_of(self, scheduler: Scheduler) -> str:
        """See `WorkerGroupSnapshot.adapters`."""
        model, usage = scheduler.capacity.model, scheduler.placed.adapters.usage()
        return ", ".join(f"{self._name_of(model, a)} {number}" for a, number in usage.items())

    def inspect(self, seq_groups: Iterable[SequenceGroup], detail: InspectionDetail) -> Inspection:
        """The requested details; `seq_groups` are all live groups, in the order of acceptance."""
        inspection = Inspection()
        if detail.include_blocks:
            inspection.block_maps = {
                worker_group_id: _block_maps(scheduler)
                for worker_group_id, scheduler in self._schedulers.items()
            }
        if detail.include_requests:
            self._add_requests(inspection, seq_groups, detail)
        return inspection

    def _add_requests(
        self, inspection: Inspection, seq_groups: Iterable[SequenceGroup], detail: InspectionDetail
    ) -> None:
        ordered = sorted(seq_groups, key=lambda g: 0 if g.num_running else 1 if g.swapped() else 2)
        places = {seq_group: s for s in self._schedulers.values() for seq_group in s.seq_groups}
        prefilling = {
            seq_group for s in self._schedulers.values() for seq_group in s.prefilling_seq_groups()
        }
        for seq_group in ordered[: detail.max_requests]:
            scheduler = places.get(seq_group)
            worker_group_id = scheduler.capacity.worker_group_id if scheduler is not None else ""
            state = _live_state(seq_group, is_prefilling=seq_group in prefilling)
            snapshot = _snapshot(seq_group, state, worker_group_id)
            snapshot.lora = self._name_of(seq_group.request.model, seq_group.adapter)
            if scheduler is not None and detail.include_blocks:
                for seq in seq_group.sequences:
                    if (held := scheduler.cache.tables.held.get(seq.seq_id)) is not None:
                        snapshot.block_tables.append(list(held.blocks()))
                    elif (held := scheduler.cache.swap.held.get(seq.seq_id)) is not None:
                        snapshot.host_block_tables.append(list(held.blocks()))
            inspection.requests.append(snapshot)
        inspection.num_unlisted_requests = len(ordered) - len(inspection.requests)
        inspection.ended_requests = list(self._ended)
