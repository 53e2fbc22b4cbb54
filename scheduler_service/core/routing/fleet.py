"""The worker groups, the models that they serve, and the requests that wait for each model."""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity, check_capacity
from scheduler_service.core.policies import POLICIES, Policy
from scheduler_service.core.request_queue import AnyQueue, ModelQueue, WaitingQueue
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.routing.router import (
    EquivalentWorkerGroups,
    Router,
    RoutingRound,
    TooLate,
    eligible,
)
from scheduler_service.core.scheduler_stats import ModelSnapshot, ModelTotals
from scheduler_service.core.scheduling.scheduler import Scheduler, make_scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.tenants import Tenants
from scheduler_service.core.throughput import QueueThroughput
from scheduler_service.errors import PagewireError, UnknownModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LostWorkerGroup:
    """A worker group that was lost, and whose replacement is expected."""

    capacity: WorkerGroupCapacity
    expected_until_us: float
    """Time at which it is given up; may be infinite."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model's worker groups and its requests that are in none of them."""

    name: str
    policy: Policy
    max_lost_us: float = inf
    """Microseconds for which a lost worker group is expected back."""
    router: Router = field(default_factory=Router)
    was_served: bool = False
    """Whether a worker group has ever served it; if so, requests wait for its return."""
    schedulers: list[Scheduler] = field(default_factory=list)
    unschedulable: WaitingQueue = field(default_factory=WaitingQueue)
    """Requests that fit no present worker group; kept apart so that they do not hold up others."""
    throughput: QueueThroughput = field(default_factory=QueueThroughput)
    """The rate at which requests leave `waiting`."""
    woken: set[str] = field(default_factory=set)
    """Ids of worker groups that may have something to plan without a new result of theirs."""
    waiting: ModelQueue[tuple[EquivalentWorkerGroups, ...]] = field(init=False)
    lost: list[LostWorkerGroup] = field(default_factory=list)
    """Worker groups that were lost and not replaced, the first to be given up first."""
    former_until_us: dict[SequenceGroup, float] = field(default_factory=dict)
    """Requests that a former core accepted and that fit no present worker group, and the time until
    which each waits for a worker group that only the former core knew."""
    _sorted_for: list[tuple[Scheduler, bool]] = field(default_factory=list)
    """The worker groups for which the queue was sorted, and whether they were draining."""
    _equivalent: list[EquivalentWorkerGroups] = field(default_factory=list)
    """The same worker groups in sets of equivalent ones, to which the same requests may go."""

    def __post_init__(self) -> None:
        self.waiting = ModelQueue(
            self.policy, lambda seq_group: eligible(seq_group, self._equivalent)
        )

    @property
    def is_unused(self) -> bool:
        """True if it was never served and no request waits for it, so that it can be dropped."""
        return not (self.was_served or self.waiting or self.unschedulable)

    def capacities(self) -> list[WorkerGroupCapacity]:
        """Capacities of its worker groups, present or expected back."""
        return [
            *(scheduler.capacity for scheduler in self.schedulers),
            *(lost.capacity for lost in self.lost),
        ]

    def enqueue(self, seq_group: SequenceGroup) -> None:
        """Queue a new request, and wake the worker groups that may take it."""
        self.waiting.add(seq_group)
        self.wake()

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group that is not placed out of the queue."""
        self.waiting.discard(seq_group)
        self.unschedulable.discard(seq_group)
        self.former_until_us.pop(seq_group, None)

    def add(self, scheduler: Scheduler) -> None:
        """Add a worker group; requests that have not begun may be routed to it instead."""
        self.was_served = True
        self.throughput.interrupt()
        self.reopen()
        self.schedulers.append(scheduler)
        self._take_place_of_lost(scheduler.capacity.num_cache_tokens)
        self.sort_queue()

    def remove(self, scheduler: Scheduler, now_us: int) -> None:
        """Remove a worker group. Unless it was draining, a replacement is expected."""
        self.schedulers.remove(scheduler)
        if not scheduler.is_draining:
            self.lost.append(LostWorkerGroup(scheduler.capacity, now_us + self.max_lost_us))

    @property
    def next_given_up_us(self) -> float:
        """When the next lost worker group is given up; infinite if no request waits for it."""
        if not (self.waiting or self.unschedulable):
            return inf
        lost_until_us = self.lost[0].expected_until_us if self.lost else inf
        return min([lost_until_us, *self.former_until_us.values()])

    def give_up_lost(self, now_us: int) -> bool:
        """Stop expecting worker groups that have been lost for too long; returns whether there were
        any for which requests may have waited."""
        if now_us < self.next_given_up_us:
            return False
        self.lost = [lost for lost in self.lost if now_us < lost.expected_until_us]
        due = [
            group_id for group_id, until_us in self.former_until_us.items() if until_us <= now_us
        ]
        for seq_group in due:
            self._give_up_former(seq_group)
        return True

    def _give_up_former(self, seq_group: SequenceGroup) -> None:
        """Stop waiting for a worker group that only a former core knew. A request that fits a lost
        worker group keeps waiting as long as that group is expected back; any other request counts
        as too large for all groups, unless none is present: they may return with other
        capacities."""
        del self.former_until_us[seq_group]
        fitting = [lost for lost in self.lost if seq_group.fits(lost.capacity)]
        if fitting:
            self.former_until_us[seq_group] = fitting[-1].expected_until_us
        elif self.schedulers and not seq_group.outgrown_tokens:
            most_tokens = max(capacity.num_cache_tokens for capacity in self.capacities())
            seq_group.outgrown_tokens = most_tokens

    def unroutable(self) -> list[SequenceGroup]:
        """Requests that have outgrown all worker groups that are here or expected back."""
        if not self.unschedulable or self.max_lost_us == inf:
            return []
        capacities = self.capacities()
        return [
            seq_group
            for seq_group in self.unschedulable
            if seq_group.outgrown_tokens and not any(map(seq_group.fits, capacities))
        ]

    def _take_place_of_lost(self, num_tokens: int) -> None:
        """Stop expecting the lost group whose cache was closest to this size: a restarted worker
        may find a little more or less memory than before."""
        if self.lost:
            self.lost.remove(
                min(self.lost, key=lambda lost: abs(lost.capacity.num_cache_tokens - num_tokens))
            )

    def reopen(self) -> None:
        """Queue all requests that have not started for routing again."""
        for scheduler in self.schedulers:
            self.requeue(scheduler.pop_not_started())
        for seq_group in self.unschedulable.take_all():
            self.waiting.add(seq_group)

    def migrate_from_draining(self, now_us: int) -> None:
        """Send requests away from draining worker groups if another group can generate as many of
        their tokens. The rest stay until they end or a suitable worker group joins."""
        self.sort_queue()
        for scheduler in self.schedulers:
            if not scheduler.is_draining:
                continue
            num_leaving = scheduler.start_moving(self._can_leave(scheduler), now_us)
            if num_leaving:
                logger.info(
                    "requests leave a draining group group_id=%s num_requests=%d",
                    scheduler.capacity.worker_group_id,
                    num_leaving,
                )
            self.requeue(scheduler.pop_moved())

    def settle_outgrown(self, here: Scheduler, now_us: int) -> bool:
        """Move requests that outgrew a worker group to larger ones; fail them if there is none and
        none is expected back. Returns whether there were any."""
        outgrown = here.pop_exceeding()
        moving: set[SequenceGroup] = set()
        for seq_group in outgrown:
            seq_group.outgrown_tokens = here.capacity.num_cache_tokens
            if self._has_larger(seq_group, here.capacity):
                moving.add(seq_group)
                logger.info(
                    "request leaves a group that it has outgrown request_id=%s group_id=%s "
                    "num_cache_tokens=%d",
                    seq_group.request.request_id,
                    here.capacity.worker_group_id,
                    here.capacity.num_cache_tokens,
                )
            else:
                here.fail_exceeding(seq_group, now_us)
        if moving:
            here.start_moving(moving.__contains__, now_us)
            self.requeue(here.pop_moved())
        return bool(outgrown)

    def _has_larger(self, seq_group: SequenceGroup, here: WorkerGroupCapacity) -> bool:
        """Whether another worker group, present or expected back, can continue a request and let it
        become as long as it could here."""
        length = seq_group.max_length(here)
        return any(
            seq_group.fits(capacity) and seq_group.max_length(capacity) >= length
            for capacity in self.capacities()
        )

    def is_needed(self, scheduler: Scheduler) -> bool:
        """Whether a started request needs a draining worker group because no other can continue it.
        Looks at requests in the queues and on their way between worker groups."""
        on_their_way = (
            seq_group for other in self.schedulers for seq_group in other.placed.migrating
        )
        queues = chain(self.waiting, self.unschedulable, on_their_way)
        return any(
            scheduler in groups
            for seq_group in queues
            for groups in eligible(seq_group, self._equivalent)
        )

    def _can_leave(self, here: Scheduler) -> Callable[[SequenceGroup], bool]:
        others = [scheduler for scheduler in self.schedulers if not scheduler.is_draining]

        def can_leave(seq_group: SequenceGroup) -> bool:
            reach = seq_group.reach(here.capacity)
            capacities = (scheduler.capacity for scheduler in others)
            return any(
                seq_group.fits(capacity) and seq_group.reach(capacity) >= reach
                for capacity in capacities
            )

        return can_leave

    def requeue(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Queue groups for routing that have left a worker group."""
        for seq_group in seq_groups:
            self.release(seq_group)
            self.waiting.add(seq_group)

    def check(self) -> None:
        """Assert the invariants. Cost: waiting requests times worker groups."""
        self.waiting.check()
        assert self._sorted_for == self._present()
        for seq_group in self.waiting:
            for scheduler in self.schedulers:
                known = seq_group.routing.refusals.get(scheduler.capacity.worker_group_id)
                if known == scheduler.num_changes:
                    assert not scheduler.probe.has_room_for(seq_group), (
                        "a worker group has room for a request that it refused"
                    )

    def release(self, seq_group: SequenceGroup) -> None:
        """Give what a group in a worker group holds of its tenant's limit back."""
        if seq_group.is_placed:
            seq_group.is_placed = seq_group.is_preempting = False
            seq_group.tenant.kv_quota -= seq_group.kv_quota
            seq_group.kv_quota = 0

    def route(
        self, why_late: Callable[[SequenceGroup], PagewireError | None], now_us: int
    ) -> list[TooLate]:
        """Hand waiting requests, in order, to worker groups that have room. Returns those for which
        `why_late` has an error when their turn comes; they are in no queue any more, and must be
        ended."""
        if not self.waiting:
            self.throughput.interrupt()
            return []
        round_ = RoutingRound(
            self.waiting,
            self.schedulers,
            self._equivalent,
            self.policy,
            self.router,
        )
        too_late = round_.run(why_late, now_us)
        self._set_aside([*self.waiting.of_kind(()), *round_.unfit], now_us)
        self.woken.update(routed.capacity.worker_group_id for routed in round_.routed.values())
        if round_.routed:
            self.wake_drained()
        self.throughput.note(
            now_us,
            num_requests=len(round_.routed),
            num_tokens=sum(seq_group.num_prompt_tokens for seq_group in round_.routed),
            is_empty=not self.waiting,
        )
        return too_late

    def _set_aside(self, unfit: list[SequenceGroup], now_us: int) -> None:
        """Move requests that fit no worker group out of the queue, where they would hold
        up others."""
        for seq_group in unfit:
            self.waiting.discard(seq_group)
            self.unschedulable.add(seq_group)
            if seq_group.request.is_continued:
                self.former_until_us.setdefault(seq_group, now_us + self.max_lost_us)
        for seq_group in [
            former for former in self.former_until_us if former not in self.unschedulable
        ]:
            del self.former_until_us[seq_group]  # it fits a worker group that has joined

    def wake(self) -> None:
        """Wake every worker group whose pipeline has room. Whichever plans first places all waiting
        requests; groups with a full pipeline plan when their next result arrives."""
        can_plan = (s for s in self.schedulers if not s.is_full(is_awaited=True))
        self.woken.update(scheduler.capacity.worker_group_id for scheduler in can_plan)

    def wake_drained(self) -> None:
        """Wake draining worker groups without requests: the requests that they were kept for may
        have ended or moved."""
        idle = (s for s in self.schedulers if s.is_draining and not s.seq_groups)
        self.woken.update(scheduler.capacity.worker_group_id for scheduler in idle)

    def sort_queue(self) -> None:
        """Sort the queue again after worker groups have joined, left or begun to drain."""
        worker_groups = self._present()
        if worker_groups != self._sorted_for:
            self._sorted_for = worker_groups
            equivalent: dict[object, list[Scheduler]] = {}
            for scheduler in self.schedulers:
                capacity = scheduler.capacity
                key = capacity.size, capacity.arithmetic, scheduler.is_draining
                equivalent.setdefault(key, []).append(scheduler)
            self._equivalent = [tuple(schedulers) for schedulers in equivalent.values()]
            self.waiting.reorder()
            for seq_group in self.waiting:
                seq_group.routing.refusals.clear()  # ids may be used again

    def _present(self) -> list[tuple[Scheduler, bool]]:
        """The worker groups that are present, and whether they are draining."""
        return [(scheduler, scheduler.is_draining) for scheduler in self.schedulers]


