"""Which worker group takes a request."""

from collections.abc import Sequence
from typing import Protocol

from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.sequence import SequenceGroup


class Placement(Protocol):
    """Chooses among worker groups that have room."""

    def choose(self, group: SequenceGroup, candidates: Sequence[Scheduler]) -> Scheduler:
        """One of the candidates, of which there is at least one."""


class LeastLoaded:
    """The group with the fewest sequences, then the most free blocks, then the first to join."""

    def choose(self, group: SequenceGroup, candidates: Sequence[Scheduler]) -> Scheduler:
        """See the class."""
        del group
        return min(candidates, key=lambda s: (s.num_sequences, -s.blocks.num_free_blocks))
