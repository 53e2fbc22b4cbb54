"""The worker groups, the models that they serve, and the requests that wait for each model."""

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from scheduler_service.core.config import (
    MoveKV,
    Role,
    SchedulerConfig,
    WorkerGroupCapacity,
    check_capacity,
)
from scheduler_service.core.context import adapter_of
from scheduler_service.core.policies import POLICIES, Policy
from scheduler_service.core.request import Request
from scheduler_service.core.request_queue import AnyQueue, ModelQueue
from scheduler_service.core.request_timing import to_us
from scheduler_service.core.routing.recovery import Recovery
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
from scheduler_service.errors import PagewireError, UnknownAdapter, UnknownModel

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model's worker groups and its requests that are in none of them."""

    name: str
    policy: Policy
    recovery: Recovery = field(default_factory=Recovery)
    router: Router = field(default_factory=Router)
    on_quota_released: Callable[[], None] = lambda: None
    """Called when requests release what they hold of their tenants' limits, which may hold up
    requests for other models."""
    was_served: bool = False
    """Whether a worker group has ever served it; if so, requests wait for its return."""
    schedulers: list[Scheduler] = field(default_factory=list)
    throughput: QueueThroughput = field(default_factory=QueueThroughput)
    """The rate at which requests leave `waiting`."""
    woken: set[str] = field(default_factory=set)
    """Ids of worker groups that may have something to plan without a new result of theirs."""
    waiting: ModelQueue[tuple[EquivalentWorkerGroups, ...]] = field(init=False)
    _sorted_for: list[tuple[Scheduler, bool]] = field(default_factory=list)
    """The worker groups for which the queue was sorted, and whether they were draining."""
    equivalent: list[EquivalentWorkerGroups] = field(default_factory=list)
    """The same worker groups in sets of equivalent ones, to which the same requests may go."""

    def __post_init__(self) -> None:
        self.waiting = ModelQueue(
            self.policy, lambda seq_group: eligible(seq_group, self.equivalent)
        )

    @property
    def is_unused(self) -> bool:
        """True if it was never served and no request waits for it, so that it can be dropped."""
        return not (self.was_served or self.waiting or self.recovery.unschedulable)

    def capacities(self) -> list[WorkerGroupCapacity]:
        """Capacities of its worker groups, present or expected back."""
        return [
            *(scheduler.capacity for scheduler in self.schedulers),
            *(lost.capacity for lost in self.recovery.lost),
        ]

    def enqueue(self, seq_group: SequenceGroup) -> None:
        """Queue a new request, and wake the worker groups that may take it."""
        self.waiting.add(seq_group)
        self.wake()

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group that is not placed out of the queue."""
        self.waiting.discard(seq_group)
        self.recovery.discard(seq_group)

    def add(self, scheduler: Scheduler) -> None:
        """Add a worker group; requests that have not begun may be routed to it instead."""
        self.was_served = True
        self.throughput.interrupt()
        self.reopen()
        self.schedulers.append(scheduler)
        self.recovery.replace_lost(scheduler.capacity)
        self.sort_queue()

    def remove(self, scheduler: Scheduler, now_us: int) -> None:
        """Remove a worker group. Unless it was draining, a replacement is expected."""
        self.schedulers.remove(scheduler)
        if scheduler.is_draining:
            self.recovery.lose_drained(now_us)
        else:
            self.recovery.expect_back(scheduler.capacity, now_us)

    @property
    def next_given_up_us(self) -> float:
        """When the next lost worker group is given up; infinite if no request waits for it."""
        return self.recovery.next_given_up_us(has_waiting=bool(self.waiting))

    def give_up_lost(self, now_us: int) -> bool:
        """Stop expecting worker groups that have been lost for too long; returns whether there were
        any for which requests may have waited."""
        is_due = now_us >= self.next_given_up_us
        if is_due:
            self.recovery.give_up([scheduler.capacity for scheduler in self.schedulers], now_us)
        return is_due

    def reopen(self) -> None:
        """Queue all requests that have not started for routing again."""
        for scheduler in self.schedulers:
            self.requeue(scheduler.pop_not_started())
        for seq_group in self.recovery.unschedulable.pop_all():
            self.waiting.add(seq_group)

    def requeue(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Queue groups for routing that have left a worker group."""
        has_released = False
        for seq_group in seq_groups:
            has_released |= seq_group.tenant.config.max_kv_blocks is not None
            seq_group.placement.release(seq_group.tenant)
            self.waiting.add(seq_group)
        if has_released:
            self.on_quota_released()

    def check(self) -> None:
        """Assert the invariants. Cost: waiting requests times worker groups."""
        self.waiting.check()
        assert self._sorted_for == self._present()
        for seq_group in self.waiting:
            for scheduler in self.schedulers:
                num_changes = seq_group.placement.refusals.get(scheduler.capacity.worker_group_id)
                if num_changes == scheduler.num_changes:
                    assert not scheduler.probe.has_room_for(seq_group), (
                        "a worker group has room for a request that it refused"
                    )

    def route(
        self,
        late_error: Callable[[SequenceGroup], PagewireError | None],
        adapters: Container[bytes],
        now_us: int,
    ) -> tuple[list[TooLate], Mapping[SequenceGroup, Scheduler]]:
        """Hand waiting requests, in order, to worker groups that have room. Returns those for which
        `late_error` has an error when their turn comes, which are in no queue any more, and must be
        ended; and those that were handed over, with their worker groups. `adapters`: digests of
        those that all worker groups have; requests with others wait."""
        if not self.waiting:
            self.throughput.interrupt()
            return [], {}
        round_ = RoutingRound(
            self.waiting,
            self.schedulers,
            self.equivalent,
            self.policy,
            self.router,
            adapters,
        )
        too_late = round_.run(late_error, now_us)
        unfit = round_.unfit
        if () in self.waiting.kinds:
            unfit = [*(g for g in self.waiting if not self.waiting.kind_of(g)), *unfit]
        for seq_group in unfit:  # in the queue they would hold up others
            self.waiting.discard(seq_group)
        self.recovery.set_aside(unfit, self.capacities() if unfit else [], now_us)
        self.woken.update(routed.capacity.worker_group_id for routed in round_.routed.values())
        if round_.routed or unfit:
            self.wake_drained()
        self.throughput.observe(
            now_us,
            num_requests=len(round_.routed),
            num_tokens=sum(seq_group.num_prompt_tokens for seq_group in round_.routed),
            is_empty=not self.waiting,
        )
        return too_late, round_.routed

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
                key = capacity.size, capacity.arithmetic, capacity.role, scheduler.is_draining
                equivalent.setdefault(key, []).append(scheduler)
            self._find_partners()
            self.equivalent = [tuple(schedulers) for schedulers in equivalent.values()]
            self.waiting.reorder()
            for seq_group in self.waiting:
                seq_group.placement.refusals.clear()  # ids may be used again

    def _find_partners(self) -> None:
        for here in self.schedulers:
            capacity, had_partner = here.capacity, here.has_partner
            here.has_partner = capacity.role is Role.BOTH or any(
                other.is_partner_of(here) for other in self.schedulers
            )
            if had_partner and not here.has_partner and not here.is_draining:
                logger.warning(
                    "no group exchanges KV with this one to do the rest of its requests: until one "
                    "joins, it does all of them group_id=%s model=%s role=%s",
                    capacity.worker_group_id,
                    self.name,
                    capacity.role,
                )

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
        self.adapters: dict[str, Mapping[bytes, str]] = {}
        """Names of the adapters that all worker groups of a model have, by model and digest."""
        self._settling: set[str] = set()
        """Models of which more adapters may become known."""

    # Worker groups.

    def add(self, capacity: WorkerGroupCapacity, now_us: int) -> ServedModel:
        """Add a worker group; return its model. Raises ValueError if its id already exists,
        or it could not work with the configuration."""
        if capacity.worker_group_id in self.schedulers:
            raise ValueError(f"worker group {capacity.worker_group_id} already exists")
        check_capacity(self._config, capacity)
        self._adopt_seed(capacity)
        capacity = replace(capacity, max_chunk_tokens=self._config.max_num_batched_tokens)
        if self._config.move_kv is MoveKV.NEVER or not self._config.enable_prefix_caching:
            capacity = replace(capacity, kv_layout=())
        model = self.model(capacity.model)
        totals = self.totals.setdefault(capacity.model, ModelTotals())
        scheduler = make_scheduler(self._config, capacity, totals, model.policy, now_us)
        self.schedulers[capacity.worker_group_id] = scheduler
        model.add(scheduler)
        return model

    def _adopt_seed(self, capacity: WorkerGroupCapacity) -> None:
        """Make keys like those that workers have recorded, if they have more than has been cached
        since. An earlier core has given all groups the same seed, as this one does."""
        kept, config = capacity.kept, self._config
        if kept is None or kept.key_seed is None or not config.enable_prefix_caching:
            return
        seed = kept.key_seed
        if seed == config.key_seed:
            return
        caches = [scheduler.cache for scheduler in self.schedulers.values()]
        num_cached = sum(cache.prefixes.num_cached for cache in caches)
        if num_cached and num_cached >= kept.num_records:
            return
        self._config = replace(self._config, key_seed=seed)
        for cache in caches:
            cache.prefixes.reseed(seed)
        if num_cached:
            logger.warning(
                "the prefix cache is dropped for that of a group that joins num_dropped=%d "
                "num_kept=%d",
                num_cached,
                kept.num_records,
            )

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

    def pop_woken(self) -> set[str]:
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
        times = [
            model.next_given_up_us
            for model in models
            if model.recovery.lost or model.recovery.unschedulable
        ]
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
            recovery = Recovery(max_lost_us)
            model = ServedModel(name, policy, recovery, on_quota_released=self.wake_tenant_limited)
            self.models[name] = model
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

    def set_adapters(self, name: str, adapters: Mapping[bytes, str], *, is_settling: bool) -> None:
        """Set the adapters that all worker groups of a model have; `is_settling`: more may become
        known soon."""
        self.adapters[name] = adapters
        (self._settling.add if is_settling else self._settling.discard)(name)
        self.wake(name)

    def check_adapter(self, request: Request) -> None:
        """Raise UnknownAdapter if a request is for an adapter that the workers do not have."""
        adapter, model = adapter_of(request.context), self.models.get(request.model)
        is_known = request.model in self.adapters or (model is not None and model.was_served)
        if adapter is None or not is_known or request.model in self._settling:
            return
        present = self.adapters.get(request.model, {})
        if adapter not in present:
            names = ", ".join(sorted(set(present.values()))) or "none"
            raise UnknownAdapter(
                f"the workers of the model {request.model!r} do not have the adapter "
                f"{adapter.hex()}; adapters: {names}",
                details={"model": request.model, "digest": adapter.hex()},
            )

    def queues(self) -> list[AnyQueue]:
        """All queues in which requests wait."""
        queues: list[AnyQueue] = []
        for scheduler in self.schedulers.values():
            queues += (scheduler.placed.waiting, scheduler.placed.preempting)
        for model in self.models.values():
            queues += (model.waiting, model.recovery.unschedulable)
        return queues

    def model_snapshots(self, seq_groups: Iterable[SequenceGroup]) -> dict[str, ModelSnapshot]:
        """Snapshots of all models that were ever served or that a live request is for."""
        snapshots = {name: ModelSnapshot(name=name, totals=t) for name, t in self.totals.items()}
        for seq_group in seq_groups:
            name = seq_group.request.model
            model = snapshots.setdefault(name, ModelSnapshot(name=name, totals=ModelTotals()))
            model.num_running += seq_group.num_running > 0
            model.num_waiting += seq_group.num_running == 0
        for scheduler in self.schedulers.values():  # what is swapped out does not run
            model = snapshots[scheduler.capacity.model]
            model.num_swapped += len(scheduler.running.swapped)
            model.num_waiting -= len(scheduler.running.swapped)
        return snapshots

    def check(self, seq_groups: Collection[SequenceGroup]) -> None:
        """Assert that each live group is in one place, and nothing else is in any."""
        for seq_group in seq_groups:
            model = self.models[seq_group.request.model]
            places = [seq_group in model.waiting, seq_group in model.recovery.unschedulable]
            assert seq_group.placement.is_placed == (not any(places))
            places += [seq_group in scheduler.seq_groups for scheduler in model.schedulers]
            assert sum(places) == 1, "a live request is in one place"
        num_placed = sum(len(scheduler.seq_groups) for scheduler in self.schedulers.values())
        num_unplaced = sum(
            len(m.waiting) + len(m.recovery.unschedulable) for m in self.models.values()
        )
        assert num_placed + num_unplaced == len(seq_groups), (
            "a place holds a request that has ended"
        )
        for model in self.models.values():
            model.check()
        for scheduler in self.schedulers.values():
            scheduler.check()
