"""Sequence groups that wait for a place in a batch, in the policy's order."""

from collections.abc import Iterator

from scheduler_service.core.heap import RemovableHeap
from scheduler_service.core.sequence import SequenceGroup


class WaitingQueue:
    """Groups by rank, with the sums that admission and placement ask for."""

    def __init__(self) -> None:
        self._heap: RemovableHeap[SequenceGroup] = RemovableHeap()
        self._sizes: dict[SequenceGroup, tuple[int, int]] = {}
        self.num_tokens = 0
        """Prompt tokens of all groups."""
        self.num_sequences = 0
        """Sequences that waited when their groups were added."""

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, group: SequenceGroup) -> bool:
        return group in self._heap

    def __iter__(self) -> Iterator[SequenceGroup]:
        """The groups, in no particular order."""
        return iter(self._heap)

    def head(self) -> SequenceGroup | None:
        """The group to be served first; None if none waits."""
        top = self._heap.peek()
        return top[1] if top is not None else None

    def add(self, group: SequenceGroup) -> None:
        """Queue a group at its rank; one that is queued already stays."""
        if group in self._heap:
            return
        self._heap.push(group.rank, group)
        size = self._sizes[group] = (group.num_prompt_tokens, len(group.waiting()))
        self.num_tokens += size[0]
        self.num_sequences += size[1]

    def discard(self, group: SequenceGroup) -> None:
        """Take a group out, if it is in."""
        if group not in self._heap:
            return
        self._heap.remove(group)
        num_tokens, num_sequences = self._sizes.pop(group)
        self.num_tokens -= num_tokens
        self.num_sequences -= num_sequences

    def take_all(self) -> list[SequenceGroup]:
        """Empty the queue; its groups in no particular order."""
        groups = list(self._heap)
        for group in groups:
            self.discard(group)
        return groups
