"""The worker groups, the models that they serve, and the requests that wait for each model."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity, check_capacity
from scheduler_service.core.policies import POLICIES, Policy
from scheduler_service.core.request_queue import AnyQueue, ModelQueue, WaitingQueue
from scheduler_service.core.routing.router import Router, RoutingRound
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import RoutingState, SequenceGroup
from scheduler_service.core.stats.request_timing import to_us
from scheduler_service.core.stats.scheduler_stats import ModelSnapshot, ModelTotals
from scheduler_service.core.stats.throughput import QueueThroughput
from scheduler_service.core.tenants import Tenants
from scheduler_service.errors import UnknownModel

logger = logging.getLogger(__name__)


EquivalentWorkerGroups: TypeAlias = tuple[Scheduler, ...]
"""Worker groups to which the same requests may go."""


@dataclass(frozen=True, slots=True)
class LostWorkerGroup:
    """A worker group that died, and whose replacement is expected."""

    capacity: WorkerGroupCapacity
    expected_until_us: float
    """May be infinite."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model's worker groups and its requests that are in none of them."""

    name: str
    policy: Policy
    max_lost_us: float = float("inf")
    """How long a lost worker group is expected back."""
    router: Router = field(default_factory=Router)
    was_served: bool = False
    """Whether a worker group has ever served it; if so, its return is waited for."""
    schedulers: list[Scheduler] = field(default_factory=list)
    unschedulable: WaitingQueue = field(default_factory=WaitingQueue)
    """Requests that fit none of the groups there are: they must not hold up the others."""

    throughput: QueueThroughput = field(default_factory=QueueThroughput)
    """How fast requests come out of `waiting`."""

    woken: set[str] = field(default_factory=set)
    """Ids of worker groups that may have something to plan without a new result of theirs."""
    waiting: ModelQueue[tuple[EquivalentWorkerGroups, ...]] = field(init=False)
    _lost: list[LostWorkerGroup] = field(default_factory=list)
    """Worker groups that died and were not replaced, the first to be given up first."""
    _sorted_for: list[tuple[Scheduler, bool]] = field(default_factory=list)
    """The worker groups that there were when the queue was sorted, and whether they drained."""
    _alike: list[EquivalentWorkerGroups] = field(default_factory=list)
    """The same, those together to which the same requests may go."""

    def __post_init__(self) -> None:
        self.waiting = ModelQueue(self.policy, self._kind_of)

    @property
    def is_unused(self) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return not (self.was_served or self.waiting or self.unschedulable)

    def capacities(self) -> list[WorkerGroupCapacity]:
        """What its worker groups hold."""
        return [scheduler.capacity for scheduler in self.schedulers]

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group that is not placed out of the queue."""
        self.waiting.discard(seq_group)
        self.unschedulable.discard(seq_group)

    def add(self, scheduler: Scheduler) -> None:
        """Add a worker group; requests that have not begun may be routed to it instead."""
        self.was_served = True
        self.throughput.interrupt()
        self.reopen()
        self.schedulers.append(scheduler)
        self._take_place_of_lost(scheduler.capacity.num_cache_tokens)
        self.sort_queue()

    def remove(self, scheduler: Scheduler, now_us: int) -> None:
        """A group is gone. If it did not drain, one like it is expected to take its place."""
        self.schedulers.remove(scheduler)
        if not scheduler.is_draining:
            self._lost.append(LostWorkerGroup(scheduler.capacity, now_us + self.max_lost_us))

    @property
    def next_given_up_us(self) -> float:
        """When the next lost worker group is given up; infinite if nothing waits for it."""
        if not self._lost or not (self.waiting or self.unschedulable):
            return float("inf")
        return self._lost[0].expected_until_us

    def give_up_lost(self, now_us: int) -> list[SequenceGroup]:
        """Expect worker groups back no longer that have been lost for too long; the requests that
        have outgrown all others and so can never continue."""
        if now_us < self.next_given_up_us:
            return []
        self._lost = [lost for lost in self._lost if now_us < lost.expected_until_us]
        return self.stranded()

    def stranded(self) -> list[SequenceGroup]:
        """Requests that have outgrown all worker groups that are here or expected back."""
        if not self.unschedulable or self.max_lost_us == float("inf"):
            return []
        capacities = [*self.capacities(), *(lost.capacity for lost in self._lost)]
        return [
            seq_group
            for seq_group in self.unschedulable
            if seq_group.outgrown_tokens and not any(map(seq_group.fits, capacities))
        ]

    def _take_place_of_lost(self, num_tokens: int) -> None:
        """Expect the lost group back no more whose memory was the most like this: a worker that is
        started again may find a little more or less."""
        if self._lost:
            self._lost.remove(
                min(self._lost, key=lambda lost: abs(lost.capacity.num_cache_tokens - num_tokens))
            )

    def reopen(self) -> None:
        """Put all that has not begun up for routing again."""
        for scheduler in self.schedulers:
            self.queue_again(scheduler.give_back())
        for seq_group in self.unschedulable.take_all():
            self.waiting.add(seq_group)

    def move_on(self, now_us: int) -> None:
        """Send requests away from draining worker groups where others can generate as much of them.

        The others stay until they end or a suitable worker group joins.
        """
        self.sort_queue()
        for scheduler in self.schedulers:
            if not scheduler.is_draining:
                continue
            num_leaving = scheduler.send_away(self._can_leave(scheduler), now_us)
            if num_leaving:
                logger.info(
                    "requests leave a draining group group_id=%s num_requests=%d",
                    scheduler.capacity.worker_group_id,
                    num_leaving,
                )
            self.queue_again(scheduler.take_gone())

    def settle_outgrown(self, here: Scheduler, now_us: int) -> bool:
        """Move requests that outgrew a worker group to larger ones. They fail if there is none
        and none is expected back. Returns whether there were any."""
        outgrown = here.take_outgrown()
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
                here.fail_outgrown(seq_group, now_us)
        if moving:
            here.send_away(moving.__contains__, now_us)
            self.queue_again(here.take_gone())
        return bool(outgrown)

    def _has_larger(self, seq_group: SequenceGroup, here: WorkerGroupCapacity) -> bool:
        """Whether a request can go on elsewhere, now or when what was lost is back, and come to be
        as long as it could here."""
        length = seq_group.max_length(here)
        capacities = chain(self.capacities(), (lost.capacity for lost in self._lost))
        return any(
            seq_group.fits(each) and seq_group.max_length(each) >= length for each in capacities
        )

    def is_needed(self, scheduler: Scheduler) -> bool:
        """Whether a request that has begun needs a draining worker group, as no other can continue
        it. Looks at requests in the queues and on their way between worker groups."""
        on_their_way = (seq_group for other in self.schedulers for seq_group in other.migrating)
        queues = chain(self.waiting, self.unschedulable, on_their_way)
        return any(scheduler in self._suitable(seq_group) for seq_group in queues)

    def _can_leave(self, here: Scheduler) -> Callable[[SequenceGroup], bool]:
        others = [scheduler for scheduler in self.schedulers if not scheduler.is_draining]

        def can_leave(seq_group: SequenceGroup) -> bool:
            reach = seq_group.reach(here.capacity)
            capacities = (scheduler.capacity for scheduler in others)
            return any(
                seq_group.fits(each) and seq_group.reach(each) >= reach for each in capacities
            )

        return can_leave

    def queue_again(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Put groups up for routing that a worker group has parted with."""
        for seq_group in seq_groups:
            self.release(seq_group)
            self.waiting.add(seq_group)

    def check(self) -> None:
        """Assert the invariants. Looks at every worker group for every request that waits."""
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
        """A group may have been in a worker group, and is no more: its tenant may use the blocks
        for others."""
        if seq_group.is_placed:
            seq_group.is_placed = seq_group.is_ahead = False
            seq_group.tenant.num_kv_blocks -= seq_group.num_reserved_blocks
            seq_group.num_reserved_blocks = 0

    def place(self, is_late: Callable[[SequenceGroup], bool], now_us: int) -> None:
        """Give waiting requests, in order, to worker groups that have room. Of each it is asked
        before whether it is too late for it, and if so, has been taken out of the queue."""
        if not self.waiting:
            self.throughput.interrupt()
            return
        placed: list[SequenceGroup] = []
        self.waiting.retry_tenant_limited()
        placing = RoutingRound(
            self.waiting, self._awaited(), self.policy, self.router, self._suitable
        )
        while (found := placing.next(now_us)) is not None:
            seq_group, scheduler = found
            if not is_late(seq_group):
                self._give(seq_group, scheduler, now_us)
                placing.note_taken(scheduler)
                placed.append(seq_group)
        self.waiting.end_round()
        for seq_group in placing.unsuitable:
            self.unschedulable.add(seq_group)
        if placed:
            self.wake_drained()
        self.throughput.note(
            now_us,
            num_requests=len(placed),
            num_tokens=sum(seq_group.num_prompt_tokens for seq_group in placed),
            is_empty=not self.waiting,
        )

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

    def _awaited(self) -> list[Scheduler]:
        """The worker groups that something waits for. Room in others, which drain or are too small,
        is no reason to look at what waits."""
        if len(self._alike) == 1:
            return self.schedulers
        alike = {alike for kind in self.waiting.kinds for alike in kind}
        awaited = set(chain.from_iterable(alike))
        return [scheduler for scheduler in self.schedulers if scheduler in awaited]

    def _kind_of(self, seq_group: SequenceGroup) -> tuple[EquivalentWorkerGroups, ...]:
        """Which worker groups a request may go to, full or not: those in which it can come to have
        the most of the tokens that it asks for, so that where it goes does not show in its answer;
        for one that has begun that is memory's concern too. Those that drain take nothing, unless
        it has begun and no other is left. One with output goes to a group of the arithmetic that
        computed it, if there is one."""
        fitting = [alike for alike in self._alike if seq_group.fits(alike[0].capacity)]
        suitable = [alike for alike in fitting if not alike[0].is_draining]
        reach = SequenceGroup.max_length
        if seq_group.has_begun or seq_group.request.generated:
            suitable = suitable or fitting
            exact = [alike for alike in suitable if not seq_group.is_inexact_in(alike[0].capacity)]
            suitable = exact or suitable
            reach = SequenceGroup.reach
        farthest = max((reach(seq_group, alike[0].capacity) for alike in suitable), default=0)
        return tuple(
            [alike for alike in suitable if reach(seq_group, alike[0].capacity) == farthest]
        )

    def _suitable(self, seq_group: SequenceGroup) -> list[Scheduler]:
        """These worker groups, in the order in which they came."""
        kind = self._kind_of(seq_group)
        if len(self._alike) == 1:
            return list(chain.from_iterable(kind))
        suitable = set(chain.from_iterable(kind))
        return [scheduler for scheduler in self.schedulers if scheduler in suitable]

    def sort_queue(self) -> None:
        """Sort the queue again after worker groups have joined, left or begun to drain."""
        worker_groups = self._present()
        if worker_groups != self._sorted_for:
            self._sorted_for = worker_groups
            alike: dict[object, list[Scheduler]] = {}
            for scheduler in self.schedulers:
                size = scheduler.capacity
                key = size.num_gpu_blocks, size.block_size, size.max_model_len, size.arithmetic
                alike.setdefault((*key, scheduler.is_draining), []).append(scheduler)
            self._alike = [tuple(schedulers) for schedulers in alike.values()]
            self.waiting.sort_again()
            for seq_group in self.waiting:
                seq_group.routing.refusals.clear()  # a new one may have a former id

    def _present(self) -> list[tuple[Scheduler, bool]]:
        """Its worker groups, and whether they drain."""
        return [(scheduler, scheduler.is_draining) for scheduler in self.schedulers]

    def _give(self, seq_group: SequenceGroup, scheduler: Scheduler, now_us: int) -> None:
        self.waiting.discard(seq_group)
        seq_group.routing = RoutingState()
        seq_group.is_placed = True
        seq_group.num_reserved_blocks = seq_group.most_blocks(scheduler.capacity)
        seq_group.tenant.num_kv_blocks += seq_group.num_reserved_blocks
        self.policy.note_placed(seq_group)
        scheduler.take(seq_group, now_us)
        self.woken.add(scheduler.capacity.worker_group_id)


