"""Sequence groups that wait, by rank."""

from collections.abc import Iterator

from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.sequence import SequenceGroup


class WaitingQueue:
    """Groups by rank, with the sums that admission and placement ask for."""

    def __init__(self) -> None:
        self._heap: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._passed_over: dict[SequenceGroup, None] = {}
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}
        self.num_tokens = 0
        """Prompt tokens of all groups."""
        self.num_sequences = 0
        """Sequences that waited when their groups were added."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._sizes

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return iter(self._sizes)

    def head(self) -> SequenceGroup | None:
        """The group to be served first, except those passed over; None if none waits."""
        top = self._heap.peek()
        return top[1] if top is not None else None

    def first(self) -> SequenceGroup:
        """The head of a queue that has one."""
        head = self.head()
        assert head is not None
        return head

    def add(self, group: SequenceGroup) -> None:
        """Queue a group at its rank; one that is queued already stays."""
        if group in self:
            return
        self._heap.push(group.rank, group)
        size = self._sizes[group] = (group.num_prompt_tokens, len(group.waiting()))
        group.tenant.num_queued_tokens += size[0]
        self.num_tokens += size[0]
        self.num_sequences += size[1]

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out, if it is in."""
        if group not in self:
            return
        if group in self._passed_over:
            del self._passed_over[group]
        else:
            self._heap.remove(group)
        num_tokens, num_sequences = self._sizes.pop(group)
        group.tenant.num_queued_tokens -= num_tokens
        self.num_tokens -= num_tokens
        self.num_sequences -= num_sequences

    def pass_over(self, head: SequenceGroup) -> None:
        """Have the next one be first until `look_again`."""
        self._heap.remove(head)
        self._passed_over[head] = None

    def look_again(self) -> None:
        """Put those that were passed over back into their places."""
        passed_over, self._passed_over = self._passed_over, {}
        for group in passed_over:
            self._heap.push(group.rank, group)

    def take_all(self) -> list[SequenceGroup]:
        """Empty the queue; its groups in no particular order."""
        groups = list(self)
        for group in groups:
            self.discard(group)
        return groups
