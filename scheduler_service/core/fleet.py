"""All worker groups by their ids, and the models that they serve by name."""

from collections.abc import Collection, Iterable, Mapping

from scheduler_service.core.admission.admission_control import Queue
from scheduler_service.core.config import GroupCapacity, SchedulerConfig, check_capacity
from scheduler_service.core.policies import POLICIES
from scheduler_service.core.routing.fleet import Model
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.stats.scheduler_stats import ModelSnapshot, Totals
from scheduler_service.core.tenants import Tenants
from scheduler_service.errors import UnknownModel


class Fleet:
    """Worker groups and models.

    Invariant: a model is known while it is served, was ever served, or something waits for it.
    """

    def __init__(self, config: SchedulerConfig, tenants: Tenants) -> None:
        self._config = config
        self._tenants = tenants
        self._schedulers: dict[str, Scheduler] = {}
        self._models: dict[str, Model] = {}
        self.totals: dict[str, Totals] = {}
        """By model, of all that worker groups have ever served."""

    # Worker groups.

    @property
    def schedulers(self) -> Mapping[str, Scheduler]:
        """By worker group."""
        return self._schedulers

    def add(self, capacity: GroupCapacity, now_us: int) -> Model:
        """A worker group is there; its model. Raises ValueError if one of this id is there already,
        or it could not work with the configuration."""
        if capacity.group_id in self._schedulers:
            raise ValueError(f"group {capacity.group_id} is there already")
        check_capacity(self._config, capacity)
        model = self.model(capacity.model)
        totals = self.totals.setdefault(capacity.model, Totals())
        scheduler = Scheduler(self._config, capacity, model.policy, totals, now_us)
        self._schedulers[capacity.group_id] = scheduler
        model.add(scheduler)
        return model

    def remove(self, group_id: str) -> Scheduler | None:
        """A worker group is gone; None if it was not there."""
        scheduler = self._schedulers.pop(group_id, None)
        if scheduler is not None:
            self.model_of(scheduler).remove(scheduler)
        return scheduler

    def scheduler_of(self, group: SequenceGroup) -> Scheduler | None:
        """Where a live group is placed."""
        model = self._models[group.request.model]
        return next((s for s in model.schedulers if group in s.groups), None)

    def stir_held_up(self) -> None:
        """A tenant has fewer blocks in use: of any model, what waits for that is to be looked at,
        though nothing else may have its worker groups plan."""
        for model in self._models.values():
            if model.waiting.has_set_aside:
                model.stir()

    def take_stirred(self) -> set[str]:
        """Worker groups that may have something to plan although nothing was heard of them, since
        the last call."""
        stirred: set[str] = set()
        for model in self._models.values():
            if model.stirred:
                stirred |= model.stirred
                model.stirred = set()
        return stirred

    # Models.

    @property
    def models(self) -> Mapping[str, Model]:
        """By name."""
        return self._models

    def model(self, name: str) -> Model:
        """The model of this name, made if it is new."""
        model = self._models.get(name)
        if model is None:
            policy = POLICIES[self._config.policy](self._tenants)
            model = self._models[name] = Model(name, policy)
        return model

    def model_of(self, scheduler: Scheduler) -> Model:
        """The one that a worker group serves."""
        return self._models[scheduler.capacity.model]

    def stir(self, name: str) -> None:
        """Have a model's worker groups, if there are any, look at what waits for it."""
        model = self._models.get(name)
        if model is not None:
            model.stir()

    def drop_if_unused(self, model: Model) -> None:
        """Forget a model that was never served, and that nobody waits for any more."""
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

    def queues(self) -> list[Queue]:
        """All places in which requests wait."""
        queues: list[Queue] = []
        for scheduler in self._schedulers.values():
            queues += (scheduler.waiting, scheduler.ahead)
        for model in self._models.values():
            queues += (model.waiting, model.stranded)
        return queues

    def model_snapshots(self, groups: Iterable[SequenceGroup]) -> dict[str, ModelSnapshot]:
        """Of models that were served, and of those that one of the live groups waits for."""
        known = {name: ModelSnapshot(name=name, totals=t) for name, t in self.totals.items()}
        for group in groups:
            name = group.request.model
            model = known.setdefault(name, ModelSnapshot(name=name, totals=Totals()))
            model.num_running += group.num_running > 0
            model.num_waiting += group.num_running == 0
        for scheduler in self._schedulers.values():  # what is swapped out does not run
            model = known[scheduler.capacity.model]
            model.num_swapped += len(scheduler.swapping)
            model.num_waiting -= len(scheduler.swapping)
        return known

    def check(self, groups: Collection[SequenceGroup]) -> None:
        """Assert that each live group is in one place, and nothing else is in any."""
        for group in groups:
            model = self._models[group.request.model]
            places = [group in model.waiting, group in model.stranded]
            assert group.is_placed == (not any(places))
            places += [group in scheduler.groups for scheduler in model.schedulers]
            assert sum(places) == 1, "a live request is in one place"
        num_placed = sum(len(scheduler.groups) for scheduler in self._schedulers.values())
        num_unplaced = sum(len(m.waiting) + len(m.stranded) for m in self._models.values())
        assert num_placed + num_unplaced == len(groups), "a place holds a request that has ended"
        for model in self._models.values():
            model.check()
        for scheduler in self._schedulers.values():
            scheduler.check()
