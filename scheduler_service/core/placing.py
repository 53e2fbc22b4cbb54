"""One round of giving a model's waiting requests to its worker groups, in order.

A request is placed when a worker group has room for it, not before, so that a queue never waits
behind one group while another is idle. One that finds none waits for one of those that it fits.
That group keeps its room, be it little, for it: nothing that comes later is placed there, so that
large requests are served in their turn. The other groups go on taking what follows, and so does
each group that the request does not fit.

What had no room for a request is looked at again only once it has changed, and between two rounds
one or two worker groups have. So a round takes about as many looks as there are groups that keep
their room for somebody, not as many for each of those who wait.

A suspect, which may have killed workers, goes to no group that has another: were the worker to
die, both would fail. It waits until the other has ended or is none any more, which is a matter of
a few steps, and holds up nobody meanwhile.
"""

from collections.abc import Callable, Iterable
from typing import Any

from scheduler_service.core.policies import Policy
from scheduler_service.core.request_queue import Lanes
from scheduler_service.core.routing.router import Placement
from scheduler_service.core.scheduling.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup


class Placing:
    """The worker groups that nobody waits for so far, and what is placed in them.

    Whatever is left out of the queue's order meanwhile is to come back when the round is over.
    """

    def __init__(
        self,
        waiting: Lanes[Any],
        schedulers: list[Scheduler],
        policy: Policy,
        placement: Placement,
        suitable: Callable[[SequenceGroup], list[Scheduler]],
    ) -> None:
        """`suitable`: the worker groups that a request may go to, full or not."""
        self._waiting = waiting
        self._open = dict.fromkeys(schedulers)
        self._with_room = {s for s in schedulers if s.room.has_room}
        """Those of the open ones that may have room for something."""
        self._policy = policy
        self._placement = placement
        self._suitable = suitable
        self.unsuitable: list[SequenceGroup] = []
        """Requests that may go nowhere; they are out of the queue."""

    def next(self, now_us: int) -> tuple[SequenceGroup, Scheduler] | None:
        """The next request that goes to a worker group, and which; it is in the queue still. None
        if no more finds room."""
        while self._may_go_on() and (group := self._waiting.head()) is not None:
            scheduler = self._place(group, now_us)
            if scheduler is not None:
                return group, scheduler
        return None

    def note_taken(self, scheduler: Scheduler) -> None:
        """The worker group has taken what `next` gave it."""
        if not scheduler.room.has_room:
            self._with_room.discard(scheduler)

    def _may_go_on(self) -> bool:
        """Whether anything at all may be placed."""
        return bool(self._with_room) or (self._policy.goes_ahead and bool(self._open))

    def _place(self, group: SequenceGroup, now_us: int) -> Scheduler | None:
        """Where the head goes; if nowhere, it is the head no more."""
        suitable = self._suitable(group)
        if not suitable:
            self._waiting.discard(group)
            self.unsuitable.append(group)
            return None
        tenant = group.tenant
        allowed = [s for s in suitable if tenant.may_hold(group.most_blocks(s.capacity))]
        if not allowed:
            self._waiting.set_aside(group)
            return None
        free = [scheduler for scheduler in allowed if scheduler in self._open]
        if not free:
            self._waiting.leave_out(group)
            return None
        if group.is_suspect:
            free = [scheduler for scheduler in free if not scheduler.room.has_suspect]
            if not free:
                self._waiting.pass_over(group)
                return None
        return self._choose(group, free, now_us)

    def _choose(
        self, group: SequenceGroup, schedulers: list[Scheduler], now_us: int
    ) -> Scheduler | None:
        group.is_ahead = False
        awaited = self._still_awaited(group, schedulers)
        if awaited is not None:
            self._wait_for(awaited, group)
            return None
        if self._with_room:
            best = self._placement.choose(group, schedulers, now_us)
            if best.has_room:
                return best.scheduler
            if best.waits_by_choice:
                self._wait_for(best.scheduler, group)
                return None
        ahead = [scheduler for scheduler in schedulers if scheduler.room.can_take_ahead(group)]
        if ahead:
            group.is_ahead = True
            return self._placement.choose(group, ahead, now_us).scheduler
        if self._with_room:
            _note_refusals(group, schedulers)
            self._wait_for(best.scheduler, group)
        else:
            for scheduler in schedulers:  # what follows goes ahead of nobody there either
                del self._open[scheduler]
        return None

    def _still_awaited(self, group: SequenceGroup, schedulers: list[Scheduler]) -> Scheduler | None:
        """What a request goes on waiting for, since all that had no room have none still; None if
        it must be chosen."""
        wait = group.wait
        awaited = next((s for s in schedulers if s.capacity.group_id == wait.awaits), None)
        if awaited is None or not self._with_room:
            return None
        changed = [s for s in schedulers if wait.refusals.get(s.capacity.group_id) != s.num_changes]
        if any(scheduler.room.has_room_for(group) for scheduler in changed):
            return None
        _note_refusals(group, changed)
        return awaited

    def _wait_for(self, scheduler: Scheduler, group: SequenceGroup) -> None:
        group.wait.awaits = scheduler.capacity.group_id
        del self._open[scheduler]
        self._with_room.discard(scheduler)
        self._waiting.pass_over(group)


def _note_refusals(group: SequenceGroup, schedulers: Iterable[Scheduler]) -> None:
    """These have no room for a request."""
    group.wait.refusals.update((s.capacity.group_id, s.num_changes) for s in schedulers)
