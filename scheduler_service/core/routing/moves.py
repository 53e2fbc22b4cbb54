"""How requests move between the worker groups of a model: one drains, or is for prefills alone, or
they exceed its cache."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.routing.fleet import ServedModel
from scheduler_service.core.routing.router import eligible
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup

logger = logging.getLogger(__name__)


def migrate_from_draining(model: ServedModel, now_us: int) -> None:
    """Send requests away from draining worker groups if another group can generate as many of
    their tokens. The rest stay until they end or a suitable worker group joins."""
    model.sort_queue()
    others = [other.capacity for other in model.schedulers if not other.is_draining]
    for here in model.schedulers:
        if not here.is_draining or (here.capacity.kv_layout and len(here.pipeline)):
            continue  # later, when all that its requests have computed is known
        may_leave = partial(
            _fits_any, here=here.capacity, others=others, length=SequenceGroup.reach
        )
        num_leaving = here.start_moving(may_leave, now_us)
        if num_leaving:
            logger.info(
                "requests leave a draining group group_id=%s num_requests=%d",
                here.capacity.worker_group_id,
                num_leaving,
            )
        model.requeue(here.pop_moved())


def hand_over(model: ServedModel, here: Scheduler, now_us: int) -> None:
    """Send requests whose prompts are computed to worker groups for what follows, if any of these
    has room and can read what is computed here. The rest stay until one has."""
    others = [other for other in model.schedulers if other.is_partner_of(here)]
    prefilling = here.prefilling_seq_groups()

    def may_leave(seq_group: SequenceGroup) -> bool:
        is_ready = seq_group.has_output and seq_group not in prefilling
        return (
            is_ready
            and bool(seq_group.running())
            and not (seq_group.waiting() or seq_group.stays_where_it_began)
            and _fits_any(
                seq_group, here.capacity, [o.capacity for o in others], SequenceGroup.reach
            )
            and any(other.probe.has_room_for(seq_group) for other in others)
        )

    here.start_moving(may_leave, now_us)
    model.requeue(here.pop_moved())


def settle_exceeding(model: ServedModel, here: Scheduler, now_us: int) -> bool:
    """Move requests that exceed a worker group's cache to larger ones; fail them if there is none
    and none is expected back. Returns whether there were any."""
    exceeding = here.pop_exceeding()
    moving: set[SequenceGroup] = set()
    for seq_group in exceeding:
        num_tokens = seq_group.placement.exceeded_tokens = seq_group.placement.num_cache_tokens
        if _fits_any(seq_group, here.capacity, model.capacities(), SequenceGroup.max_length):
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
        here.start_moving(moving.__contains__, now_us)
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
    return any(seq_group.fits(other) and length(seq_group, other) >= min_length for other in others)


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