class Fleet:
    """Worker groups and models.

    Invariant: a model is known while it is served, was ever served, or something waits for it.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants
        self._schedulers: dict[str, Scheduler] = {}
        self._models: dict[str, ServedModel] = {}
        self.totals: dict[str, ModelTotals] = {}
        """By model, of all that worker groups have ever served."""

    # Worker groups.

    @property
    def schedulers(self) -> Mapping[str, Scheduler]:
        """By worker group."""
        return self._schedulers

    def add(self, capacity: WorkerGroupCapacity, now_us: int) -> ServedModel:
        """Add a worker group; return its model. Raises ValueError if its id already exists,
        or it could not work with the configuration."""
        if capacity.worker_group_id in self._schedulers:
            raise ValueError(f"worker group {capacity.worker_group_id} already exists")
        check_capacity(self._config, capacity)
        model = self.model(capacity.model)
        totals = self.totals.setdefault(capacity.model, ModelTotals())
        scheduler = Scheduler(self._config, capacity, model.policy, totals, now_us)
        self._schedulers[capacity.worker_group_id] = scheduler
        model.add(scheduler)
        return model

    def remove(self, worker_group_id: str, now_us: int) -> Scheduler | None:
        """A worker group is gone; None if it was not there."""
        scheduler = self._schedulers.pop(worker_group_id, None)
        if scheduler is not None:
            self.model_of(scheduler).remove(scheduler, now_us)
        return scheduler

    def scheduler_of(self, seq_group: SequenceGroup) -> Scheduler | None:
        """Where a live group is placed."""
        model = self._models[seq_group.request.model]
        return next((s for s in model.schedulers if seq_group in s.seq_groups), None)

    def wake_tenant_limited(self) -> None:
        """Wake models that have requests blocked by a tenant's limit on KV blocks, because a tenant
        has released some."""
        for model in self._models.values():
            if model.waiting.has_tenant_limited:
                model.wake()

    def take_woken(self) -> set[str]:
        """Worker groups woken since the last call."""
        woken: set[str] = set()
        for model in self._models.values():
            if model.woken:
                woken |= model.woken
                model.woken = set()
        return woken

    @property
    def next_given_up_us(self) -> float:
        """When the next lost worker group is given up; infinite if nothing waits for one."""
        return min((m.next_given_up_us for m in self._models.values()), default=float("inf"))

    def give_up_lost(self, now_us: int) -> list[SequenceGroup]:
        """Expect worker groups back no longer that have been lost for too long; the requests that
        have outgrown all others and so can never continue."""
        given_up = [model.give_up_lost(now_us) for model in self._models.values()]
        return list(chain.from_iterable(given_up))

    # Models.

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """By name."""
        return self._models

    def model(self, name: str) -> ServedModel:
        """The model of this name, made if it is new."""
        model = self._models.get(name)
        if model is None:
            policy = POLICIES[self._config.policy](self._tenants)
            wait_s = self._config.max_outgrown_wait_s
            max_lost_us = float("inf") if wait_s is None else to_us(wait_s)
            model = self._models[name] = ServedModel(name, policy, max_lost_us)
        return model

    def model_of(self, scheduler: Scheduler) -> ServedModel:
        """The one that a worker group serves."""
        return self._models[scheduler.capacity.model]

    def wake(self, name: str) -> None:
        """Wake a model's worker groups, if there are any."""
        model = self._models.get(name)
        if model is not None:
            model.wake()

    def drop_if_unused(self, model: ServedModel) -> None:
        """Forget a model that was never served, and that no request waits for."""
        if model.is_unused:
            del self._models[model.name]

    def check_served(self, name: str) -> None:
        """Raise UnknownModel if other models are served, and this one never was."""
        model = self._models.get(name)
        if self._schedulers and (model is None or not model.was_served):
            served = ", ".join(sorted({s.capacity.model for s in self._schedulers.values()}))
            raise UnknownModel(
                f"no model named {name!r} is served; there is: {served}",
                details={"model": name, "served": served},
            )

    def queues(self) -> list[AnyQueue]:
        """All places in which requests wait."""
        queues: list[AnyQueue] = []
        for scheduler in self._schedulers.values():
            queues += (scheduler.waiting, scheduler.ahead)
        for model in self._models.values():
            queues += (model.waiting, model.unschedulable)
        return queues

    def model_snapshots(self, seq_groups: Iterable[SequenceGroup]) -> dict[str, ModelSnapshot]:
        """Of models that were served, and of those that one of the live groups waits for."""
        known = {name: ModelSnapshot(name=name, totals=t) for name, t in self.totals.items()}
        for seq_group in seq_groups:
            name = seq_group.request.model
            model = known.setdefault(name, ModelSnapshot(name=name, totals=ModelTotals()))
            model.num_running += seq_group.num_running > 0
            model.num_waiting += seq_group.num_running == 0
        for scheduler in self._schedulers.values():  # what is swapped out does not run
            model = known[scheduler.capacity.model]
            model.num_swapped += len(scheduler.swapping)
            model.num_waiting -= len(scheduler.swapping)
        return known

    def check(self, seq_groups: Collection[SequenceGroup]) -> None:
        """Assert that each live group is in one place, and nothing else is in any."""
        for seq_group in seq_groups:
            model = self._models[seq_group.request.model]
            places = [seq_group in model.waiting, seq_group in model.unschedulable]
            assert seq_group.is_placed == (not any(places))
            places += [seq_group in scheduler.seq_groups for scheduler in model.schedulers]
            assert sum(places) == 1, "a live request is in one place"
        num_placed = sum(len(scheduler.seq_groups) for scheduler in self._schedulers.values())
        num_unplaced = sum(len(m.waiting) + len(m.unschedulable) for m in self._models.values())
        assert num_placed + num_unplaced == len(seq_groups), (
            "a place holds a request that has ended"
        )
        for model in self._models.values():
            model.check()
        for scheduler in self._schedulers.values():
            scheduler.check()
