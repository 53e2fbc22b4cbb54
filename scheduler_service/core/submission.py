"""From a request to a group that may be queued: all that can refuse it, in order."""

from scheduler_service.core.admission.admission_control import (
    check_queue,
    check_request,
    check_tenant,
    why_not,
)
from scheduler_service.core.admission.deadlines import check_deadline
from scheduler_service.core.admission.request_registry import Registry
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.request import Request
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.stats.request_timing import to_us
from scheduler_service.core.takeover import check_takes_over, continuation
from scheduler_service.errors import DuplicateRequest


class Submission:
    """The door: it asks, and changes nothing."""

    def __init__(self, config: SchedulerConfig, registry: Registry, fleet: Fleet) -> None:
        self._config = config
        self._registry = registry
        self._fleet = fleet

    def check(self, request: Request, now: float) -> tuple[SequenceGroup, SequenceGroup | None]:
        """A group for the request, which is not live yet; and the live one that it goes on with,
        which is to end before. Raises as `SchedulerCore.submit` says."""
        check_request(request, self._config)
        former = self._registry.find(request.tenant, request.request_id)
        if former is not None:
            check_takes_over(request, former.request)
            request = continuation(request, former, to_us(now))
        self._check_handles(request)
        self._fleet.check_served(request.model)
        group = self._registry.make_group(request, to_us(now))
        if former is not None:
            group.is_charged = former.is_charged
        self._check_possible(group)
        self._check_limits(group)
        model = self._fleet.models.get(request.model)
        check_deadline(group, model, self._registry.groups, now)
        return group, former

    def _check_handles(self, request: Request) -> None:
        if self._registry.has_handles_of(request):
            raise DuplicateRequest(
                f"the frontend has a live request of handle {request.handle}",
                reason="DUPLICATE_HANDLE",
                details={"request_id": request.request_id},
            )

    def _check_possible(self, group: SequenceGroup) -> None:
        """Raise what makes it impossible for all worker groups, where any is known."""
        model = self._fleet.models.get(group.request.model)
        error = why_not(group, model.capacities()) if model is not None else None
        if error is not None:
            raise error

    def _check_limits(self, group: SequenceGroup) -> None:
        """Raise what is too much just now."""
        drains = [model.drain for model in self._fleet.models.values()]
        check_tenant(group, drains, self._config)
        check_queue(group.request, self._fleet.queues(), drains, self._config)
