"""When to look at which request, so that it ends at its deadline, or once it cannot meet it."""

from scheduler_service.core.admission.deadlines import next_look
from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.routing.fleet import Model
from scheduler_service.core.sequence import SequenceGroup


class DeadlineWatch:
    """Live requests with deadlines, by the time at which each is to be looked at."""

    def __init__(self) -> None:
        self._looks: RemovableHeap[SequenceGroup] = RemovableHeap()

    def watch(self, group: SequenceGroup, model: Model, now: float) -> None:
        """Look at a request when it may no longer meet its deadline; none, if it has none."""
        self.forget(group)
        deadline = group.request.deadline
        if deadline is not None:
            self._looks.push((next_look(group, model, deadline, now), group.rank), group)

    def forget(self, group: SequenceGroup) -> None:
        """Look at a request no more."""
        if group in self._looks:
            self._looks.remove(group)

    def due(self, now: float) -> SequenceGroup | None:
        """A request to look at now; it is to be watched again, or forgotten."""
        first = self._looks.peek()
        return first[1] if first is not None and first[0][0] <= now else None

    @property
    def next_look(self) -> float | None:
        """When the first look is due; None if no request has a deadline."""
        first = self._looks.peek()
        return first[0][0] if first is not None else None

    def check(self, live: set[SequenceGroup]) -> None:
        """Assert that nothing is watched that has ended."""
        assert set(self._looks) <= live
