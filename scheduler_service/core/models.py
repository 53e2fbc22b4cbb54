"""The served models: for each its worker groups, and the requests that wait for one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from scheduler_service.core.config import GroupCapacity
from scheduler_service.core.drain import DrainRate
from scheduler_service.core.lanes import Lanes
from scheduler_service.core.placement import Placement
from scheduler_service.core.policies import Policy
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
    policy: Policy
    waiting: Lanes
    was_served: bool = False
    """Whether a worker group has ever served it; if so, its return is waited for."""
    schedulers: list[Scheduler] = field(default_factory=list)
    stranded: WaitingQueue = field(default_factory=WaitingQueue)
    """Requests that fit none of the groups there are: they must not hold up the others."""

    drain: DrainRate = field(default_factory=DrainRate)
    """How fast requests come out of `waiting`."""

    @classmethod
    def make(cls, name: str, policy: Policy) -> "Model":
        """A model that nobody serves yet."""
        return cls(name, policy, Lanes(policy))

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
        self.drain.interrupt()
        self.reopen()
        self.schedulers.append(scheduler)

    def reopen(self) -> None:
        """Put all that has not begun up for placement again."""
        for scheduler in self.schedulers:
            self.queue_again(scheduler.give_back())
        for group in self.stranded.take_all():
            self.waiting.add(group)

    def queue_again(self, groups: Iterable[SequenceGroup]) -> None:
        """Put groups up for placement that a worker group has parted with."""
        for group in groups:
            self.release(group)
            self.waiting.add(group)

    def release(self, group: SequenceGroup) -> None:
        """A group may have been in a worker group, and is no more: its tenant may use the blocks
        for others."""
        if group.is_placed:
            group.is_placed = group.is_ahead = False
            group.tenant.num_kv_blocks -= group.num_reserved_blocks
            group.num_reserved_blocks = 0

    def place(
        self, placement: Placement, is_late: Callable[[SequenceGroup], bool], now_us: int
    ) -> None:
        """Give waiting requests, in order, to worker groups that have room. Of each it is asked
        before whether it is too late for it, and if so, has been taken out of the queue."""
        if not self.waiting:
            self.drain.interrupt()
            return
        placed: list[SequenceGroup] = []
        self.waiting.take_back()
        while (group := self.waiting.head()) is not None:
            suitable = [s for s in self.schedulers if not s.is_draining and s.fits(group)]
            if not suitable:
                self.waiting.discard(group)
                self.stranded.add(group)
                continue
            allowed = [s for s in suitable if group.tenant.may_hold(group.most_blocks(s.capacity))]
            if not allowed:
                self.waiting.set_aside(group)
                continue
            candidates = [s for s in allowed if s.can_take(group)]
            group.is_ahead = not candidates
            if group.is_ahead:
                candidates = [s for s in allowed if s.can_take_ahead(group)]
            if not candidates:
                break
            if is_late(group):
                continue
            self._give(group, placement.choose(group, candidates), now_us)
            placed.append(group)
        self.drain.note(
            now_us,
            num_requests=len(placed),
            num_tokens=sum(group.num_prompt_tokens for group in placed),
            is_empty=not self.waiting,
        )

    def _give(self, group: SequenceGroup, scheduler: Scheduler, now_us: int) -> None:
        self.waiting.discard(group)
        group.is_placed = True
        group.num_reserved_blocks = group.most_blocks(scheduler.capacity)
        group.tenant.num_kv_blocks += group.num_reserved_blocks
        self.policy.note_placed(group)
        scheduler.take(group, now_us)
