"""Requests of one model that fit no worker group that is present, and the groups expected back."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from scheduler_service.core import fitting
from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.sequence import SequenceGroup

MAX_SHRINKAGE = 2
"""How many times as large a lost group's cache may have been as that of its replacement."""


@dataclass(frozen=True, slots=True)
class LostWorkerGroup:
    """A worker group that was lost, and whose replacement is expected."""

    capacity: WorkerGroupCapacity
    expected_until_us: float
    """Time at which it is given up; may be infinite."""


@dataclass(slots=True, eq=False)
class Recovery:
    """What a model waits for, and the requests that wait for it."""

    max_lost_us: float = inf
    """Microseconds for which a lost worker group is expected back."""
    unschedulable: WaitingQueue = field(default_factory=WaitingQueue)
    """Requests that fit no present worker group; kept apart so that they do not hold up others."""
    lost: list[LostWorkerGroup] = field(default_factory=list)
    """Worker groups that were lost and not replaced, the first to be given up first."""
    accepted_until_us: dict[SequenceGroup, float] = field(default_factory=dict)
    """Requests of `unschedulable` that have begun, that another core accepted, or that a drained
    worker group has left behind, and the time until which each waits for one that can hold it."""

    def expect_back(self, capacity: WorkerGroupCapacity, now_us: int) -> None:
        """Expect a lost worker group's replacement."""
        self.lost.append(LostWorkerGroup(capacity, now_us + self.max_lost_us))

    def replace_lost(self, capacity: WorkerGroupCapacity) -> None:
        """Stop expecting the lost group that a group that joins may replace: that with the closest
        cache, of those that do no other work, are no longer, and have no cache of more than
        `MAX_SHRINKAGE` times the size. A restarted worker may find a little more or less memory
        than before."""
        tokens = capacity.num_cache_tokens
        replaceable = [
            lost
            for lost in self.lost
            if lost.capacity.work_kinds <= capacity.work_kinds
            and lost.capacity.max_model_len <= capacity.max_model_len
            and lost.capacity.num_cache_tokens <= MAX_SHRINKAGE * tokens
        ]
        if replaceable:
            self.lost.remove(
                min(replaceable, key=lambda lost: abs(lost.capacity.num_cache_tokens - tokens))
            )

    def set_aside(
        self,
        seq_groups: Iterable[SequenceGroup],
        capacities: list[WorkerGroupCapacity],
        now_us: int,
    ) -> None:
        """Add requests that fit no present worker group, unless it drains. `capacities`: of the
        groups that are present or expected back."""
        for seq_group in seq_groups:
            self.unschedulable.add(seq_group)
            is_accepted = seq_group.request.is_continued or seq_group.has_begun
            if is_accepted or not any(fitting.fits(seq_group, c) for c in capacities):
                self.accepted_until_us.setdefault(seq_group, now_us + self.max_lost_us)
        for seq_group in [g for g in self.accepted_until_us if g not in self.unschedulable]:
            del self.accepted_until_us[seq_group]  # it fits a worker group that has joined

    def lose_drained(self, now_us: int) -> None:
        """Let requests that may have waited for a drained worker group, which is gone, wait no
        longer than for a lost one."""
        for seq_group in self.unschedulable:
            self.accepted_until_us.setdefault(seq_group, now_us + self.max_lost_us)

    def discard(self, seq_group: SequenceGroup) -> None:
        """Remove a request, if it is here."""
        self.unschedulable.discard(seq_group)
        self.accepted_until_us.pop(seq_group, None)

    def next_given_up_us(self, *, has_waiting: bool) -> float:
        """When the next lost worker group is given up; infinite if no request waits for it.
        `has_waiting`: whether requests of the model wait elsewhere."""
        if not (has_waiting or self.unschedulable):
            return inf
        lost_until_us = self.lost[0].expected_until_us if self.lost else inf
        return min([lost_until_us, *self.accepted_until_us.values()])

    def give_up(self, present: list[WorkerGroupCapacity], now_us: int) -> None:
        """Stop expecting worker groups that have been lost for too long."""
        self.lost = [lost for lost in self.lost if now_us < lost.expected_until_us]
        for seq_group in [g for g, until in self.accepted_until_us.items() if until <= now_us]:
            self._give_up_unknown(seq_group, present)

    def _give_up_unknown(
        self, seq_group: SequenceGroup, present: list[WorkerGroupCapacity]
    ) -> None:
        """Stop waiting for a worker group that may never join. A request that fits a lost one keeps
        waiting as long as that group is expected back, and one that fits a present one as long
        as that drains; any other request counts as too large for all groups, unless none is
        present: they may return with other capacities."""
        del self.accepted_until_us[seq_group]
        large = [lost for lost in self.lost if fitting.fits(seq_group, lost.capacity)]
        if large:
            self.accepted_until_us[seq_group] = large[-1].expected_until_us
        elif any(fitting.fits(seq_group, capacity) for capacity in present):
            pass
        elif present and not seq_group.placement.exceeded_tokens:
            capacities = [*present, *(lost.capacity for lost in self.lost)]
            max_tokens = max(
                1, *(fitting.num_cache_tokens(seq_group, capacity) for capacity in capacities)
            )
            seq_group.placement.exceeded_tokens = max_tokens

    def unroutable(self, capacities: list[WorkerGroupCapacity]) -> list[SequenceGroup]:
        """Requests that exceed the caches of all these worker groups: those present, and those
        expected back."""
        if not self.unschedulable or self.max_lost_us == inf:
            return []
        return [
            seq_group
            for seq_group in self.unschedulable
            if seq_group.placement.exceeded_tokens
            and not any(fitting.fits(seq_group, capacity) for capacity in capacities)
        ]
