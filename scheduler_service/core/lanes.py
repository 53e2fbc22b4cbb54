"""The queue for a worker group: lanes, of which the policy says whose first request is next."""

from collections.abc import Iterator
from itertools import chain

from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.policies import Policy
from scheduler_service.core.sequence import SequenceGroup
from scheduler_service.core.waiting_queue import WaitingQueue


class Lanes:
    """Waiting groups in the policy's order, with the sums that admission asks for.

    A lane's place in the heap may be out of date, as its tenant is served; since it can only have
    fallen back, it is enough to look again at the lane that comes out first.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[str | None, WaitingQueue] = {}
        self._order: RemovableHeap[WaitingQueue] = RemovableHeap()
        self._set_aside: dict[WaitingQueue, None] = {}
        self._num_groups = 0
        self.num_tokens = 0
        """Prompt tokens of all groups."""

    def __len__(self) -> int:
        return self._num_groups

    def __contains__(self, group: SequenceGroup) -> bool:
        lane = self._lane(group)
        return lane is not None and group in lane

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return chain.from_iterable(self._lanes.values())

    def head(self) -> SequenceGroup | None:
        """The group to be served first; None if none waits, except in lanes that are set aside."""
        while (top := self._order.peek()) is not None:
            key, lane = top
            head = lane.first()
            if key == self._policy.key(head):
                return head
            self._order.remove(lane)
            self._order.push(self._policy.key(head), lane)
        return None

    def add(self, group: SequenceGroup) -> None:
        """Queue a group in its lane; one that is queued already stays."""
        if group in self:
            return
        lane = self._lane(group)
        if lane is None:
            self._policy.open_lane(group.tenant, self.head())
            lane = self._lanes[self._policy.lane(group.tenant)] = WaitingQueue()
        lane.add(group)
        self._num_groups += 1
        self.num_tokens += group.num_prompt_tokens
        if lane.head() is group and lane not in self._set_aside:
            if lane in self._order:
                self._order.remove(lane)
            self._order.push(self._policy.key(group), lane)

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out, if it is in."""
        lane = self._lane(group)
        if lane is None or group not in lane:
            return
        lane.discard(group)
        self._num_groups -= 1
        self.num_tokens -= group.num_prompt_tokens
        if not lane:
            del self._lanes[self._policy.lane(group.tenant)]
            self._set_aside.pop(lane, None)
            if lane in self._order:
                self._order.remove(lane)
            self._policy.close_lane(group.tenant)

    def set_aside(self, head: SequenceGroup) -> None:
        """Leave a lane out for now: its first cannot be served for its tenant's own limits."""
        lane = self._lanes[self._policy.lane(head.tenant)]
        self._order.remove(lane)
        self._set_aside[lane] = None

    def take_back(self) -> None:
        """Look again at the lanes that were set aside."""
        if not self._set_aside:
            return
        lanes, self._set_aside = self._set_aside, {}
        first = self.head()
        for lane in lanes:
            head = lane.first()
            self._policy.open_lane(head.tenant, first)
            self._order.push(self._policy.key(head), lane)

    def num_tokens_before(self, group: SequenceGroup) -> int:
        """Prompt tokens that are served before a group is, at least: those before it in its lane.
        The group need not be in. Linear in the lane's groups."""
        lane = self._lane(group)
        return sum(g.num_prompt_tokens for g in lane or () if g.rank < group.rank)

    def check(self) -> None:
        """Assert the invariants."""
        groups = list(self)
        assert self._num_groups == len(groups)
        assert self.num_tokens == sum(group.num_prompt_tokens for group in groups)
        assert {*self._order, *self._set_aside} == set(self._lanes.values())
        assert all(self._lanes.values()), "no lane is empty"

    def _lane(self, group: SequenceGroup) -> WaitingQueue | None:
        return self._lanes.get(self._policy.lane(group.tenant))
