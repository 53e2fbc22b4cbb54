"""The served models: for each its worker groups, and the requests that wait for one."""

from dataclasses import dataclass, field

from scheduler_service.core.config import GroupCapacity
from scheduler_service.core.placement import Placement
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.waiting_queue import WaitingQueue


@dataclass(slots=True, eq=False)
class Model:
    """One model's worker groups and its requests that are in none of them.

    A request is placed when a group has room for it, not before, so that a queue never waits
    behind one group while another is idle.
    """

    name: str
    was_served: bool = False
    """Whether a worker group has ever served it; if so, its return is waited for."""
    schedulers: list[Scheduler] = field(default_factory=list)
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    stranded: WaitingQueue = field(default_factory=WaitingQueue)
    """Requests that fit none of the groups there are: they must not hold up the others."""

    @property
    def is_unused(self) -> bool:
        """Whether nothing would be lost by forgetting it."""
        return not (self.was_served or self.waiting or self.stranded)

    def capacities(self) -> list[GroupCapacity]:
        """What its worker groups hold."""
        return [scheduler.capacity for scheduler in self.schedulers]

    def discard(self, group: SequenceGroup) -> None:
        """Take a group that is not placed out of the queue."""
        self.waiting.discard(group)
        self.stranded.discard(group)

    def add(self, scheduler: Scheduler) -> None:
        """A group joins: what has not begun may go there instead."""
        self.was_served = True
        self.reopen()
        self.schedulers.append(scheduler)

    def reopen(self) -> None:
        """Put all that has not begun up for placement again."""
        groups = [group for scheduler in self.schedulers for group in scheduler.give_back()]
        for group in groups + self.stranded.take_all():
            self.waiting.add(group)

    def place(self, placement: Placement, now_us: int) -> None:
        """Give waiting requests, in order, to groups that have room."""
        while (group := self.waiting.head()) is not None:
            candidates = [s for s in self.schedulers if s.can_take(group)]
            if candidates:
                self.waiting.discard(group)
                placement.choose(group, candidates).take(group, now_us)
            elif any(s.fits(group) for s in self.schedulers if not s.is_draining):
                return
            else:
                self.waiting.discard(group)
                self.stranded.add(group)