class Fleet:
    """Worker groups and models.

    Invariant: a model is known if it is served, was ever served, or a request waits for it.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants
        self.schedulers: dict[str, Scheduler] = {}
        """Schedulers by worker group."""
        self.models: dict[str, ServedModel] = {}
        """Models by name."""
        self.totals: dict[str, ModelTotals] = {}
        """Totals of all models that were ever served, by name."""

    # Worker groups.

    def add(self, capacity: WorkerGroupCapacity, now_us: int) -> ServedModel:
        """Add a worker group; return its model. Raises ValueError if its id already exists,
        or it could not work with the configuration."""
        if capacity.worker_group_id in self.schedulers:
            raise ValueError(f"worker group {capacity.worker_group_id} already exists")
        check_capacity(self._config, capacity)
        capacity = replace(capacity, max_chunk_tokens=self._config.max_num_batched_tokens)
        model = self.model(capacity.model)
        totals = self.totals.setdefault(capacity.model, ModelTotals())
        scheduler = make_scheduler(self._config, capacity, totals, model.policy, now_us)
        self.schedulers[capacity.worker_group_id] = scheduler
        model.add(scheduler)
        return model

    def remove(self, worker_group_id: str, now_us: int) -> Scheduler | None:
        """Remove and return a worker group; None if the id is unknown."""
        scheduler = self.schedulers.pop(worker_group_id, None)
        if scheduler is not None:
            self.model_of(scheduler).remove(scheduler, now_us)
        return scheduler

    def scheduler_of(self, seq_group: SequenceGroup) -> Scheduler | None:
        """The worker group's scheduler that has a live group; None if it waits for placement."""
        model = self.models[seq_group.request.model]
        return next((s for s in model.schedulers if seq_group in s.seq_groups), None)

    def wake_tenant_limited(self) -> None:
        """Wake models that have requests held up by a tenant's limit on KV memory, because a tenant
        has released some."""
        for model in self.models.values():
            if model.waiting.has_tenant_limited:
                model.wake()

    def take_woken(self) -> set[str]:
        """Worker groups woken since the last call."""
        woken: set[str] = set()
        for model in self.models.values():
            if model.woken:
                woken |= model.woken
                model.woken = set()
        return woken

    @property
    def next_given_up_us(self) -> float:
        """When the next lost worker group is given up; infinite if no request waits for one."""
        # Asked in every step, in which usually no worker group is lost.
        models = self.models.values()
        times = [model.next_given_up_us for model in models if model.lost or model.unschedulable]
        return min(times) if times else inf

    def give_up_lost(self, now_us: int) -> list[ServedModel]:
        """Stop expecting worker groups that have been lost for too long; returns the models whose
        requests may have waited for them."""
        return [model for model in self.models.values() if model.give_up_lost(now_us)]

    # Models.

    def model(self, name: str) -> ServedModel:
        """The model of this name, created if it is new."""
        model = self.models.get(name)
        if model is None:
            policy = POLICIES[self._config.policy](self._tenants)
            wait_s = self._config.max_outgrown_wait_s
            max_lost_us = inf if wait_s is None else to_us(wait_s)
            model = self.models[name] = ServedModel(name, policy, max_lost_us)
        return model

    def model_of(self, scheduler: Scheduler) -> ServedModel:
        """The model that a worker group serves."""
        return self.models[scheduler.capacity.model]

    def wake(self, name: str) -> None:
        """Wake a model's worker groups, if there are any."""
        model = self.models.get(name)
        if model is not None:
            model.wake()

    def drop_if_unused(self, model: ServedModel) -> None:
        """Forget a model that was never served, and that no request waits for."""
        if model.is_unused:
            del self.models[model.name]

    def check_served(self, name: str) -> None:
        """Raise UnknownModel if other models are served, and this one never was."""
        model = self.models.get(name)
        if self.schedulers and (model is None or not model.was_served):
            served = ", ".join(sorted({s.capacity.model for s in self.schedulers.values()}))
            raise UnknownModel(
                f"unknown model {name!r}; available models: {served}",
                details={"model": name, "served": served},
            )

    def queues(self) -> list[AnyQueue]:
        """All queues in which requests wait."""
        queues: list[AnyQueue] = []
        for scheduler in self.schedulers.values():
            queues += (scheduler.placed.waiting, scheduler.placed.preempting)
        for model in self.models.values():
            queues += (model.waiting, model.unschedulable)
        return queues

    def model_snapshots(self, seq_groups: Iterable[SequenceGroup]) -> dict[str, ModelSnapshot]:
        """Snapshots of all models that were ever served or that a live request is for."""
        known = {name: ModelSnapshot(name=name, totals=t) for name, t in self.totals.items()}
        for seq_group in seq_groups:
            name = seq_group.request.model
            model = known.setdefault(name, ModelSnapshot(name=name, totals=ModelTotals()))
            model.num_running += seq_group.num_running > 0
            model.num_waiting += seq_group.num_running == 0
        for scheduler in self.schedulers.values():  # what is swapped out does not run
            model = known[scheduler.capacity.model]
            model.num_swapped += len(scheduler.running.swapped)
            model.num_waiting -= len(scheduler.running.swapped)
        return known

    def check(self, seq_groups: Collection[SequenceGroup]) -> None:
        """Assert that each live group is in one place, and nothing else is in any."""
        for seq_group in seq_groups:
            model = self.models[seq_group.request.model]
            places = [seq_group in model.waiting, seq_group in model.unschedulable]
            assert seq_group.is_placed == (not any(places))
            places += [seq_group in scheduler.seq_groups for scheduler in model.schedulers]
            assert sum(places) == 1, "a live request is in one place"
        num_placed = sum(len(scheduler.seq_groups) for scheduler in self.schedulers.values())
        num_unplaced = sum(len(m.waiting) + len(m.unschedulable) for m in self.models.values())
        assert num_placed + num_unplaced == len(seq_groups), (
            "a place holds a request that has ended"
        )
        for model in self.models.values():
            model.check()
        for scheduler in self.schedulers.values():
            scheduler.check()
