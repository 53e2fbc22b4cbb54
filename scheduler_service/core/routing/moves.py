"""How requests move between the worker groups of a model: one drains, is for prefills alone, or is
short of memory that another one has; or they exceed its cache."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from scheduler_service.core import fitting
from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.request_timing import RequestPhase
from scheduler_service.core.routing.fleet import ServedModel
from scheduler_service.core.routing.router import eligible
from scheduler_service.core.routing.transfers import Transfers
from scheduler_service.core.scheduler_stats import MoveReason
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup

logger = logging.getLogger(__name__)

SHORT_STEPS = 32
"""A worker group whose memory suffices for fewer steps gives a request away: in good time before it
would preempt one, as it computes other requests while the KV is copied."""

SPARE_STEPS = 256
"""A worker group accepts it whose memory suffices for this number of steps, the request included:
many more, so that it does not soon give one away itself."""

MIN_TOKENS_BETWEEN_MOVES = 128
"""Tokens that a request generates between two such moves."""


def migrate_from_draining(model: ServedModel, now_us: int) -> None:
    """Send requests away from draining worker groups if another group can generate as many of
    their tokens. The rest stay until they end or a suitable worker group joins."""
    model.sort_queue()
    others = [other.capacity for other in model.schedulers if not other.is_draining]
    for here in model.schedulers:
        if not here.is_draining or (here.capacity.kv_layout and len(here.pipeline)):
            continue  # later, when all that its requests have computed is known
        may_leave = partial(_fits_any, here=here.capacity, others=others, length=fitting.reach)
        num_leaving = here.start_moving(may_leave, MoveReason.DRAIN, now_us)
        if num_leaving:
            logger.info(
                "requests leave a draining group group_id=%s num_requests=%d",
                here.capacity.worker_group_id,
                num_leaving,
            )
        model.requeue(here.pop_moved())


def hand_over(model: ServedModel, here: Scheduler, now_us: int) -> None:
    """Send requests whose prompts are computed to worker groups for what follows, as far as these
    have room and can read what is computed here. The rest stay until one has."""
    others = [other for other in model.schedulers if other.is_partner_of(here)]
    capacities = [other.capacity for other in others]
    prefilling = here.prefilling_seq_groups() if others else ()
    ready = [
        seq_group
        for seq_group in (here.seq_groups if others else ())
        if seq_group.has_output
        and seq_group not in prefilling
        and seq_group.running()
        and not (seq_group.waiting() or seq_group.stays_where_it_began)
        and _fits_any(seq_group, here.capacity, capacities, fitting.reach)
    ]
    entering = _entering(model, others) if ready else {}
    leaving: set[SequenceGroup] = set()
    for seq_group in ready:
        target = next((o for o in others if o.probe.has_room_for(seq_group, entering[o])), None)
        if target is not None:
            entering[target].append(seq_group)
            leaving.add(seq_group)
    if leaving:
        here.start_moving(leaving.__contains__, MoveReason.HAND_OVER, now_us)
        model.requeue(here.pop_moved())
        model.wake()


def _entering(
    model: ServedModel, schedulers: list[Scheduler]
) -> dict[Scheduler, list[SequenceGroup]]:
    """The requests that have begun elsewhere and wait for room in these worker groups."""
    waiting = model.waiting
    kinds = [{*chain.from_iterable(kind)} for kind in waiting.kinds]
    if all(kind.isdisjoint(schedulers) for kind in kinds):
        return {scheduler: [] for scheduler in schedulers}
    begun = [(g, {*chain.from_iterable(waiting.kind_of(g))}) for g in waiting if g.has_output]
    return {s: [g for g, groups in begun if s in groups] for s in schedulers}


def rebalance(model: ServedModel, transfers: Transfers, here: Scheduler, now_us: int) -> None:
    """Give a request away, one at a time, if memory is short here, or will be soon, and another
    group that can read what is computed here has much more than it needs."""
    if (
        len(model.schedulers) == 1
        or model.waiting  # what others have is theirs
        or here.placed.migrating
        or here.port.is_in_use
        or here.is_draining
        or not here.probe.is_nearly_full
        or not (others := _relieving(model, here))
        or here.probe.memory_short(SHORT_STEPS) <= 0
    ):
        return
    for seq_group in here.relieving():
        target = _with_spare_memory(model, transfers, here, seq_group, others)
        if target is not None:
            logger.info(
                "a group short of memory gives a request away request_id=%s group_id=%s target=%s "
                "num_tokens=%d",
                seq_group.request.request_id,
                here.capacity.worker_group_id,
                target.capacity.worker_group_id,
                seq_group.max_known_tokens,
            )
            placement = seq_group.placement
            placement.avoids = here.capacity.worker_group_id
            placement.num_tokens_at_move = seq_group.max_known_tokens
            here.start_moving({seq_group}.__contains__, MoveReason.REBALANCE, now_us)
            return


def _relieving(model: ServedModel, here: Scheduler) -> list[Scheduler]:
    """The worker groups that may serve requests instead of another one."""
    return [
        other
        for other in model.schedulers
        if other is not here
        and other.capacity.stores_like(here.capacity)
        and not other.is_draining
        and other.probe.has_room
        and other.placed.suspect is None
    ]


def _with_spare_memory(
    model: ServedModel,
    transfers: Transfers,
    here: Scheduler,
    seq_group: SequenceGroup,
    others: Iterable[Scheduler],
) -> Scheduler | None:
    """The worker group with the most spare memory for a request that may leave, if any has
    enough, and the request continues there sooner than here."""
    num_tokens = seq_group.max_known_tokens
    placement = seq_group.placement
    if (
        seq_group.stays_where_it_began
        or seq_group in here.placed.awaiting_kv
        or (
            placement.num_tokens_at_move
            and num_tokens < placement.num_tokens_at_move + MIN_TOKENS_BETWEEN_MOVES
        )
    ):
        return None
    suitable = set(chain.from_iterable(eligible(seq_group, model.equivalent)))
    is_preempted = seq_group.clock.phase is RequestPhase.PREEMPTED and not seq_group.swapped()
    best, max_spare = None, -1
    for other in others:
        length = min(num_tokens + SPARE_STEPS, fitting.reach(seq_group, other.capacity))
        needed = other.cache.tables.demand.of(length, seq_group.num_source_tokens)
        num_spare = -other.probe.memory_short(SPARE_STEPS) - seq_group.num_unfinished * needed
        num_entries = other.cache.exchange.num_entries(num_tokens)
        if (
            other in suitable
            and num_spare > max_spare
            and other.probe.has_places_for(seq_group)
            and (is_preempted or transfers.pays(num_tokens, num_entries, here, other))
        ):
            best, max_spare = other, num_spare
    return best


def settle_exceeding(model: ServedModel, here: Scheduler, now_us: int) -> bool:
    """Move requests that exceed a worker group's cache to larger ones; fail them if there is none
    and none is expected back. Returns whether there were any."""
    exceeding = here.pop_exceeding()
    moving: set[SequenceGroup] = set()
    for seq_group in exceeding:
        num_tokens = seq_group.placement.exceeded_tokens = seq_group.placement.num_cache_tokens
        if _fits_any(seq_group, here.capacity, model.capacities(), fitting.max_length):
            moving.add(seq_group)
            logger.info(
                "request leaves a group whose cache it exceeds request_id=%s group_id=%s "
                "num_cache_tokens=%d",
                seq_group.request.request_id,
                here.capacity.worker_group_id,
                num_tokens,
            )
        else:
            here.fail_exceeding(seq_group, now_us)
    if moving:
        here.start_moving(moving.__contains__, MoveReason.EXCEEDS_CACHE, now_us)
        model.requeue(here.pop_moved())
    return bool(exceeding)


def _fits_any(
    seq_group: SequenceGroup,
    here: WorkerGroupCapacity,
    others: Iterable[WorkerGroupCapacity],
    length: Callable[[SequenceGroup, WorkerGroupCapacity], int],
) -> bool:
    """Whether another worker group can hold a request, and let it become as long as here."""
    min_length = length(seq_group, here)
    return any(
        fitting.fits(seq_group, other) and length(seq_group, other) >= min_length
        for other in others
    )


def is_needed(model: ServedModel, scheduler: Scheduler) -> bool:
    """Whether a started request needs a draining worker group because no other can continue it.
    Looks at requests in the queues and on their way between worker groups."""
    on_their_way = (seq_group for other in model.schedulers for seq_group in other.placed.migrating)
    queues = chain(model.waiting, model.recovery.unschedulable, on_their_way)
    return any(
        scheduler in groups
        for seq_group in queues
        for groups in eligible(seq_group, model.equivalent)
    )
